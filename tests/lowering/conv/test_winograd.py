"""Winograd lowerings of Conv and its gradients against float64 PyTorch: geometry, accuracy, and refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnx_convgrad as og
from onnx_convgrad.lowering.conv.winograd import SIZES
from tests.support.conv_geometry import (
    SETTINGS,
    Axis,
    Geometry,
    arrays_of,
    attributes_of,
    axes,
    axis_fits,
    case,
    check_built,
    check_even_padding,
    conv_model,
    equal_test,
    error,
    forced_results,
    geometry,
    model_of,
    refusal_test,
)
from tests.support.one_input import graph_of
from tests.support.optimizer import optimized

OPERATORS = ("Conv", "ConvInputGrad", "ConvWeightGrad")


def _check(
    g: Geometry, most: int, bound: float, unknown: set[int], *, bias: bool = True, relu: bool = False
) -> set[str]:
    """Force tiles of at most `most` outputs for every operator to which they apply; return these operators."""
    arrays = arrays_of(g, bias=bias)
    if relu:
        arrays["x"] = np.maximum(arrays["x"], 0)
    model = model_of("Conv", arrays, unknown, **attributes_of(g))
    used = {}
    for op in OPERATORS:
        try:
            og.augment(model, wrt=["x", "w"], training=True, target=og.Target(lowering={op: f"winograd_{most}"}))
        except og.errors.LoweringError:
            continue
        used[op] = f"winograd_{most}"
    built = og.augment(model, wrt=list(arrays), training=True, target=og.Target(lowering=used or "auto"))
    check_built(built, g, bound, arrays=arrays, static=not unknown)
    return set(used)


def _axis(rank: int, _: int) -> st.SearchStrategy[Axis]:
    size, taps = {1: (20, 7), 2: (11, 5), 3: (6, 3)}[rank]
    step = st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (3, 1)])  # with stride and dilation there are no tiles
    pad = st.integers(0, 3)
    found = st.tuples(st.integers(1, size), st.integers(1, taps), step, pad, pad)
    return found.map(lambda a: (*a[:2], *a[2], *a[3:], 0)).filter(axis_fits)


@pytest.mark.slow
@SETTINGS
@given(
    geometry(axis=_axis, groups=(1, 1), channels=(1, 5), features=(1, 5), batch=(1, 2)).filter(
        lambda g: max(g["kernel"]) > 1
    ),
    st.sampled_from(SIZES),
    st.booleans(),
)
def test_random_geometry(g: Geometry, most: int, bias: bool) -> None:
    _check(g, most, 1e-4, set(), bias=bias)


@pytest.mark.parametrize("most", SIZES)
@pytest.mark.parametrize("unknown", [set(), {0}], ids=["static", "batch"])
@pytest.mark.parametrize(
    "g",
    [
        case((2, 24, 9, 7), 16, (3, 3), begin=1, groups=2),
        case((3, 16, 11, 8), 24, (3, 2), dilations=[2, 1], begin=1, groups=2),
        case((2, 24, 13), 24, (5,), begin=1, groups=3),
        case((2, 16, 9, 8), 16, (3, 3), strides=2, begin=1, groups=2),
    ],
)
def test_wide_groups(g: Geometry, unknown: set[int], most: int) -> None:
    assert _check(g, most, 1e-4, unknown) == set(OPERATORS) or most > 2


@pytest.mark.parametrize("relu", [False, True], ids=["normal", "relu"])
@pytest.mark.parametrize(("most", "bound"), [(2, 3e-6), (3, 1e-5), (4, 1e-5), (6, 3e-5)])
@pytest.mark.parametrize(
    "g",
    [
        case((4, 32, 28, 28), 48, (3, 3), begin=1),
        case((2, 16, 21, 15), 16, (5, 5), begin=2),
        case((2, 16, 12, 13, 14), 8, (3, 3, 3), begin=1),
    ],
    ids=["3x3", "5x5", "3x3x3"],
)
def test_accuracy(g: Geometry, most: int, bound: float, relu: bool) -> None:
    used = _check(g, most, bound, set(), relu=relu)
    assert used == set(OPERATORS) or most == 6  # six outputs and five taps need too many points


@pytest.mark.parametrize("most", SIZES[:3])
@pytest.mark.parametrize(
    "g",
    [
        *(
            case((2, 3, 17, 20), 4, (3, 3), dilations=dilation, begin=pad)
            for dilation, pad in ((2, 2), (2, 1), (3, 3), (4, 0))
        ),
        case((2, 3, 41), 4, (17,), strides=4, begin=8, end=5),
        case((2, 3, 38), 4, (9,), strides=3, end=2),
        case((2, 3, 17, 20), 4, (4, 4), strides=2, begin=[1, 2], end=[1, 0]),
        case((2, 3, 13, 18), 4, (3, 5), strides=[2, 1], begin=[0, 2], end=[1, 2]),
        case((2, 3, 9, 8, 7), 4, (4, 3, 3), strides=[2, 2, 1], begin=[1, 0, 1], end=[2, 2, 1]),
    ],
)
def test_each_phase_of_a_dilation_or_stride_is_cut_into_tiles(g: Geometry, most: int) -> None:
    assert _check(g, most, 1e-5, set()) == set(OPERATORS) or most == 4  # where tiles of 3 do the same


@pytest.mark.parametrize("target", ["cuda", "web", "portable"])
def test_targets_without_asymmetric_padding(target: str) -> None:
    g = case((2, 3, 14, 14), 4, (3, 3), begin=1)
    choices = {"ConvInputGrad": "winograd_4", "ConvWeightGrad": "winograd_4"}
    model = og.augment(conv_model(g), wrt=["x", "w"], target=og.Target(target, lowering=choices))
    check_even_padding(model)
    check_built(model, g)


def test_no_sample_is_added_to_a_batch_of_unknown_size_in_training() -> None:
    """It is never empty."""
    model = conv_model(case((2, 4, 12, 12), 4, (3, 3), begin=1), {0}, bias=True)
    for op in OPERATORS:
        augmented = og.augment(model, wrt=["x", "w"], training=True, target=og.Target(lowering={op: "winograd_4"}))
        assert "Max" not in {n.op_type for n in augmented.graph.node}


def test_tiles_of_the_forward_pass_are_not_kept_for_the_gradient(tmp_path: Path) -> None:
    """They are larger than x, and ONNX Runtime would share equal nodes."""
    model = conv_model(case((2, 3, 12, 12), 4, (3, 3), begin=1))
    choices = {"Conv": "winograd_4", "ConvWeightGrad": "winograd_4"}
    augmented = og.augment(model, wrt=["w"], training=True, target=og.Target(lowering=choices))
    nodes = optimized(augmented, tmp_path, "extended").graph.node
    assert sum(n.op_type == "Conv" for n in nodes) == 2 + 4  # x on two axes; x and dY on two axes


@pytest.mark.parametrize("lowering", ["winograd_4", "winograd_rows_4"])
def test_kernels_are_transformed_when_they_are_needed(lowering: str, tmp_path: Path) -> None:
    """Several times as large as the weights, they would else be held for all layers before the first layer runs."""
    text = """(float[2, 8, 12, 12] x, float[8, 8, 3, 3] v, float[8, 8, 3, 3] w) => (float loss) {
            h = Conv <pads = [1, 1, 1, 1]> (x, v) r = Relu (h)
            y = Conv <pads = [1, 1, 1, 1]> (r, w) loss = ReduceSumSquare <keepdims = 0> (y)
        }"""
    model = graph_of(text, opset=21)
    made = og.augment(
        model, wrt=["v"], training=True, target=og.Target(lowering={"Conv": lowering, "ConvInputGrad": lowering})
    )
    order = list(optimized(made, tmp_path).graph.node)
    r = next(node.output[0] for node in order if node.op_type == "Relu")
    tiles = min(i for i, node in enumerate(order) if r in node.input and node.op_type != "HardSigmoid")
    assert tiles < min(i for i, node in enumerate(order) if "w" in node.input)


REFUSALS = [
    (case((2, 4, 12, 12), 4, (3, 1), strides=[1, 2]), "along axis 1 the stride is 2, with a kernel of 1"),
    (case((2, 4, 12, 12), 4, (3, 3), strides=2, dilations=2), "along axis 0 the stride is 2, with dilation 2"),
    (case((2, 4, 12, 12), 4, (2, 2), strides=2), "a phase of one tap leaves nothing to save"),
    (case((2, 4, 12, 12), 4, (3, 3), groups=2), "a group has 2 channels or features, fewer than 8"),
    (case((2, 4, 12, 12), 4, (1, 1)), "a kernel of one tap leaves nothing to save"),
    (case((2, 4, 12, 12), 4, (9, 3), begin=[4, 1]), "a kernel of 9 rows needs more than 8 points"),
    (case((2, 4, 12, 12), 4, (7, 7), begin=3), "smaller tiles do the same"),
]
test_refusals = refusal_test(
    *((op, "winograd_4", g, reason) for op in OPERATORS for g, reason in REFUSALS), training=True
)


def test_a_half_precision_convolution_is_refused() -> None:
    g = case((2, 4, 12, 12), 4, (3, 3))
    model = model_of("Conv", {k: v.astype(np.float16) for k, v in arrays_of(g, bias=False).items()})
    with pytest.raises(og.errors.LoweringError, match="rounds too much for FLOAT16"):
        og.augment(model, wrt=["x", "w"], target=og.Target(lowering={"ConvWeightGrad": "winograd_2"}))


def test_exact_leaves_winograd_out() -> None:
    model = conv_model(case((16, 128, 28, 28), 128, (3, 3), begin=1))
    for choosing, any_winograd in (("auto", True), ("exact", False)):
        rows = og.explain(model, wrt=["x", "w"], target=og.Target(lowering=choosing)).rows
        chosen = [row["chosen"] for row in rows if row["operator"] in OPERATORS]
        assert any(name.startswith("winograd") for name in chosen) == any_winograd, choosing


def _axis_of_rows(_: int, position: int) -> st.SearchStrategy[Axis]:
    if position:
        return axes(6, 3, steps=2, pads=3)
    first = st.tuples(st.integers(1, 20), st.integers(2, 6), st.integers(0, 6), st.integers(0, 6))
    return first.map(lambda a: (a[0], a[1], 1, 1, a[2], a[3], 0)).filter(axis_fits)


@pytest.mark.slow
@settings(SETTINGS, max_examples=100)
@given(
    geometry(axis=_axis_of_rows, ranks=(2, 3), channels=(1, 3), features=(1, 3), batch=(1, 3)),
    st.sampled_from(SIZES),
    st.sampled_from(["Conv", "ConvInputGrad"]),
    st.sampled_from([set(), {0}]),
)
def test_random_geometry_of_rows(g: Geometry, most: int, op: str, unknown: set[int]) -> None:
    try:
        got, want = forced_results(op, f"winograd_rows_{most}", g, unknown or "static")
    except og.errors.LoweringError:
        return
    assert error(got, want) < 1e-4


DENSE = case((2, 4, 14, 9), 6, (3, 3), begin=1)


APPLIES = [
    DENSE,
    case((2, 12, 14, 9), 18, (3, 3), begin=1, groups=3),
    case((2, 4, 14, 9), 6, (3, 1), end=[2, 0]),
    case((2, 4, 14, 9), 6, (2, 4), begin=1),
    case((2, 4, 13, 5, 6), 6, (3, 2, 3), dilations=[1, 2, 1], begin=[1, 0, 1], end=[2, 1, 0]),
]
test_applies = equal_test(
    *((("Conv", "ConvInputGrad"), f"winograd_rows_{most}", g) for most in SIZES for g in APPLIES),
    shapes=[{0}],
    bound=1e-4,
)
test_the_conv_takes_a_stride_along_the_other_axes = equal_test(
    ("Conv", "winograd_rows_4", {**DENSE, "strides": [1, 2]}), bound=1e-4
)

REFUSALS: list[tuple[str, Geometry, str]] = [
    ("Conv", {"kernel": [1, 3]}, "the kernel has one row"),
    ("Conv", {"kernel": [9, 3], "begin": [4, 1], "end": [4, 1]}, "a kernel of 9 rows needs more than 8 points"),
    ("Conv", {"strides": [2, 1]}, "the stride and dilation of the rows are 2 and 1"),
    ("ConvInputGrad", {"strides": [1, 2]}, r"strides \[1, 2\] are not 1"),
    ("ConvInputGrad", {"begin": [3, 1]}, "the rows are padded by -1 and 1, which cuts some off"),
    ("Conv", {"size": [4, 9]}, "smaller tiles do the same"),
]
test_refusals_of_rows = refusal_test(
    *((op, "winograd_rows_6", {**DENSE, **change}, reason) for op, change, reason in REFUSALS), training=True
)


def test_exact_leaves_it_out() -> None:
    choices = og.explain(
        conv_model({**DENSE, "size": [64, 64]}, bias=True), wrt=["x"], training=True, target=og.Target(lowering="exact")
    ).choices
    refused = {c.name: c.reason for choice in choices for c in choice.candidates if c.name.startswith("winograd_rows")}
    assert refused
    assert all("times as much as a direct sum; lowering='exact' allows 1" in reason for reason in refused.values())
