"""Merge the cotangent contributions of one value before they are summed.

Slices: the parts of a tensor (the halves of a channel split, queries, keys and values) each contribute a cotangent that is
zero elsewhere. Padding and adding them takes three passes over the whole tensor per part; a Concat takes one.

Equal products: a square contributes the same product twice. Its smaller factor is doubled instead, which often has one
number per row. Powers and sums of a value with itself are treated alike.

Products of matrices: a matrix that many products share, such as the weight of a recurrent layer, gets a' g from each.
With the rows of all a and of all g concatenated this is one product, without a sum over matrices as large as the weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Emitter, known, static_dims
from onnx_convgrad.ir.geometry import HINT_BATCH
from onnx_convgrad.ir.nodes import is_op


@dataclass(frozen=True, slots=True)
class _Piece:
    """A term that is zero except for `value`, at position `begin` of `axis`, with `after` zeros after it."""

    term: ir.Value
    value: ir.Value
    axis: int
    begin: int
    size: int
    after: int

    @property
    def end(self) -> int:
        return self.begin + self.size


def merge_terms(e: Emitter, terms: Sequence[ir.Value]) -> list[ir.Value]:
    """Merge equal products, low-rank products of matrices and adjacent slices; returns terms with the same sum."""
    terms = _merge_matrix_products(e, _merge_equal(e, terms))
    pieces = [piece for piece in map(_piece, terms) if piece is not None]
    taken = {id(piece.term) for piece in pieces}
    others = [term for term in terms if id(term) not in taken]
    return others + [run[0].term if len(run) == 1 else _concatenated(e, run) for run in _runs(pieces)]


def _merge_equal(e: Emitter, terms: Sequence[ir.Value]) -> list[ir.Value]:
    """Replace n equal terms, or n products of the same factors, by n times one of them."""
    alike: dict[tuple[ir.Value, ...], list[ir.Value]] = {}
    for term in terms:
        alike.setdefault(_factors(term), []).append(term)
    return [same[0] if len(same) == 1 else _times(e, len(same), factors, same[0]) for factors, same in alike.items()]


def _times(e: Emitter, count: int, factors: tuple[ir.Value, ...], term: ir.Value) -> ir.Value:
    first, *rest = sorted(factors, key=_size)
    scaled = e.mul(first, count)
    return e.typed(e.mul(scaled, rest[0]), term) if rest else scaled


def _factors(term: ir.Value) -> tuple[ir.Value, ...]:
    """The factors of a product; the term itself if it is not a product."""
    node = term.producer()
    return tuple(v for v in node.inputs if v is not None) if is_op(node, "Mul") else (term,)


def _size(value: ir.Value) -> float:
    """The number of elements; infinite if unknown."""
    sizes = static_dims(value)
    return math.inf if sizes is None or None in sizes else math.prod(size or 0 for size in sizes)


def _merge_matrix_products(e: Emitter, terms: Sequence[ir.Value]) -> list[ir.Value]:
    """Replace products of matrices by one product of concatenated rows, if the factors are smaller than the result."""
    groups: dict[str, list[tuple[ir.Value, ir.Value, ir.Value]]] = {}
    others = []
    for term in terms:
        factors = rows_multiplied(term)
        if factors is None or not _is_low(*factors, term):
            others.append(term)
        else:
            node = term.producer()
            assert node is not None
            groups.setdefault(node.op_type, []).append((*factors, term))
    for op_type, products in groups.items():
        left, right, like = products[0]
        if len(products) > 1:
            left, right = (e.concat([factors[i] for factors in products], -2) for i in range(2))
            product = e.op("Gemm", left, right, transA=1) if op_type == "Gemm" else e.matmul(e.swap_last(left), right)
            like = e.typed(product, like)
        others.append(like)
    return others


def rows_multiplied(term: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """The factors a [.., k, m] and b [.., k, n] of a term a' b, the cotangent for the right operand of a product."""
    node = term.producer()
    if not is_op(node, "Gemm", "MatMul") or len(node.inputs) != 2:
        return None
    left, right = node.inputs
    if node.op_type == "MatMul":
        transpose = left.producer() if left is not None else None
        if not is_op(transpose, "Transpose") or transpose.inputs[0] is None or transpose.inputs[0].shape is None:
            return None
        left, rank = transpose.inputs[0], len(transpose.inputs[0].shape)
        order = transpose.attributes.get("perm")
        if order is None or list(order.as_ints()) != [*range(rank - 2), rank - 1, rank - 2]:
            return None
    elif {name: a.value for name, a in node.attributes.items()} != {"transA": 1}:
        return None
    return None if left is None or right is None else (left, right)


def _is_low(left: ir.Value, right: ir.Value, product: ir.Value) -> bool:
    """Whether both factors together are smaller than their product; their batches must be known and equal."""
    sizes = [static_dims(v) for v in (left, right, product)]
    known_sizes = [s for s in sizes if s is not None and len(s) >= 2 and None not in s[:-2] + s[-1:]]
    if len(known_sizes) < len(sizes) or any(s[:-2] != known_sizes[0][:-2] for s in known_sizes):
        return False
    elements = [math.prod(size or HINT_BATCH for size in s) for s in known_sizes]
    return elements[0] + elements[1] < elements[2]


def _piece(term: ir.Value) -> _Piece | None:
    """A term that is a value padded with zeros along one axis."""
    node = term.producer()
    if node is None or node.op_type != "Pad" or node.domain or len(node.inputs) != 2 or node.attributes or term.uses():
        return None
    value, pads = node.inputs[0], constant_of(node.inputs[1])
    if value is None or pads is None or value.shape is None or len(pads) != 2 * len(value.shape):
        return None
    rank = len(value.shape)
    axes = [axis for axis in range(rank) if pads[axis] or pads[rank + axis]]
    size = known(value.shape[axes[0]]) if len(axes) == 1 else None
    if size is None or min(pads) < 0:
        return None
    return _Piece(term, value, axes[0], int(pads[axes[0]]), size, int(pads[rank + axes[0]]))


def _runs(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Runs of adjacent pieces, in order; a piece that overlaps another starts a new run."""
    runs: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda p: (p.axis, p.begin)):
        before = next((run for run in runs if run[-1].axis == piece.axis and run[-1].end == piece.begin), None)
        if before is None:
            runs.append([piece])
        else:
            before.append(piece)
    return runs


def _concatenated(e: Emitter, run: Sequence[_Piece]) -> ir.Value:
    axis = run[0].axis
    whole = e.concat([piece.value for piece in run], axis)
    return e.typed(e.pad(whole, [run[0].begin], [run[-1].after], [axis]), run[0].term)
