"""Convolution gradients over random geometry, against float64 autograd of PyTorch, with every lowering forced."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import onnx_convgrad as og
from onnx_convgrad.ir.geometry import ConvSpec, same_padding
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import Built, build
from onnx_convgrad.runtime import run

QUICK = settings.default.max_examples < 1000
"""Whether this is not a hunt (`HYPOTHESIS_PROFILE=explore`), where kernels and volumes are as large as promised."""

SETTINGS = settings(
    max_examples=60 if QUICK else settings.default.max_examples, suppress_health_check=list(HealthCheck)
)

CONV = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}
TRANSPOSED = {
    1: torch.nn.functional.conv_transpose1d,
    2: torch.nn.functional.conv_transpose2d,
    3: torch.nn.functional.conv_transpose3d,
}


Axis = tuple[int, int, int, int, int, int, int]


def _axis(rank: int, *, transposed: bool) -> st.SearchStrategy[Axis]:
    """Size, kernel, stride, dilation, begin and end padding and output padding of one spatial axis."""
    most = {1: 9, 2: 9, 3: 7}[rank] if QUICK else 9
    sizes, pads = st.integers(1, most), st.integers(0, 4)
    kernels = st.integers(1, {1: 5, 2: 4, 3: 3}[rank] if QUICK else 5)
    steps = st.integers(1, 4)
    extras = st.integers(0, 3) if transposed else st.just(0)
    axes = st.tuples(sizes, kernels, steps, steps, pads, pads, extras)
    return axes.filter(_transposed_axis_fits if transposed else _axis_fits)


def _axis_fits(axis: Axis) -> bool:
    size, kernel, _, dilation, begin, end, _ = axis
    return size + begin + end >= dilation * (kernel - 1) + 1


def _transposed_axis_fits(axis: Axis) -> bool:
    size, kernel, stride, dilation, begin, end, extra = axis
    # ONNX Runtime refuses an output padding of a whole stride
    return extra < stride and stride * (size - 1) + extra + dilation * (kernel - 1) + 1 > begin + end


@st.composite
def geometry(draw: st.DrawFn, *, transposed: bool = False) -> dict:
    rank = draw(st.integers(1, 3))
    axes = draw(st.lists(_axis(rank, transposed=transposed), min_size=rank, max_size=rank))
    names = ("size", "kernel", "strides", "dilations", "begin", "end", "extra")
    groups = draw(st.integers(1, 3))
    return {
        "rank": rank,
        "groups": groups,
        "channels": groups * draw(st.integers(1, 2)),
        "features": groups * draw(st.integers(1, 2)),
        "batch": draw(st.integers(0, 2)),
        **{name: list(values) for name, values in zip(names, zip(*axes, strict=True), strict=True)},
    }


def _fits(g: dict) -> bool:
    return all(x + b + e >= s for x, b, e, s in zip(g["size"], g["begin"], g["end"], _spans(g), strict=True))


def _spans(g: dict) -> list[int]:
    return [d * (k - 1) + 1 for k, d in zip(g["kernel"], g["dilations"], strict=True)]


def _unknown_sizes_check(g: dict, unknown: set[int], choices: list, *, training: bool) -> None:
    """For sizes of x that are not told along the axes `unknown`."""
    arrays = _arrays(g, transposed=False)
    model = _model("Conv", arrays, unknown, **_attributes(g))
    y = run(model, arrays)["y"]
    seed = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    want = _oracle("Conv", arrays, g, seed)
    terms = _oracle("Conv", {name: np.abs(a) for name, a in arrays.items()}, g, np.abs(seed))
    for choice in ("auto", *_together(model, choices, training=training)):
        built = build(model, Options(wrt=["x", "w", "b"], lowering=choice, training=training))
        got = run(ir.to_proto(built.model), {**arrays, "y_grad": seed})
        assert got["y"].shape == y.shape
        assert _error(got["y"], y) < 1e-4
        for name in arrays:
            _close(got[f"{name}_grad"], want[name], terms[name], _bound(built, name), (name, choice))


def _together(model: onnx.ModelProto, forced: list, *, training: bool = False) -> Iterator[dict[str, str]]:
    """Choices that force, in as few models as can be, each of the lowerings that apply: one of every operator at once."""
    found = build(model, Options(wrt=["x", "w", "b"], training=training), compare=True).choices
    apply = {(c.op_type, way.name) for c in found for way in c.candidates if way.reason is None}
    columns: dict[str, list] = {}
    for choice in forced:
        for pair in choice.items():
            if pair in apply:
                columns.setdefault(pair[0], []).append(pair)
    for row in itertools.zip_longest(*columns.values()):
        yield dict(filter(None, row))


def _model(op: str, arrays: dict[str, np.ndarray], shapes: str | set[int], **attributes: object) -> onnx.ModelProto:
    """One node, with x declared in full, or for its channels alone, or not at all, or but for the axes of a set."""
    axes = {"static": set(), "symbolic": {*range(arrays["x"].ndim)} - {1}, "absent": None}
    unknown = axes[shapes] if isinstance(shapes, str) else shapes
    node = helper.make_node(op, list(arrays), ["y"], name="conv", **attributes)
    inputs = []
    for name, array in arrays.items():
        dims: list | None = list(array.shape)
        if name == "x":
            dims = None if unknown is None else [f"d{i}" if i in unknown else d for i, d in enumerate(array.shape)]
        inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims))
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _oracle(op: str, arrays: dict[str, np.ndarray], g: dict, seed: np.ndarray) -> dict[str, np.ndarray]:
    t = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in arrays.items()}
    if op == "Conv":
        pads = [p for b, e in reversed(list(zip(g["begin"], g["end"], strict=True))) for p in (b, e)]
        x = torch.nn.functional.pad(t["x"], pads)
        y = CONV[g["rank"]](x, t["w"], t["b"], g["strides"], 0, g["dilations"], g["groups"])
    else:
        y = TRANSPOSED[g["rank"]](t["x"], t["w"], None, g["strides"], 0, 0, g["groups"], g["dilations"])
        extra = [p for o in reversed(g["extra"]) for p in (0, o)]  # first, so that what is cut off is there
        pads = [-p for b, e in reversed(list(zip(g["begin"], g["end"], strict=True))) for p in (b, e)]
        y = torch.nn.functional.pad(torch.nn.functional.pad(y, extra), pads) + t["b"].reshape(1, -1, *[1] * g["rank"])
    y.backward(torch.tensor(seed, dtype=torch.float64))
    return {k: v.grad.numpy() for k, v in t.items()}


def _error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-6))


def _arrays(g: dict, *, transposed: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    c, o, n = g["channels"], g["features"], g["groups"]
    w = (c, o // n, *g["kernel"]) if transposed else (o, c // n, *g["kernel"])
    shapes = {"x": (g["batch"], c, *g["size"]), "w": w, "b": (o,)}
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


def _check(op: str, g: dict, arrays: dict[str, np.ndarray], choices: list, **attributes: object) -> None:
    y = run(_model(op, arrays, "static", **attributes), arrays)["y"]
    seed = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    sizes = {name: np.abs(a) for name, a in arrays.items()}
    for shapes in ("static", "symbolic", "absent"):
        cotangent = np.ones_like(seed) if y.size == 1 and shapes == "static" else seed  # one element needs no seed
        want = _oracle(op, arrays, g, cotangent)
        terms = _oracle(op, sizes, g, np.abs(cotangent))
        model = _model(op, arrays, shapes, **attributes)
        for choice in ("auto", *_together(model, choices)) if shapes == "static" else ["auto"]:
            built = build(model, Options(wrt=["x", "w", "b"], lowering=choice))
            feed = {**arrays, "y_grad": cotangent}
            got = run(ir.to_proto(built.model), {i.name: feed[i.name] for i in built.model.graph.inputs})
            for name in arrays:
                _close(got[f"{name}_grad"], want[name], terms[name], _bound(built, name), (name, shapes, choice))


def _close(got: np.ndarray, want: np.ndarray, terms: np.ndarray, bound: float, what: tuple) -> None:
    """Equal within `bound`, or, where positive and negative terms cancel, within a few roundings of their size."""
    assert got.shape == want.shape
    room = max(bound * np.linalg.norm(want), ROUNDINGS * np.linalg.norm(terms), 1e-11)
    assert np.linalg.norm(got - want) < room, what


ROUNDINGS = 2.0**-22
"""Four units in the last place of float32: no sum in float32 is better than that, against the sum of its terms' sizes."""


