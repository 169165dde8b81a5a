"""Predicted seconds of matrix products and convolutions, whose speed depends on their shapes."""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import is_folded
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.targets import Rates
from onnx_convgrad.lowering.cost.passes import memory_share, memory_wait, moved_bytes, shape_of, traffic

_LANES = 16
"""Columns that a product computes in parallel."""


def _gemm(rates: Rates, m: int, n: int, k: int, batch: int, packing: float) -> float:
    """Seconds of a product: few rows make `packing` the other operand costly; few columns or terms leave lanes idle."""
    idle = -n % _LANES / max(n, 1)
    narrow = 1 < n < _LANES  # all lanes are packed and multiplied
    edge = idle * (1.0 if narrow else 0.5) + 2 / max(n, 1)
    packing *= 1 + idle if narrow else 1
    slow = 1 + packing * rates.small / max(m, 1) + edge + 2 / max(k, 1)
    return 2.0 * m * n * k * batch * slow / rates.gemm


def matmul(node: ir.Node, rates: Rates) -> float:
    """Seconds of a batch of products; operands are packed, and transposed where a Transpose folds into the product."""
    a, b = shape_of(node.inputs[0]), shape_of(node.inputs[1])
    if len(a) < 2 or len(b) < 2:
        return traffic(node, rates)
    out = shape_of(node.outputs[0])
    m, k, n = a[-2], a[-1], b[-1]
    if node.op_type == "Gemm":
        call = Call(node)
        m, k = (a[1], a[0]) if call.int("transA", 0) else (a[0], a[1])
        n = b[0] if call.int("transB", 0) else b[1]
    right = node.inputs[1]
    packed = right is not None and right.const_value is not None  # when the model is loaded
    batch = math.prod(out[:-2])
    if max(m, k) <= _FEW:
        return max(_gemm(rates, m, n, k, batch, 1.0), traffic(node, rates)) + moved_bytes(node) / rates.memory
    slowly = 0.12 + 0.2 * memory_share(node, rates) * (1 - rates.memory / rates.cached)
    turning = slowly * rates.item * m * k * batch if folds(node.inputs[0]) else 0.0
    shared = math.prod(a[:-2]) < math.prod(b[:-2])  # weights times the images of many samples
    packing = 0.0 if packed else 1.0 if shared else 0.4
    seconds = _gemm(rates, m, n, k, batch, packing) + turning + memory_wait(node, rates)
    return max(seconds, traffic(node, rates)) + (3 if packed else 9) * rates.run * (batch - 1)


_FEW = 8
"""Most rows and terms for which a product takes as long as loading its operands. Cores without a common cache wait as
long for values that another core wrote as for memory, with little computation meanwhile."""


def folds(value: ir.Value | None) -> bool:
    """Whether a value is a Transpose of the last two axes and is read by matrix products only.

    The runtime folds it into them: at no cost on the right, by packing one element at a time on the left.
    """
    node = None if value is None else value.producer()
    if node is None or not may_fold(node):
        return False
    uses = [use.node for use in node.outputs[0].uses()]
    return bool(uses) and all(use.op_type == "MatMul" and use.graph is node.graph for use in uses)


def may_fold(node: ir.Node) -> bool:
    """Whether a node is a Transpose of the last two axes."""
    if not is_op(node, "Transpose"):
        return False
    perm = list(node.attributes["perm"].as_ints())
    n = len(perm)
    return n >= 2 and perm == [*range(n - 2), n - 1, n - 2]


_SHORT = 16
"""Cost of starting a row, in elements, where rows are gathered to patches or added from them."""


def _short_rows(row: int) -> float:
    return 1 + _SHORT / max(row, 1)


