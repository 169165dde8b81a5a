"""Questions about nodes that the facts and factors of their operators answer.

An operator without a rule has none of these properties.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import rule_of
from onnx_convgrad.autodiff.factors import Factors, Work, every_axis
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call, stem
from onnx_convgrad.ir.constants import is_constant
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import origin_of


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


# -- infinite derivatives ----------------------------------------------------------------------------------------------


def meets_a_pole(value: ir.Value) -> bool:
    """Whether the model applies a function with an infinite derivative at 0 (a root, a logarithm) to multiples of `value`.

    The cotangent is then infinite where the value is 0, and must be selected, not multiplied by 0.
    """
    todo, seen = [value], {value}
    while todo:
        for use in todo.pop().uses():
            node = use.node
            rule = None if origin_of(node) else rule_of(node)  # nodes with an origin were added by differentiation
            if rule is None:
                continue
            call = Call(node)
            name = call.names[0][use.idx]
            if 0 in rule.poles_in(call, name):
                return True
            if rule.is_zero_with(call, name):
                todo += [result for result in node.outputs if result not in seen]
                seen.update(node.outputs)
    return False


def chosen(e: Emitter, condition: ir.Value, y: ir.Value) -> ir.Value:
    """A condition as the derivative of y: as 0 and 1, which is fast, or to select cotangents that may be infinite."""
    return condition if meets_a_pole(y) else e.mask(condition, y)


# -- following an axis through a node ----------------------------------------------------------------------------------
#
# An axis of an operand is the place of a factor. The results have it where the same factor runs through them; what the
# operator does along the factor says whether the indices stay apart.


@dataclass(frozen=True, slots=True)
class Passage:
    """One factor of a node.

    Attributes:
        work: The work of the node along it.
        axis: The axis that was followed, in the first operand that has it.
        results: Its axis in each result; `None` for a result without it.
        others: The operands that run along the factor and are not followed, with their axis.
    """

    work: Work
    axis: int
    results: Sequence[int | None]
    others: Sequence[tuple[ir.Value, int]]

    @property
    def goes_on(self) -> bool:
        """Whether the indices stay apart, each at its place in a result."""
        return self.work.kind == "each" and any(axis is not None for axis in self.results)

    @property
    def totals(self) -> bool:
        """Whether the results are linear in each index, and depend on all."""
        return self.work.kind in ("sum", "mean")

    def stop(self, held: str) -> str:
        """The reason why the axis ends here, for a message; `held` says what the axis holds."""
        if self.work.reason:
            return self.work.reason
        return f"it {self.work.verb or 'removes'} axis {self.axis}, which holds {held}"


def passage(n: Call, factors: Factors, held: Mapping[int, int]) -> Passage | None:
    """The factor that operands hold on an axis each: position of the operand -> axis. `None` if it is not one factor.

    Raises:
        UnsupportedCase: An operand with options or sizes holds it.
    """
    names: set[str] = set()
    for position, axis in held.items():
        axes = factors.operands[position]
        if axes is None:
            raise UnsupportedCase(f"its operand {n.names[0][position]} depends on the samples, which is not supported.")
        names.add(axes[axis])
    factor = names.pop()
    if names:
        return None
    results = [axes.index(factor) if axes is not None and factor in axes else None for axes in factors.results]
    others = [
        (value, axes.index(factor))
        for position, (value, axes) in enumerate(zip(n.inputs, factors.operands, strict=False))
        if value is not None and axes is not None and factor in axes and position not in held
    ]
    return Passage(factors.does(factor), next(iter(held.values())), results, others)


def kept_axes(node: ir.Node) -> list[int | None]:
    """For each axis of the first operand its place in the first result, `None` where it has none; empty if unknown."""
    rule = rule_of(node)
    try:
        factors = None if rule is None or rule.factors is None else rule.factors(Call(node))
    except UnsupportedCase:
        return []
    if factors is None or factors.flat:
        return []
    result = factors.results[0] or ()
    return [result.index(name) if name and name in result else None for name in factors.operands[0] or ()]
