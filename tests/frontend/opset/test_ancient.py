"""Models of opsets before 7."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.runtime import run


@pytest.mark.parametrize("rest", [(), (4,), (3,), (4, 3)])
def test_slopes_per_channel_of_an_old_prelu(rest: tuple[int, ...]) -> None:
    """Before opset 7 a vector of slopes went along the channels, not along the last axis."""
    dims = ", ".join(map(str, (2, 3, *rest)))
    graph = f"g (float[{dims}] x, float[3] w = {{0.1, 0.2, 0.3}}) => (float[{dims}] y) {{ y = PRelu (x, w) }}"
    model = onnx.parser.parse_model(f'<ir_version: 3, opset_import: ["": 6]> {graph}')
    x = np.random.default_rng(0).standard_normal((2, 3, *rest)).astype(np.float32)
    got = run(og.augment(model, seed="ones"), {"x": x})
    slopes = np.asarray([0.1, 0.2, 0.3], np.float32).reshape(3, *[1] * len(rest))
    np.testing.assert_allclose(got["y"], np.where(x > 0, x, x * slopes), rtol=1e-6)
    others = (0, *range(2, x.ndim))
    np.testing.assert_allclose(got["w_grad"], np.minimum(x, 0).sum(others), rtol=1e-5)
