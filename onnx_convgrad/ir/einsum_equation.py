"""Parse equations of Einsum: one index per axis of the operands and of the result."""

from __future__ import annotations

import string
from collections.abc import Sequence

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

    Each ellipsis is replaced by fresh letters, aligned at the right, if the ranks of its operands are known.
    """
    terms, out = _split(equation)
    dotted = [(t, v) for t, v in zip(terms, operands, strict=True) if ELLIPSIS in t]
    if not dotted or any(v.shape is None for _, v in dotted):
        return terms, out
    fresh = [c for c in string.ascii_letters if c not in equation]
    most = max(len(v.shape) - len(t) + 1 for t, v in dotted if v.shape is not None)

    def spell(term: tuple[str, ...], count: int) -> tuple[str, ...]:
        if ELLIPSIS not in term:
            return term
        at = term.index(ELLIPSIS)
        return (*term[:at], *fresh[most - count : most], *term[at + 1 :])

    counts = [0 if v.shape is None else len(v.shape) - len(t) + 1 for t, v in zip(terms, operands, strict=True)]
    return [spell(t, count) for t, count in zip(terms, counts, strict=True)], spell(out, most)
