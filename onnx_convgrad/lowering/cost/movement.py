"""Predicted seconds of operators that move, pick or sum elements: in long runs, short runs, or one at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.targets import Rates
from onnx_convgrad.lowering.cost.passes import (
    memory_wait,
    missing_share,
    moved_bytes,
    on_one_thread,
    shape_of,
    traffic,
    value_bytes,
)

_STREAMS = 64
"""Most columns that are written in parallel streams at full speed."""


def transpose(node: ir.Node, rates: Rates) -> float:
    """Seconds of a Transpose, on one thread: it copies runs if the last axis stays, else single elements."""
    shape = shape_of(node.inputs[0])
    perm = Call(node).ints("perm") or range(len(shape))[::-1]
    moved = [p for p in perm if shape[p] != 1]
    if moved == sorted(moved):
        return traffic(node, rates)
    kept = [a for a in range(len(shape)) if shape[a] != 1]
    run, at = 1, len(moved) - 1
    while at >= 0 and moved[at] == kept[at]:
        run *= shape[kept[at]]
        at -= 1
    size = float(math.prod(shape))
    if run > 1 and rates.wave and run * _bytes_of_entry(node) % _WORD:
        return max(traffic(node, rates), _ALONE * size * rates.item)
    if run > 1:
        far = (
            missing_share(rates, moved_bytes(node), spread=1.0) if run >= _LINE else 0.0
        )  # cache lines are not prefetched
        return max(on_one_thread(node, rates), size / run * (0.65 + 2.5 * far) * rates.run)
    if not _swaps_two(moved):
        return on_one_thread(node, rates) + size * 3 * rates.item
    lead = 0
    while moved[lead] == kept[lead]:
        lead += 1
    matrices = math.prod(shape[a] for a in kept[:lead])
    columns = math.prod(shape[a] for a in kept[kept.index(moved[lead]) :])  # each is written as a separate stream
    rows = size / matrices / columns
    entering = matrices * 50 * rates.run * (lead > 0)
    fetching = rates.alone * missing_share(rates, moved_bytes(node)) * moved_bytes(node) / rates.memory
    if columns <= _STREAMS:
        return max(traffic(node, rates), size * 0.13 * rates.item + fetching) + entering
    each = 0.5 if columns * 4 % _PAGE == 0 and rows >= _WAYS else 0.3
    each *= 2 if rows > _TALL else 1
    return max(traffic(node, rates), size * each * rates.item + fetching) + entering


def _bytes_of_entry(node: ir.Node) -> int:
    return max(1, value_bytes(node.inputs[0]) // max(1, math.prod(shape_of(node.inputs[0]))))


_WORD = 16
"""Bytes that a thread of a GPU moves at once."""

_ALONE = 7
"""Multiple of `Rates.item` for moving an element of a row that is not made of such words.

