"""What a node moves, and how long a pass over it takes: from the cache, from memory, by one thread."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_convgrad.ir.targets import Rates

__all__ = ["Shape", "alone", "late", "missing", "moved_bytes", "shape_of", "traffic", "value_bytes", "waiting"]

Shape = tuple[int, ...]


def shape_of(value: ir.Value | None) -> Shape:
    """The sizes of a value of a sketch; an unknown one counts as 1."""
    if value is None or value.shape is None:
        return ()
    return tuple([d if isinstance(d, int) else 1 for d in value.shape.dims])


def value_bytes(value: ir.Value | None) -> int:
    """Memory of a value."""
    if value is None:
        return 0
    return math.prod(shape_of(value)) * max(1, round((value.dtype or ir.DataType.FLOAT).itemsize))


def missing(rates: Rates, count: float, spread: float = 4.0) -> float:
    """The part of so many bytes that comes from memory.

    Other arrays want a place in the cache too: from an eighth of it on, some of the operands are not there any more, and
    none when there are 2 ** `spread` times as many.
    """
    return min(1.0, max(0.0, math.log2(max(8 * count, 1.0) / rates.cache) / spread))


def moved_bytes(node: ir.Node) -> int:
    """Memory of all operands and results of a node."""
    return sum(value_bytes(v) for v in (*node.inputs, *node.outputs))


def traffic(node: ir.Node, rates: Rates, *, times: float = 1.0) -> float:
    """Seconds of reading every operand and writing every result once."""
    count = times * moved_bytes(node)
    share = missing(rates, count)
    return count * ((1 - share) / rates.cached + share / rates.memory)


def alone(node: ir.Node, rates: Rates) -> float:
    """The same by one thread, which does not wait longer for memory than all of them."""
    return max(traffic(node, rates), rates.alone * moved_bytes(node) / rates.cached)


def late(node: ir.Node, rates: Rates) -> float:
    """The part of a product's operands and result that comes from memory: it reads and writes one part after the other."""
    return missing(rates, 0.6 * moved_bytes(node), spread=1.0)


def waiting(node: ir.Node, rates: Rates) -> float:
    """Seconds for which a product waits for memory."""
    return 1.6 * late(node, rates) * moved_bytes(node) * (1 / rates.memory - 1 / rates.cached)
