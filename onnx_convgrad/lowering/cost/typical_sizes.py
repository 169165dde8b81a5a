"""Substitute typical numbers for sizes that are unknown while building, for the cost model.

Symbols in the shapes of the graph's inputs get typical values; all other sizes follow from them by the expressions of shape
inference, so that the layers of a network of unknown image size have the proportions that they will have at run time.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnx_convgrad.ir.emit import known
from onnx_convgrad.ir.geometry import HINT_BATCH, HINT_SIZE

_BY_RANK: Mapping[int, int] = {3: 1024, 4: 224, 5: 64}
"""Typical sizes of signals, images and volumes, by rank."""


class TypicalSizes:
    """Typical values of the symbols in the shapes of a graph's inputs, and of expressions of them.

    Args:
        graph: The graph.
        given: Symbols whose values are known.

    Attributes:
        symbols: The value of each symbol.
    """

    def __init__(self, graph: ir.Graph, given: Mapping[str, int] | None = None) -> None:
        self.symbols = dict(given or {})
        for value in graph.inputs:
            for axis, dim in enumerate(value.shape or ()):
                if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                    size = HINT_BATCH if axis == 0 else _BY_RANK.get(len(value.shape or ()), HINT_SIZE)
                    self.symbols.setdefault(dim.value, size)
        self._sizes: dict[str, int | None] = {}

    def size(self, dim: int | ir.SymbolicDim) -> int | None:
        """A dimension as a number, or `None` if it does not follow from the inputs."""
        if isinstance(dim, int) or dim.value is None:
            return known(dim)
        if dim.value not in self._sizes:
            try:
                self._sizes[dim.value] = known(dim.evaluate(self.symbols))
            except ValueError:  # the name is not an expression
                self._sizes[dim.value] = None
        return self._sizes[dim.value]

    def node(self, node: ir.Node) -> ir.Node:
        """A copy of a node, in no graph, with operands and results of typical sizes."""
        operands = [None if v is None else self.value(v) for v in node.inputs]
        attributes = list(node.attributes.values())
        copy = ir.Node(node.domain, node.op_type, operands, attributes, num_outputs=len(node.outputs))
        for new, old in zip(copy.outputs, node.outputs, strict=True):
            new.shape = self._copied(old)
        return copy

    def value(self, value: ir.Value) -> ir.Value:
        """A copy of a value, in no graph, of typical sizes."""
        kind = None if value.dtype is None else ir.TensorType(value.dtype)
        return ir.Value(name=value.name, shape=self._copied(value), type=kind, const_value=value.const_value)

    def shape(self, value: ir.Value) -> tuple[int | None, ...] | None:
        """The sizes of a value, each `None` if it does not follow from the inputs; `None` for an unknown rank."""
        shape = value.shape
        return None if shape is None else tuple([d if isinstance(d, int) else self.size(d) for d in shape.dims])

    def _copied(self, value: ir.Value) -> ir.Shape | None:
        if value.shape is None:
            return None
        return ir.Shape([dim if (size := self.size(dim)) is None else size for dim in value.shape])
