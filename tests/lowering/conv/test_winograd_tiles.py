"""Winograd's matrices and tiles of one axis, and its lowerings where the size of the image is unknown while building."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import onnx_convgrad as og
from onnx_convgrad.lowering.conv.winograd import SIZES
from onnx_convgrad.lowering.conv.winograd_tiles import MOST, matrices, tiled
from tests.support.conv_geometry import Geometry, case, check_built, check_even_padding, conv_model

STEPS = [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1)]
"""Stride and dilation of an axis: with both there are no tiles."""


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


GEOMETRIES = {
    "same": case((2, 3, 7, 12), 4, (3, 3), begin=1),
    "unpadded": case((2, 3, 7, 12), 4, (3, 3)),
    "uneven": case((2, 3, 7, 12), 4, (3, 2), begin=[2, 0], end=[0, 1]),
    "one axis": case((2, 3, 7, 12), 4, (1, 5), begin=[0, 2]),
    "line": case((2, 3, 7), 4, (4,), begin=1, end=2),
    "volume": case((2, 3, 7, 12, 5), 4, (3, 2, 1), begin=[1, 0, 0], end=[1, 1, 0]),
}
BOTH = {"ConvInputGrad": "winograd_4", "ConvWeightGrad": "winograd_4"}


def _unknown(g: Geometry) -> set[int]:
    return {0, *range(2, 2 + g["rank"])}


@pytest.mark.parametrize("most", SIZES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_size(name: str, most: int) -> None:
    """One graph for all sizes, tiles at the end of an axis cut or whole."""
    g = GEOMETRIES[name]
    rank, used = g["rank"], 0
    for training in (False, True):
        for op in ("Conv", "ConvInputGrad", "ConvWeightGrad") if training else ("ConvInputGrad", "ConvWeightGrad"):
            options = {"wrt": ["x", "w"], "target": og.Target(lowering={op: f"winograd_{most}"}), "training": training}
            try:
                backward = og.augment(conv_model(g, _unknown(g), bias=True), **options)
            except og.errors.LoweringError as problem:
                assert "smaller tiles do the same" in str(problem)  # noqa: PT017 - the only reason there may be
                continue
            used += 1
            for size in ((4, 5, 6), (7, 12, 5), (13, 6, 4)):
                check_built(backward, {**g, "size": [*size[:rank]]}, 1e-4, static=False)
            if not training:
                check_built(backward, {**g, "batch": 0, "size": [4, 5, 6][:rank]}, 1e-4, static=False)
    assert used or most > 2


@pytest.mark.parametrize("key", ["strides", "dilations"])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("unknown", [0, 1])
def test_one_unknown_axis(unknown: int, step: int, key: str) -> None:
    """The other axis may have any step."""
    g = {**GEOMETRIES["same"], "size": [7, 5]}
    g[key] = [1 if axis == unknown else step for axis in range(2)]
    check_built(
        og.augment(conv_model(g, {0, 2 + unknown}, bias=True), wrt=["x", "w"], target=og.Target(lowering=BOTH)),
        g,
        1e-4,
        static=False,
    )


@pytest.mark.parametrize("target", ["cuda", "web"])
def test_even_padding_only(target: str) -> None:
    g = GEOMETRIES["same"]
    backward = og.augment(
        conv_model(g, _unknown(g), bias=True), wrt=["x", "w"], target=og.Target(target, lowering=BOTH)
    )
    check_even_padding(backward)
    check_built(backward, g, 1e-4, static=False)


@pytest.mark.parametrize(
    "change",
    [
        {"begin": [1, 1], "end": [1, 3]},
        {"begin": [2, 2], "end": [2, 2], "dilations": [2, 2]},
        {"strides": [2, 1]},
    ],
)
def test_refusals(change: Geometry) -> None:
    g = {**GEOMETRIES["same"], **change}
    with pytest.raises(
        og.errors.LoweringError,
        match="a spatial size is not known while building, and the kernel is dilated, strided or",
    ):
        og.augment(conv_model(g, _unknown(g)), wrt=["w"], target=og.Target(lowering={"ConvWeightGrad": "winograd_4"}))
