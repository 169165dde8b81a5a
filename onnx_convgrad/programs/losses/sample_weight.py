"""Multiply the loss of each sample by its weight, where the nodes of a loss add it up.

The mean of a weighted loss divides by the count of the loss without weights: sum(w l) / N, Keras' `sum_over_batch_size`. So
weights of 1 change nothing, and batches are joined by the counts of the labels.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.constants import number_of
from onnx_convgrad.ir.dims import dims_equal
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op

SAMPLE_WEIGHT = "sample_weight"
"""Input with the weights of the samples, as Keras calls them."""


def weighted(e: Emitter, result: Any, weight: ir.Value, loss: str) -> Any:
    """The result of a loss, a value or the pair `(total, count)`, with the loss of each sample times its weight `[N]`.

    Raises:
        ArgumentError: The nodes of the loss do not show the loss of each sample.
    """
    if isinstance(result, tuple) and len(result) == 2:
        return _weighted(e, result[0], weight, loss), result[1]
    return _weighted(e, result, weight, loss) if isinstance(result, ir.Value) else result


def _weighted(e: Emitter, value: ir.Value, weight: ir.Value, loss: str) -> ir.Value:
    """Entries times their weights; of one number, the sum or mean that has it is computed from such entries."""
    if value.shape is None or len(value.shape):
        return _times(e, value, weight, loss)
    node = value.producer()
    operands = [] if node is None else [v for v in node.inputs if v is not None]
    if is_op(node, "ReduceMean", "ReduceSum", "ReduceSumSquare") and len(operands) == 1:
        entries = e.square(operands[0]) if node.op_type == "ReduceSumSquare" else operands[0]
        operator = "ReduceMean" if node.op_type == "ReduceMean" else "ReduceSum"
        return e.op(operator, _times(e, entries, weight, loss), keepdims=0)
    if is_op(node, "Add", "Sub", "Sum"):
        return e.op(node.op_type, *(_weighted(e, v, weight, loss) for v in operands))
    if is_op(node, "Div") or (is_op(node, "Mul") and number_of(operands[1]) is not None):
        return e.op(node.op_type, _weighted(e, operands[0], weight, loss), operands[1])
    if is_op(node, "Mul") and number_of(operands[0]) is not None:
        return e.op("Mul", operands[0], _weighted(e, operands[1], weight, loss))
    if is_op(node, "Neg"):
        return e.neg(_weighted(e, operands[0], weight, loss))
    if is_op(node, "Cast"):
        return e.cast_like(_weighted(e, operands[0], weight, loss), value)
    raise _refused(loss)


def _times(e: Emitter, entries: ir.Value, weight: ir.Value, loss: str) -> ir.Value:
    """Entries with the samples along their first axis, times the weights."""
    rank = e.rank(entries, "the weights of samples")
    first, count = (
        (None, None) if not rank or entries.shape is None else (entries.shape[0], (weight.shape or [None])[0])
    )
    if not rank or (isinstance(first, int) and not dims_equal(first, count)):
        raise _refused(loss)
    return e.mul(entries, e.cast_like(e.unsqueeze(weight, list(range(1, rank))), entries))


def _refused(loss: str) -> ArgumentError:
    return ArgumentError(
        f"sample_weight multiplies the loss of each sample, and {loss} computes one number that does not show it.",
        hint="Use another loss; a function of your own returns one entry for each sample, without reducing them, or takes "
        "the weights as a further argument, see docs/how_to/own_loss.md.",
    )
