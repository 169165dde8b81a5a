"""AveragePool over one axis or three, or of channels that form no blocks, as fast pools over two axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import dims, graph_of, node_of


def _model(shape: tuple[int | str, ...], **window: Any) -> onnx.ModelProto:
    """y = w times the means of x."""
    pool = node_of("AveragePool", "x", **window)
    text = f"(float[{dims(shape)}] x) => (float[] y) <float w = {{1.5}}> {{ [pool] m = {pool} y = Mul (m, w) }}"
    return graph_of(text, opset=21)


CASES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((4, 16, 900), {"kernel_shape": [5], "pads": [2, 2]}),
    ((4, 12, 3000), {"kernel_shape": [3], "strides": [2], "pads": [1, 0], "count_include_pad": 1}),
    ((4, 12, 60, 60), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    ((4, 12, 60, 61), {"kernel_shape": [3, 2], "strides": [1, 2], "ceil_mode": 1, "count_include_pad": 1}),
    ((2, 16, 12, 20, 22), {"kernel_shape": [3, 3, 3], "pads": [1, 1, 1, 1, 1, 1]}),
    (
        (2, 16, 13, 20, 23),
        {"kernel_shape": [2, 3, 4], "strides": [2, 1, 2], "pads": [0, 1, 2, 1, 1, 1], "ceil_mode": 1},
    ),
    ((16, 3, 12, 20, 22), {"kernel_shape": [3, 3, 3], "pads": [1, 0, 1, 1, 0, 1], "count_include_pad": 1}),
]


@pytest.mark.parametrize(("shape", "window"), CASES, ids=str)
@pytest.mark.parametrize("batch", ["known", "unknown"])
def test_means(shape: tuple[int, ...], window: dict[str, Any], batch: str) -> None:
    """Values and gradients equal those of the original node, which inference mode keeps."""
    named = shape if batch == "known" else ("N", *shape[1:])
    model = _model(named, **window)
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    want = run(model, {"x": x})["y"]
    y_grad = rng.standard_normal(want.shape).astype(np.float32)
    trained, kept = (og.augment(model, wrt=["x", "w"], of=["y"], training=training) for training in (True, False))
    pools = [node for node in trained.graph.node if node.op_type == "AveragePool"]
    whole = batch == "known" or shape[1] % 16 == 0
    forward = [node for node in pools if "kernel_shape" in {a.name for a in node.attribute}]
    assert all(len(helper.get_node_attr_value(node, "kernel_shape")) == 2 for node in forward) or not whole
    got = run(trained, {"x": x, "y_grad": y_grad})
    base = run(kept, {"x": x, "y_grad": y_grad})
    np.testing.assert_allclose(got["y"], want, rtol=1e-5, atol=1e-6)
    for name in ("x_grad", "w_grad"):
        assert np.linalg.norm(got[name] - base[name]) <= 1e-6 * np.linalg.norm(base[name]), name
    # <y_grad, w A x> = <x_grad, x>
    left, right = (float((a.astype(np.float64) * b).sum()) for a, b in ((y_grad, want), (got["x_grad"], x)))
    assert abs(left - right) < 1e-4 * np.linalg.norm(y_grad) * np.linalg.norm(want) ** 0.5


def test_small_pools_stay() -> None:
    made = og.augment(_model((1, 3, 8, 8), kernel_shape=[3, 3]), wrt=["x"], training=True)
    (pool,) = (node for node in made.graph.node if node.op_type == "AveragePool")
    assert pool.name == "pool"
