"""Lowerings of the data gradient and of the forward convolution: forced over random geometry, and what each is for."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import given

import onnx_convgrad as og
from onnx_convgrad.bench.layer import ConvLayer
from onnx_convgrad.errors import LoweringError
from onnx_convgrad.ir.targets import target_named
from onnx_convgrad.lowering.candidates import Policy
from onnx_convgrad.lowering.lower import lower
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.runtime import run
from tests.lowering.conv.test_geometry import CONV, SETTINGS, _arrays, _attributes, _error, _model, geometry

FORWARD = [name for name in lowerings()["Conv"] if name != "conv"]


def _convolved(arrays: dict[str, np.ndarray], g: dict) -> np.ndarray:
    t = {k: torch.tensor(v, dtype=torch.float64) for k, v in arrays.items()}
    pads = [p for b, e in reversed(list(zip(g["begin"], g["end"], strict=True))) for p in (b, e)]
    x = torch.nn.functional.pad(t["x"], pads)
    return CONV[g["rank"]](x, t["w"], t.get("b"), g["strides"], 0, g["dilations"], g["groups"]).numpy()


def _lowered(model: onnx.ModelProto, name: str, target: str = "cpu") -> onnx.ModelProto:
    graph = ir.from_proto(model)
    graph.graph.opset_imports[""] = 21
    lower(graph.graph, target_named(target), Policy({"Conv": name}, training=True))
    return ir.to_proto(graph)


@SETTINGS
@given(geometry())
def test_forward_lowerings(g: dict) -> None:
    full = _arrays(g, transposed=False)
    for arrays in (full, {k: full[k] for k in ("x", "w")}):
        want = _convolved(arrays, g)
        # they serve training, where a batch of unknown size is taken to have samples
        for shapes in ("static", "symbolic") if g["batch"] else ("static",):
            model = _model("Conv", arrays, shapes, **_attributes(g))
            for name in FORWARD:
                try:
                    lowered = _lowered(model, name)
                except LoweringError:
                    continue
                got = run(lowered, arrays)["y"]
                bound = 1e-5 if lowerings()["Conv"][name].exact else 1e-4
                assert got.shape == want.shape
                assert _error(got, want) < bound, (name, shapes)


def case(
    x: tuple[int, ...],
    features: int,
    kernel: tuple[int, ...],
    *,
    strides: int | list[int] = 1,
    dilations: int = 1,
    begin: int = 0,
    end: int | None = None,
    groups: int = 1,
) -> dict:
    """A geometry by its sizes, with the same stride, dilation and padding on every axis, unless it is a list."""
    rank = len(kernel)
    each = {"strides": strides, "dilations": dilations, "begin": begin, "end": begin if end is None else end}
    sizes = {"rank": rank, "batch": x[0], "channels": x[1], "size": [*x[2:]], "kernel": [*kernel]}
    lists = {k: v if isinstance(v, list) else [v] * rank for k, v in each.items()}
    return sizes | {"features": features, "groups": groups} | lists


DEPTHWISE = [
    ("bands", case((3, 4, 7, 7), 4, (3, 3), begin=1, groups=4)),
    ("bands", case((2, 3, 9, 5), 3, (5, 2), strides=2, dilations=2, begin=3, end=1, groups=3)),
    ("bands", case((2, 2, 4, 3, 5), 2, (2, 3, 3), begin=1, groups=2)),
    ("bands", case((2, 2, 61), 2, (9,), begin=4, groups=2)),
    ("bands", case((2, 3, 28, 12), 3, (5, 5), strides=2, begin=2, groups=3)),
    ("tiled_sample_rows", case((2, 3, 31, 6), 3, (3, 5), begin=1, end=2, groups=3)),
    ("tiled_sample_rows", case((3, 2, 7, 11), 2, (5, 3), dilations=2, begin=4, groups=2)),
    ("tiled_sample_rows", case((2, 2, 5, 6, 7), 2, (3, 3, 2), begin=1, end=0, groups=2)),
    ("sliding_bands", case((3, 4, 14, 9), 4, (5, 5), begin=2, groups=4)),
    ("sliding_bands", case((2, 3, 9, 5), 3, (5, 2), strides=2, dilations=2, begin=3, end=1, groups=3)),
    ("sliding_bands", case((2, 2, 61), 2, (9,), begin=4, groups=2)),
    ("folded_sliding_bands", case((3, 4, 7, 7), 4, (3, 3), begin=1, groups=4)),
    ("folded_sliding_bands", case((2, 3, 28, 12), 3, (5, 5), strides=2, begin=2, groups=3)),
    ("folded_sliding_bands", case((2, 2, 4, 3, 5), 2, (2, 3, 3), begin=3, end=0, groups=2)),
]

BOXES = [
    ("boxes", case((3, 4, 7, 6), 5, (3, 3), dilations=6, begin=6)),
    ("boxes", case((2, 3, 5, 4), 4, (3, 5), dilations=7, begin=20, end=14)),
    ("boxes", case((2, 3, 40), 4, (4,), dilations=15, begin=45, end=0)),
    ("boxes", case((2, 3, 3, 1, 2), 2, (3, 3, 3), dilations=2, begin=2)),
]

CASES = [
    ("phases", case((2, 3, 9, 8), 4, (3, 3), strides=2, begin=1)),
    ("phases", case((2, 4, 11, 10), 6, (5, 4), strides=3, begin=2, end=0, groups=2)),
    ("phases", case((2, 3, 17), 4, (7,), strides=2, dilations=3, begin=4, end=1)),
    ("phases", case((1, 2, 5, 6, 7), 3, (2, 3, 2), strides=2, begin=1)),
    ("phases", case((1, 2, 3), 2, (9,), strides=2, begin=8, end=8)),
    ("row_phases", case((2, 4, 11, 10), 6, (5, 4), strides=3, begin=2, end=0, groups=2)),
    ("row_phases", case((2, 3, 9, 8), 4, (3, 3), strides=2, begin=1)),
    ("row_phases", case((2, 6, 5, 6, 7), 4, (2, 3, 2), strides=2, begin=1, groups=2)),
    ("row_phases", case((1, 2, 9, 7, 4), 3, (3, 4, 3), strides=[1, 2, 1], begin=1)),
    ("folded_gemm", case((3, 4, 5, 6), 6, (1, 1), groups=2)),
    ("folded_gemm", case((2, 5, 7), 3, (1,))),
    ("folded_gemm", case((2, 5, 3, 2, 4), 3, (1, 1, 1))),
    ("col2im", case((2, 4, 9, 8), 6, (3, 2), strides=2, dilations=2, begin=2, end=1, groups=2)),
    ("col2im", case((2, 3, 9), 4, (3,), strides=3, begin=1)),
    ("col2im", case((2, 3, 12), 4, (3,), strides=2, dilations=2, begin=2, end=1)),
    ("folded_col2im", case((2, 4, 9, 8), 6, (1, 1), strides=2, groups=2)),
    ("folded_col2im", case((3, 2, 7, 7), 3, (3, 3), begin=1)),
    ("folded_col2im", case((2, 4, 12), 4, (3,), dilations=3, begin=1, end=2, groups=2)),
    ("tiled_conv", case((2, 3, 31, 6), 3, (3, 5), begin=1, end=2, groups=3)),
    ("tiled_conv", case((2, 2, 13, 11), 4, (5, 3), strides=2, begin=2, groups=2)),
    ("tiled_conv", case((1, 2, 5, 6, 7), 2, (3, 3, 2), strides=2, begin=1, groups=2)),
    ("tiled_conv", case((1, 2, 23), 2, (4,), dilations=2, begin=5, end=0, groups=2)),
    *BOXES,
    *DEPTHWISE,
]


FORWARD_CASES = [
    ("boxes", case((2, 3, 9, 10), 4, (3, 3), strides=[2, 3], dilations=8, begin=8)),
    ("stacked_conv", case((3, 4, 6, 5), 6, (3, 2), strides=2, begin=2, end=0, groups=2)),
    ("stacked_conv", case((2, 3, 9), 4, (3,), dilations=2, begin=5)),
    ("stacked_conv", case((3, 4, 7, 7), 5, (3, 3), begin=1)),
    ("folded_gemm", case((3, 4, 5, 6), 6, (1, 1), strides=2, groups=2)),
    ("folded_gemm", case((2, 5, 7), 3, (1,))),
    ("folded_gemm", case((2, 5, 3, 2, 4), 3, (1, 1, 1), strides=3)),
    ("tiled_conv", case((2, 3, 31, 6), 3, (3, 5), begin=1, end=2, groups=3)),
    ("tiled_conv", case((2, 2, 23, 11), 4, (5, 3), strides=2, begin=2, groups=2)),
    ("tiled_conv", case((1, 2, 6, 6, 7), 2, (3, 3, 2), dilations=2, begin=2, groups=2)),
    *BOXES,
    *DEPTHWISE,
]


@pytest.mark.parametrize(("name", "g"), FORWARD_CASES, ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("bias", [True, False])
def test_forward(name: str, g: dict, bias: bool) -> None:
    arrays = _arrays(g, transposed=False)
    if not bias:
        del arrays["b"]
    got = run(_lowered(_model("Conv", arrays, "static", **_attributes(g)), name), arrays)["y"]
    assert _error(got, _convolved(arrays, g)) < 1e-5


@pytest.mark.parametrize(("name", "g"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_input_grad(name: str, g: dict) -> None:
    arrays = _arrays(g, transposed=False)
    model = _model("Conv", arrays, "static", **_attributes(g))
    seed = np.random.default_rng(1).standard_normal(_convolved(arrays, g).shape).astype(np.float32)
    got = run(og.augment(model, wrt=["x"], lowering={"ConvInputGrad": name}), {**arrays, "y_grad": seed})["x_grad"]
    x = torch.tensor(arrays["x"], dtype=torch.float64, requires_grad=True)
    pads = [p for b, e in reversed(list(zip(g["begin"], g["end"], strict=True))) for p in (b, e)]
    padded = torch.nn.functional.pad(x, pads)
    w = torch.tensor(arrays["w"], dtype=torch.float64)
    y = CONV[g["rank"]](padded, w, None, g["strides"], 0, g["dilations"], g["groups"])
    y.backward(torch.tensor(seed, dtype=torch.float64))
    assert _error(got, x.grad.numpy()) < 1e-5


@pytest.mark.parametrize("shapes", ["symbolic", "absent"])
@pytest.mark.parametrize("size", [8, 9])
def test_phases_of_unknown_sizes(shapes: str, size: int) -> None:
    """How many rows no window reaches is known only at run time."""
    g = case((2, 3, size, size + 1), 4, (3, 3), strides=2, begin=1)
    arrays = _arrays(g, transposed=False)
    seed = np.random.default_rng(1).standard_normal(_convolved(arrays, g).shape).astype(np.float32)
    feed = {**arrays, "y_grad": seed}
    results = [
        run(
            og.augment(_model("Conv", arrays, shapes, **_attributes(g)), wrt=["x"], lowering={"ConvInputGrad": name}),
            feed,
        )["x_grad"]
        for name in ("phases", "conv_transpose")
    ]
    assert results[0].shape == arrays["x"].shape
    assert _error(*results) < 1e-5


@pytest.mark.parametrize("name", ["col2im", "folded_col2im"])
def test_windows_of_signals_are_added_over_two_axes(name: str) -> None:
    """Before ONNX Runtime 1.28, Col2Im is wrong over one axis and over three."""
    model = ConvLayer((2, 4, 9), (6, 4, 3), (2,), (1,), (1,), (1,)).model()
    nodes = og.vjp(model, wrt=["x"], lowering={"ConvInputGrad": name}).graph.node
    (adding,) = (node for node in nodes if node.op_type == "Col2Im")
    lengths = {a.name: len(a.ints) for a in adding.attribute}
    assert lengths == {"dilations": 2, "pads": 4, "strides": 2}


@pytest.mark.parametrize(
    ("name", "g", "reason"),
    [
        ("phases", case((1, 2, 8, 8), 2, (3, 3), begin=1), "every stride is 1"),
        ("phases", case((1, 2, 8, 8), 2, (1, 1), strides=2), "some rows belong to no window"),
        ("phases", case((1, 2, 20, 20), 2, (5, 5), strides=5), "there are 25 phases"),
        ("row_phases", case((1, 2, 20), 2, (5,), strides=2), "every stride but that along the last axis is 1"),
        ("boxes", case((2, 2, 8, 8), 2, (3, 3), dilations=3, begin=3), "only 44% of what the taps read is padding"),
        ("folded_gemm", case((2, 2, 8, 8), 2, (3, 3)), "the kernel is not 1x1"),
        ("folded_gemm", case((1, 2, 8, 8), 2, (1, 1)), "there is only one sample"),
        ("col2im", case((2, 2, 4, 5, 6), 2, (3, 3, 3)), "before 1.28 adds up windows wrongly over three axes"),
        ("col2im", case((2, 2, 8, 8), 2, (1, 1)), "leaves nothing to add up"),
        ("tiled_conv", case((2, 2, 8, 8), 2, (3, 3)), "one channel per group"),
        ("tiled_conv", case((2, 2, 1, 8), 2, (1, 3), groups=2), "one row"),
        ("bands", case((2, 2, 4, 300), 2, (3, 3), begin=1, groups=2), "rows are too long"),
        ("bands", case((2, 2, 8, 8), 4, (3, 3), groups=2), "several features"),
        ("tiled_sample_rows", case((2, 2, 8), 2, (3,), groups=2), "there is one spatial axis"),
        (
            "tiled_sample_rows",
            case((2, 2, 8, 8), 2, (3, 3), strides=2, groups=2),
            "the stride along the last axis is 2",
        ),
        ("sliding_bands", case((2, 2, 1, 8), 2, (1, 3), begin=0, groups=2), "one band"),
    ],
)
def test_reasons(name: str, g: dict, reason: str) -> None:
    model = _model("Conv", _arrays(g, transposed=False), "static", **_attributes(g))
    with pytest.raises(LoweringError, match=reason):
        og.augment(model, wrt=["x"], lowering={"ConvInputGrad": name})


@pytest.mark.parametrize(
    ("g", "reason"),
    [
        (case((1, 2, 8, 8), 2, (3, 3)), "there is only one sample"),
        (case((2, 2, 4, 4, 4), 2, (3, 3, 3)), "three axes at most"),
        (case((2, 2, 4, 4), 2, (1, 1)), "the kernel is 1x1"),
    ],
)
def test_reasons_against_stacked_samples(g: dict, reason: str) -> None:
    with pytest.raises(LoweringError, match=reason):
        _lowered(_model("Conv", _arrays(g, transposed=False), "static", **_attributes(g)), "stacked_conv")


@pytest.mark.parametrize("name", ["flipped_conv", "phases", "row_phases", "tiled_conv"])
def test_uneven_padding_is_made_explicit_where_the_provider_wants_it(name: str) -> None:
    strides = 2 if name.endswith("phases") else 1
    g = case((2, 2, 9, 9), 2, (3, 3), strides=strides, begin=2, end=0, groups=2)
    arrays = _arrays(g, transposed=False)
    model = _model("Conv", arrays, "static", **_attributes(g))
    augmented = og.augment(model, wrt=["x"], lowering={"ConvInputGrad": name}, target="cuda")
    added = [n for n in augmented.graph.node if n.op_type == "Conv"][1:]
    assert added
    for node in added:
        pads = next(list(a.ints) for a in node.attribute if a.name == "pads")
        assert pads[: len(pads) // 2] == pads[len(pads) // 2 :]
    seed = np.random.default_rng(1).standard_normal(_convolved(arrays, g).shape).astype(np.float32)
    plain = og.augment(model, wrt=["x"], lowering={"ConvInputGrad": "conv_transpose"})
    results = [run(m, {**arrays, "y_grad": seed})["x_grad"] for m in (augmented, plain)]
    assert _error(*results) < 1e-5


def test_constant_kernels_are_laid_out_when_the_model_is_loaded() -> None:
    """Of a kernel that no input can change, the turned one is a constant too: nothing of it is priced in a run."""
    g = case((8, 96, 56, 56), 96, (7, 7), begin=3, end=3, groups=96)
    shapes = {"x": (8, 96, 56, 56), "w": (96, 1, 7, 7), "b": (96,)}
    arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    model = _model("Conv", arrays, "static", **_attributes(g))
    fixed = onnx.ModelProto()
    fixed.CopyFrom(model)
    fixed.graph.initializer.append(onnx.numpy_helper.from_array(arrays["w"], "w"))
    del fixed.graph.input[1]
    choices = [og.explain(m, wrt=["x"]).choices[0] for m in (model, fixed)]
    assert choices[0].chosen != "flipped_conv"
    assert choices[1].chosen == "flipped_conv"
    seconds = [next(c.seconds for c in choice.candidates if c.name == "flipped_conv") for choice in choices]
    assert seconds[0] > 2 * seconds[1]
