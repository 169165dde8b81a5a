"""Broadcast operands expanded to a sample, or given full rank; results are equal to the bit."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import check_by_torch, graph_of, op_types


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
    """(x s - s)^2, with the operand on either side; expanded once for all readers."""
    body = "a = Mul(s, x) b = Sub(a, s) y = Mul(b, b)"
    model = graph_of(f"(float[{x}] x, float[{scale}] s) => (float[{x}] y) {{ {body} }}", opset=21)
    gradient = og.augment(model, wrt=["x"], cotangents="ones", training=True)
    assert op_types(gradient).count("Expand") == nodes
    draw = np.random.default_rng(0)
    shapes = [[int(d) for d in text.replace("N", "32").split(",")] for text in (x, scale)]
    feed = dict(zip("xs", (draw.normal(size=shape).astype(np.float32) for shape in shapes), strict=True))
    got = run(gradient, feed)
    np.testing.assert_array_equal(got["y"], run(model, feed)["y"])
    check_by_torch(got, lambda x, s: (x * s - s).square(), **feed)


@pytest.mark.parametrize(
    ("x", "number", "expected"),
    [
        ("4, 96, 1, 1", "", True),
        ("4, 96, 1, 1", "[1, 1]", True),
        ("4, 96, 1, 7", "[1]", True),
        ("N, 96, 1, 1", "", True),
        ("4, 96, 1, 1", "[1, 1, 1, 1]", False),
        ("1, 1, 4, 96", "", False),
        ("4, 96, 2, 2", "", False),
        ("4, 9, 1, 1", "", False),
    ],
    ids=["scalar", "two axes", "a row", "unknown batch", "full rank", "leading axes", "no axis of 1", "few"],
)
def test_numbers_of_full_rank(x: str, number: str, *, expected: bool) -> None:
    """If the result has an axis of 1 after a longer one."""
    body = "a = Sub(s, x) b = Div(a, s) y = Mul(b, b)"
    model = graph_of(f"(float[{x}] x, float{number} s) => (float[{x}] y) {{ {body} }}", opset=21)
    gradient = og.augment(model, wrt=["x"], cotangents="ones", training=True)
    graph = onnx.shape_inference.infer_shapes(gradient).graph
    used = next(node.input[0] for node in graph.node if node.op_type == "Sub" and "x" in node.input)
    shape = next(v for v in (*graph.value_info, *graph.input) if v.name == used).type.tensor_type.shape
    assert (used != "s") == expected
    assert len(shape.dim) == (4 if expected else number.count("1"))
    draw = np.random.default_rng(0)
    shapes = [[int(d) for d in text.replace("N", "4").strip("[]").split(",") if d] for text in (x, number)]
    feed = dict(zip("xs", (np.asarray(draw.uniform(1, 2, shape), np.float32) for shape in shapes), strict=True))
    got = run(gradient, feed)
    np.testing.assert_array_equal(got["y"], run(model, feed)["y"])
    check_by_torch(got, lambda x, s: ((s - x) / s).square(), **feed)


def test_optimizers_of_1x1_weights_use_numbers_of_full_rank() -> None:
    """Otherwise a call per element takes longer than the rest of the step."""
    w = np.random.default_rng(0).standard_normal((64, 4, 1, 1)).astype(np.float32)
    model = graph_of("(float[2, 4, 5, 5] x) => (float[2, 64, 5, 5] y) { y = Conv(x, w) }", opset=21, w=w)
    step = og.build_training(model, loss="mse", optimizer=og.optim.Adam(lr=1e-3)).step
    graph = onnx.shape_inference.infer_shapes(step).graph
    shapes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*graph.value_info, *graph.input, *graph.output)
    }
    shapes |= {t.name: list(t.dims) for t in graph.initializer}
    of_weights = [
        [shapes[name] for name in node.input]
        for node in graph.node
        if node.op_type in {"Add", "Mul", "Sub", "Div"} and shapes[node.output[0]] == [64, 4, 1, 1]
    ]
    assert len(of_weights) >= 8
    assert all(len(shape) == 4 for operands in of_weights for shape in operands)