OPERATORS = {"x": ("ConvInputGrad", "Conv"), "w": ("ConvWeightGrad",), "b": ()}
"""What computes each gradient; that of a transposed convolution's data is a Conv."""


def _bound(built: Built, name: str) -> float:
    """Lowerings that are not exact round more than a direct sum does."""
    chosen = [lowerings()[c.op_type][c.chosen] for c in built.choices if c.op_type in OPERATORS[name]]
    return 1e-5 if all(way.exact for way in chosen) else 1e-4


FORCED: list[dict[str, str]] = []
for _op in ("ConvInputGrad", "ConvWeightGrad"):
    FORCED += [{_op: name} for name in lowerings()[_op]]


def _attributes(g: dict) -> dict[str, object]:
    pads = [*g["begin"], *g["end"]]
    return {"strides": g["strides"], "dilations": g["dilations"], "pads": pads, "group": g["groups"]}


@SETTINGS
@given(geometry())
def test_conv(g: dict) -> None:
    _check("Conv", g, _arrays(g, transposed=False), FORCED, **_attributes(g))


@settings(SETTINGS, max_examples=20 if QUICK else SETTINGS.max_examples)
@given(geometry().filter(lambda g: g["batch"]))
def test_conv_with_an_unknown_batch_in_training(g: dict) -> None:
    choices = [*FORCED, *({"Conv": name} for name in lowerings()["Conv"])]
    _unknown_sizes_check(g, {0}, choices, training=True)


