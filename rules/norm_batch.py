"""BatchNormalization with given statistics, alone or behind a Conv, and in training mode with those of the batch.

    y[n, c, p] = scale[c] (x[n, c, p] - mean[c]) r[c] + B[c],    r = (var + eps)^(-1/2)

Several ranks that normalize with the statistics of all their samples have the abstract operator MomentsOverRanks:

    mean[c], var[c] and count, the number of entries per channel, of the entries of X on all ranks

It is replaced after differentiation (`programs.exchanges`). See `norm` for the precision of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.factors import Factors, first_operand, mix, none, notation, rank_of
from onnx_convgrad.autodiff.per_sample.batch import Batch
from onnx_convgrad.autodiff.registry import Cotangents, linear, per_sample, vjp
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.dims import static_product
from onnx_convgrad.ir.emit import DOMAIN, Dim, Emitter, static_dims
from onnx_convgrad.ir.half_sums import channel_products, channel_sum, sums_halves
from onnx_convgrad.ir.normalized import Channels, Normalized, inverse_deviation
from onnx_convgrad.rules.conv import require_vector

_STATISTICS = none("it takes statistics of the whole batch")
_FIXED = notation("n c *s, c, c, c, c -> n c *s, c, c", broadcasts=True)
_NORMALIZES = mix(
    "normalizes along",
    reason="in training mode it normalizes with the mean and variance of the whole batch",
    hint="Use inference mode (training=False), or replace it by GroupNormalization or InstanceNormalization.",
)
_TRAINED = notation("n c *s, c, c, c, c -> n c *s, c, c", broadcasts=True, n=_NORMALIZES, s=_NORMALIZES)


def _normalized(n: Call) -> Factors:
    """With given statistics each element is mapped by itself. A vector is samples of one channel; a matrix is not."""
    if rank_of(n["X"]) == 1:
        return replace(first_operand(n), ahead=None) if not n.int("training_mode", 0) else _STATISTICS(n)
    return (_TRAINED if n.int("training_mode", 0) else _FIXED)(n)


def _affine(n: Call) -> tuple[str, ...]:
    return ("scale B input_mean input_var",) if n.int("training_mode", 0) else ("X B input_mean", "scale B")


# -- together with the Conv before it ----------------------------------------------------------------------------------


def _folded_conv(e: Emitter, n: Call, inner: Call, varied: Collection[ir.Value]) -> ir.Value | None:
    """scale (conv(x, w) + b - mean) r + B = conv(x, a w) + a (b - mean) + B with given mean and variance, and a = scale r.

    No cotangent needs the value between them: that of the scale follows from that of the folded weight. The sums of products
    are not centered on the mean, which costs digits if that is large against the deviation.
    """
    w, scale, var = inner["W"], n["scale"], n["input_var"]
    of_weight_only = w not in varied and (scale in varied or var in varied)
    if n.int("training_mode", 0) or of_weight_only or not _worthwhile(w, n.y):
        return None
    bias, mean = inner.get("B"), n["input_mean"]
    require_vector(bias)
    a = e.mul(scale, inverse_deviation(e, var, n.float("epsilon", 1e-5)))
    rank = e.rank(w, "the gradient of a convolution")
    shift = e.neg(mean) if bias is None else e.sub(bias, mean)
    weight, offset = e.mul(w, e.unsqueeze(a, range(1, rank))), e.add(e.mul(shift, a), n["B"])
    return e.typed(e.conv(inner["X"], weight, offset, **inner.attributes()), n.y)


def _worthwhile(w: ir.Value, y: ir.Value) -> bool:
    """Whether the weight has no more elements than the result; never in float16, which would round the folded weight."""
    if w.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE) or w.shape is None:
        return False
    weight, result = static_product(w.shape.dims), None if y.shape is None else static_product(y.shape.dims)
    return weight is None or result is None or weight <= result


# -- BatchNormalization ------------------------------------------------------------------------------------------------


@vjp(
    "BatchNormalization",
    wrt=("X", "scale", "B", "input_mean", "input_var"),
    parameters=("scale", "B"),
    factors=_normalized,
    affine=_affine,
    joint=("Conv", _folded_conv),
)
def batch_normalization_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[n, c, p] = scale[c] (x[n, c, p] - mean[c]) r[c] + B[c] with given statistics, with sums over n and p:

    dx = scale r g, dB = sum of g, dscale = r sum of g (x - mean),
    dmean = -scale r sum of g, dvar = -scale r^3 / 2 times the sum of g (x - mean).
    """
    if n.int("training_mode", 0):
        return _batch_normalization_training(e, n, g)
    x, scale, bias, mean, var, gy = n["X"], n["scale"], n["B"], n["input_mean"], n["input_var"], g["Y"]
    channels = Channels(e, x)
    inverse = inverse_deviation(e, e.wide(var), n.float("epsilon", 1e-5))

    def factor() -> ir.Value:
        return e.mul(e.cast_like(e.wide(scale), inverse), inverse)

    def total() -> ir.Value:
        return e.cast_like(channels.sum(e.wide(gy)), inverse)

    def moment() -> ir.Value:  # sum(g x) - mean sum(g) would lose digits if the mean is large
        centered = e.sub(e.wide(x), channels.spread(e.cast_like(e.wide(mean), e.wide(x))))
        return e.cast_like(channels.sum(e.mul(e.wide(gy), centered)), inverse)

    return {
        "X": lambda: e.mul(gy, channels.spread(e.cast_like(factor(), x))),
        "scale": lambda: e.cast_like(e.mul(moment(), inverse), scale),
        "B": lambda: e.cast_like(total(), bias),
        "input_mean": lambda: e.cast_like(e.neg(e.mul(total(), factor())), mean),
        "input_var": lambda: e.cast_like(e.mul(e.mul(moment(), factor()), e.mul(e.square(inverse), -0.5)), var),
    }


