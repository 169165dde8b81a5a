"""The graph `counts`: the number that each summand of a loss is joined by, from data and labels alone."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.facts import arranges, placed_operands
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import number_of
from onnx_convgrad.ir.dims import dims_equal, known
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.programs.summands import Facts, Summand, behind, depends


class Counter:
    """Emits counts in terms of data and labels: sizes that follow from the forward pass are those of the inputs.

    Args:
        e: An emitter at the end of the graph, whose nodes are sorted afterwards.
        facts: The values of the graph.
    """

    def __init__(self, e: Emitter, facts: Facts) -> None:
        self.e, self.inputs, self.own = e, facts.inputs, facts.own

    def samples(self) -> ir.Value:
        """The number of samples, float64."""
        return self._number(self._size(self.inputs[0], 0))

    def count(self, summand: Summand) -> ir.Value:
        """The count of a summand, float64; its samples if the sizes of its entries are unknown before the forward pass."""
        assert summand.count is not None
        if summand.division is None:
            return self._number(self._entries(summand.count))
        return self._number(summand.count) if self._free(summand.count) else self.samples()

    def _number(self, value: ir.Value | int | None) -> ir.Value:
        if value is None:
            return self.samples()
        if isinstance(value, int):
            return self.e.const(np.float64(value))
        return self.e.reshape(self.e.cast(value, ir.DataType.DOUBLE), [])

    def _free(self, value: ir.Value) -> bool:
        """Make a value independent of the forward pass, in place; return whether that is possible."""
        for node in {v.producer() for v in behind(value)}:
            source = node.inputs[0] if is_op(node, "Shape", "Size") else None
            if node is None or source is None or not depends(source, self.own):
                continue
            self.e.anchor = node
            found = self._size_of(source) if node.op_type == "Size" else self._shape(node, source)
            self.e.anchor = None
            if found is None:
                return False
            node.outputs[0].replace_all_uses_with(found)
        return True

    def _size_of(self, source: ir.Value) -> ir.Value | None:
        count = self._entries(source)
        if count is None:
            return None
        return self.e.const(np.int64(count)) if isinstance(count, int) else self.e.reshape(count, [])

    def _shape(self, node: ir.Node, source: ir.Value) -> ir.Value | None:
        call = Call(node)
        if source.shape is None:
            return None
        dims = list(range(len(source.shape)))[call.int("start", 0) : call.int("end", len(source.shape))]
        sizes = [self._size(source, axis) for axis in dims]
        return None if None in sizes else self.e.vector([s for s in sizes if s is not None])

    def _entries(self, value: ir.Value) -> ir.Value | int | None:
        """The number of entries of a value; `None` if it is unknown."""
        if not depends(value, self.own) and value.shape is None:
            return self.e.reshape(self.e.op("Size", value), [1])
        if value.shape is not None:
            sizes = [self._size(value, axis) for axis in range(len(value.shape))]
            if None not in sizes:
                return self.e.size_mul(*(s for s in sizes if s is not None))
        node = value.producer()
        if is_op(node, "Compress", "Gather", "GatherND"):
            return self._chosen(node)
        sources = [] if node is None else node.inputs[:1] if arranges(node) else placed_operands(node)
        operands = [v for v in sources if v is not None and number_of(v) is None]
        if operands:  # of an output of unknown shape and its labels
            known_ones = [v for v in operands if not depends(v, self.own)] or operands[:1]
            return self._entries(known_ones[0]) if known_ones else None
        return None

    def _chosen(self, node: ir.Node) -> ir.Value | int | None:
        """The number of entries that a mask or indices choose."""
        source, chosen = node.inputs[:2]
        if source is None or chosen is None or depends(chosen, self.own):
            return None
        if node.op_type == "GatherND":
            if chosen.shape is None or source.shape is None or len(chosen.shape) != 2:
                return None
            whole = known(chosen.shape[1]) == len(source.shape)
            return self.e.op("Shape", chosen, start=0, end=1) if whole else None
        masked = node.op_type == "Compress"
        rest: list[ir.Value | int | None] = []
        if not masked or "axis" in node.attributes:
            if source.shape is None:
                return None
            axis, rank = Call(node).int("axis", 0), len(source.shape)
            rest = [self._size(source, i) for i in range(rank) if i != axis % rank]
        if None in rest:
            return None
        e = self.e
        count = e.op("ReduceSum", e.cast(chosen, ir.DataType.INT64), keepdims=0) if masked else e.op("Size", chosen)
        return e.size_mul(e.reshape(count, [1]), *(size for size in rest if size is not None))

    def _size(self, value: ir.Value, axis: int) -> ir.Value | int | None:
        dim = None if value.shape is None else value.shape[axis]
        if isinstance(dim, int):
            return dim
        if value in self.inputs or not depends(value, self.own):
            return self.e.op("Shape", value, start=axis, end=axis + 1)
        for port in self.inputs:
            for i, other in enumerate(port.shape or ()):
                if dim is not None and dims_equal(dim, other):
                    return self.e.op("Shape", port, start=i, end=i + 1)
        return None