def _blocked(node: ir.Node) -> bool:
    """Whether ONNX Runtime runs a Conv of a constant kernel with its channels in blocks: in two spatial dimensions."""
    x, w = node.inputs[:2]
    if x is None or x.dtype not in (None, ir.DataType.FLOAT) or len(shape_of(w)) != 4 or not is_folded(w):
        return False
    features, inner = shape_of(w)[:2]
    groups = Call(node).int("group", 1)
    if groups == 1:
        return inner < _BLOCK or inner % 4 == 0
    single = inner == 1 and features == groups
    return features % _BLOCK == 0 and (single or (inner % _BLOCK == 0 and features // groups % _BLOCK == 0))


def _blocked_conv(node: ir.Node, rates: Rates) -> float:
    """Seconds of a Conv without patches: both operands are converted to blocks of channels and back."""
    w, y = shape_of(node.inputs[1]), shape_of(node.outputs[0])
    flops = 2.0 * y[0] * -(-y[1] // _BLOCK) * _BLOCK * math.prod(y[2:]) * math.prod(w[1:])
    single = w[1] == 1 and w[0] > 1
    return max(flops / rates.gemm * (1.8 if single else 0.95), traffic(node, rates, times=3))


_BLOCK = 16
"""Channels of a block."""


def _conv_on_gpu(node: ir.Node, rates: Rates) -> float:
    """Seconds of a product without patches, in tiles of the result; the sum is not shared out. See `Rates.wave`.

    cuDNN converts images to channels last and back, except for kernels of one tap, and has no kernel at all for several
    features per group of one channel: it calls one for every group.
    """
    x, w, y = (shape_of(v) for v in (node.inputs[0], node.inputs[1], node.outputs[0]))
    groups, strides = Call(node).int("group", 1), Call(node).ints("strides") or (1,)
    taps, per_group = math.prod(w[2:]), w[0] // groups
    ends = x if node.op_type == "ConvTranspose" else y
    macs = float(ends[0] * math.prod(ends[2:]) * math.prod(w))
    if groups > 1 and w[1] == 1:
        if per_group > 1:
            return 3 * groups * rates.node + 2 * macs * rates.tap + traffic(node, rates)
        slowly = 1 if set(strides) == {1} else 20 if node.op_type == "ConvTranspose" else 2
        return macs * rates.tap * slowly + traffic(node, rates)
    busy = min(1.0, math.prod(y) / rates.wave)
    plain = taps == 1 and set(strides) == {1}
    return 4 * macs / (rates.gemm * busy) + traffic(node, rates, times=1.0 if plain else 2.2)


_CALL = 4.5
"""Cost of starting one sample and group, in copied runs."""


def conv(node: ir.Node, rates: Rates) -> float:
    """Seconds of a Conv that gathers patches into a small buffer and multiplies them there, per sample and group."""
    if rates.wave:
        return _conv_on_gpu(node, rates)
    if _blocked(node):
        return _blocked_conv(node, rates)
    x, w, y = (shape_of(v) for v in (node.inputs[0], node.inputs[1], node.outputs[0]))
    n = Call(node)
    groups, strides = n.int("group", 1), n.ints("strides") or (1,)
    unit = set(strides) == {1}
    taps, inner, points = math.prod(w[2:]), w[1], math.prod(y[2:])
    macs = float(math.prod(y) * inner * taps)
    patches = 0.0 if taps == 1 and unit else float(y[0] * points * x[1] * taps)
    padded = any(n.ints("pads") or ()) or set(n.ints("dilations") or (1,)) != {1}
    if inner == 1 and groups > 1 and len(w) == 4 and w[3] == x[3] and taps > 1 and unit and not padded:
        seconds = _windows(rates, x[0] * groups, w[0] // groups, points, taps)
    elif inner == 1 and groups > 1 and is_folded(node.inputs[1]):
        product = 1.9 * macs / rates.gemm + 0.17 * patches * rates.item
        each = 0.15 if strides[-1] == 1 else 0.25
        seconds = max(each * math.prod(y) * rates.item, product) + x[0] * groups * _CALL * rates.run
    elif inner == 1 and groups > 1 and w[0] == groups:
        seconds = macs * rates.tap * (1.0 if unit else 2.0) * _short_rows(y[-1])
        seconds += x[0] * groups * _CALL * rates.run + traffic(node, rates)
    elif inner == 1 and groups > 1:
        images = x[0] * groups * 10 * rates.run
        serial = w[0] // groups > points
        runs = patches / y[-1] * (0.8 if serial else 0.35 if y[-1] < 7 else 0.12 if y[-1] < 16 else 0.0)
        each = (0.18 if serial else 0.09) * (1 if strides[-1] == 1 else 2)
        gathered = each * _short_rows(y[-1]) * patches * rates.item
        seconds = 1.9 * macs / rates.gemm + gathered + runs * rates.run + images + 0.85 * memory_wait(node, rates)
    else:
        rows, k = w[0] // groups, inner * taps
        slow = 1 + 0.4 * rates.small / max(rows, 1) + 1.25 * rates.small / max(points, 1) + 2 / max(k, 1)
        # with more features than points one thread gathers; with a stride along rows, single points are picked
        runs = patches / y[-1] * (0.35 if rows > points else 0.14)
        each = 0.06 if strides[-1] == 1 else 0.18
        seconds = 2 * macs * slow / rates.gemm + each * patches * rates.item + runs * rates.run
        seconds += moved_bytes(node) / rates.memory if 1 < max(rows, k) <= _FEW else memory_wait(node, rates)
    return max(seconds, traffic(node, rates))


def _windows(rates: Rates, groups: int, rows: int, windows: int, k: int) -> float:
    """Seconds for kernels as wide as the input: dot products with its windows per group, four at a time, in place."""
    if rows == 1:
        passes = windows // 4 + windows % 4 // 2 + windows % 2
        return groups * max(_CALL * rates.run, 2 * rates.run + 0.075 * k * passes * rates.item)
    calls = groups * 5.5 * rates.run
    lanes = -(-windows // _LANES) * _LANES  # partly filled lanes take nearly as much work as full ones
    packed = lanes if windows < _LANES else (windows + lanes) / 2
    return calls + groups * k * packed * (0.05 * rates.item + 2 * rows / rates.gemm)


def conv_transpose(node: ir.Node, rates: Rates) -> float:
    """Seconds of a product to patches, which are then added in place; the weights are transposed for every sample."""
    if rates.wave:
        return _conv_on_gpu(node, rates)
    x, w, y = (shape_of(v) for v in (node.inputs[0], node.inputs[1], node.outputs[0]))
    n = Call(node)
    groups, unit = n.int("group", 1), set(n.ints("strides") or (1,)) == {1}
    points, taps = math.prod(x[2:]), math.prod(w[2:])
    patches = float(x[0] * groups * w[1] * taps * points)
    each = 0.15 * _short_rows(y[-1]) if unit and len(x) < 5 else 0.5
    each += _places(len(x) - 2, points, x[-1])
    added = patches * rates.item * each if taps > 1 else 0.0
    slow = 1 + rates.small / max(w[1] * taps, 1) + 8 / max(points, 1) + 8 / max(w[0] // groups, 1)
    product = 2.0 * x[0] * w[0] * w[1] * taps * points * slow / rates.gemm
    packed = 0.0 if is_folded(node.inputs[1]) else 0.25 * rates.item * x[0] * math.prod(w)
    packed += x[0] * groups * 15 * rates.run
    return max(product + packed + added + memory_wait(node, rates), traffic(node, rates))


def _places(rank: int, points: int, row: int) -> float:
    """Multiple of `Rates.item`, per element of patches added to an image, for computing where: none in two dimensions.

    In others it is computed for each tap and channel of `points` patches, and in three for every `row` of them.
    """
    return 0.0 if rank == 2 else (18 + 8 * rank) / max(points, 1) + (3 / max(row, 1) if rank > 2 else 0.0)


def recurrent(node: ir.Node, rates: Rates) -> float:
    """Seconds of a recurrent layer: a product with both weights in every turn."""
    turns, batch = (*shape_of(node.inputs[0]), 1, 1)[:2]
    weights = math.prod(shape_of(node.inputs[1])) + math.prod(shape_of(node.inputs[2]))
    return 2.0 * turns * (batch + rates.small) * weights / rates.gemm + traffic(node, rates)


PRODUCTS = {
    "MatMul": matmul,
    "Gemm": matmul,
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), recurrent),
}
"""Operator -> predicted seconds, besides starting it."""
