"""Deformable convolution, with and without mask, groups and offset groups."""

from __future__ import annotations

from functools import partial

import numpy as np

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, make_model, rand
from tests.support.operators import rule_test

deform = partial(Case, "DeformConv")
CASES = [
    deform([rand(2, 2, 5, 4), rand(3, 2, 3, 2), rand(2, 12, 3, 3), rand(3)], {"kernel_shape": [3, 2]}, order=1),
    deform(
        [rand(1, 4, 6, 5), rand(4, 2, 2, 3), rand(1, 24, 3, 5), rand(4), rand(1, 12, 3, 5, low=0)],
        {"kernel_shape": [2, 3], "strides": [2, 1], "pads": [1, 1, 0, 1], "group": 2, "offset_group": 2},
    ),
    deform([rand(1, 2, 6, 6), rand(1, 2, 2, 2), rand(1, 8, 4, 4)], {"dilations": [2, 2]}, order=1, dynamic=False),
]

test_rule = rule_test(CASES)


def test_without_offsets_it_is_an_ordinary_convolution() -> None:
    """Except for the offsets: the interpolation has a kink at whole pixels."""
    x, w = rand(2, 3, 6, 6), rand(4, 3, 3, 3)
    attributes = {"pads": [1, 1, 1, 1], "strides": [2, 2]}
    plain, bent = Case("Conv", [x, w], attributes), Case("DeformConv", [x, w, np.zeros((2, 18, 3, 3), "f")], attributes)
    arrays = [*plain.arrays, *bent.arrays[2:]]
    seed = np.random.default_rng(0).standard_normal((2, 4, 3, 3)).astype(np.float32)
    wanted, got = (
        run(
            og.vjp(make_model(case, arrays[:count]), wrt=["x0", "x1"]),
            {f"x{i}": a for i, a in enumerate(arrays[:count])} | {"y0_grad": seed},
        )
        for case, count in ((plain, 2), (bent, 3))
    )
    for name, want in wanted.items():
        np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-5)
