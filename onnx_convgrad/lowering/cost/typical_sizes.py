"""What sizes that are not known while building are taken for where a number is needed, as in the cost model.

The sizes of the graph's inputs are typical ones; all others follow from them by the expressions that shape inference has
found, so that the layers of a network of unknown image size differ as they will when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnx_convgrad.ir.emit import known
from onnx_convgrad.ir.geometry import HINT_BATCH, HINT_SIZE

__all__ = ["TypicalSizes"]

_BY_RANK: Mapping[int, int] = {3: 1024, 4: 224, 5: 64}
"""Sizes of signals, images and volumes."""


class TypicalSizes:
    """Typical sizes for the symbols in the shapes of a graph's inputs, and what follows from them."""

    def __init__(self, graph: ir.Graph) -> None:
        self._symbols: dict[str, int] = {}
        for value in graph.inputs:
            for axis, dim in enumerate(value.shape or ()):
                if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                    size = HINT_BATCH if axis == 0 else _BY_RANK.get(len(value.shape or ()), HINT_SIZE)
                    self._symbols.setdefault(dim.value, size)
        self._found: dict[str, int | None] = {}

    def size(self, dim: int | ir.SymbolicDim) -> int | None:
        """A dimension as a number, or `None` if it does not follow from the inputs."""
        if isinstance(dim, int) or dim.value is None:
            return known(dim)
        if dim.value not in self._found:
            try:
                self._found[dim.value] = known(dim.evaluate(self._symbols))
            except ValueError:  # a name that is no expression
                self._found[dim.value] = None
        return self._found[dim.value]

    def node(self, node: ir.Node) -> ir.Node:
        """A node for reading shapes, in no graph: the same operator on operands of typical sizes."""
        operands = [None if v is None else self._value(v) for v in node.inputs]
        attributes = list(node.attributes.values())
        copy = ir.Node(node.domain, node.op_type, operands, attributes, num_outputs=len(node.outputs))
        for new, old in zip(copy.outputs, node.outputs, strict=True):
            new.shape = self._shape(old)
        return copy

    def _value(self, value: ir.Value) -> ir.Value:
        kind = None if value.dtype is None else ir.TensorType(value.dtype)
        return ir.Value(name=value.name, shape=self._shape(value), type=kind, const_value=value.const_value)

    def _shape(self, value: ir.Value) -> ir.Shape | None:
        if value.shape is None:
            return None
        return ir.Shape([dim if (size := self.size(dim)) is None else size for dim in value.shape])
