"""Reverse walks that change how cotangents pass certain nodes: guided backpropagation and layer-wise relevance."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import Activity, rule_of
from onnx_convgrad.autodiff.layers import WeightLayer, layer_of
from onnx_convgrad.autodiff.registry import Rule
from onnx_convgrad.autodiff.reverse import Walk
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op, sole_producer

Contributions = list[tuple[ir.Value, ir.Value]]


class ModifiedWalk(Walk):
    """Base class: the plain reverse walk, node by node, also inside of functions."""

    joint = False  # joint forms take several nodes at once

    def within(self, cotangents: dict[ir.Value, ir.Value], sources: dict[ir.Value, None]) -> dict[ir.Value, ir.Value]:
        inner = type(self)(self.e, Activity.between(sources, cotangents, self.e.order, partial=True))
        return inner.run(cotangents, sources, {*sources})


# -- guided backpropagation --------------------------------------------------------------------------------------------


def rectifies(node: ir.Node) -> bool:
    """Whether a node is a Relu, or a Clip whose lower bound is 0."""
    if is_op(node, "Clip") and len(node.inputs) > 1 and node.inputs[1] is not None:
        return bool(Emitter.number_of(node.inputs[1]) == 0)
    return is_op(node, "Relu")


class GuidedWalk(ModifiedWalk):
    """Drops negative cotangents at each Relu."""

    def node(self, node: ir.Node, rule: Rule | None, upstream: dict[ir.Value, ir.Value]) -> Contributions:
        contributions = super().node(node, rule, upstream)
        return [(v, self.e.op("Relu", g)) for v, g in contributions] if rectifies(node) else contributions


# -- layer-wise relevance ----------------------------------------------------------------------------------------------

_ACTIVATIONS = frozenset(
    "Celu Elu Erf Gelu HardSigmoid HardSwish Mish Selu Sigmoid Softplus Softsign Swish Tanh".split()
)
"""Functions of one operand whose relevance passes unchanged; that of Relu and its relatives does so by the gradient."""

_PRODUCTS = frozenset("Einsum MatMul Mul".split())


class RelevanceWalk(ModifiedWalk):
    """Propagates c = R / a, the relevance R of each value divided by the value a.

    In this form the rules of linear operators without stabilizer, of pools and of Relu are their gradients. For a layer
    z = W x + b with modified weights W' = W + gamma max(W, 0) and z' = W' x + b, R_i = x_i sum_j W'_ji R_j / (z'_j + eps_j)
    becomes c_x = W'^T (c_z z / (z' + eps)), where eps has the sign of z'.
    """

    stabilizer: float = 1e-6
    gamma: float = 0.0

    def node(self, node: ir.Node, rule: Rule | None, upstream: dict[ir.Value, ir.Value]) -> Contributions:
        varied = [v for v in node.inputs if v in self.activity.varied]
        layer = layer_of(node)
        if layer is not None and varied == [node.inputs[0]]:
            return self._layer(layer, rule, upstream)
        if is_op(node, *_ACTIVATIONS) and len(varied) == 1 and varied[0] is not None:
            ratio = self.e.div(node.outputs[0], self.stabilized(varied[0]))
            return [(varied[0], self.e.mul(upstream[node.outputs[0]], ratio))]
        if is_op(node, "Div") and node.inputs[1] in varied:  # a divisor normalizes, and has no relevance of its own
            return [(v, g) for v, g in super().node(node, rule, upstream) if v is not node.inputs[1]]
        contributions = super().node(node, rule, upstream)
        if is_op(node, *_PRODUCTS) and len(varied) > 1:  # both factors share the relevance
            return [(v, self.e.mul(g, 1 / len(varied))) for v, g in contributions]
        return contributions

    def stabilized(self, value: ir.Value) -> ir.Value:
        """The value, moved away from zero by stabilizer."""
        e = self.e
        return e.add(value, e.where(e.compare("Less", value, 0), e.scalar(-self.stabilizer, value), self.stabilizer))

    def _layer(self, layer: WeightLayer, rule: Rule | None, upstream: dict[ir.Value, ir.Value]) -> Contributions:
        e, node, y = self.e, layer.node, layer.node.outputs[0]
        modified, behind = self._with_gamma(layer), self._bias_behind(node)
        total, changed = y, modified.outputs[0]
        if behind is not None:  # the sum is the layer's result
            total = behind.outputs[0]
            if modified is node:
                changed = total
            else:
                changed = e.op("Add", *(modified.outputs[0] if v is y else v for v in behind.inputs))
        ratio = e.div(total, self.stabilized(changed))
        cotangents = {modified.outputs[0]: e.mul(upstream[y], ratio)}
        return super().node(modified, rule if modified is node else rule_of(modified), cotangents)

    def _with_gamma(self, layer: WeightLayer) -> ir.Node:
        """The layer with gamma times its positive weights added to its weights."""
        e, node, weight = self.e, layer.node, layer.weight
        if not self.gamma:
            return node
        heavier = e.add(weight, e.mul(e.op("Relu", weight), self.gamma))
        operands = [node.inputs[0], heavier, *node.inputs[2:]]
        copy = ir.Node(node.domain, node.op_type, operands, node.attributes.values(), num_outputs=1)
        e.place(copy)
        e.typed(copy.outputs[0], node.outputs[0])
        return copy

    def _bias_behind(self, node: ir.Node) -> ir.Node | None:
        """The Add of a constant that alone reads the layer's result."""
        users = list(node.outputs[0].uses())
        if len(users) != 1 or not is_op(users[0].node, "Add"):
            return None
        add = users[0].node
        other = next((v for v in add.inputs if v is not node.outputs[0]), None)
        constant = sole_producer(node.outputs[0]) is node and other is not None and other not in self.activity.varied
        return add if constant and add.outputs[0].shape == node.outputs[0].shape else None


def lrp_walk(stabilizer: float, gamma: float) -> type[RelevanceWalk]:
    """The walk with these two numbers."""
    return type("LrpWalk", (RelevanceWalk,), {"stabilizer": stabilizer, "gamma": gamma})
