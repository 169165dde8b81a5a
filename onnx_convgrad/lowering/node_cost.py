"""The predicted time of one node: a roofline of multiplications and passes over memory, and a constant.

    seconds = node + max(flops / rate(shape), bytes / bandwidth(bytes) + runs * run + items * item)

Which of the terms an operator has, and how its kernel's shape enters, is written down once per operator here; the speeds
are those of `Rates`. Sizes must be static: a `sketch` has only such values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnx_convgrad.cost import Rates
from onnx_convgrad.emit import VIEWS
from onnx_convgrad.graph.constants import constant_of, is_folded

__all__ = ["body_of", "folds", "leading_axes", "node_seconds", "value_bytes"]

Shape = tuple[int, ...]
_FREE = VIEWS | {"Shape", "Size", "Constant"}


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


def _missing(rates: Rates, count: float, spread: float = 4.0) -> float:
    """The part of so many bytes that comes from memory.

    Other arrays want a place in the cache too: from an eighth of it on, some of the operands are not there any more, and
    none when there are 2 ** `spread` times as many.
    """
    return min(1.0, max(0.0, math.log2(max(8 * count, 1.0) / rates.cache) / spread))


def _bytes(node: ir.Node) -> int:
    return sum(value_bytes(v) for v in (*node.inputs, *node.outputs))


def _traffic(node: ir.Node, rates: Rates, *, times: float = 1.0) -> float:
    """Seconds of reading every operand and writing every result once."""
    count = times * _bytes(node)
    share = _missing(rates, count)
    return count * ((1 - share) / rates.cached + share / rates.memory)


def _alone(node: ir.Node, rates: Rates) -> float:
    """The same by one thread: the speeds of `Rates` are those of all."""
    return 2 * _traffic(node, rates)


def _late(node: ir.Node, rates: Rates) -> float:
    """The part of a product's operands and result that comes from memory: it reads and writes one part after the other."""
    return _missing(rates, 0.6 * _bytes(node), spread=1.0)


def _waiting(node: ir.Node, rates: Rates) -> float:
    """Seconds for which a product waits for memory."""
    return 1.6 * _late(node, rates) * _bytes(node) * (1 / rates.memory - 1 / rates.cached)


def _ints(node: ir.Node, name: str, default: Sequence[int]) -> list[int]:
    attr = node.attributes.get(name)
    return list(default) if attr is None else list(attr.as_ints())


_LANES = 16
"""Columns that a product computes at once."""


def _gemm(rates: Rates, m: int, n: int, k: int, batch: int, packing: float) -> float:
    """Few rows cannot pay for the `packing` of the other operand, few columns or terms not for the kernel's edges."""
    idle = -n % _LANES / max(n, 1)
    narrow = 1 < n < _LANES  # all lanes are packed and multiplied
    edge = idle * (1.0 if narrow else 0.5) + 2 / max(n, 1)
    packing *= 1 + idle if narrow else 1
    slow = 1 + packing * rates.small / max(m, 1) + edge + 2 / max(k, 1)
    return 2.0 * m * n * k * batch * slow / rates.gemm


def _matmul(node: ir.Node, rates: Rates) -> float:
    a, b = shape_of(node.inputs[0]), shape_of(node.inputs[1])
    if len(a) < 2 or len(b) < 2:
        return _traffic(node, rates)
    out = shape_of(node.outputs[0])
    m, k, n = a[-2], a[-1], b[-1]
    if node.op_type == "Gemm":
        m, k = (a[1], a[0]) if node.attributes.get("transA") else (a[0], a[1])
        n = b[0] if node.attributes.get("transB") else b[1]
    right = node.inputs[1]
    packed = right is not None and right.const_value is not None  # when the model is loaded
    batch = math.prod(out[:-2])
    slowly = 0.12 + 0.2 * _late(node, rates) * (1 - rates.memory / rates.cached)
    turning = slowly * rates.item * m * k * batch if folds(node.inputs[0]) else 0.0
    shared = math.prod(a[:-2]) < math.prod(b[:-2])  # weights times the images of many samples
    packing = 0.0 if packed else 1.0 if shared else 0.2
    seconds = _gemm(rates, m, n, k, batch, packing) + turning + _waiting(node, rates)
    return max(seconds, _traffic(node, rates)) + (3 if packed else 9) * rates.run * (batch - 1)


