"""Bytes that a node moves, and seconds of a pass over them: in the cache, in memory, by one thread."""

from __future__ import annotations

import math
from functools import cache

import onnx_ir as ir

from onnx_convgrad.ir.targets import Rates

Shape = tuple[int, ...]


def shape_of(value: ir.Value | None) -> Shape:
    """The sizes of a value of a sketch; an unknown one counts as 1."""
    if value is None or value.shape is None:
        return ()
    return tuple([d if isinstance(d, int) else 1 for d in value.shape.dims])


def value_bytes(value: ir.Value | None) -> int:
    """Bytes of a value."""
    return 0 if value is None else math.prod(shape_of(value)) * _element_bytes(value.dtype)


@cache
def _element_bytes(dtype: ir.DataType | None) -> int:
    """Bytes of an element: at least one, and four of an unknown type."""
    return max(1, round((dtype or ir.DataType.FLOAT).itemsize))


def missing_share(rates: Rates, count: float, spread: float = 4.0) -> float:
    """The fraction of `count` bytes that comes from memory.

    Other arrays compete for the cache: above an eighth of it, some of the operands have been evicted, and at
    2 ** `spread` times that size all of them.
    """
    return min(1.0, max(0.0, math.log2(max(8 * count, 1.0) / rates.cache) / spread))


def moved_bytes(node: ir.Node) -> int:
    """Bytes of all operands and results of a node."""
    return sum(value_bytes(v) for v in (*node.inputs, *node.outputs))


def traffic(node: ir.Node, rates: Rates, *, times: float = 1.0) -> float:
    """Seconds of reading every operand and writing every result once."""
    count = times * moved_bytes(node)
    share = missing_share(rates, count)
    return count * ((1 - share) / rates.cached + share / rates.memory)


def on_one_thread(node: ir.Node, rates: Rates) -> float:
    """Seconds of these reads and writes by one thread, which does not wait longer for memory than all threads do."""
    return max(traffic(node, rates), rates.alone * moved_bytes(node) / rates.cached)


def memory_share(node: ir.Node, rates: Rates) -> float:
    """The fraction of a product's operands and result that comes from memory, which it reads and writes part by part."""
    return missing_share(rates, 0.6 * moved_bytes(node), spread=1.0)


def memory_wait(node: ir.Node, rates: Rates) -> float:
    """Seconds that a product waits for memory."""
    return 1.6 * memory_share(node, rates) * moved_bytes(node) * (1 / rates.memory - 1 / rates.cached)
