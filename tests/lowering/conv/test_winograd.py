"""Winograd lowerings of Conv and its gradients against float64 PyTorch: geometry, accuracy, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import onnx_convgrad as og
from onnx_convgrad.lowering.conv.winograd import SIZES
from onnx_convgrad.lowering.conv.winograd_axes import MOST, matrices, tiled
from onnx_convgrad.runtime import run
from tests.support.optimizer import optimized

SETTINGS = settings(deadline=None, max_examples=100, derandomize=True, suppress_health_check=list(HealthCheck))
CONV = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}
OPERATORS = ("Conv", "ConvInputGrad", "ConvWeightGrad")

STEPS = [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1)]
"""Stride and dilation of an axis: with both there are no tiles."""

Arrays = dict[str, np.ndarray]


def _model(
    arrays: Arrays, batch: str | None = None, dtype: int = TensorProto.FLOAT, **attributes: object
) -> onnx.ModelProto:
    inputs = []
    for name, array in arrays.items():
        dims: list = list(array.shape)
        if batch and name == "x":
            dims[0] = batch
        inputs.append(helper.make_tensor_value_info(name, dtype, dims))
    node = helper.make_node("Conv", list(arrays), ["y"], name="conv", **attributes)
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", dtype, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _arrays(shape: tuple[int, ...], weight: tuple[int, ...], *, bias: bool = True) -> Arrays:
    rng = np.random.default_rng(0)
    shapes = {"x": shape, "w": weight} | ({"b": weight[:1]} if bias else {})
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


def _oracle(
    arrays: Arrays,
    seed: np.ndarray | None,
    begin: list[int],
    end: list[int],
    dilations: list[int] | int = 1,
    strides: list[int] | int = 1,
    groups: int = 1,
) -> Arrays:
    """The output, and with a seed the gradients, in float64."""
    t = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in arrays.items()}
    pads = [p for pair in reversed(list(zip(begin, end, strict=True))) for p in pair]
    y = CONV[len(begin)](torch.nn.functional.pad(t["x"], pads), t["w"], t.get("b"), strides, 0, dilations, groups)
    found = {"y": y.detach().numpy()}
    if seed is not None:
        y.backward(torch.tensor(seed, dtype=torch.float64))
        found |= {f"{k}_grad": v.grad.numpy() for k, v in t.items()}
    return found


def _lowered(model: onnx.ModelProto, most: int) -> tuple[onnx.ModelProto, set[str]]:
    """The model with every operator that applies lowered to tiles of at most `most`, and which operators those are."""
    used = {}
    for op in OPERATORS:
        try:
            og.augment(model, wrt=["x", "w"], training=True, lowering={op: f"winograd_{most}"})
        except og.LoweringError:
            continue
        used[op] = f"winograd_{most}"
    return og.augment(model, wrt=list(_inputs(model)), training=True, lowering=used or "auto"), set(used)


def _inputs(model: onnx.ModelProto) -> list[str]:
    return [i.name for i in model.graph.input]


def _error(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-6))


@st.composite
def geometry(draw: st.DrawFn) -> dict:
    rank = draw(st.integers(1, 3))
    most, taps = {1: (20, 7), 2: (11, 5), 3: (6, 3)}[rank]

    def each(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))

    steps = draw(st.lists(st.sampled_from(STEPS), min_size=rank, max_size=rank))
    return {
        "shape": (draw(st.integers(1, 2)), draw(st.integers(1, 5)), *each(1, most)),
        "weight": (draw(st.integers(1, 5)), 0, *each(1, taps)),
        "strides": [s for s, _ in steps],
        "dilations": [d for _, d in steps],
        "begin": each(0, 3),
        "end": each(0, 3),
        "bias": draw(st.booleans()),
    }


def _fits(g: dict) -> bool:
    rows = zip(g["shape"][2:], g["weight"][2:], g["dilations"], g["begin"], g["end"], strict=True)
    return max(g["weight"][2:]) > 1 and all(x + b + e > d * (k - 1) for x, k, d, b, e in rows)


@SETTINGS
@given(geometry().filter(_fits), st.sampled_from(SIZES))
def test_random_geometry(g: dict, most: int) -> None:
    weight = (g["weight"][0], g["shape"][1], *g["weight"][2:])
    arrays = _arrays(g["shape"], weight, bias=g["bias"])
    pads = [*g["begin"], *g["end"]]
    y = _oracle(arrays, None, g["begin"], g["end"], g["dilations"], g["strides"])["y"]
    seed = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    if y.size == 1:  # a single element needs no seed: it is 1
        seed = np.ones(y.shape, np.float32)
    want = _oracle(arrays, seed, g["begin"], g["end"], g["dilations"], g["strides"])
    model, used = _lowered(_model(arrays, pads=pads, dilations=g["dilations"], strides=g["strides"]), most)
    got = run(model, {**arrays, "y_grad": seed} if y.size > 1 else arrays)
    for name, value in want.items():
        assert _error(got[name], value) < 1e-4, (name, used)


@pytest.mark.parametrize("most", SIZES)
@pytest.mark.parametrize("batch", [None, "n"])
@pytest.mark.parametrize(
    ("shape", "weight", "groups", "dilations", "stride"),
    [
        ((2, 24, 9, 7), (16, 12, 3, 3), 2, [1, 1], 1),
        ((3, 16, 11, 8), (24, 8, 3, 2), 2, [2, 1], 1),
        ((2, 24, 13), (24, 8, 5), 3, [1], 1),
        ((2, 16, 9, 8), (16, 8, 3, 3), 2, [1, 1], 2),
    ],
)
def test_wide_groups(
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    groups: int,
    dilations: list[int],
    stride: int,
    batch: str | None,
    most: int,
) -> None:
    arrays, pads = _arrays(shape, weight), [1] * (len(shape) - 2)
    y = _oracle(arrays, None, pads, pads, dilations, stride, groups)["y"]
    seed = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    want = _oracle(arrays, seed, pads, pads, dilations, stride, groups)
    strides = [stride] * len(pads)
    model = _model(arrays, batch, pads=pads * 2, dilations=dilations, strides=strides, group=groups)
    lowered, used = _lowered(model, most)
    assert used == set(OPERATORS) or most > 2
    got = run(lowered, {**arrays, "y_grad": seed})
    for name, value in want.items():
        assert _error(got[name], value) < 1e-4, (name, used)


@pytest.mark.parametrize(
    ("outputs", "taps"), [(m, k) for m in range(1, MOST + 1) for k in range(1, MOST + 1) if m + k - 1 <= MOST]
)
def test_matrices_correlate(outputs: int, taps: int) -> None:
    a, g, b = matrices(outputs, taps)
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal(taps), rng.standard_normal(outputs + taps - 1)
    np.testing.assert_allclose(a @ ((g @ w) * (b @ x)), np.correlate(x, w, "valid"), rtol=1e-11, atol=1e-11)


@given(st.integers(1, 300), st.integers(1, MOST - 1), st.sampled_from(STEPS), st.sampled_from(SIZES))
def test_tiles_cover_the_axis_and_no_tile_is_superfluous(
    size: int, taps: int, step: tuple[int, int], most: int
) -> None:
    stride, dilation = step
    axis = tiled(size, taps, dilation, most, stride)
    outputs = axis.tile * axis.count * axis.dilation
    assert outputs >= size > outputs - axis.tile * axis.dilation
    assert sum(axis.phases) == taps
    assert axis.tile + max(axis.phases) - 1 <= MOST
    assert axis.tile <= most


@pytest.mark.parametrize("positive", [False, True], ids=["normal", "relu"])
@pytest.mark.parametrize(("most", "bound"), [(2, 3e-6), (4, 1e-5), (6, 3e-5)])
@pytest.mark.parametrize(
    ("shape", "features", "kernel"),
    [((4, 32, 28, 28), 48, (3, 3)), ((2, 16, 21, 15), 16, (5, 5)), ((2, 16, 12, 13, 14), 8, (3, 3, 3))],
    ids=["3x3", "5x5", "3x3x3"],
)
def test_accuracy(
    shape: tuple[int, ...], features: int, kernel: tuple[int, ...], most: int, bound: float, positive: bool
) -> None:
    arrays = _arrays(shape, (features, shape[1], *kernel))
    if positive:
        arrays["x"] = np.maximum(arrays["x"], 0)
    pads = [k // 2 for k in kernel]
    seed = np.random.default_rng(1).standard_normal((shape[0], features, *shape[2:])).astype(np.float32)
    want = _oracle(arrays, seed, pads, pads)
    model, used = _lowered(_model(arrays, pads=[*pads, *pads]), most)
    assert used == set(OPERATORS) or most == 6  # six outputs and five taps need too many points
    got = run(model, {**arrays, "y_grad": seed})
    for name, value in want.items():
        assert _error(got[name], value) < bound, name


@pytest.mark.parametrize("most", SIZES[:2])
@pytest.mark.parametrize(("dilation", "pad"), [(2, 2), (2, 1), (3, 3), (4, 0)])
def test_dilation_cuts_each_phase_into_tiles(dilation: int, pad: int, most: int) -> None:
    arrays = _arrays((2, 3, 17, 20), (4, 3, 3, 3))
    pads, dilations = [pad, pad], [dilation, dilation]
    y = _oracle(arrays, None, pads, pads, dilations)["y"]
    seed = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    want = _oracle(arrays, seed, pads, pads, dilations)
    model, used = _lowered(_model(arrays, pads=[*pads, *pads], dilations=dilations), most)
    assert used == set(OPERATORS)
    got = run(model, {**arrays, "y_grad": seed})
    for name, value in want.items():
        assert _error(got[name], value) < 1e-5, name


@pytest.mark.parametrize("most", SIZES[:2])
@pytest.mark.parametrize(
    ("size", "kernel", "strides", "begin", "end"),
    [
        ((41,), (17,), [4], [8], [5]),
        ((38,), (9,), [3], [0], [2]),
        ((17, 20), (4, 4), [2, 2], [1, 2], [1, 0]),
        ((13, 18), (3, 5), [2, 1], [0, 2], [1, 2]),
        ((9, 8, 7), (4, 3, 3), [2, 2, 1], [1, 0, 1], [2, 2, 1]),
    ],
)
def test_each_phase_of_a_stride_is_cut_into_tiles(
    size: tuple[int, ...], kernel: tuple[int, ...], strides: list[int], begin: list[int], end: list[int], most: int
) -> None:
    arrays = _arrays((2, 3, *size), (4, 3, *kernel))
    y = _oracle(arrays, None, begin, end, strides=strides)["y"]
    seed = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    want = _oracle(arrays, seed, begin, end, strides=strides)
    model, used = _lowered(_model(arrays, pads=[*begin, *end], strides=strides), most)
    assert used == set(OPERATORS)
    got = run(model, {**arrays, "y_grad": seed})
    for name, value in want.items():
        assert _error(got[name], value) < 1e-5, name


@pytest.mark.parametrize("target", ["cuda", "web", "portable"])
def test_targets_without_asymmetric_padding(target: str) -> None:
    arrays = _arrays((2, 3, 14, 14), (4, 3, 3, 3), bias=False)
    seed = np.random.default_rng(1).standard_normal((2, 4, 14, 14)).astype(np.float32)
    want = _oracle(arrays, seed, [1, 1], [1, 1])
    choices = {"ConvInputGrad": "winograd_4", "ConvWeightGrad": "winograd_4"}
    model = og.augment(_model(arrays, pads=[1, 1, 1, 1]), wrt=["x", "w"], lowering=choices, target=target)
    for node in model.graph.node:
        pads = next((list(a.ints) for a in node.attribute if a.name == "pads"), [])
        assert pads[: len(pads) // 2] == pads[len(pads) // 2 :]
    got = run(model, {**arrays, "y_grad": seed})
    for name, value in want.items():
        assert _error(got[name], value) < 1e-5, name


def test_a_trimmed_operand() -> None:
    """The gradients of a ConvTranspose padded by more than its kernel are those of a convolution with negative pads."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((2, 3, 12, 11), (3, 4, 3, 3)))
    values = [helper.make_tensor_value_info(k, TensorProto.FLOAT, v.shape) for k, v in (("x", x), ("w", w))]
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], name="conv", pads=[4, 0, 3, 5])
    graph = helper.make_graph([node], "g", values, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    tx, tw = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (x, w))
    y = torch.nn.functional.conv_transpose2d(tx, tw)[:, :, 4:-3, :-5]
    seed = rng.standard_normal(tuple(y.shape)).astype(np.float32)
    y.backward(torch.tensor(seed, dtype=torch.float64))
    for most in SIZES:
        augmented = og.augment(model, wrt=["x", "w"], lowering={"ConvWeightGrad": f"winograd_{most}"})
        got = run(augmented, {"x": x, "w": w, "y_grad": seed})
        for name, t in (("x", tx), ("w", tw)):
            assert _error(got[f"{name}_grad"], t.grad.numpy()) < 1e-4


