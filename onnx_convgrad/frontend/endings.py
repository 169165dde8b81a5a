"""The last nodes before an output: the activation that a classifier ends in, and changes of layout and type behind it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.autodiff.facts import arranges, kept_axes
from onnx_convgrad.autodiff.layers import layer_of
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.dims import known, static_product
from onnx_convgrad.ir.nodes import is_op


@dataclass(frozen=True, slots=True)
class Ending:
    """The last nodes before a value.

    Attributes:
        last: The node that computes the numbers, if there is one.
        layout: The nodes behind it, which move or cast numbers, in order.
    """

    last: ir.Node | None
    layout: tuple[ir.Node, ...]

    @classmethod
    def of(cls, y: ir.Value) -> Ending:
        """Follow a value back to the node that computes its numbers."""
        layout: list[ir.Node] = []
        value: ir.Value | None = y
        while value is not None and (node := value.producer()) is not None:
            if arranges(node):
                layout.insert(0, node)
            elif not _normalizes_softmax(node):
                break
            value = node.inputs[0]
        return cls(None if value is None else value.producer(), tuple(layout))

    @property
    def activation(self) -> str:
        """`"Softmax"`, `"LogSoftmax"`, `"Sigmoid"`, or nothing."""
        return self.last.op_type if is_op(self.last, "Softmax", "LogSoftmax", "Sigmoid") else ""

    @property
    def is_product(self) -> bool:
        """Whether the numbers come right from a product with weights, perhaps with a bias."""
        before = [self.last]
        if is_op(self.last, "Add"):
            before = [v.producer() for v in self.last.inputs if v is not None]
        return any(layer_of(node) is not None for node in before)

    def axis(self) -> int | None:
        """The axis of the output along which the activation normalizes; `None` if it cannot be followed."""
        shape = None if self.last is None else self.last.outputs[0].shape
        if self.last is None or shape is None or not len(shape):
            return None
        axis: int | None = Call(self.last).int("axis", -1) % len(shape)
        for node in self.layout:
            axis = None if axis is None else _moved(node, axis)
        return axis


def _normalizes_softmax(node: ir.Node) -> bool:
    """Whether a node divides rows that add up to 1 by their sum, as in classifiers that skl2onnx converts."""
    if (node.domain, node.op_type) != ("ai.onnx.ml", "Normalizer") or Call(node).string("norm", "MAX") != "L1":
        return False
    softmax = node.inputs[0].producer() if node.inputs[0] is not None else None
    return is_op(softmax, "Softmax") and Call(softmax).int("axis", -1) in (-1, 1)


def _moved(node: ir.Node, axis: int) -> int | None:
    """The axis of the result that an axis of the operand becomes; `None` if that is unknown, or it is mixed with others."""
    if places := kept_axes(node):
        return places[axis]
    before, after = node.inputs[0].shape if node.inputs[0] is not None else None, node.outputs[0].shape
    if before is None or after is None:
        return None
    size, behind = known(before[axis]), static_product(before[axis + 1 :])
    if size is None or behind is None:
        return None
    found = [i for i, d in enumerate(after) if known(d) == size and static_product(after[i + 1 :]) == behind]
    return found[0] if len(found) == 1 else None