Measured on an H100, in float16, with the first two axes of [64, 1024, 196] exchanged: 3.9 ps per element; of
[64, 2048, 49] 3.2 ps; but of [64, 512, 784], whose rows are made of such words, 1.5 ps, which is a pass.
"""


def _swaps_two(moved: Sequence[int]) -> bool:
    """Whether a permutation only exchanges two adjacent groups of axes, for which the runtime has a special loop."""
    places = [sorted(moved).index(axis) for axis in moved]
    off = [i for i, place in enumerate(places) if i != place]
    inner = places[off[0] : off[-1] + 1]
    return sum(b != a + 1 for a, b in itertools.pairwise(inner)) == 1


_LINE = 16
"""Elements of a cache line."""

_PAGE = 4096
"""Row pitch in bytes at which the elements of a column compete for the same few lines of the nearest cache."""

_WAYS = 32
"""Most rows whose lines stay in the cache until the next column is read."""

_TALL = 8192
"""Number of rows whose lines are evicted from the second cache before the next column is read."""


def _thins_rows(node: ir.Node, rank: int) -> bool:
    """Whether a Slice has a step along the last axis, so that elements are moved one at a time."""
    axes, steps = (constant_of(v) for v in (*node.inputs[3:5], *[None] * (5 - len(node.inputs))))
    if steps is None:
        return False
    where = range(len(steps)) if axes is None else axes
    return any(int(a) % rank == rank - 1 and abs(int(s)) != 1 for a, s in zip(where, steps, strict=True))


def slice_(node: ir.Node, rates: Rates) -> float:
    """Seconds of a Slice: one thread copies runs, or single elements where there is a step along the rows."""
    shape, out = shape_of(node.inputs[0]), shape_of(node.outputs[0])
    if _thins_rows(node, len(shape)):
        rows = math.prod(out[:-1])
        return max(traffic(node, rates), math.prod(out) * rates.item + rows * 0.5 * rates.run)
    run = 1
    for axis in reversed(range(len(out))):
        run *= out[axis]
        if out[axis] != shape[axis]:
            break
    return _picked(node, on_one_thread(node, rates)) + math.prod(out) / max(run, 1) * 0.4 * rates.run


def in_pieces(node: ir.Node, rates: Rates) -> float:
    """Seconds of a Concat or Split, which copies rows of several values into longer rows of one, or the reverse."""
    joins = node.op_type == "Concat"
    whole, parts = (node.outputs[0], len(node.inputs)) if joins else (node.inputs[0], len(node.outputs))
    sizes = shape_of(whole)
    axis = Call(node).int("axis", 0) % max(1, len(sizes))
    pieces = math.prod(sizes[:axis]) * parts
    if math.prod(sizes[axis:]) == parts:  # single elements have a special loop
        return traffic(node, rates) + pieces * 0.012 * rates.run
    return traffic(node, rates) + 0.5 * memory_wait(node, rates) + pieces * 0.35 * rates.run


def pad(node: ir.Node, rates: Rates) -> float:
    """Seconds of a Pad: one thread copies rows. On a GPU only rows and columns of images are fast, see quirks.CUDA_PAD."""
    if rates.wave:
        rank = len(shape_of(node.inputs[0]))
        amounts = constant_of(node.inputs[1])
        images = rank == 4 and amounts is not None and not amounts.reshape(2, rank)[:, :2].any()
        return traffic(node, rates) + (0 if images else 250 * rates.item * math.prod(shape_of(node.outputs[0])))
    return max(on_one_thread(node, rates), math.prod(shape_of(node.outputs[0])[:-1]) * 1.2 * rates.run)


def gather(node: ir.Node, rates: Rates) -> float:
    """Seconds of a Gather, which copies rows by one call each."""
    data, out = shape_of(node.inputs[0]), shape_of(node.outputs[0])
    row = math.prod(data[Call(node).int("axis", 0) % max(1, len(data)) + 1 :])
    return _picked(node, traffic(node, rates)) + math.prod(out) / max(row, 1) * 0.4 * rates.run


def _picked(node: ir.Node, whole_pass: float) -> float:
    """The share of a pass in which only as much of the first operand is read as is written."""
    moved, whole = 2 * value_bytes(node.outputs[0]), value_bytes(node.inputs[0]) + value_bytes(node.outputs[0])
    return whole_pass * min(1.0, moved / max(1, whole))


def reduce(node: ir.Node, rates: Rates) -> float:
    """Seconds of a sum: along rows it streams; across rows it adds row by row, or becomes a product (`fast_forms`)."""
    shape = shape_of(node.inputs[0])
    axes = constant_of(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    if node.op_type == "ReduceSum" and leading_axes(node):
        return traffic(node, rates)
    if axes is not None and len(shape) - 1 not in {int(a) % max(1, len(shape)) for a in axes.reshape(-1)}:
        return max(traffic(node, rates), 0.55 * rates.item * math.prod(shape))
    return traffic(node, rates)


def leading_axes(node: ir.Node) -> int:
    """Number of leading axes that a reduction sums over; 0 if it sums over others too, or over all."""
    x, axes = node.inputs[0], constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if x is None or x.shape is None or axes is None:
        return 0
    rank = len(x.shape)
    summed = sorted(int(a) % rank for a in axes.reshape(-1)) if rank else []
    return len(summed) if summed == list(range(len(summed))) and len(summed) < rank else 0


def items(factor: float) -> Callable[[ir.Node, Rates], float]:
    """A pass that takes at least `factor` times `Rates.item` per element."""

    def seconds(node: ir.Node, rates: Rates) -> float:
        size = max(math.prod(shape_of(node.outputs[0])), math.prod(shape_of(node.inputs[0])))
        return max(traffic(node, rates), factor * rates.item * size)

    return seconds


def max_pool(node: ir.Node, rates: Rates) -> float:
    """Seconds of a MaxPool: a pass; with indices, every element of every window is compared singly."""
    seen = math.prod(shape_of(node.outputs[0])) * math.prod(Call(node).ints("kernel_shape") or ())
    return traffic(node, rates) if len(node.outputs) < 2 else max(traffic(node, rates), 1.5 * rates.item * seen)


def scatter(factor: float, updates: int) -> Callable[[ir.Node, Rates], float]:
    """A pass, and `factor` times `Rates.item` per element of the operand at position `updates`."""

    def seconds(node: ir.Node, rates: Rates) -> float:
        return traffic(node, rates) + factor * rates.item * math.prod(shape_of(node.inputs[updates]))

    return seconds


def col2im(node: ir.Node, rates: Rates) -> float:
    """Seconds of a Col2Im over two axes, as lowerings emit it: rows are added whole at unit stride, else by elements."""
    return items(0.22 if set(Call(node).ints("strides") or (1,)) == {1} else 0.55)(node, rates)


MOVEMENT: dict[str, Callable[[ir.Node, Rates], float]] = {
    "Transpose": transpose,
    "Slice": slice_,
    "Pad": pad,
    "Concat": in_pieces,
    "Split": in_pieces,
    "ReduceSum": reduce,
    "ReduceMean": reduce,
    "ReduceSumSquare": items(0.4),
    "SpaceToDepth": items(0.6),
    "DepthToSpace": items(2.0),
    "Where": items(0.5),
    "Gather": gather,
    "GatherElements": items(2.0),
    "ScatterElements": scatter(2.5, 2),
    "ScatterND": scatter(2.5, 2),
    "MaxPool": max_pool,
    "MaxUnpool": scatter(1.0, 0),
    "Cast": on_one_thread,
    "Col2Im": col2im,
    "Einsum": items(4.0),
    "Expand": items(0.3),
    "Tile": items(0.3),
    **dict.fromkeys(("Erf", "LayerNormalization", "LogSoftmax", "Softmax"), items(0.3)),
    "Gelu": items(0.5),
    **dict.fromkeys(("Acos", "Asin", "Atan", "Elu", "Log", "Selu"), items(0.9)),
    **dict.fromkeys(("Celu", "Cos", "Sin"), items(2.0)),
    **dict.fromkeys(("Acosh", "Cosh", "Pow", "Tan"), items(8.0)),
    **dict.fromkeys(("Asinh", "Atanh", "Mish", "Sinh", "Softplus"), items(15.0)),
}
"""Operator -> predicted seconds, besides starting it. Others take one pass over their operands and results."""