def test_a_batch_of_unknown_size_has_samples_in_training() -> None:
    """So none is added to it."""
    model = _model(_arrays((2, 4, 12, 12), (4, 4, 3, 3)), "n", pads=[1, 1, 1, 1])
    for op in OPERATORS:
        augmented = og.augment(model, wrt=["x", "w"], training=True, lowering={op: "winograd_4"})
        assert "Max" not in {n.op_type for n in augmented.graph.node}


def test_tiles_of_the_forward_pass_are_not_kept_for_the_gradient(tmp_path: Path) -> None:
    """They are larger than x, and ONNX Runtime would share equal ones."""
    model = _model(_arrays((2, 3, 12, 12), (4, 3, 3, 3), bias=False), pads=[1, 1, 1, 1])
    choices = {"Conv": "winograd_4", "ConvWeightGrad": "winograd_4"}
    augmented = og.augment(model, wrt=["w"], training=True, lowering=choices)
    nodes = optimized(augmented, tmp_path, "extended").graph.node
    assert sum(n.op_type == "Conv" for n in nodes) == 2 + 4  # x on two axes; x and dY on two axes


@pytest.mark.parametrize("lowering", ["winograd_4", "winograd_rows_4"])
def test_kernels_are_transformed_when_they_are_needed(lowering: str, tmp_path: Path) -> None:
    """Several times as large as the weights, they would else be there for all layers before the first one begins."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[2, 8, 12, 12] x, float[8, 8, 3, 3] v, float[8, 8, 3, 3] w) => (float loss) {
            h = Conv <pads = [1, 1, 1, 1]> (x, v)
            r = Relu (h)
            y = Conv <pads = [1, 1, 1, 1]> (r, w)
            loss = ReduceSumSquare <keepdims = 0> (y)
        }""")
    made = og.augment(model, wrt=["v"], training=True, lowering={"Conv": lowering, "ConvInputGrad": lowering})
    order = list(optimized(made, tmp_path).graph.node)
    r = next(node.output[0] for node in order if node.op_type == "Relu")
    tiles = min(i for i, node in enumerate(order) if r in node.input and node.op_type != "HardSigmoid")
    assert tiles < min(i for i, node in enumerate(order) if "w" in node.input)


