"""The `Emitter`, with which rules, lowerings and passes add operators to a graph.

It appends to (or inserts into) an onnx_ir graph. Every new value gets its dtype and, if it can be inferred, its shape; equal
pure nodes are emitted once; operations on known sizes are folded, so the same rule gives constants in a static model and
run-time shape arithmetic in a dynamic one. It has three layers: nodes and constants (`onnx_convgrad.ir.writer`), sizes
(`onnx_convgrad.ir.sizes`), and here the operators that rules are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnx_convgrad.ir.dims import dims_equal, known, same_shape, static_dims
from onnx_convgrad.ir.sizes import HALVES, Dim, SizeWriter
from onnx_convgrad.ir.writer import CANONICAL_OPSET, DOMAIN, RANDOM, Operand

_LEAST_HALF, _LARGEST_HALF = 2.0**-14, 65504.0
"""Range of the magnitudes that float16 holds with all its digits."""

__all__ = [
    "CANONICAL_OPSET",
    "DOMAIN",
    "RANDOM",
    "Dim",
    "Emitter",
    "Operand",
    "dims_equal",
    "empty_graph",
    "empty_model",
    "known",
    "static_dims",
]


def empty_graph(name: str) -> ir.Graph:
    """A graph in canonical form, to be written by an emitter."""
    return ir.Graph([], [], nodes=[], opset_imports={"": CANONICAL_OPSET}, name=name)


def empty_model(name: str) -> ir.Model:
    """A model in canonical form, to be written by an emitter."""
    return ir.Model(empty_graph(name), ir_version=10)


class Emitter(SizeWriter):
    """Adds operators to `graph`, at its end or before the node `anchor`.

    `op` is the general form; the named helpers fold trivial cases (adding 0, an identity Transpose) and take Python numbers
    in place of constant tensors. `samples` states that a batch of unknown size is never empty.
    """

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def add(self, a: Operand, b: Operand) -> ir.Value:
        return _first(a, b, neutral=0) or self._binary("Add", a, b)

    def sub(self, a: Operand, b: Operand) -> ir.Value:
        if _is(b, 0) and isinstance(a, ir.Value):
            return a
        if _is(a, 0) and isinstance(b, ir.Value):
            return self.neg(b)
        return self._binary("Sub", a, b)

    def mul(self, a: Operand, b: Operand) -> ir.Value:
        if _is(b, -1) and isinstance(a, ir.Value):
            return self.neg(a)
        if _is(a, -1) and isinstance(b, ir.Value):
            return self.neg(b)
        return _first(a, b, neutral=1) or self._binary("Mul", a, b)

    def div(self, a: Operand, b: Operand) -> ir.Value:
        return a if _is(b, 1) and isinstance(a, ir.Value) else self._binary("Div", a, b)

    def averaged(self, total: ir.Value, count: Dim) -> ir.Value:
        """Divide a sum over `count` entries by `count`: a multiplication if the number is known. 0 divides by 1.

        In half types, a count that they do not hold divides in float32.
        """
        if isinstance(count, int):
            return self.scaled(total, 1 / max(count, 1))
        total_, least = self.wide(total), self.size_max(count, 1)
        return self.cast_like(self.div(total_, self.size_as(least, total_)), total)

    def unless_empty(self, statistic: ir.Value, count: Dim) -> ir.Value:
        """A statistic of `count` entries, or 0 if there are none: a mean over nothing is NaN, and so is 0 times it."""
        if isinstance(count, int):
            return statistic if count else self.zeros_like(statistic)
        return self.typed(self.where(self.compare("Greater", count, 0), statistic, 0), statistic)

    def multiplied(self, value: ir.Value, count: Dim) -> ir.Value:
        """Multiply by a size; in half types, a size that they do not hold multiplies in float32."""
        if isinstance(count, int):
            return self.scaled(value, count)
        wide = self.wide(value)
        return self.cast_like(self.mul(wide, self.size_as(count, wide)), value)

    def scaled(self, value: ir.Value, factor: float) -> ir.Value:
        """Multiply by a number; in float32 where the half type of `value` rounds it to fewer digits than it has, or to 0."""
        if value.dtype == ir.DataType.FLOAT16 and not _LEAST_HALF <= abs(factor) <= _LARGEST_HALF and factor:
            return self.cast_like(self.mul(self.wide(value), factor), value)
        return self.mul(value, factor)

    def wide(self, value: ir.Value) -> ir.Value:
        """The value in a dtype for sums and sizes: float32 in place of half types."""
        return self.cast(value, ir.DataType.FLOAT) if value.dtype in HALVES else value

    def cast_like(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """The value in the dtype of `like`."""
        return value if like.dtype is None else self.cast(value, like.dtype)

    def neg(self, a: ir.Value) -> ir.Value:
        return self.op("Neg", a)

    def square(self, a: ir.Value) -> ir.Value:
        return self.op("Mul", a, a)

    def _binary(self, op_type: str, a: Operand, b: Operand) -> ir.Value:
        if isinstance(a, ir.Value):
            if not isinstance(b, (int, float)) and isinstance(b, ir.Value):
                return self.op(op_type, _narrowed(a, b), _narrowed(b, a))
            return self.op(op_type, a, b if b is None else self.scalar(b, a))
        assert isinstance(b, ir.Value), "at least one operand is a tensor"
        return self.op(op_type, a if a is None else self.scalar(a, b), b)

    def sum(self, terms: Sequence[ir.Value]) -> ir.Value:
        """Sum of tensors of one shape, as a chain of Add, which every execution provider has."""
        total = terms[0]
        for term in terms[1:]:
            total = self.add(total, term)
        return total

    def where(self, condition: ir.Value, a: Operand, b: Operand) -> ir.Value:
        reference = a if isinstance(a, ir.Value) else b
        assert isinstance(reference, ir.Value), "at least one branch is a tensor"
        a, b = (v if isinstance(v, ir.Value) else self.scalar(v or 0, reference) for v in (a, b))
        return self.op("Where", condition, a, b)

    def compare(self, op_type: str, a: Operand, b: Operand) -> ir.Value:
        """`Greater`, `Less`, `Equal`, ...: a bool tensor."""
        result = self._binary(op_type, a, b)
        result.dtype = ir.DataType.BOOL
        return result

    def mask(self, condition: ir.Value, like: ir.Value) -> ir.Value:
        """A bool tensor as 0/1 in `like`'s dtype."""
        return self.cast(condition, like.dtype or ir.DataType.FLOAT)

    # -- layout --------------------------------------------------------------------------------------------------------

    def reshape(self, value: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """Reshape to `dims`; a single unknown size is written as -1 unless a zero could make that ambiguous."""
        current = static_dims(value)
        if current is not None and None not in current and list(dims) == current:
            return value
        dynamic = [i for i, d in enumerate(dims) if not isinstance(d, int)]
        if len(dynamic) == 1 and all(isinstance(d, int) and d > 0 for i, d in enumerate(dims) if i not in dynamic):
            return self.op("Reshape", value, self.ints(d if isinstance(d, int) else -1 for d in dims))
        # allowzero: a size of 0 at run time must not mean "as in the input"; it excludes -1
        literal = -1 not in dims and (0 in dims or bool(dynamic))
        return self.op("Reshape", value, self.vector(dims), allowzero=1 if literal else None)

    def reshape_like(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Reshape to the shape of another value."""
        if value.shape is not None and like.shape is not None and same_shape(value.shape, like.shape):
            return value
        if like.shape is not None:
            return self.typed(self.reshape(value, self.dims(like)), like)
        return self.typed(self.op("Reshape", value, self.shape(like), allowzero=1), like)

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        """Permute the axes; where only axes of size one move, as a Reshape, which copies nothing."""
        if list(perm) == list(range(len(perm))):
            return value
        sizes = static_dims(value)
        if sizes is not None and sizes.count(None) < 2:
            kept = [axis for axis in perm if sizes[axis] != 1]
            if kept == sorted(kept):
                return self.reshape(value, [self.dim(value, axis) for axis in perm])
        return self.op("Transpose", value, perm=list(perm))

    def move_axis(self, value: ir.Value, source: int, to: int) -> ir.Value:
        """Move one axis, as `numpy.moveaxis` does; negative numbers count from the end."""
        axes = list(range(self.rank(value)))
        axes.insert(to % len(axes), axes.pop(source))
        return self.transpose(value, axes)

    def swap_last(self, value: ir.Value) -> ir.Value:
        """Transpose of the last two axes (of matrices in a batch)."""
        n = self.rank(value)
        return self.transpose(value, [*range(n - 2), n - 1, n - 2])

    def unsqueeze(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        return self.op("Unsqueeze", value, self.ints(axes)) if axes else value

    def squeeze(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        return self.op("Squeeze", value, self.ints(axes)) if axes else value

    def concat(self, values: Sequence[ir.Value], axis: int) -> ir.Value:
        return values[0] if len(values) == 1 else self.op("Concat", *values, axis=axis)

    def gather(self, data: ir.Value, indices: ir.Value, axis: int = 0) -> ir.Value:
        """The entries at `indices` along an axis."""
        return self.op("Gather", data, indices, axis=axis)

    def expand(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Broadcast to the shape of `like`."""
        if value.shape is not None and like.shape is not None and same_shape(value.shape, like.shape):
            return value
        shape = self.shape(like)
        result = self.op("Expand", value, shape)
        if like.shape is not None:
            result.shape = like.shape
        return result

    def full_like(self, value: ir.Value, number: float) -> ir.Value:
        """A tensor of `value`'s shape and dtype filled with `number`."""
        if value.shape is not None and not value.shape:
            return self.scalar(number, value)
        return self.typed(self.op("Expand", self.scalar(number, value), self.shape(value)), value)

    def zeros_like(self, value: ir.Value) -> ir.Value:
        return self.full_like(value, 0)

    def slice(
        self,
        value: ir.Value,
        starts: Sequence[Dim],
        ends: Sequence[Dim],
        axes: Sequence[int],
        steps: Sequence[int] | None = None,
    ) -> ir.Value:
        """Slice along `axes`; axes that keep everything are omitted."""
        picked = [
            (start, end, axis, step)
            for start, end, axis, step in zip(starts, ends, axes, steps or [1] * len(axes), strict=True)
            if not (_is(start, 0) and step == 1 and self._covers(value, axis, end))
        ]
        if not picked:
            return value
        first, last, where, by = zip(*picked, strict=True)
        extra = [self.ints(by)] if any(step != 1 for step in by) else []
        return self.op("Slice", value, self.vector(first), self.vector(last), self.ints(where), *extra)

    @staticmethod
    def _covers(value: ir.Value, axis: int, end: Dim) -> bool:
        size = None if value.shape is None else known(value.shape[axis])
        return isinstance(end, int) and size is not None and end >= size

    def pad(
        self, value: ir.Value, begin: Sequence[Dim], end: Sequence[Dim], axes: Sequence[int], fill: float = 0
    ) -> ir.Value:
        """Pad along `axes` with `fill`; negative amounts trim. All-zero padding emits nothing."""
        if all(_is(d, 0) for d in (*begin, *end)):
            return value
        constant = self.scalar(fill, value) if fill else None
        if value.shape is None:
            amounts, where = [*begin, *end], self.ints(axes)
        else:  # of all axes: see quirks.PAD_AXES
            rank = len(value.shape)
            amounts, where = [0] * (2 * rank), None
            for axis, low, high in zip(axes, begin, end, strict=True):
                amounts[axis % rank], amounts[rank + axis % rank] = low, high
        result = self.op("Pad", value, self.vector(amounts), constant, where)
        if value.dtype is not None:
            result.dtype = value.dtype
        return result

    def all_pads(self, value: ir.Value, pads: ir.Value, axes: ir.Value | None) -> ir.Value:
        """The amounts of a Pad for every axis of `value`, from those of some `axes`; see quirks.PAD_AXES."""
        if axes is None:
            return pads
        rank = self.ints([len(value.shape)]) if value.shape is not None else self.op("Shape", self.op("Shape", value))
        axes = self.cast(axes, ir.DataType.INT64)
        axes = self.op("Where", self.op("Less", axes, self.ints([0])), self.op("Add", axes, rank), axes)
        slots = self.op("Concat", axes, self.op("Add", axes, rank), axis=0)
        nothing = self.op("Expand", self.ints([0]), self.op("Add", rank, rank))
        return self.op("ScatterElements", nothing, slots, pads, axis=0)

    # -- reductions and products ---------------------------------------------------------------------------------------

    def reduce_sum(self, value: ir.Value, axes: Sequence[int], *, keepdims: bool = True) -> ir.Value:
        return self.reduce("ReduceSum", value, axes, keepdims=keepdims) if axes else value

    def reduce(self, op_type: str, value: ir.Value, axes: Sequence[int], *, keepdims: bool = True) -> ir.Value:
        """Any Reduce operator over `axes`, at least one."""
        return self.op(op_type, value, self.ints(axes), keepdims=int(keepdims))

    def matmul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.op("MatMul", a, b)

    def conv(self, x: ir.Value, w: ir.Value, bias: ir.Value | None = None, /, **attributes: Any) -> ir.Value:
        return self.op("Conv", x, w, bias, **attributes)


def _narrowed(value: ir.Value, other: ir.Value) -> ir.Value:
    """The operand of an Expand to the shape of `other`, since the operator broadcasts it without a copy; else `value`."""
    node = value.producer()
    if node is None or node.op_type != "Expand" or node.domain or value.shape is None or other.shape is None:
        return value
    source, fellow = node.inputs[0], other.producer()
    if (
        source is None
        or not same_shape(value.shape, other.shape)
        or (fellow is not None and fellow.op_type == "Expand")
    ):
        return value
    return source


def _is(operand: Operand | Dim, number: float) -> bool:
    return isinstance(operand, (int, float)) and operand == number


def _first(a: Operand, b: Operand, *, neutral: float) -> ir.Value | None:
    """The other operand when one is the neutral element."""
    if _is(b, neutral) and isinstance(a, ir.Value):
        return a
    return b if _is(a, neutral) and isinstance(b, ir.Value) else None