@settings(SETTINGS, max_examples=30 if QUICK else SETTINGS.max_examples)
@given(geometry())
def test_conv_with_an_unknown_batch_that_may_be_empty(g: dict) -> None:
    _unknown_sizes_check(g, {0}, FORCED, training=False)


@settings(SETTINGS, max_examples=30 if QUICK else SETTINGS.max_examples)
@given(geometry(), st.data())
def test_conv_with_some_unknown_sizes(g: dict, data: st.DataObject) -> None:
    unknown = data.draw(st.sets(st.sampled_from([0, *range(2, 2 + g["rank"])]), min_size=1), label="unknown")
    _unknown_sizes_check(g, unknown, FORCED, training=False)


@SETTINGS
@given(geometry(transposed=True))
def test_conv_transpose(g: dict) -> None:
    arrays = _arrays(g, transposed=True)
    _check(
        "ConvTranspose",
        g,
        arrays,
        [choice for choice in FORCED if "ConvWeightGrad" in choice],
        **_attributes(g),
        output_padding=g["extra"],
    )


@pytest.mark.parametrize("name", ["conv", "stacked_conv", "winograd_2", "im2col_gemm"])
def test_the_convolution_in_a_gradient_is_lowered(name: str) -> None:
    """The data's gradient of a ConvTranspose is a Conv; one of the model's own stays as it is."""
    g = {"rank": 2, "groups": 1, "channels": 2, "features": 3, "batch": 2, "size": [5, 6], "kernel": [4, 4]}
    g |= {"strides": [2, 2], "dilations": [1, 1], "begin": [1, 1], "end": [1, 1], "extra": [0, 0]}
    arrays, attributes = _arrays(g, transposed=True), {"strides": [2, 2], "pads": [1, 1, 1, 1]}
    choice = {"Conv": name}
    model = _model("ConvTranspose", arrays, "static", **attributes)
    assert ("Conv", name) in {(c.op_type, c.chosen) for c in og.explain(model, wrt=["x"], lowering=choice).choices}
    _check("ConvTranspose", g, arrays, [choice], **attributes)
    own = _model("Conv", _arrays(g, transposed=False), "static", **attributes)
    assert "Conv" not in {c.op_type for c in og.explain(own, wrt=["x", "w"]).choices}