@pytest.mark.parametrize(
    ("weight", "attributes", "reason"),
    [
        ((4, 4, 3, 1), {"strides": [1, 2]}, "along axis 1 the stride is 2, with a kernel of 1"),
        ((4, 4, 3, 3), {"strides": [2, 2], "dilations": [2, 2]}, "along axis 0 the stride is 2, with dilation 2"),
        ((4, 4, 2, 2), {"strides": [2, 2]}, "a phase of one tap leaves nothing to save"),
        ((4, 2, 3, 3), {"group": 2}, "a group has 2 channels or features, fewer than 8"),
        ((4, 4, 1, 1), {}, "a kernel of one tap leaves nothing to save"),
        ((4, 4, 9, 3), {"pads": [4, 1, 4, 1]}, "a kernel of 9 rows needs more than 8 points"),
        ((4, 4, 7, 7), {"pads": [3, 3, 3, 3]}, "smaller tiles do the same"),
    ],
)
def test_refusals(weight: tuple[int, ...], attributes: dict, reason: str) -> None:
    model = _model(_arrays((2, 4, 12, 12), weight, bias=False), **attributes)
    for op in OPERATORS:
        with pytest.raises(og.LoweringError, match=reason):
            og.augment(model, wrt=["x", "w"], training=True, lowering={op: "winograd_4"})


def test_a_half_precision_convolution_is_refused() -> None:
    model = _model(_arrays((2, 4, 12, 12), (4, 4, 3, 3), bias=False), dtype=TensorProto.FLOAT16)
    with pytest.raises(og.LoweringError, match="rounds too much for FLOAT16"):
        og.augment(model, wrt=["x", "w"], lowering={"ConvWeightGrad": "winograd_2"})


def test_exact_leaves_winograd_out() -> None:
    model = _model(_arrays((16, 128, 28, 28), (128, 128, 3, 3), bias=False), pads=[1, 1, 1, 1])
    for choosing, any_winograd in (("auto", True), ("exact", False)):
        rows = og.explain(model, wrt=["x", "w"], lowering=choosing).rows
        chosen = [row["chosen"] for row in rows if row["operator"] in OPERATORS]
        assert any(name.startswith("winograd") for name in chosen) == any_winograd, choosing
