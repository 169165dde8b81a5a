"""Write out the recurrent layers that are trained, so that their forward pass is computed once.

The gradient of LSTM, GRU and RNN needs the gates of every turn, which the operators do not give out: it comes from the
written-out form, beside which the operator itself would compute the same results a second time. Forward values may differ
in the last digits.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnx_convgrad.autodiff.function_bodies import equivalent
from onnx_convgrad.autodiff.registry import lookup
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.notes import VARIES
from onnx_convgrad.ir.passes import NodePass


class WriteOutRecurrent(NodePass):
    """Replace LSTM, GRU and RNN whose weights are trained by their written-out forms, which the gradient differentiates.

    An operator with a result in `keep`, or with a final state that is a graph output, stays.
    """

    operators = ("GRU", "LSTM", "RNN")
    label = "turns"

    def rewrite_node(self, e: Emitter, node: ir.Node) -> ir.Value | None:
        """The states of all turns."""
        if not _depends_on_variables(node.inputs[1:3]):
            return None
        if any(v in self.keep for v in node.outputs) or any(v.is_graph_output() for v in node.outputs[1:]):
            return None
        try:
            states, *finals = equivalent(e, Call(node), lookup(node.domain, node.op_type))
        except UnsupportedCase:  # the walk reports it, if a gradient passes through the node
            return None
        for old, new in zip(node.outputs[1:], finals, strict=False):
            if new is not None:
                old.replace_all_uses_with(e.typed(new, old))
        return states


def _depends_on_variables(values: Iterable[ir.Value | None]) -> bool:
    """Whether some value is computed from a graph input or from an initializer that is differentiated."""
    todo, seen = [v for v in values if v is not None], set()
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.is_graph_input() or VARIES in value.meta:
            return True
        node = value.producer()
        todo += [] if node is None else [v for v in node.inputs if v is not None]
    return False
