"""One number per channel against small images: written out for a sample, without a change of any bit."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run


@pytest.mark.parametrize(
    ("x", "scale", "nodes"),
    [
        ("32, 48, 4, 4", "48, 1, 1", 1),
        ("32, 48, 4, 4", "1, 48, 1, 1", 1),
        ("32, 48, 16, 16", "48, 1, 1", 0),
        ("2, 1024, 4, 4", "1024, 1, 1", 0),
        ("32, 48, 4, 4", "32, 48, 1, 1", 0),
        ("32, 48, 4, 4", "4, 1", 1),
        ("N, 48, 4, 4", "48, 1, 1", 0),
    ],
    ids=["small images", "of four axes", "larger images", "few samples", "of each sample", "rows", "unknown number"],
)
def test_written_out(x: str, scale: str, nodes: int) -> None:
    """(x s - s)^2, with the operand on either side; written out once for all that read it."""
    text = f"g (float[{x}] x, float[{scale}] s) => (float[{x}] y) {{ a = Mul(s, x) b = Sub(a, s) y = Mul(b, b) }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    gradient = og.augment(model, wrt=["x"], seed="ones", training=True)
    assert [node.op_type for node in gradient.graph.node].count("Expand") == nodes

    draw = np.random.default_rng(0)
    shapes = [[int(d) for d in text.replace("N", "32").split(",")] for text in (x, scale)]
    data, factor = (draw.normal(size=shape).astype(np.float32) for shape in shapes)
    got = run(gradient, {"x": data, "s": factor})
    np.testing.assert_array_equal(got["y"], run(model, {"x": data, "s": factor})["y"])
    leaf, other = (torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in (data, factor))
    (leaf * other - other).square().sum().backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(got["x_grad"], leaf.grad.numpy(), rtol=1e-5, atol=1e-5)
