"""Parse equations of Einsum: one index per axis of the operands and of the result."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence

import onnx_ir as ir

ELLIPSIS = "..."


def _tokens(term: str) -> tuple[str, ...]:
    head, dots, tail = term.partition(ELLIPSIS)
    return (*head, *([dots] if dots else []), *tail)


def _split(equation: str) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """The operands' terms and the output's; an implicit output has the indices that occur once, in order."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = [_tokens(term) for term in left.split(",")]
    if arrow:
        return terms, _tokens(right)
    once = sorted(c for c in left if c not in ".," and left.count(c) == 1)
    return terms, (*([ELLIPSIS] if ELLIPSIS in left else []), *once)


def parse_equation(equation: str, operands: Sequence[ir.Value]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """The indices of each operand and of the result.

    Each ellipsis is replaced by fresh letters if the ranks of its operands are known; all stand for as many axes.
    """
    terms, out = _split(equation)
    dotted = [(t, v.shape) for t, v in zip(terms, operands, strict=True) if ELLIPSIS in t]
    counts = [None if shape is None else len(shape) - len(t) + 1 for t, shape in dotted]
    if not counts or counts[0] is None or None in counts:
        return terms, out
    fresh = [c for c in string.ascii_letters if c not in equation][: counts[0]]

    def spell(term: tuple[str, ...]) -> tuple[str, ...]:
        if ELLIPSIS not in term:
            return term
        at = term.index(ELLIPSIS)
        return (*term[:at], *fresh, *term[at + 1 :])

    return [spell(t) for t in terms], spell(out)


# -- equations that do not fit -----------------------------------------------------------------------------------------

_TERM = r"[A-Za-z ]*(\.\.\.[A-Za-z ]*)?"
_EQUATION = re.compile(rf"{_TERM}(,{_TERM})*(->{_TERM})?")


def objections(equation: str, operands: Sequence[ir.Value | None]) -> Iterator[str]:
    """Say why an equation is not valid, or does not fit the shapes of its operands as far as they are known."""
    what = f"its equation {equation!r}"
    if not _EQUATION.fullmatch(equation):
        yield f"{what} is not of the form 'ij,jk->ik'."
        return
    terms, out = _split(equation)
    if len(terms) != len(operands):
        yield f"{what} has a term for {len(terms)} of its {len(operands)} inputs."
        return
    found = {index for term in terms for index in term}
    if missing := [index for index in out if index not in (*found, ELLIPSIS)]:
        yield f"{what} has {missing[0]!r} in its result, but in no input."
    if len(set(out)) < len(out):
        yield f"{what} repeats an index in its result."
    ranks = [None if v is None or v.shape is None else len(v.shape) for v in operands]
    for i, (term, rank) in enumerate(zip(terms, ranks, strict=True)):
        least = len(term) - (ELLIPSIS in term)
        if rank is not None and (rank < least or (rank > least and ELLIPSIS not in term)):
            yield f"{what} gives {least}{' or more' * (ELLIPSIS in term)} axes to input {i}, which has {rank}."
            return
    covered = {r - len(t) + 1 for t, r in zip(terms, ranks, strict=True) if r is not None and ELLIPSIS in t}
    if len(covered) > 1:
        yield f"{what} has ellipses for {min(covered)} and for {max(covered)} axes."
        return
    if ELLIPSIS not in out and any(covered):
        yield f"{what} has an ellipsis in an input, but not in its result."
    yield from _unequal(what, terms, operands)


def _unequal(what: str, terms: Sequence[tuple[str, ...]], operands: Sequence[ir.Value | None]) -> Iterator[str]:
    """Object to sizes under one index that differ; a size of 1 is broadcast, except within one operand."""
    sizes: dict[str, int] = {}
    for i, (term, operand) in enumerate(zip(terms, operands, strict=True)):
        if operand is None or operand.shape is None:
            continue
        own: dict[str, int] = {}
        if ELLIPSIS in term:
            at, count = term.index(ELLIPSIS), len(operand.shape) - len(term) + 1
            term = (*term[:at], *(f"{ELLIPSIS}{k}" for k in range(count)), *term[at + 1 :])  # noqa: PLW2901
        for index, size in zip(term, operand.shape, strict=True):
            if isinstance(size, int):
                if own.setdefault(index, size) != size:
                    yield f"{what} takes a diagonal of the axes {index!r} of input {i}, of sizes {own[index]} and {size}."
                    return
                if size != 1 and sizes.setdefault(index, size) != size:
                    yield f"{what} has {index!r} for axes of sizes {sizes[index]} and {size}."
                    return
