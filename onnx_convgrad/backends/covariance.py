"""Normalize a pointwise convolution by the covariance of its input, instead of passing over its larger output.

Let y = scale (W u - mean) r + B be the BatchNormalization of a convolution W u with many more channels than u. The mean of
W u is W mean(u), and its variances are the diagonal of W S W', with S the covariance of u. So, with z = u - mean(u),

    S = z z' / M        v = diag(W S W')        y = (W scale (v + eps)^(-1/2)) z + B

W u itself is never computed, so normalizing it costs no pass over memory, forward or backward; S costs one small product.
The derivative follows from that of the operators. Where W nearly cancels u, the variance W S W' is less precise than a sum
over W u: `lowering="exact"` leaves this pass out.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import DOMAIN, Dim, Emitter, known, static_dims
from onnx_convgrad.ir.geometry import HINT_BATCH, HINT_SIZE
from onnx_convgrad.ir.half_sums import channel_sum, sums_halves
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.normalized import inverse_deviation
from onnx_convgrad.ir.passes import NodePass
from onnx_convgrad.ir.replace import become
from onnx_convgrad.ir.targets import Rates

_PASSES = 12
"""Passes over W u that its normalization takes, forward and backward."""

_SIDE = 16
"""Most nodes between the convolution and the other operands of the BatchNormalization."""


class NormalizeByCovariance(NodePass):
    """Rewrite training-mode BatchNormalization of a pointwise convolution where it saves time by the rates of the target.

    Its statistics must be shared first, see `ShareBatchStatistics`. If products of float32 have the precision of float16 on
    the target, nothing in float32 is rewritten: the variance would have three digits. Data in float16 is, on targets that
    add it up in float32. What the rewrite needs are abstract operators, to be lowered.
    """

    operators = ("BatchNormalization",)
    label = "covariance"

    def rewrite_node(self, e: Emitter, node: ir.Node) -> bool:
        """Turn the node into the scaled convolution."""
        conv = self._convolution(node)
        if conv is None:
            return False
        halves = sums_halves(e, Call(conv)["X"])
        if not halves and (e.target.narrow_products or Call(conv)["X"].dtype != ir.DataType.FLOAT):
            return False
        if not (_pays_in_halves if halves else _pays)(conv, e.target.rates):
            return False
        (_rewrite_halves if halves else _rewrite)(e, node, conv)
        return True

    def _convolution(self, node: ir.Node) -> ir.Node | None:
        """The pointwise convolution that `node` normalizes, if nothing else reads its result or the blended statistics."""
        if not _of_batch(node) or any(v in self.keep or v.is_graph_output() for v in node.outputs[1:]):
            return None
        x = node.inputs[0]
        conv = x.producer() if x is not None else None
        if x is None or not is_op(conv, "Conv"):
            return None
        alone = x not in self.keep and _only_for(x, node)
        single = all(v is not None and v.dtype == ir.DataType.FLOAT for v in node.inputs[1:3])
        return conv if alone and single and _pointwise(conv) else None


def _only_for(value: ir.Value, node: ir.Node) -> bool:
    """Whether all nodes that depend on `value` end at `node`, after the few that compute its other operands."""
    seen, open_ = {node}, [value]
    while open_:
        value = open_.pop()
        users = {use.node for use in value.uses()} - seen
        seen |= users
        if value.is_graph_output() or len(seen) > _SIDE:
            return False
        open_ += [v for user in users for v in user.outputs]
    return True


def _of_batch(node: ir.Node) -> bool:
    """Whether the node normalizes with the statistics of the batch, and returns those or none."""
    n = Call(node)
    if not n.int("training_mode", 0):
        return False
    return n.float("momentum", 0.9) == 0 or not any(v.uses() for v in node.outputs[1:])


def _pointwise(conv: ir.Node) -> bool:
    """Whether the convolution multiplies each point by one matrix of known size, without bias."""
    u, w = conv.inputs[:2]
    if len(conv.inputs) > 2 and conv.inputs[2] is not None:
        return False
    if u is None or w is None or u.shape is None or w.shape is None or len(w.shape) < 3:
        return False
    sizes = [known(d) for d in w.shape]
    if None in sizes or any(d != 1 for d in sizes[2:]) or known(u.shape[1]) != sizes[1]:
        return False
    n = Call(conv)
    return n.int("group", 1) == 1 and set(n.ints("strides") or ()) <= {1} and set(n.ints("pads") or ()) <= {0}


def _sizes(conv: ir.Node) -> tuple[int, int, int]:
    """Features, channels, and points of all samples; unknown ones at typical sizes."""
    n = Call(conv)
    features, channels = (size or 1 for size in (static_dims(n["W"]) or ())[:2])
    batch, _, *sizes = static_dims(n["X"]) or [None, None]
    return features, channels, (batch or HINT_BATCH) * math.prod(s or HINT_SIZE for s in sizes)


def _pays(conv: ir.Node, rates: Rates) -> bool:
    """Whether the passes over W u take longer than the products and passes for S."""
    features, channels, points = _sizes(conv)
    saved = _PASSES * _pass(features * points, rates)
    slow = 1 + (rates.small + 8) / channels
    spent = 4.0 * points * channels**2 * slow / rates.gemm + 8 * _pass(channels * points, rates) + 60 * rates.node
    return saved > spent


def _pass(elements: int, rates: Rates) -> float:
    """Seconds to read so many numbers once; three such arrays compete for the cache."""
    return 4 * elements / (rates.cached if 12 * elements < rates.cache else rates.memory)


def _pays_in_halves(conv: ir.Node, rates: Rates) -> bool:
    """Whether the rewrite saves time in float16 on a GPU, where the passes over W u take most of it."""
    features, channels, points = _sizes(conv)
    saved = _PASSES_IN_HALVES * 2 * features * points / rates.memory
    spent = 8.0 * points * channels**2 / rates.gemm + 7 * 2 * channels * points / rates.memory + _NUMBERS
    return saved > spent


_PASSES_IN_HALVES = 11
"""Passes over W u that the rewrite saves in float16, where the bias of the new convolution takes one."""

_NUMBERS = 5e-5
"""Seconds that the numbers per channel take on a GPU: some 30 short kernels in a captured graph."""


def _rewrite(e: Emitter, node: ir.Node, conv: ir.Node) -> None:
    n = Call(node)
    u, w, scale, bias = Call(conv)["X"], Call(conv)["W"], n["scale"], n["B"]
    rank = e.rank(u)
    features, channels = (size or 1 for size in (static_dims(w) or ())[:2])  # both are known
    mean = e.reduce("ReduceMean", u, [0, *range(2, rank)])
    centered = e.sub(u, mean)
    matrix = e.reshape(w, [features, channels])
    covariance = _covariance(e, centered, channels)
    product = e.mul(e.matmul(matrix, covariance), matrix)
    variance = e.op("Relu", e.reduce_sum(product, [1], keepdims=False))
    deviation = e.op("Sqrt", e.add(variance, n.float("epsilon", 1e-5)))
    scaled = e.mul(w, e.unsqueeze(e.div(scale, deviation), list(range(1, rank))))
    if len(node.outputs) == 3:
        means = e.reshape(e.matmul(matrix, e.reshape(mean, [channels, 1])), [features])
        for statistic, value in zip(node.outputs[1:], (means, variance), strict=True):
            statistic.replace_all_uses_with(value)
    _convolve(node, conv, [centered, scaled, bias])


def _rewrite_halves(e: Emitter, node: ir.Node, conv: ir.Node) -> None:
    """Rewrite a node with data in float16 and statistics in float32, by the operators of `lowering.conv.covariance`.

    The mean that rounding leaves in z, the `rest`, would cost the gradient of W digits: it is multiplied by the sums of the
    cotangents of y, which are large.
    """
    n, wide = Call(node), ir.DataType.FLOAT
    u, w = Call(conv)["X"], Call(conv)["W"]
    rank = e.rank(u)
    features, channels = (size or 1 for size in (static_dims(w) or ())[:2])
    made = w.producer()
    source = made.inputs[0] if is_op(made, "Cast") else None
    matrix = e.reshape(source if source is not None and source.dtype == wide else e.cast(w, wide), [features, channels])
    centered = e.typed(e.op("Center", u, domain=DOMAIN), u)
    covariance = e.op("Covariance", centered, domain=DOMAIN)
    covariance.dtype, covariance.shape = wide, ir.Shape((channels, channels))
    mapped = e.matmul(matrix, covariance)
    variance = e.op("Relu", e.reduce_sum(e.mul(mapped, matrix), [1], keepdims=False))
    inverse = inverse_deviation(e, variance, n.float("epsilon", 1e-5))
    rest = channel_sum(e, centered, mean=True)
    if len(node.outputs) == 3:
        mean = e.reshape(e.matmul(matrix, e.reshape(channel_sum(e, u, mean=True), [channels, 1])), [features])
        for statistic, value in zip(node.outputs[1:], (mean, variance), strict=True):
            statistic.replace_all_uses_with(value)
    operands = centered, matrix, n["scale"], n["B"], rest, covariance, mapped, inverse
    both = e.op("NormalizedKernel", *operands, domain=DOMAIN)
    both.dtype, both.shape = wide, ir.Shape((features, channels + 1))
    kernel, bias = e.ops("Split", e.cast(both, u.dtype or wide), e.ints([channels, 1]), outputs=2, axis=1)
    shaped = e.reshape(kernel, [features, channels, *[1] * (rank - 2)])
    _convolve(node, conv, [centered, shaped, e.reshape(bias, [features])])


def _convolve(node: ir.Node, conv: ir.Node, operands: list[ir.Value]) -> None:
    """Turn the BatchNormalization into a convolution with the attributes of `conv`."""
    become(node, "Conv", operands, [ir.Attr(a.name, a.type, a.value) for a in conv.attributes.values()])


def _covariance(e: Emitter, centered: ir.Value, channels: int) -> ir.Value:
    """z z' / M: the weight gradient of a pointwise convolution with itself."""
    rank = e.rank(centered) - 2
    like = e.const(np.zeros((channels, channels, *[1] * rank)), centered.dtype)
    window = {"strides": (1,) * rank, "dilations": (1,) * rank, "pads": (0,) * (2 * rank), "group": 1}
    total = e.op("ConvWeightGrad", centered, centered, like, domain=DOMAIN, **window)
    sizes: list[Dim] = [e.dim(centered, axis) for axis in (0, *range(2, rank + 2))]
    return e.averaged(e.reshape(total, [channels, channels]), e.size_mul(*sizes))
