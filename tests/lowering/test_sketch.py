"""Trial emission: workspace, nodes and time of a few nodes with static sizes."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.targets import TARGETS
from onnx_convgrad.lowering.sketch import Sketch, sketch

SHAPE = (64, 100)
BYTES = 4 * 64 * 100


def _sketch(steps: list[str], **options: object) -> Sketch:
    """A chain of operators on one operand."""
    x = ir.Value(name="x", shape=ir.Shape(SHAPE), type=ir.TensorType(ir.DataType.FLOAT))

    def emit(e: Emitter, node: ir.Node) -> ir.Value:
        value = node.inputs[0]
        assert value is not None
        for step in steps:
            value = e.reshape(value, [100, 64]) if step == "Reshape" else e.op(step, value)
        return value

    return sketch(ir.Node("", "Relu", [x]), {0: SHAPE}, TARGETS["cpu"], emit, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("steps", "held"),
    [
        (["Exp"], 0),  # the result alone
        (["Exp", "Neg"], BYTES),
        (["Exp", "Neg", "Abs"], 2 * BYTES),  # operand and result of the second
        (["Exp", "Reshape", "Neg"], BYTES),  # a view holds no bytes of its own
    ],
)
def test_workspace_is_the_peak_between_the_nodes(steps: list[str], held: int) -> None:
    found = _sketch(steps)
    assert found.workspace == held
    assert found.nodes == len(steps)


def test_time_is_the_sum_over_the_nodes_but_nothing_for_constants() -> None:
    one, two = _sketch(["Exp"]), _sketch(["Exp", "Neg"])
    assert 0 < one.seconds < two.seconds
    assert _sketch(["Exp", "Neg"], constant=[0]).seconds == 0


def test_a_view_at_the_end_of_a_graph_is_a_copy() -> None:
    assert _sketch(["Exp", "Reshape"], ends=True).seconds > _sketch(["Exp", "Reshape"]).seconds
