"""RoiAlign and MaxRoiPool: images and regions, maxima, regions outside of the image and of negative size."""

from __future__ import annotations

import numpy as np
import pytest

from onnx_convgrad import api
from onnx_convgrad.errors import DifferentiationError
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, make_model, rand
from tests.support.operators import gradient, rule_test

ROIS = np.array([[0.3, 0.5, 4.2, 3.1], [1, 1, 5.5, 6.2], [-2, -1, 3, 9], [2, 2, 1, 1]], np.float32)
MOVED = ROIS + np.array([[0.13, 0.21, 0.07, 0.11]], np.float32)  # no sample is at an element
IMAGES = np.array([0, 1, 1, 0])
GRID = {"output_height": 2, "output_width": 3, "spatial_scale": 0.9}
X = rand(2, 3, 6, 7)
WINDOWS = np.array(
    [[0, 0.3, 0.6, 4.2, 3.1], [1, 1.6, 1, 7, 8], [1, -4, -3, 1, 2], [0, 20, 2, 30, 4], [0, 3, 3, 1, 1]], np.float32
)

CASES = [
    *(
        Case(
            "RoiAlign",
            [X, ROIS, IMAGES],
            {**GRID, "sampling_ratio": s, "coordinate_transformation_mode": c},
            wrt=[0],
            constants=k,
        )
        for s in (0, 2)
        for c in ("half_pixel", "output_half_pixel")
        for k in ([1], [])
    ),
    *(
        Case("RoiAlign", [X, MOVED, IMAGES], {**GRID, "sampling_ratio": s, "mode": m}, order=o, name="both", step=1e-4)
        for s, m, o in ((2, "avg", 2), (0, "avg", 1), (2, "max", 2), (0, "max", 1))
    ),
    Case("RoiAlign", [X, MOVED.astype(np.float64), IMAGES], {**GRID, "mode": "max"}, dtype=np.float64, order=1),
    *(
        Case("RoiAlign", [X, ROIS[:0], IMAGES[:0]], {"output_height": 2, "mode": m}, wrt=[0], name="no regions")
        for m in ("avg", "max")
    ),
    Case("MaxRoiPool", [X, WINDOWS], {"pooled_shape": [2, 3], "spatial_scale": 0.8}, wrt=[0], step=1e-3, order=1),
    Case("MaxRoiPool", [X, WINDOWS], {"pooled_shape": [7, 1]}, wrt=[0], constants=[1], step=1e-3),
    Case("MaxRoiPool", [X, WINDOWS[:0]], {"pooled_shape": [2, 2]}, wrt=[0], name="no regions", step=1e-3),
]

test_rule = rule_test(CASES)


def test_the_first_maximum_of_a_bin_gets_the_gradient() -> None:
    x = np.zeros((1, 1, 4, 4), np.float32)
    x[0, 0, 1, 2] = x[0, 0, 2, 1] = x[0, 0, 3, 3] = 5
    case = Case("MaxRoiPool", [x, np.array([[0, 0, 0, 3, 3]], np.float32)], {"pooled_shape": [1, 1]})
    got = run(api.augment(make_model(case, case.arrays), wrt=["x0"], of=["y0"]), {"x0": x, "x1": case.arrays[1]})
    want = np.zeros_like(x)
    want[0, 0, 1, 2] = 1
    np.testing.assert_array_equal(got["x0_grad"], want)


def test_unknown_modes_are_refused() -> None:
    case = Case("RoiAlign", [X, ROIS, IMAGES], {"mode": "median"}, wrt=[0])
    with pytest.raises(DifferentiationError, match="its mode 'median' is unknown"):
        api.augment(make_model(case, case.arrays), wrt=["x0"], of=["y0"])


def test_bins_of_infinities_keep_their_gradient() -> None:
    """Elements outside of a bin must not win against its elements, which are all -inf."""
    x, rois = np.full((1, 1, 6, 6), -np.inf, np.float32), np.array([[0, 2, 2, 5, 5]], np.float32)
    case = Case("MaxRoiPool", [x, rois], {"pooled_shape": [2, 2]}, wrt=[0])
    got = gradient(case, np.ones((1, 1, 2, 2), np.float32))
    assert got[..., 2:, 2:].sum() == got.sum() == 4
