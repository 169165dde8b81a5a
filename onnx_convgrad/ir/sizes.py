"""Arithmetic of sizes: folded where they are known, else emitted into the graph.

A static model gets constants and a dynamic one run-time shape arithmetic from the same rule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import reduce
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnknownShape
from onnx_convgrad.ir.dims import known, static_dims
from onnx_convgrad.ir.shape_hints import input_shape_option
from onnx_convgrad.ir.writer import NodeWriter

Dim: TypeAlias = int | ir.Value
"""A size: an `int` when known while building, else a one-element int64 vector computed by the graph."""


HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""Types that hold no size exactly: float16 none above 65504 at all, nor its reciprocal."""


class SizeWriter(NodeWriter):
    """Adds shapes and arithmetic of sizes to a graph."""

    def rank(self, value: ir.Value, why: str = "its gradient") -> int:
        """The rank of `value`; raises `UnknownShape` when inference could not find it."""
        if value.shape is None:
            raise UnknownShape(
                f"the rank of {value.name!r} is unknown and {why} needs it.",
                hint=f"Give the shapes of the inputs, as in {input_shape_option(self.graph.inputs)}.",
            )
        return len(value.shape)

    def shape(self, value: ir.Value) -> ir.Value:
        """The shape as an int64 vector: a constant when static, else a `Shape` node."""
        dims = static_dims(value)
        if dims is not None and None not in dims:
            return self.ints(d for d in dims if d is not None)
        return self.op("Shape", value)

    def dim(self, value: ir.Value, axis: int) -> Dim:
        """One dimension: an `int` when static, else `Shape(start, end)`."""
        if value.shape is not None:
            size = known(value.shape[axis])
            if size is not None:
                return size
        end = axis + 1
        return self.op("Shape", value, start=axis, end=end if end != 0 else None)

    def dims(self, value: ir.Value) -> list[Dim]:
        """All dimensions; the rank must be known."""
        return [self.dim(value, axis) for axis in range(self.rank(value))]

    def count(self, value: ir.Value) -> Dim:
        """The number of elements; the rank may be unknown."""
        dims = static_dims(value)
        if dims is None or None in dims:
            return self.op("Reshape", self.op("Size", value), self.ints([1]))
        return math.prod(d for d in dims if d is not None)

    def vector(self, dims: Sequence[Dim]) -> ir.Value:
        """An int64 vector from sizes: one constant, or a Concat whose static runs are constants."""
        if all(isinstance(d, int) for d in dims):
            return self.ints(d for d in dims if isinstance(d, int))
        parts: list[ir.Value] = []
        for static, group in itertools.groupby(dims, lambda d: isinstance(d, int)):
            parts += [self.ints(group)] if static else group  # type: ignore[arg-type] # noqa: B031
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)

    def arange(self, count: Dim, step: int = 1) -> ir.Value:
        """`count` int64 numbers `0, step, 2 step, ...`."""
        if isinstance(count, int) and count <= 4096:
            return self.const(np.arange(count, dtype=np.int64) * step)
        last = self.size_mul(count, step)
        limit = self.const(np.int64(last)) if isinstance(last, int) else self.op("Squeeze", last, self.ints([0]))
        return self.op("Range", self.const(np.int64(0)), limit, self.const(np.int64(step)))

    def size_add(self, a: Dim, b: Dim) -> Dim:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        for size, other in ((a, b), (b, a)):
            if isinstance(size, int) and size == 0:
                return other
        return self.op("Add", self._size(a), self._size(b))

    def size_sub(self, a: Dim, b: Dim) -> Dim:
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        return a if isinstance(b, int) and b == 0 else self.op("Sub", self._size(a), self._size(b))

    def size_mul(self, *factors: Dim) -> Dim:
        """Product of sizes."""
        static = math.prod(f for f in factors if isinstance(f, int))
        dynamic = [f for f in factors if not isinstance(f, int)]
        if not dynamic or static == 0:
            return static
        result = reduce(lambda product, f: self.op("Mul", product, f), dynamic)
        return result if static == 1 else self.op("Mul", result, self.ints([static]))

    def size_div(self, a: Dim, b: Dim) -> Dim:
        """Quotient of non-negative sizes, rounded down."""
        if isinstance(a, int) and isinstance(b, int):
            return a // b
        return a if isinstance(b, int) and b == 1 else self.op("Div", self._size(a), self._size(b))

    def size_max(self, a: Dim, b: Dim) -> Dim:
        return max(a, b) if isinstance(a, int) and isinstance(b, int) else self.op("Max", self._size(a), self._size(b))

    def size_min(self, a: Dim, b: Dim) -> Dim:
        return min(a, b) if isinstance(a, int) and isinstance(b, int) else self.op("Min", self._size(a), self._size(b))

    def _size(self, d: Dim) -> ir.Value:
        return self.ints([d]) if isinstance(d, int) else d

    def size_as(self, d: Dim, like: ir.Value) -> ir.Value:
        """A size as a rank-0 floating tensor of `like`'s dtype; in float32 for half types: widen what it scales."""
        dtype = ir.DataType.FLOAT if like.dtype is None or like.dtype in HALVES else like.dtype
        if isinstance(d, int):
            return self.const(np.asarray(d), dtype)
        return self.op("Squeeze", self.cast(d, dtype), self.ints([0]))