@per_sample("BatchNormalization")
def batch_normalization_per_sample(e: Emitter, n: Call, g: dict[str, Any], batch: Batch) -> Cotangents:
    """y[n, c, p] = scale[c] (x[n, c, p] - mean[c]) r[c] + B[c] with given statistics, which are differentiated too."""
    x, at, gy = n["X"], batch.of(n.y), e.wide(g["Y"])
    channels = Channels(e, x)
    inverse = e.cast_like(inverse_deviation(e, e.wide(n["input_var"]), n.float("epsilon", 1e-5)), gy)

    def total() -> ir.Value:
        return batch.sum(gy, at, [1])

    def moment() -> ir.Value:
        centered = e.sub(e.wide(x), channels.spread(e.cast_like(e.wide(n["input_mean"]), gy)))
        return batch.sum(e.mul(gy, centered), at, [1])

    def factor() -> ir.Value:
        return e.mul(e.cast_like(e.wide(n["scale"]), gy), inverse)

    return {
        "scale": lambda: e.cast_like(e.mul(moment(), inverse), n["scale"]),
        "B": lambda: e.cast_like(total(), n["B"]),
        "input_mean": lambda: e.cast_like(e.mul(total(), e.neg(factor())), n["input_mean"]),
        "input_var": lambda: e.cast_like(
            e.mul(moment(), e.mul(factor(), e.mul(e.square(inverse), -0.5))), n["input_var"]
        ),
    }


