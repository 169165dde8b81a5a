"""Questions about nodes that the facts of their operators answer; other operators have none of these properties."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import rule_of
from onnx_convgrad.autodiff.factors import every_axis
from onnx_convgrad.ir.call import Call, stem
from onnx_convgrad.ir.constants import is_constant
from onnx_convgrad.ir.nodes import is_op


def is_view(node: ir.Node | None) -> bool:
    """Whether a node has the numbers of its first operand in their order, so that a runtime may share the memory."""
    rule = None if node is None else rule_of(node)
    return rule is not None and rule.moves == "reshapes"


def arranges(node: ir.Node | None) -> bool:
    """Whether a node has each number of its first operand once, perhaps in another type."""
    rule = None if node is None else rule_of(node)
    return rule is not None and (rule.moves in ("reshapes", "permutes") or is_op(node, "Cast", "CastLike"))


def moved_operands(node: ir.Node) -> list[ir.Value]:
    """The operands whose numbers a node gives as they are; none for an operator that computes."""
    rule = rule_of(node)
    if rule is None or not rule.moves:
        return []
    names = zip(Call(node).names[0], node.inputs, strict=False)
    return [v for name, v in names if v is not None and stem(name) in rule.wrt]


def is_elementwise(node: ir.Node | None) -> bool:
    """Whether each number of the results depends on its own place in the operands alone."""
    rule = None if node is None else rule_of(node)
    return rule is not None and rule.is_elementwise


def is_activation(node: ir.Node) -> bool:
    """Whether a node is a function of the numbers of one value, one by one, and not an affine one."""
    rule, call = rule_of(node), Call(node)
    varied = [name for name, v in zip(call.names[0], node.inputs, strict=False) if v is not None and not is_constant(v)]
    if rule is None or rule.kind != "elementwise" or len(varied) != 1:
        return False
    return not rule.is_affine_in(call, varied)


def placed_operands(node: ir.Node) -> list[ir.Value | None]:
    """The operands whose places the results keep; none for an operator that is not elementwise."""
    rule = rule_of(node)
    if rule is None or not rule.is_elementwise:
        return []
    return list(node.inputs[: None if rule.factors is every_axis else 1])


def reads_numbers(node: ir.Node) -> bool:
    """Whether the numbers of an operand matter, and not only its shape and type."""
    rule = rule_of(node)
    return rule is None or not rule.is_of_shape
