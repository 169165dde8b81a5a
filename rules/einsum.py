"""Einsum: any number of operands, any equation.

The cotangent of operand x_i swaps its term with that of the output. Three cases need more than one Einsum. An index of
term_i that occurs nowhere else was summed: the cotangent is constant along it (Expand). An index repeated within term_i
takes a diagonal: the cotangent is zero off it (Where). An axis of size one that meets a longer one is broadcast: the walk
sums over it, or, where the longer one belongs to x_i, it is expanded. Where the ranks are known, an ellipsis is replaced by
new indices.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.batching import Batched, require_rule
from onnx_convgrad.autodiff.factors import SUM, Factors, mix
from onnx_convgrad.autodiff.per_sample.batch import Batch
from onnx_convgrad.autodiff.registry import Cotangents, batched, multilinear, per_sample
from onnx_convgrad.base.limits import check_limit
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.einsum_equation import ELLIPSIS, parse_equation
from onnx_convgrad.ir.emit import Dim, Emitter, dims_equal, known


@dataclass(frozen=True, slots=True)
class Factor:
    """A tensor with the index of each of its axes."""

    term: tuple[str, ...]
    value: ir.Value

    def sizes(self, index: str) -> list[Any]:
        """The dimensions under an index, as far as the shape is known."""
        if self.value.shape is None or ELLIPSIS in self.term:
            return [None] if index in self.term else []
        return [d for label, d in zip(self.term, self.value.shape, strict=True) if label == index]


def _factors(n: Call) -> tuple[list[Factor], tuple[str, ...]]:
    """The operands, and the indices of the output."""
    operands = [v for v in n.inputs if v is not None]
    check_limit("nodes", len(operands) ** 2, f"The gradient of an Einsum of {len(operands)} operands")
    terms, out = parse_equation(n.string("equation", ""), operands)
    return [Factor(term, v) for term, v in zip(terms, operands, strict=True)], out


def _indices(n: Call) -> Factors:
    """The letters of the equation; one that stands twice in a term takes a diagonal."""
    terms, out = parse_equation(n.string("equation", ""), [v for v in n.inputs if v is not None])
    require(
        ELLIPSIS not in out and not any(ELLIPSIS in term for term in terms),
        "the axes of its ellipsis are not known, because the shape of an operand is not.",
    )
    work = {letter: SUM for term in terms for letter in term if letter not in out}
    twice = {letter for term in terms for letter in term if term.count(letter) > 1}
    work |= dict.fromkeys(twice, mix("takes a diagonal along"))
    return Factors(tuple(terms), (tuple(out),), work, broadcasts=True)


@multilinear("Einsum", wrt=("Inputs",), parameters=("Inputs",), factors=_indices)
def einsum_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[out] = x_0[term_0] x_1[term_1] ...: dx_i[term_i] = g[out] times the x_j[term_j] with j != i."""
    factors, out = _factors(n)
    cotangent = Factor(out, g["Output"])
    return {"Inputs": lambda i: _cotangent(e, factors[i], [cotangent, *factors[:i], *factors[i + 1 :]])}


@batched("Einsum")
def einsum_batched(b: Batched, n: Call) -> list[ir.Value]:
    """A letter of its own for the axis of the examples."""
    operands = [v for v in n.inputs if v is not None]
    terms, out = parse_equation(n.string("equation", ""), operands)
    require_rule(not any(ELLIPSIS in term for term in (*terms, out)))
    new = next(letter for letter in string.ascii_letters if not any(letter in term for term in terms))
    left = ",".join("".join((new, *term) if v in b else term) for v, term in zip(operands, terms, strict=True))
    return [b.e.op("Einsum", *(b[v] for v in operands), equation=f"{left}->{new}{''.join(out)}")]


@per_sample("Einsum")
def einsum_per_sample(e: Emitter, n: Call, g: dict[str, Any], batch: Batch) -> Cotangents:
    """For each sample s: dx_i[s, term_i] = g[out] times the x_j[term_j] with j != i, not summed over s."""
    factors, out = _factors(n)
    at, cotangent = batch.of(n.y), Factor(out, g["Output"])
    index = out[at.axis]

    def cotangents(i: int) -> ir.Value:
        own, others = factors[i], [cotangent, *factors[:i], *factors[i + 1 :]]
        require(
            at.plain
            and len({index, *own.term}) == 1 + len(own.term)
            and all(known(d) not in (None, 1) for label in own.term for d in own.sizes(label)),
            f"its operand {own.value.name!r} has no form per sample: an index is repeated, broadcast or unique.",
        )
        shared = [label for label in own.term if any(label in f.term for f in others)]
        value = _contract(e, others, (index, *shared))
        value = e.unsqueeze(value, [p for p, label in enumerate(own.term, 1) if label not in shared])
        if any(_must_expand(own, label, others) for label in own.term):
            value = e.op("Expand", value, e.vector([batch.count, *e.dims(own.value)]))
        return batch.stacked(value, own.value)

    return {f"Inputs.{i}": partial(cotangents, i) for i in range(len(factors))}


# -- one cotangent -----------------------------------------------------------------------------------------------------


def _cotangent(e: Emitter, operand: Factor, others: Sequence[Factor]) -> ir.Value:
    term = operand.term
    if ELLIPSIS in term and term[0] != ELLIPSIS:
        e.rank(operand.value, "the gradient of an Einsum with an ellipsis after an index")
    indices = tuple(dict.fromkeys(term))
    shared = [index for index in indices if any(index in f.term for f in others)]
    if ELLIPSIS in indices and ELLIPSIS not in shared:
        e.rank(operand.value, "the gradient of an Einsum that sums over an ellipsis")
    if any(ELLIPSIS in f.term for f in others) and ELLIPSIS not in shared:
        shared.insert(0, ELLIPSIS)  # an ellipsis may not be summed in the equation; the walk sums over it
    value = _contract(e, others, tuple(shared))
    value = e.unsqueeze(value, [p - len(indices) for p, index in enumerate(indices) if index not in shared])
    if any(_must_expand(operand, index, others) for index in indices):
        value = e.op("Expand", value, _sizes(e, operand, indices))
    return value if len(indices) == len(term) else _diagonal(e, value, operand, indices)


