"""Dimensions of values: integers, or symbols for sizes known only at run time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir


def known(dim: Any) -> int | None:
    """The dimension as an `int`, or `None` when it is symbolic."""
    return dim if isinstance(dim, int) else None


def dims_equal(a: Any, b: Any) -> bool:
    """Whether two dimensions are certainly equal: the same number, or the same named symbol."""
    if isinstance(a, int) or isinstance(b, int):
        return a == b if isinstance(a, int) and isinstance(b, int) else False
    return a.value is not None and a.value == b.value


def static_dims(value: ir.Value) -> list[int | None] | None:
    """The dimensions of a value with `None` for unknown ones, or `None` when even the rank is unknown."""
    return None if value.shape is None else [known(d) for d in value.shape]


def static_product(dims: Sequence[Any]) -> int | None:
    """The product of dimensions, or `None` when one of them is symbolic."""
    return math.prod(dims) if all(isinstance(d, int) for d in dims) else None


def same_shape(a: ir.Shape, b: ir.Shape) -> bool:
    """Whether two shapes are certainly the same."""
    return len(a) == len(b) and all(map(dims_equal, a, b))


def symbols(graph: ir.Graph) -> set[str]:
    """The names of the unknown dimensions of a graph."""
    values = [*graph.inputs, *(v for node in graph for v in node.outputs)]
    shapes = [v.shape for v in values]
    return {d.value for shape in shapes if shape for d in shape.dims if not isinstance(d, int) and d.value}