def _batch_normalization_training(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """Mean and variance are those of the M entries of each channel: running = momentum input + (1 - momentum) batch.

    With a = scale r and z = x - mean,

        dx = a (g - mean(g) - z r^2 mean(g z)) + z k + c,    k = 2 (1 - momentum) / M drunning_var,
                                                             c = (1 - momentum) / M drunning_mean.
    """
    x, scale, bias = n["X"], n["scale"], n["B"]
    momentum = n.float("momentum", 0.9)
    channels = Channels(e, x)
    through_running = any(g.get(name) is not None for name in ("running_mean", "running_var"))
    if sums_halves(e, x) and g["Y"] is not None and _has_statistics(n) and not through_running:
        return _in_halves(e, n, channels, g["Y"])
    data = e.wide(x)
    count = _count(e, data, scale)
    centered, inverse = _batch_statistics(e, n, channels, data)
    inverse = e.unless_empty(inverse, count)
    gy = None if g["Y"] is None else e.wide(g["Y"])

    def mean(total: ir.Value) -> ir.Value:
        return e.averaged(total, count)

    def moment() -> ir.Value:  # rounding errors of a large mean give z a sum; its product with mean(g) is removed
        assert gy is not None
        rest = e.mul(mean(channels.sum(gy)), channels.sum(centered))
        return e.sub(channels.sum(e.mul(gy, centered)), rest)

    def from_running(name: str, weight: float) -> ir.Value:
        return channels.spread(mean(e.mul(e.cast_like(e.wide(g[name]), data), weight * (1 - momentum))))

    def through_y() -> ir.Value:
        assert gy is not None
        factor = e.mul(e.cast_like(e.wide(scale), data), inverse)
        slope = e.neg(e.mul(e.square(inverse), mean(moment())))
        centring = channels.affine(centered, slope, e.neg(mean(channels.sum(gy))))
        return e.mul(e.add(gy, centring), channels.spread(factor))

    def data_cotangent() -> ir.Value:
        terms = [] if gy is None else [through_y()]
        if g.get("running_var") is not None:
            terms.append(e.mul(centered, from_running("running_var", 2.0)))
        if g.get("running_mean") is not None:
            shift = from_running("running_mean", 1.0)
            terms.append(shift if terms else e.expand(shift, data))
        return e.cast_like(e.sum(terms), x)

    def running(name: str, like: ir.Value) -> ir.Value | None:
        return None if g.get(name) is None or momentum == 0 else e.mul(e.cast_like(g[name], like), momentum)

    return {
        "X": data_cotangent,
        "scale": lambda: None if gy is None else e.cast_like(e.mul(moment(), inverse), scale),
        "B": lambda: None if gy is None else e.cast_like(channels.sum(gy), bias),
        "input_mean": lambda: running("running_mean", n["input_mean"]),
        "input_var": lambda: running("running_var", n["input_var"]),
    }


def _in_halves(e: Emitter, n: Call, channels: Channels, gy: ir.Value) -> Cotangents:
    """The cotangents with passes over float16; numbers per channel are float32, and few depend on the cotangent:

    dx = a (g + s x + t),    s = (sum(g x) - m sum(g)) (-r^2 / M),    t = sum(g) (-1 / M) - s m.
    """
    x, scale, bias, count = n["X"], n["scale"], n["B"], _count(e, n["X"], n["scale"])
    mean, var = (e.wide(n.out(name)) for name in ("running_mean", "running_var"))
    mean = e.unless_empty(mean, count)
    inverse = e.unless_empty(inverse_deviation(e, var, n.float("epsilon", 1e-5)), count)
    total = channel_sum(e, gy)

    def moment() -> ir.Value:
        return e.sub(channel_products(e, gy, x), e.mul(mean, total))

    def data_cotangent() -> ir.Value:
        least = e.size_max(count, 1)
        rate = -1 / least if isinstance(least, int) else e.div(-1, e.size_as(least, mean))
        slope = e.mul(moment(), e.mul(e.square(inverse), rate))
        shift = e.sub(e.mul(total, rate), e.mul(slope, mean))
        centring = channels.affine(x, e.cast_like(slope, x), e.cast_like(shift, x))
        return e.mul(e.add(gy, centring), channels.spread(e.cast_like(e.mul(e.wide(scale), inverse), x)))

    return {
        "X": data_cotangent,
        "scale": lambda: e.cast_like(e.mul(moment(), inverse), scale),
        "B": lambda: e.cast_like(total, bias),
        **dict.fromkeys(("input_mean", "input_var"), lambda: None),
    }


def _has_statistics(n: Call) -> bool:
    """Whether the node's own outputs are the statistics of the batch; from running ones, extracting them costs digits."""
    outputs = n.node.outputs
    return n.float("momentum", 0.9) == 0 and len(outputs) == 3 and all(v.name != "" for v in outputs)


def _batch_statistics(e: Emitter, n: Call, channels: Channels, data: ir.Value) -> tuple[ir.Value, ir.Value]:
    """x - mean, and r of each channel."""
    epsilon = n.float("epsilon", 1e-5)
    if _has_statistics(n):
        mean, var = (e.cast_like(e.wide(n.out(name)), data) for name in ("running_mean", "running_var"))
        return e.sub(data, channels.spread(mean)), inverse_deviation(e, var, epsilon)
    normalized = Normalized.of(e, data, channels.axes, epsilon)
    return normalized.centered, channels.flat(normalized.inverse)


def _count(e: Emitter, x: ir.Value, scale: ir.Value) -> Dim:
    """The number of entries per channel."""
    sizes = static_dims(x)
    if sizes is not None and None not in sizes:
        return math.prod(d for i, d in enumerate(sizes) if d is not None and (i != 1 or len(sizes) == 1))
    return e.size_div(e.count(x), e.size_max(e.count(scale), 1))


# -- by the covariance of the data of a pointwise convolution, see `backends.covariance` ---------------------------


@linear(f"{DOMAIN}::Center", wrt="X", factors=_STATISTICS)
def center_vjp(e: Emitter, _: Call, g: dict[str, Any]) -> ir.Value:
    """Y[n, c, p] = X[n, c, p] - mean of X over n and p, a symmetric map: dX = Center(dY)."""
    return e.op("Center", g["Y"], domain=DOMAIN)


@vjp(f"{DOMAIN}::Covariance", wrt="X", factors=_STATISTICS)
def covariance_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """Y = X X' / M over the M points of X [N, C, ...], in float32: dX = (dY + dY') X / M."""
    return _mixed(e, n["X"], e.add(g["Y"], e.transpose(g["Y"], [1, 0])))


@vjp(f"{DOMAIN}::NormalizedKernel", wrt=("X", "W", "scale", "B"), factors=_STATISTICS)
def normalized_kernel_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """Y = [f W, B] with f = scale r and r = (diag(W S W') + eps)^(-1/2) normalizes W x, for the covariance S of x.

    The last operands, the mean of x, S, W S and r, are functions of X and W; this rule has the derivative through them. X is
    centered, but for a rest m of its mean that rounding leaves. With P = dY_1 - dY_2 m':

        dscale = r e,    dW = f P - q W S,    dX = -W' (q W) X / M    with e = sum over c of P W, q = f r^2 e.
    """
    x, w, inverse = n["X"], n["W"], e.unsqueeze(n["inverse"], [1])
    kernel, bias = e.ops("Split", g["Y"], e.vector([e.dim(w, 1), 1]), outputs=2, axis=1)
    kernel = e.sub(kernel, e.mul(bias, n["rest"]))
    factor = e.mul(e.unsqueeze(n["scale"], [1]), inverse)
    scale = e.mul(e.reduce_sum(e.mul(kernel, w), [1]), inverse)
    slope = e.mul(e.mul(scale, inverse), factor)
    return {
        "X": lambda: _mixed(e, x, e.matmul(e.transpose(w, [1, 0]), e.mul(e.neg(slope), w))),
        "W": lambda: e.sub(e.mul(factor, kernel), e.mul(slope, n["mapped"])),
        "scale": lambda: e.reshape(scale, [-1]),
        "B": lambda: e.reshape(bias, [-1]),
    }


def _mixed(e: Emitter, x: ir.Value, matrix: ir.Value) -> ir.Value:
    """The product of matrix / M with each of the M points of x."""
    batch, channels, *sizes = e.dims(x)
    share = e.averaged(matrix, e.size_mul(batch, *sizes))
    kernel = e.reshape(e.cast_like(share, x), [channels, channels, *[1] * len(sizes)])
    return e.typed(e.conv(x, kernel), x)


# -- several ranks -----------------------------------------------------------------------------------------------------


@vjp(f"{DOMAIN}::MomentsOverRanks", wrt="X", factors=_STATISTICS)
def moments_over_ranks_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """dX = (S(dmean) + 2 (X - mean) S(dvar)) / count, where S sums over the ranks.

    The loss is the sum of the losses of all ranks, and each rank's loss depends on the entries of all.
    """
    x, mean = n["X"], n.out("mean")
    channels = Channels(e, x)
    data, size = e.wide(x), e.dim(mean, 0)
    own = [e.zeros_like(mean) if g[name] is None else g[name] for name in ("mean", "var")]
    together = e.op("SumOverRanks", e.concat(own, 0), domain=DOMAIN)
    shift, slope = e.slice(together, [0], [size], [0]), e.slice(together, [size], [e.size_mul(size, 2)], [0])
    count = n.out("count")
    centered = e.sub(data, channels.spread(mean))
    return e.cast_like(channels.affine(centered, e.div(e.mul(slope, 2), count), e.div(shift, count)), x)


@linear(f"{DOMAIN}::SumOverRanks", wrt="X", factors=_STATISTICS)
def sum_over_ranks_vjp(e: Emitter, _: Call, g: dict[str, Any]) -> ir.Value:
    """dX = S(dY): each rank's result depends on the operands of all."""
    return e.op("SumOverRanks", g["Y"], domain=DOMAIN)
