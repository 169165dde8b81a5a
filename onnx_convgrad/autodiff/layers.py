"""Layers: which nodes multiply data by a weight and add up, and which axis of the weight is which, by their factors.

A weight is an operand that the rule of its operator declares as a parameter, with axes that the results lack: the sums run
over them. A bias is another parameter, all of whose axes the results have. Whoever treats layers asks here, and names no
operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import MISFIT, rule_of
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call, signature, stem
from onnx_convgrad.ir.dims import known

_USUAL_RANK = 4
"""Rank of data and weight where neither is known: that of images."""


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
    parts: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A node with data, a weight and perhaps a bias, and no other operand.

    Attributes:
        node: The node.
        data: Position of the data.
        weight: Position of the weight.
        bias: Position of the bias, also where it is left out; `None` if the operator has none.
        summed: The first axis of the data, and of the weight, that the result lacks.
        features: The axis of the features; `None` for a vector, and where several axes hold them.
        convolves: Whether the weight moves along axes of the data.
        group: Number of groups of channels that have weights of their own.
    """

    node: ir.Node
    data: int
    weight: int
    bias: int | None
    summed: tuple[int, int]
    features: Features | None
    convolves: bool
    group: int

    @property
    def outputs(self) -> int | None:
        """The number of features, if it is known and the features have an axis."""
        size = None if self.features is None else self._size(self.features.of_weight)
        return None if size is None or self.features is None else size * self.features.parts

    @property
    def channels(self) -> int | None:
        """The number of channels that the data must have, if it is known."""
        size, parts = self._size(self.summed[1]), 1 if self.features is None else self.features.parts
        return None if size is None else size * self.group // parts

    def _size(self, axis: int) -> int | None:
        weight = self.node.inputs[self.weight]
        return None if weight is None or weight.shape is None else known(weight.shape[axis])


def convolves(node: ir.Node | None) -> bool:
    """Whether a node is a layer whose weight moves along axes of the data."""
    layer = layer_of(node)
    return layer is not None and layer.convolves


def layer_of(node: ir.Node | None, data: int = 0, rank: int | None = None) -> Layer | None:
    """The layer that a node computes of the operand at the position `data`; `None` if it is no layer.

    In files without inferred shapes ranks may be unknown. Then `rank` is that of the weight, or else data and weight have
    equally many axes.
    """
    rule = None if node is None else rule_of(node)
    if node is None or rule is None or rule.factors is None or rule.kind == "elementwise" or rule.moves:
        return None
    given = [i for i, v in enumerate(node.inputs) if v is not None]
    names = Call(node).names[0]
    held = [i for i in given if i != data and i < len(names) and stem(names[i]) in rule.parameters]
    if not held or data not in given or len(held) != len(given) - 1:
        return None
    try:
        factors = rule.factors(Call(_ranked(node, rank)))
    except (UnsupportedCase, *MISFIT):  # the file may not be checked yet
        return None
    axes, y = factors.operands, factors.results[0] or ()
    weights = [i for i in held if any(_lacking(axes[i], y))]
    if len(weights) != 1 or len(held) > 2 or not any(_lacking(axes[data], y)):
        return None
    (weight,) = weights
    own = [name for name in axes[weight] or () if name in y and name not in (axes[data] or ())]
    group, features = Call(node).int("group", 1), None
    if len(own) == 1:
        parts = 1 if factors.does(own[0]).kind == "each" else group
        features = Features((axes[weight] or ()).index(own[0]), y.index(own[0]) - len(y), parts)
    declared = enumerate(signature(node.domain, node.op_type)[0])
    bias = next((i for i, name in declared if name in rule.parameters and i not in (data, weight)), None)
    summed = _lacking(axes[data], y).index(True), _lacking(axes[weight], y).index(True)
    moving = any(name and all(name not in (side or ()) for side in axes) for name in y)
    return Layer(node, data, weight, bias, summed, features, moving, group)


def _lacking(axes: Sequence[str] | None, result: Sequence[str]) -> list[bool]:
    """Whether the result lacks each axis."""
    return [bool(name) and name not in result for name in axes or ()]


def _ranked(node: ir.Node, rank: int | None) -> ir.Node:
    """The node, or one like it whose operands all have a rank: of a bias 1."""
    shapes = [None if v is None else v.shape for v in node.inputs]
    if all(v is None or v.shape is not None for v in node.inputs):
        return node
    usual = rank or next((len(shape) for shape in shapes[:2] if shape is not None), _USUAL_RANK)
    ranks = [len(s) if s is not None else usual if i < 2 else 1 for i, s in enumerate(shapes)]
    operands = [
        None if v is None else ir.Value(shape=ir.Shape([None] * count))
        for v, count in zip(node.inputs, ranks, strict=True)
    ]
    return ir.Node(node.domain, node.op_type, operands, node.attributes.values(), num_outputs=len(node.outputs))
