"""A loop or a branch stores for its derivative the values that take longer to compute again."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.ir.emit import CANONICAL_OPSET, Emitter
from onnx_convgrad.ir.targets import Rates
from onnx_convgrad.lowering.cost.node import worth_storing

SCAN, LOOP = 2, 4
"""Passes over memory."""


def _stored(text: str, size: int, read: str, passes: int) -> str:
    """The operators of a chain, separated by spaces, whose results are stored; the derivative reads those in `read`."""
    x = ir.Value(name="x", shape=ir.Shape([size, size]), type=ir.TensorType(ir.DataType.FLOAT))
    e = Emitter(ir.Graph([x], [], nodes=[], opset_imports={"": CANONICAL_OPSET}, name="g"))
    y = x
    for op in text.split():
        y = e.op(op, y, x) if op in ("MatMul", "Mul", "Add") else e.op(op, y)
    wanted = {v for node in e.emitted for v in node.outputs if node.op_type in read.split()}
    found = worth_storing(Rates(), e.graph, e.emitted, wanted, passes)
    return " ".join(node.op_type for node in e.emitted if node.outputs[0] in found)


@pytest.mark.parametrize(
    ("chain", "size", "read", "passes", "stored"),
    [
        ("MatMul Relu", 256, "MatMul Relu", SCAN, "MatMul"),  # one pass is as fast as reading, its operand is there
        ("MatMul Relu", 256, "Relu", SCAN, "MatMul Relu"),  # the second is all that is read
        ("Mul Relu Sinh", 256, "Mul Relu Sinh", SCAN, "Sinh"),
        ("Mul Relu Abs", 256, "Mul Relu Abs", SCAN, ""),
        ("Neg Relu Abs Neg Abs", 8, "Neg Relu Abs Neg Abs", SCAN, ""),
        ("Neg Relu Abs Floor Ceil", 8, "Ceil", LOOP, "Abs Floor Ceil"),  # nothing else is read
    ],
)
def test_what_takes_longer_to_compute_again(chain: str, size: int, read: str, passes: int, stored: str) -> None:
    assert _stored(chain, size, read, passes) == stored


SCAN_MODEL = """<ir_version: 10, opset_import: ["" : 21]>
g (float[64,64] s0, float[T,64,64] x) => (float[64,64] s) {
  s = Scan <num_scan_inputs: int = 1, body = b (float[64,64] a, float[64,64] t) => (float[64,64] c) {
    p = Sinh (a)
    c = Mul (p, t)
  }> (s0, x)
}"""


@pytest.mark.parametrize(("budget", "times"), [(None, 1), ("min", 2)])
def test_a_slow_function_of_a_turn_is_computed_again_only_for_a_budget(budget: str | None, times: int) -> None:
    made = og.augment(onnx.parser.parse_model(SCAN_MODEL), wrt=["x"], memory=budget)
    assert _in_bodies(made) == (2, times)
    trained = SCAN_MODEL.replace("{\n", "<float[1] w = {1}> {\n  q = Mul (x, w)\n", 1).replace("(s0, x)", "(s0, q)")
    model = onnx.parser.parse_model(trained)
    step = og.build_training(model, loss="mse", optimizer="sgd", wrt="w", memory=budget).step
    assert _in_bodies(step) == (2, times)


def _in_bodies(model: onnx.ModelProto) -> tuple[int, int]:
    """The numbers of loops, and of Sinh nodes in their bodies."""
    bodies = [a.g for node in model.graph.node if node.op_type == "Scan" for a in node.attribute if a.name == "body"]
    return len(bodies), sum(node.op_type == "Sinh" for body in bodies for node in body.node)
