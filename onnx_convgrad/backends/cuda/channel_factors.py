"""Move factors per channel from the cotangent of a convolution into its kernel, which is small.

The cotangent of a convolution before a BatchNormalization is dy[n, o, p] = f[o] u[n, o, p]. The gradients are linear in it:

    ConvInputGrad(f u, w) = ConvInputGrad(u, f w)        ConvWeightGrad(x, f u) = f ConvWeightGrad(x, u)

which saves a pass over the images. On CUDA a pass takes as long as a small convolution; on the CPU nothing is gained.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import is_constant
from onnx_convgrad.ir.emit import DOMAIN, Emitter
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import origin_of
from onnx_convgrad.ir.passes import GraphPass
from onnx_convgrad.ir.replace import OutputPlaces, put_in_place
from onnx_convgrad.ir.targets import TargetInfo

_INPUT, _WEIGHT = (DOMAIN, "ConvInputGrad"), (DOMAIN, "ConvWeightGrad")
_COTANGENT = {(_INPUT, 0), (_WEIGHT, 1)}
"""Operators and the position of their cotangent."""


class MoveChannelFactors(GraphPass):
    """Multiply kernels by the factors of cotangents that convolutions' gradients alone read, before lowering.

    A constant kernel is left alone: the runtime lays it out when it loads the model.
    """

    def __init__(self, target: TargetInfo) -> None:
        super().__init__()
        self.target = target

    def rewrite(self, model: ir.Model) -> bool:
        """Rewrite the products that gradients consist of."""
        graph, changed = model.graph, False
        if self.target.name != "cuda":
            return False
        e, outputs = Emitter(graph, opsets=graph.opset_imports, target=self.target), OutputPlaces(graph)
        for node in list(graph):
            parts = _parts(node)
            if parts is not None and _only_in_gradients(node.outputs[0]):
                for use in list(node.outputs[0].uses()):
                    e.anchor, e.origin = use.node, origin_of(use.node)
                    _move(e, outputs, use.node, *parts)
                graph.remove(node, safe=True)
                changed = True
        return changed


def _parts(node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
    """u [N, C, ...] and f [C, 1, ...] of a product that differentiation emitted."""
    if not is_op(node, "Mul") or not origin_of(node):
        return None
    for u, factor in (node.inputs, node.inputs[::-1]):
        if u is None or factor is None or u.shape is None or factor.shape is None:
            continue
        sizes = list(factor.shape)
        spread = len(u.shape) > 2 and len(sizes) == len(u.shape) - 1 and all(size == 1 for size in sizes[1:])
        if spread and sizes[0] != 1 and sizes[0] == u.shape[1]:
            return u, factor
    return None


def _only_in_gradients(value: ir.Value) -> bool:
    """Whether the gradients of convolutions alone read a cotangent, those for data with kernels that are not constant."""
    uses = list(value.uses())
    if value.is_graph_output() or not uses:
        return False
    for use in uses:
        kind = use.node.domain, use.node.op_type
        if (kind, use.idx) not in _COTANGENT or (kind == _INPUT and is_constant(use.node.inputs[1])):
            return False
    return True


def _move(e: Emitter, outputs: OutputPlaces, node: ir.Node, u: ir.Value, factor: ir.Value) -> None:
    """Let a gradient read u, and multiply its kernel, or the gradient of its kernel, by the factors."""
    n, rank = Call(node), 0 if u.shape is None else len(u.shape)
    factors = e.reshape(factor, [-1, *[1] * (rank - 1)])
    if node.op_type == "ConvInputGrad":
        w = n["W"]
        node.replace_input_with(1, e.typed(e.mul(w, factors), w))
        node.replace_input_with(0, u)
        return
    old = node.outputs[0]
    gradient = e.typed(e.op("ConvWeightGrad", n["X"], u, *node.inputs[2:], domain=DOMAIN, **n.attributes()), old)
    put_in_place(e, outputs, old, e.mul(gradient, factors), new=True)
    e.graph.remove(node, safe=True)
