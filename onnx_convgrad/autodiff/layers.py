"""Layers: nodes that multiply data by a weight and add up, as the factors of their operators say.

Data, weight and bias are the first three operands. Weight and bias are parameters of the rule. The weight has axes that the
result lacks, and is summed over the first; all axes of a bias are in the result. Whoever treats layers asks here, and names
no operator.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import MISFIT, rule_of
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call, signature, stem
from onnx_convgrad.ir.dims import known


@dataclass(frozen=True, slots=True)
class Features:
    """The axis that the weight and the result have, and the data do not.

    Attributes:
        of_weight: Its place in the weight.
        of_result: Its place in the result, counted from the end.
        parts: Number of groups, if the axis of the weight has the features of one alone, as in a transposed convolution.
    """

    of_weight: int
    of_result: int
    parts: int


@dataclass(frozen=True, slots=True, eq=False)
class WeightLayer:
    """A node with data, a weight and perhaps a bias, and no other operand.

    Attributes:
        node: The node.
        takes_bias: Whether the operator has a bias, which may be left out.
        summed: The first axis of the data, and of the weight, that the result lacks.
        features: The axis of the features; `None` for a vector, and where several axes hold them.
        convolves: Whether the weight moves along axes of the data.
        group: Number of groups of channels that have weights of their own.
    """

    node: ir.Node
    takes_bias: bool
    summed: tuple[int, int]
    features: Features | None
    convolves: bool
    group: int

    @property
    def weight(self) -> ir.Value:
        """The weight."""
        weight = self.node.inputs[1]
        assert weight is not None, "a layer has one"
        return weight

    @property
    def outputs(self) -> int | None:
        """The number of features, if it is known and they have an axis."""
        return None if self.features is None else self._sized(self.features.of_weight, self.features.parts)

    @property
    def channels(self) -> int | None:
        """The number of channels that the data must have, if it is known."""
        return self._sized(self.summed[1], self.group if self.features is None else self.group // self.features.parts)

    def _sized(self, axis: int, times: int) -> int | None:
        size = None if self.weight.shape is None else known(self.weight.shape[axis])
        return None if size is None else size * times


def convolves(node: ir.Node | None) -> bool:
    """Whether a node is a layer whose weight moves along axes of the data."""
    layer = layer_of(node)
    return layer is not None and layer.convolves


def layer_of(node: ir.Node | None, rank: int | None = None) -> WeightLayer | None:
    """The layer that a node computes, or `None`; in a file without inferred shapes, `rank` is that of the weight."""
    rule = None if node is None else rule_of(node)
    if node is None or rule is None or rule.factors is None or rule.kind == "elementwise" or rule.moves:
        return None
    names = Call(node).names[0]
    if not len(names) == len(node.inputs) in (2, 3) or node.inputs[1] is None:
        return None
    if not all(stem(name) in rule.parameters for name in names[1:]):
        return None
    try:
        factors = rule.factors(Call(_ranked(node, rank)))
        sides, y = [side or () for side in factors.operands], factors.results[0] or ()
    except (UnsupportedCase, *MISFIT):  # the file may not be checked yet
        return None
    lacking = [[place for place, name in enumerate(side) if name and name not in y] for side in sides]
    if not lacking[0] or not lacking[1] or any(lacking[2:]):
        return None
    summed = lacking[0][0], lacking[1][0]
    if factors.does(sides[1][summed[1]]).kind != "sum":
        return None
    group = Call(node).int("group", 1)
    features: Features | None = None
    own = [name for name in sides[1] if name in y and name not in sides[0]]
    if len(own) == 1:
        parts = 1 if factors.does(own[0]).kind == "each" else group
        features = Features(sides[1].index(own[0]), y.index(own[0]) - len(y), parts)
    takes_bias = any(name in rule.parameters for name in signature(node.domain, node.op_type)[0][2:3])
    moves = any(name and not any(name in side for side in sides) for name in y)
    return WeightLayer(node, takes_bias, summed, features, moves, group)


def _ranked(node: ir.Node, rank: int | None) -> ir.Node:
    """The node; one like it whose operands all have a rank, if some are unknown: data and weight the same, a bias 1."""
    ranks = [None if v is None or v.shape is None else len(v.shape) for v in node.inputs]
    if all(v is None or v.shape is not None for v in node.inputs):
        return node
    usual = rank or ranks[0] or ranks[1] or 4
    shapes = [ir.Shape([None] * (usual if i < 2 else 1) if r is None else [None] * r) for i, r in enumerate(ranks)]
    operands = [None if v is None else ir.Value(shape=s) for v, s in zip(node.inputs, shapes, strict=True)]
    return ir.Node(node.domain, node.op_type, operands, node.attributes.values(), num_outputs=len(node.outputs))
