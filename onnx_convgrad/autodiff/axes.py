"""Follow an axis through a node, by the factors of its operator alone.

An axis of an operand is the place of a factor. The results have it where the same factor runs through them; what the
operator does along the factor says whether the indices stay apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.autodiff.factors import Factors, Work
from onnx_convgrad.autodiff.registry import lookup
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call


@dataclass(frozen=True, slots=True)
class Passage:
    """One factor of a node.

    Attributes:
        factor: Its name.
        work: The work of the node along it.
        axis: The axis that was followed, in the first operand that has it.
        results: Its axis in each result; `None` for a result without it.
        others: The operands that run along the factor and are not followed, with their axis.
    """

    factor: str
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


class DifferentAxes(Exception):  # noqa: N818 - it is caught where the axis is followed
    """The followed operands hold the axis under different factors."""


def passage(n: Call, factors: Factors, held: Mapping[int, int]) -> Passage:
    """The factor that operands hold on an axis each: position of the operand -> axis.

    Raises:
        DifferentAxes: It is not one factor.
        UnsupportedCase: An operand with options or sizes holds it.
    """
    names: set[str] = set()
    for position, axis in held.items():
        axes = factors.operands[position]
        if axes is None:
            raise UnsupportedCase(f"its operand {n.names[0][position]} depends on the samples, which is not supported.")
        names.add(axes[axis])
    if len(names) > 1:
        raise DifferentAxes
    (factor,) = names
    results = [axes.index(factor) if axes is not None and factor in axes else None for axes in factors.results]
    others = [
        (value, axes.index(factor))
        for position, (value, axes) in enumerate(zip(n.inputs, factors.operands, strict=False))
        if value is not None and axes is not None and factor in axes and position not in held
    ]
    return Passage(factor, factors.does(factor), next(iter(held.values())), results, others)


def kept_axes(node: ir.Node, operand: int = 0) -> list[int | None]:
    """For each axis of an operand its place in the first result, `None` where it has none; empty if that is unknown."""
    rule = lookup(node.domain, node.op_type)
    try:
        factors = None if rule is None or rule.factors is None else rule.factors(Call(node))
    except UnsupportedCase:
        return []
    axes = None if factors is None or factors.flat else factors.operands[operand]
    result = None if factors is None or factors.flat else factors.results[0]
    if axes is None or result is None:
        return []
    return [result.index(name) if name and name in result else None for name in axes]
