"""Compute bfloat16 in float32 on the CPU, where ONNX Runtime has kernels that move bfloat16 but none that compute with it.

Each result is rounded to bfloat16, as by a kernel that accumulates in float32.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.kernels import CPU_ALL_TYPES
from onnx_convgrad.ir.namespace import values_of
from onnx_convgrad.ir.nodes import nested_graphs, subgraphs
from onnx_convgrad.ir.passes import NodePass
from onnx_convgrad.ir.replace import OutputPlaces, put_in_place

_NARROW, _WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT


class WidenBfloat16(NodePass):
    """Cast the bfloat16 operands of other operators to float32, and the results back."""

    operators = frozenset(schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain) - CPU_ALL_TYPES
    label = "wide"
    bodies = True

    def rewrite(self, model: ir.Model) -> bool:
        """Rewrite a model that has values of this type."""
        graphs = (model.graph, *nested_graphs(model.graph))
        found = any(v.dtype == _NARROW for graph in graphs for v in values_of(graph))
        return found and super().rewrite(model)

    def rewrite_node(self, e: Emitter, node: ir.Node) -> ir.Value | bool | None:
        """Rewrite one node."""
        narrow = any(v is not None and v.dtype == _NARROW for v in (*node.inputs, *node.outputs))
        if not narrow or any(subgraphs(node)):
            return False
        operands = [e.cast(v, _WIDE) if v is not None and v.dtype == _NARROW else v for v in node.inputs]
        made = e.ops(node.op_type, *operands, outputs=len(node.outputs), **Call(node).attributes())
        results = [_rounded(e, new, old) for new, old in zip(made, node.outputs, strict=True)]
        outputs = OutputPlaces(e.graph)
        for old, new in zip(node.outputs[1:], results[1:], strict=True):
            put_in_place(e, outputs, old, new, new=True)
        return results[0]


def _rounded(e: Emitter, new: ir.Value, old: ir.Value) -> ir.Value:
    """The result in the type of the old one."""
    e.typed(new, old)
    if old.dtype != _NARROW:
        return new
    new.dtype = _WIDE
    return e.typed(e.cast(new, _NARROW), old)
