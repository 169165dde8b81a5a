"""Keep forward values for the backward part in float16 or bfloat16.

A large float32 value that backward nodes read is cast where it is computed, and cast back before the first of them. Forward
nodes read the value itself, so the results of the model keep their bits. A runtime may run the cast as late as the backward
part, and would keep the float32 value until then. So the forward nodes wait for the cast: they read the value through a view
whose shape depends on it.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.notes import origin_of
from onnx_convgrad.ir.passes import GraphPass
from onnx_convgrad.ir.targets import TargetInfo
from onnx_convgrad.memory.late_views import late_view, late_zero
from onnx_convgrad.memory.retained_bytes import Retained, is_large

PRECISIONS = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


def check_activations(precision: object) -> None:
    """Raise `ArgumentError` for a precision that is none."""
    if precision is not None and not (isinstance(precision, str) and precision in PRECISIONS):
        raise ArgumentError(f"activations must be 'float16', 'bfloat16' or None, not {precision!r}.")


class NarrowActivations(GraphPass):
    """Cast the large float32 values that a lowered graph keeps for its backward part, and cast them back there.

    A graph without the mark is left alone.

    Args:
        target: Its speeds are those of the model of kept values.
        mark: The node between the forward and the backward part, see `recompute.mark_boundary`. It stays.
        precision: `"float16"` or `"bfloat16"`.
    """

    def __init__(self, target: TargetInfo, mark: ir.Node, precision: str) -> None:
        super().__init__()
        self.target, self.mark, self.dtype = target, mark, PRECISIONS[precision]

    def rewrite(self, model: ir.Model) -> bool:
        """Insert the casts."""
        graph = model.graph
        boundary = next((i for i, node in enumerate(graph) if node is self.mark), None)
        if boundary is None:
            return False
        kept = Retained(graph, boundary, self.target.rates)
        e = Emitter(graph, opsets=graph.opset_imports, target=self.target)
        narrowed = [self._narrow(e, kept, owner) for owner in kept.kept if owner.dtype == ir.DataType.FLOAT]
        return any(narrowed)

    def _narrow(self, e: Emitter, kept: Retained, owner: ir.Value) -> bool:
        members, producer = kept.families[owner], owner.producer()
        forward = [use for use in owner.uses() if kept.at.get(use.node, kept.boundary) < kept.boundary]
        inside = any(user not in kept.at for value in members for user in value.consumers())
        if producer is None or not forward or inside or not is_large(owner) or not owner.shape:
            return False
        with e.rewriting(producer, f"kept{owner.index() or ''}"):  # a Split has several results
            e.anchor = kept.nodes[kept.at[producer] + 1]
            narrow = e.cast(owner, self.dtype)
            rank = len(owner.shape)
            corner = e.cast(e.slice(narrow, [0] * rank, [1] * rank, range(rank)), ir.DataType.FLOAT)
            view = late_view(e, owner, late_zero(e, [corner]))
        for use in forward:
            use.node.replace_input_with(use.idx, view)
        e.anchor = kept.nodes[min(at for value in members for at in kept.readers(value))]
        e.origin = origin_of(e.anchor)
        copies = dict.fromkeys((owner, view), e.typed(e.cast(narrow, ir.DataType.FLOAT), owner))
        for value in members:
            node = value.producer()
            if value is not owner and node is not None and node.inputs[0] is not None:
                copy = e.op(node.op_type, copies[node.inputs[0]], *node.inputs[1:], **Call(node).attributes())
                copies[value] = e.typed(copy, value)
            for use in list(value.uses()):
                if kept.at.get(use.node, -1) >= kept.boundary:
                    use.node.replace_input_with(use.idx, copies[value])
        return True
