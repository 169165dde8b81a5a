"""Slopes of computed float16 data, which ONNX Runtime on the CPU rounds for some consumers and not for others."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

BODIES = [
    "y = Clip (s, low, high)",
    "y = Clip (s, low)",
    "y = Clip (s, , high)",
    "y = Clip (s, zero, six)",
    "y = Max (s, x)",
    "y = Max (s, x, low)",
    "y = Min (s, s, x, high)",
    "y = Relu (s)",
    "y = LeakyRelu (s)",
    "y = HardSigmoid (s)",
    "y = ThresholdedRelu <alpha = 0.3> (s)",
    "y = ReduceMax (s, last)",
    "y = ReduceMin (s, last)",
    "y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (s)",
    "y = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (s)",
    "y = GlobalMaxPool (s)",
    "y, places = TopK (s, two)",
    'y = ScatterElements <reduction = "max"> (s, place, spot)',
    'y = ScatterElements <axis = 3, reduction = "min"> (s, place, spot)',
    "larger = Greater (s, x)  y = Where (larger, s, x)",
]
NUMBERS = {"low": -0.5, "high": 0.5, "zero": 0.0, "six": 6.0, "third": 0.3, "spot": [[[[0.1]]]]}


@pytest.mark.parametrize("body", BODIES)
def test_slopes_of_computed_data(body: str) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((1, 2, 4, 4)).astype(np.float16)
    got: dict[str, np.ndarray] = {}
    seed = None
    for kind, dtype in (("float16", np.float16), ("float", np.float32)):
        text = f"""({kind}[1, 2, 4, 4] x) => ({kind}[?, ?, ?, ?] y) <int64[1] last = {{3}},
            int64[1] two = {{2}}, int64[1,1,1,1] place = {{0}}> {{
            mean = ReduceMean (x, last)  part = Mul (mean, third)  s = Sub (x, part)  {body}
        }}"""
        model = graph_of(text, opset=18, **{name: np.array(number, dtype) for name, number in NUMBERS.items()})
        if seed is None:
            seed = draw.standard_normal(run(model, {"x": x})["y"].shape).astype(np.float16)
        got[kind] = run(og.vjp(model, wrt="inputs"), {"x": x.astype(dtype), "y_grad": seed.astype(dtype)})["x_grad"]
    assert got["float16"].dtype == np.float16
    assert np.linalg.norm(got["float16"] - got["float"]) <= 2e-3 * np.linalg.norm(got["float"])