def _must_expand(operand: Factor, index: str, others: Sequence[Factor]) -> bool:
    """Whether the product of the others may be shorter along this index than the operand is."""
    if index == ELLIPSIS:
        return False  # the output has the ellipsis, with the largest sizes
    sizes = [d for f in others for d in f.sizes(index)]
    own = operand.sizes(index)
    if not sizes:
        return True
    if any(d is not None and known(d) == 1 for d in own):
        return False
    return not any(dims_equal(a, b) for a in sizes for b in own if a is not None and b is not None)


def _sizes(e: Emitter, operand: Factor, indices: tuple[str, ...]) -> ir.Value:
    if len(indices) == len(operand.term):
        return e.shape(operand.value)
    parts: list[Dim] = []
    for index in indices:
        if index == ELLIPSIS:
            parts.append(e.op("Shape", operand.value, start=0, end=1 - len(operand.term)))
        else:
            parts.append(e.dim(operand.value, operand.term.index(index) - len(operand.term)))
    return e.vector(parts)


def _diagonal(e: Emitter, value: ir.Value, operand: Factor, indices: tuple[str, ...]) -> ir.Value:
    """The value where the positions on repeated axes agree, zero elsewhere."""
    term, rank = operand.term, len(operand.term)
    first = [p for p, index in enumerate(term) if term.index(index) == p]
    assert len(first) == len(indices)
    value = e.unsqueeze(value, [p - rank for p in range(rank) if p not in first])
    for p, index in enumerate(term):
        q = term.index(index)
        if q != p:
            positions = e.arange(e.dim(operand.value, p - rank))
            here, there = (e.unsqueeze(positions, list(range(1, rank - axis))) for axis in (p, q))
            value = e.where(e.compare("Equal", here, there), value, 0)
    return value


def _contract(e: Emitter, factors: Sequence[Factor], out: tuple[str, ...]) -> ir.Value:
    """The product of the factors, summed over every index that `out` lacks."""
    scalars = [f for f in factors if not f.term]
    tensors = [f for f in factors if f.term]
    if len(tensors) == 1 and len(set(tensors[0].term)) == len(tensors[0].term):
        value = _rearrange(e, tensors[0], out)
    elif tensors:
        indices = dict.fromkeys(index for f in tensors for index in f.term)
        longest = {index: _longest([d for f in tensors for d in f.sizes(index)]) for index in indices}
        tensors = [_without_ones(e, f, longest) for f in tensors]
        if len(tensors) == 2 and not all(known(size) for size in longest.values()):  # it may be empty
            tensors[1] = _aligned(e, *tensors)
        equation = f"{','.join(''.join(f.term) for f in tensors)}->{''.join(out)}"
        value = e.op("Einsum", *(f.value for f in tensors), equation=equation)
        if ELLIPSIS not in out:
            value.shape = ir.Shape([_longest([d for f in tensors for d in f.sizes(index)]) for index in out])
    else:
        value, scalars = scalars[0].value, scalars[1:]
    for scalar in scalars:
        value = e.mul(value, scalar.value)
    return value


def _without_ones(e: Emitter, factor: Factor, sizes: dict[str, Any]) -> Factor:
    """Drop axes of size one whose index is longer in another factor: inference would use their size.

    `sizes` holds the longest size of each index.
    """
    if factor.value.shape is None or ELLIPSIS in factor.term:
        return factor
    spare = [
        axis
        for axis, (index, d) in enumerate(zip(factor.term, factor.value.shape, strict=True))
        if known(d) == 1 and (known(sizes[index]) or 0) > 1
    ]
    term = tuple(index for axis, index in enumerate(factor.term) if axis not in spare)
    return Factor(term, e.squeeze(factor.value, spare))


def _aligned(e: Emitter, left: Factor, right: Factor) -> Factor:
    """The right factor with the indices of the left one first, in their order; see quirks.EINSUM_OF_NOTHING."""
    order = (*(i for i in left.term if i in right.term), *(i for i in right.term if i not in left.term))
    if ELLIPSIS in right.term or not len(set(right.term)) == len(right.term) == len(order):
        return right
    return Factor(order, e.transpose(right.value, [right.term.index(index) for index in order]))


def _rearrange(e: Emitter, factor: Factor, out: tuple[str, ...]) -> ir.Value:
    """The sum of a single tensor over the indices that `out` lacks, transposed."""
    if factor.term == out:
        return factor.value
    if ELLIPSIS in factor.term:
        return e.op("Einsum", factor.value, equation=f"{''.join(factor.term)}->{''.join(out)}")
    kept = [index for index in factor.term if index in out]
    summed = [axis for axis, index in enumerate(factor.term) if index not in out]
    value = e.reduce_sum(factor.value, summed, keepdims=False)
    return e.transpose(value, [kept.index(index) for index in out])


def _longest(sizes: Sequence[Any]) -> Any:
    """The size that all sizes broadcast to; `None` if it cannot be determined."""
    for d in sizes:
        if d is not None and (known(d) or 0) > 1:
            return d
    if sizes and all(d is not None and dims_equal(d, sizes[0]) for d in sizes):
        return sizes[0]
    rest = [d for d in sizes if d is None or known(d) != 1]
    return rest[0] if len(rest) == 1 else None