def folds(value: ir.Value | None) -> bool:
    """Whether a value is the Transpose of the last two axes of another and only feeds matrix products.

    The runtime folds it into them: for nothing on the right, by packing one element at a time on the left.
    """
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Transpose":
        return False
    perm = list(node.attributes["perm"].as_ints())
    n = len(perm)
    uses = [use.node for use in node.outputs[0].uses()]
    swaps = n >= 2 and perm == [*range(n - 2), n - 1, n - 2]
    return swaps and bool(uses) and all(use.op_type == "MatMul" and use.graph is node.graph for use in uses)


_SHORT = 16
"""Elements that the start of a row costs, where rows are gathered to patches or added from them."""


def _short_rows(row: int) -> float:
    return 1 + _SHORT / max(row, 1)


def _blocked(node: ir.Node) -> bool:
    """Whether ONNX Runtime runs a Conv of a constant kernel with its channels in blocks: in two spatial dimensions."""
    x, w = node.inputs[:2]
    if x is None or x.dtype not in (None, ir.DataType.FLOAT) or len(shape_of(w)) != 4 or not is_folded(w):
        return False
    features, inner = shape_of(w)[:2]
    attr = node.attributes.get("group")
    groups = attr.as_int() if attr else 1
    if groups == 1:
        return inner < _BLOCK or inner % 4 == 0
    alone = inner == 1 and features == groups
    return features % _BLOCK == 0 and (alone or (inner % _BLOCK == 0 and features // groups % _BLOCK == 0))


def _blocked_conv(node: ir.Node, rates: Rates) -> float:
    """No patches; both operands are brought into blocks of channels and back."""
    w, y = shape_of(node.inputs[1]), shape_of(node.outputs[0])
    flops = 2.0 * y[0] * -(-y[1] // _BLOCK) * _BLOCK * math.prod(y[2:]) * math.prod(w[1:])
    alone = w[1] == 1 and w[0] > 1
    return max(flops / rates.gemm * (1.8 if alone else 0.95), _traffic(node, rates, times=3))


_BLOCK = 16
"""Channels that lie side by side."""


def _conv(node: ir.Node, rates: Rates) -> float:
    """Patches are gathered into a small buffer and multiplied at once, per sample and group."""
    if _blocked(node):
        return _blocked_conv(node, rates)
    x, w, y = (shape_of(v) for v in (node.inputs[0], node.inputs[1], node.outputs[0]))
    attr = node.attributes.get("group")
    groups = attr.as_int() if attr else 1
    unit = set(_ints(node, "strides", [1])) == {1}
    taps, inner, points = math.prod(w[2:]), w[1], math.prod(y[2:])
    macs = float(math.prod(y) * inner * taps)
    patches = 0.0 if taps == 1 and unit else float(y[0] * points * x[1] * taps)
    padded = any(_ints(node, "pads", [0])) or set(_ints(node, "dilations", [1])) != {1}
    if inner == 1 and groups > 1 and len(w) == 4 and w[3] == x[3] and taps > 1 and unit and not padded:
        seconds = _windows(rates, x[0] * groups, w[0] // groups, points, taps)
    elif inner == 1 and groups > 1 and is_folded(node.inputs[1]):
        product = 1.9 * macs / rates.gemm + 0.17 * patches * rates.item
        each = 0.3 if _ints(node, "strides", [1])[-1] == 1 else 0.52
        seconds = max(each * math.prod(y) * rates.item, product) + x[0] * groups * 8 * rates.run
    elif inner == 1 and groups > 1 and w[0] == groups:
        seconds = macs * rates.tap * (1.0 if unit else 2.0) * _short_rows(y[-1])
    elif inner == 1 and groups > 1:
        images = x[0] * groups * 14 * rates.run
        serial = w[0] // groups > points
        runs = patches / y[-1] * (0.8 if serial else 0.35 if y[-1] < 7 else 0.12 if y[-1] < 16 else 0.0)
        gathered = (0.18 if serial else 0.09) * _short_rows(y[-1]) * patches * rates.item
        seconds = 1.9 * macs / rates.gemm + gathered + runs * rates.run + images + 0.5 * _waiting(node, rates)
    else:
        rows, k = w[0] // groups, inner * taps
        slow = 1 + 0.4 * rates.small / max(rows, 1) + 1.25 * rates.small / max(points, 1) + 2 / max(k, 1)
        # with more features than points one thread gathers; single points are picked where the last stride is not 1
        runs = patches / y[-1] * (0.35 if rows > points else 0.14)
        each = 0.06 if _ints(node, "strides", [1])[-1] == 1 else 0.18
        seconds = 2 * macs * slow / rates.gemm + each * patches * rates.item + runs * rates.run
        seconds += _waiting(node, rates)
    return max(seconds, _traffic(node, rates))


def _windows(rates: Rates, groups: int, rows: int, windows: int, k: int) -> float:
    """A kernel as wide as its input: per group, dot products with windows of it, read four at a time where they lie."""
    calls = groups * 5.5 * rates.run
    if rows == 1:
        passes = windows // 4 + windows % 4 // 2 + windows % 2
        return calls + 2.8 * groups * k * 4 * passes / rates.gemm
    lanes = -(-windows // _LANES) * _LANES  # part of the last ones is nearly as much work as all of them
    packed = lanes if windows < _LANES else (windows + lanes) / 2
    return calls + groups * k * packed * (0.05 * rates.item + 2 * rows / rates.gemm)


def _conv_transpose(node: ir.Node, rates: Rates) -> float:
    """One matrix product to patches, which are then added in place; the weights are transposed for every sample."""
    x, w, y = (shape_of(v) for v in (node.inputs[0], node.inputs[1], node.outputs[0]))
    attr = node.attributes.get("group")
    groups = attr.as_int() if attr else 1
    points, taps = math.prod(x[2:]), math.prod(w[2:])
    patches = float(x[0] * groups * w[1] * taps * points)
    unit = set(_ints(node, "strides", [1])) == {1}
    adding = patches * rates.item * (0.15 * _short_rows(y[-1]) if unit else 0.5) if taps > 1 else 0.0
    slow = 1 + rates.small / max(w[1] * taps, 1) + 8 / max(points, 1) + 8 / max(w[0] // groups, 1)
    product = 2.0 * x[0] * w[0] * w[1] * taps * points * slow / rates.gemm
    packed = 0.0 if is_folded(node.inputs[1]) else 0.25 * rates.item * x[0] * math.prod(w)
    packed += x[0] * groups * 15 * rates.run
    return max(product + packed + adding + _waiting(node, rates), _traffic(node, rates))


_STREAMS = 64
"""Columns that are written side by side at full speed."""


def _transpose(node: ir.Node, rates: Rates) -> float:
    """Whole runs are copied when the last axis stays; a matrix transposition moves single elements. All by one thread."""
    shape = shape_of(node.inputs[0])
    perm = _ints(node, "perm", range(len(shape))[::-1])
    moved = [p for p in perm if shape[p] != 1]
    if moved == sorted(moved):
        return _traffic(node, rates)
    kept = [a for a in range(len(shape)) if shape[a] != 1]
    run, at = 1, len(moved) - 1
    while at >= 0 and moved[at] == kept[at]:
        run *= shape[kept[at]]
        at -= 1
    size = float(math.prod(shape))
    if run > 1:
        far = _missing(rates, _bytes(node), spread=1.0) if run >= _LINE else 0.0  # lines are not read ahead
        return _alone(node, rates) + size / run * (0.65 + 2.5 * far) * rates.run
    if not _swaps_two(moved):
        return _alone(node, rates) + size * 3 * rates.item
    lead = 0
    while moved[lead] == kept[lead]:
        lead += 1
    matrices = math.prod(shape[a] for a in kept[:lead])
    columns = math.prod(shape[a] for a in kept[kept.index(moved[lead]) :])  # each is written as a stream of its own
    rows = size / matrices / columns
    entering = matrices * 50 * rates.run * (lead > 0)
    late = 2 * _missing(rates, _bytes(node)) * _bytes(node) / rates.memory
    if columns <= _STREAMS:
        return max(_traffic(node, rates), size * 0.13 * rates.item + late) + entering
    each = 0.5 if columns * 4 % _PAGE == 0 and rows >= _WAYS else 0.3
    each *= 2 if rows > _TALL else 1
    return max(_traffic(node, rates), size * each * rates.item + late) + entering


def _swaps_two(moved: Sequence[int]) -> bool:
    """Whether a permutation only makes two neighbouring parts of the axes change places, which has a loop of its own."""
    places = [sorted(moved).index(axis) for axis in moved]
    off = [i for i, place in enumerate(places) if i != place]
    inner = places[off[0] : off[-1] + 1]
    return sum(b != a + 1 for a, b in itertools.pairwise(inner)) == 1


_LINE = 16
"""Elements of a line of the cache."""

_PAGE = 4096
"""Bytes from row to row at which the elements of a column want the same few lines of the nearest cache."""

_WAYS = 32
"""Rows from which on these lines do not stay there until the next column is read."""

_TALL = 8192
"""Rows whose lines do not stay in the second cache until the next column is read."""


def _thins_rows(node: ir.Node, rank: int) -> bool:
    """Whether a Slice leaves out elements of the rows that it takes, so that they are moved one at a time."""
    axes, steps = (constant_of(v) for v in (*node.inputs[3:5], *[None] * (5 - len(node.inputs))))
    if steps is None:
        return False
    where = range(len(steps)) if axes is None else axes
    return any(int(a) % rank == rank - 1 and abs(int(s)) != 1 for a, s in zip(where, steps, strict=True))


def _slice(node: ir.Node, rates: Rates) -> float:
    shape, out = shape_of(node.inputs[0]), shape_of(node.outputs[0])
    if _thins_rows(node, len(shape)):
        rows = math.prod(out[:-1])
        return max(_traffic(node, rates), math.prod(out) * rates.item + rows * 0.5 * rates.run)
    run = 1
    for axis in reversed(range(len(out))):
        run *= out[axis]
        if out[axis] != shape[axis]:
            break
    return 2 * _picked(node, rates) + math.prod(out) / max(run, 1) * 0.4 * rates.run  # by one thread


def _rows(node: ir.Node, rates: Rates) -> float:
    """Pad and Concat copy rows."""
    out = shape_of(node.outputs[0])
    if node.op_type == "Concat":
        attr = node.attributes.get("axis")
        axis = (attr.as_int() if attr else 0) % max(1, len(out))
        pieces = math.prod(out[:axis]) * len(node.inputs)
        single = math.prod(out[axis:]) == len(node.inputs)  # a loop of its own
        waiting = 0.0 if single else 0.5 * _waiting(node, rates)
        return _traffic(node, rates) + waiting + pieces * (0.012 if single else 0.1) * rates.run
    return max(_alone(node, rates), math.prod(out[:-1]) * 1.2 * rates.run)


def _gather(node: ir.Node, rates: Rates) -> float:
    """Whole rows are copied, one call each."""
    out, axis = shape_of(node.outputs[0]), node.attributes.get("axis")
    at = (axis.as_int() if axis else 0) % max(1, len(shape_of(node.inputs[0])))
    row = math.prod(shape_of(node.inputs[0])[at + 1 :])
    return _picked(node, rates) + math.prod(out) / max(row, 1) * 0.4 * rates.run


def _picked(node: ir.Node, rates: Rates) -> float:
    """Seconds of reading as much of the first operand as is written."""
    moved, whole = 2 * value_bytes(node.outputs[0]), value_bytes(node.inputs[0]) + value_bytes(node.outputs[0])
    return _traffic(node, rates) * min(1.0, moved / max(1, whole))


def _reduce(node: ir.Node, rates: Rates) -> float:
    """Sums along rows stream; sums across them add whole rows, one at a time, or become a product (`fast_forms`)."""
    shape = shape_of(node.inputs[0])
    axes = constant_of(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    if node.op_type == "ReduceSum" and leading_axes(node):
        return _traffic(node, rates)
    if axes is not None and len(shape) - 1 not in {int(a) % max(1, len(shape)) for a in axes.reshape(-1)}:
        return max(_traffic(node, rates), 0.55 * rates.item * math.prod(shape))
    return _traffic(node, rates)


def leading_axes(node: ir.Node) -> int:
    """How many axes, from the first on, a reduction sums away; 0 if it sums others too, or all of them."""
    x, axes = node.inputs[0], constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if x is None or x.shape is None or axes is None:
        return 0
    rank = len(x.shape)
    summed = sorted(int(a) % rank for a in axes.reshape(-1)) if rank else []
    return len(summed) if summed == list(range(len(summed))) and len(summed) < rank else 0


def _items(factor: float) -> Callable[[ir.Node, Rates], float]:
    def seconds(node: ir.Node, rates: Rates) -> float:
        size = max(math.prod(shape_of(node.outputs[0])), math.prod(shape_of(node.inputs[0])))
        return max(_traffic(node, rates), factor * rates.item * size)

    return seconds


def _col2im(node: ir.Node, rates: Rates) -> float:
    """Whole rows are added in two dimensions and where they are not spread."""
    rows = len(shape_of(node.outputs[0])) == 4 and set(_ints(node, "strides", [1])) == {1}
    return _items(0.22 if rows else 0.55)(node, rates)


_MODELS: dict[str, Callable[[ir.Node, Rates], float]] = {
    "MatMul": _matmul,
    "Gemm": _matmul,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Transpose": _transpose,
    "Slice": _slice,
    "Pad": _rows,
    "Concat": _rows,
    "ReduceSum": _reduce,
    "ReduceMean": _reduce,
    "ReduceSumSquare": _items(0.4),
    "SpaceToDepth": _items(0.6),
    "DepthToSpace": _items(2.0),
    "Where": _items(0.5),
    "Gather": _gather,
    "GatherElements": _items(2.0),
    "ScatterElements": _items(8.0),
    "ScatterND": _items(8.0),
    "MaxUnpool": _items(2.0),
    "Col2Im": _col2im,
    "Einsum": _items(4.0),
    "Expand": _items(0.3),
    "Tile": _items(0.3),
}


def body_of(node: ir.Node) -> ir.Graph | None:
    """The body of a Scan."""
    return node.attributes["body"].as_graph() if node.op_type == "Scan" and not node.domain else None


def _loop(node: ir.Node, body: ir.Graph, rates: Rates) -> float:
    """The body for every slice of the last operand, and what entering it takes.

    Small kernels wait for their threads more than large ones, on machines that others use too: that is part of the price.
    """
    trips = shape_of(node.inputs[-1])[0]
    inside = sum(node_seconds(n, rates) for n in body if not folds(n.outputs[0]))
    return trips * (inside + 120 * rates.node)


def node_seconds(node: ir.Node, rates: Rates) -> float:
    """Predicted seconds of one node with static sizes. What is computed from constants alone costs nothing."""
    body = body_of(node)
    if body is not None:
        return rates.node + _loop(node, body, rates)
    if node.op_type in _FREE or all(map(is_folded, node.inputs)):
        return 0.0
    if node.outputs[0].dtype == ir.DataType.INT64 and math.prod(shape_of(node.outputs[0])) <= 64:
        return rates.node / 3  # arithmetic on sizes
    model = _MODELS.get(node.op_type)
    return rates.node + (model(node, rates) if model else _traffic(node, rates))
