"""Give products that read a stored weight in different ways a copy each, for targets with `packs_once`.

The forward pass multiplies by a weight, the backward pass by its transpose. OpenVINO's CPU plugin, which the target
`portable` has to suit, lays a constant out once and finds it again by address, size and layout: if the two sizes are equal,
the second product reads what was laid out for the first. See quirks.OPENVINO_PACKED_WEIGHTS.
"""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter, static_dims
from onnx_convgrad.ir.passes import NodePass


class CopyPackedWeights(NodePass):
    """Store weights again for the products that read them in another way than the first one does."""

    operators: ClassVar = ("ConvTranspose", "Gemm", "Transpose")
    label: ClassVar = "packed"

    def rewrite_node(self, e: Emitter, node: ir.Node) -> bool | None:
        """Give a node a copy of the weight that it reads, if another node reads it otherwise."""
        place = 0 if node.op_type == "Transpose" else 1
        weight = node.inputs[place]
        if weight is None or weight.const_value is None or weight.is_graph_input() or not _is_square(weight):
            return None
        if all(_way(use.node) == _way(node) for use in weight.uses()):
            return None
        name, tensor = e.names.claim(f"{weight.name}_copy"), weight.const_value
        copy = ir.Value(name=name, shape=weight.shape, type=weight.type)
        copy.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
        e.graph.register_initializer(copy)
        node.replace_input_with(place, copy)
        return True


def _is_square(weight: ir.Value) -> bool:
    """Whether a transposed weight has the sizes of the weight."""
    sizes = static_dims(weight) or ()
    return len(sizes) > 1 and (sizes[0] == sizes[1] or sizes[-1] == sizes[-2])


def _way(node: ir.Node) -> tuple[str, int]:
    """The operator that reads a weight, and whether it transposes it."""
    return node.op_type, Call(node).int("transB", 0)