@SETTINGS
@given(geometry())
def test_spec_against_brute_force(g: dict) -> None:
    for axis, span in enumerate(_spans(g)):
        padded = g["size"][axis] + g["begin"][axis] + g["end"][axis]
        starts = [p for p in range(0, padded, g["strides"][axis]) if p + span <= padded]
        reached = starts[-1] + span
        spec = ConvSpec(
            1, 1, 1, (g["size"][axis],), (g["kernel"][axis],), (len(starts),), (g["strides"][axis],),
            (g["dilations"][axis],), (g["begin"][axis],), (g["end"][axis],),
        )  # fmt: skip
        assert spec.leftover == (padded - reached if g["strides"][axis] > 1 else 0,)
        assert spec.span == (span,)


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), st.booleans())
def test_same_padding_gives_ceil_many_outputs(x: int, span: int, stride: int, upper: bool) -> None:
    low, high = same_padding(x, span, stride, upper=upper)
    assert low >= 0
    assert abs(low - high) <= 1
    assert (x + low + high - span) // stride + 1 == math.ceil(x / stride)


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [7, 8, 9])
def test_auto_pad(mode: str, stride: int, size: int) -> None:
    g = {"rank": 2, "groups": 1, "channels": 2, "features": 3, "batch": 2, "size": [size, size + 1], "kernel": [3, 4]}
    g |= {"strides": [stride, stride], "dilations": [1, 1]}
    pairs = [(0, 0) if mode == "VALID" else same_padding(x, k, stride, upper=mode == "SAME_UPPER")
             for x, k in zip(g["size"], g["kernel"], strict=True)]  # fmt: skip
    g |= {"begin": [p[0] for p in pairs], "end": [p[1] for p in pairs]}
    _check("Conv", g, _arrays(g, transposed=False), [], strides=g["strides"], auto_pad=mode)


@pytest.mark.parametrize("mode", ["NOTSET", "SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("grow", [-1, 0, 1])
@pytest.mark.parametrize("shapes", ["static", "symbolic", "absent"])
def test_conv_transpose_output_shape(mode: str, grow: int, shapes: str) -> None:
    """The oracle is the linear map itself: <y(x), seed> = <x, dx>, with y from the runtime."""
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.standard_normal((1, 2, 5)).astype(np.float32),
        "w": rng.standard_normal((2, 3, 4)).astype(np.float32),
    }
    for attributes in ({"output_shape": [12 + grow]}, {} if mode != "NOTSET" else {"output_shape": [11]}):
        model = _model("ConvTranspose", arrays, shapes, strides=[2], auto_pad=mode, **attributes)
        y = run(model, arrays)["y"]
        augmented = og.augment(model, wrt=["x", "w"])
        seed = rng.standard_normal(y.shape).astype(np.float32)
        got = run(augmented, {**arrays, "y_grad": seed})
        for name, array in arrays.items():
            assert got[f"{name}_grad"].shape == array.shape
            assert np.vdot(got[f"{name}_grad"], array) == pytest.approx(float(np.vdot(y, seed)), rel=1e-4)
            moved = array + rng.standard_normal(array.shape).astype(np.float32)
            change = run(model, {**arrays, name: moved})["y"] - y
            assert np.vdot(got[f"{name}_grad"], moved - array) == pytest.approx(float(np.vdot(change, seed)), rel=1e-3)


def test_backward_is_a_handful_of_nodes() -> None:
    """The walk adds nothing to what the lowerings emit; the fastest of those may take some nodes more."""
    arrays = {
        "x": np.zeros((2, 16, 8, 8), np.float32),
        "w": np.zeros((16, 16, 3, 3), np.float32),
        "b": np.zeros(16, np.float32),
    }
    model = _model("Conv", arrays, "static", pads=[1, 1, 1, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = {"ConvInputGrad": "conv_transpose", "ConvWeightGrad": "conv_swap"}
        augmented = og.augment(model, wrt=["x", "w", "b"], lowering=plain)
    assert len(augmented.graph.node) - 1 <= 6
    assert {n.domain for n in augmented.graph.node} == {""}
