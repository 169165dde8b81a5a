"""float64 kernels in NumPy, where neither ONNX Runtime nor ONNX's reference evaluator serves.

The runtime has these operators in float32 only, or computes parts in float32 (Shrink's threshold, GroupNormalization's
statistics, the scale of DynamicQuantizeLinear). The reference evaluator is slow (AveragePool, ConvTranspose), wrong (LRN,
GlobalMaxPool unless there are two spatial axes, OneHot with a depth that is not whole, RNN, GRU and LSTM with other
attributes or `sequence_lens`), or computes Erf, and hence Gelu, in float32.
"""

# ruff: noqa: ARG001, ARG005 - all kernels share one signature

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from onnx_convgrad.ir.pooling import Pool
from onnx_convgrad.runtime import session

Attributes = Mapping[str, Any]
Array = np.ndarray


class Unavailable(Exception):  # noqa: N818 - a signal to use the reference
    """ONNX's reference evaluator has to run this case."""


def _taps(x: np.ndarray, kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int]) -> Any:
    """For each tap of the kernel, the strided view of the padded `x` that it reads."""
    counts = [
        (size - (k - 1) * d - 1) // s + 1 for size, k, s, d in zip(x.shape[2:], kernel, strides, dilations, strict=True)
    ]
    for place in itertools.product(*map(range, kernel)):
        yield x[_seen(place, dilations, counts, strides)]


def _seen(place: Sequence[int], dilations: Sequence[int], counts: Sequence[int], strides: Sequence[int]) -> Any:
    """Index of the elements that one tap reads, over all window positions."""
    axes = zip(place, dilations, counts, strides, strict=True)
    return (..., *(slice(p * d, p * d + (c - 1) * s + 1, s) for p, d, c, s in axes))


def _average_pool(a: Attributes, x: np.ndarray) -> np.ndarray:
    auto_pad = a.get("auto_pad", b"NOTSET")
    if auto_pad not in (b"NOTSET", b"VALID"):
        raise Unavailable
    kernel, rank = tuple(a["kernel_shape"]), x.ndim - 2
    strides, dilations = tuple(a.get("strides", [1] * rank)), tuple(a.get("dilations", [1] * rank))
    pads = a.get("pads", [0] * 2 * rank) if auto_pad == b"NOTSET" else [0] * 2 * rank
    both = tuple(zip(pads[:rank], pads[rank:], strict=True))
    pool = Pool(kernel, strides, dilations, x.shape[2:], both, "NOTSET", bool(a.get("ceil_mode")))
    around = [(0, 0), (0, 0), *both]
    after = [(0, 0), (0, 0), *((0, max(pool.excess(axis) or 0, 0)) for axis in range(rank))]
    inside = np.pad(np.ones((1, 1, *x.shape[2:])), around, constant_values=float(bool(a.get("count_include_pad"))))
    window = (kernel, strides, dilations)
    share = sum(_taps(np.pad(inside, after), *window))
    result: np.ndarray = sum(_taps(np.pad(np.pad(x, around), after), *window)) / share
    return result


def _conv_transpose(a: Attributes, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
    """Add the scaled kernel of each input element to the output, then trim both ends."""
    rank, g = x.ndim - 2, a.get("group", 1)
    if "output_shape" in a or a.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise Unavailable
    strides, dilations = a.get("strides", [1] * rank), a.get("dilations", [1] * rank)
    pads, extra = a.get("pads") or [0] * 2 * rank, a.get("output_padding", [0] * rank)
    kernel, sizes = w.shape[2:], x.shape[2:]
    full = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(sizes, strides, kernel, dilations, strict=True)]
    y = np.zeros((x.shape[0], g, w.shape[1], *(f + e for f, e in zip(full, extra, strict=True))))
    xs = x.reshape(x.shape[0], g, x.shape[1] // g, -1)
    ws = w.reshape(g, x.shape[1] // g, w.shape[1], *kernel)
    for place in itertools.product(*map(range, kernel)):
        tap: Any = (..., *place)
        part = np.einsum("gcm,ngcp->ngmp", ws[tap], xs, optimize=True)
        y[_seen(place, dilations, sizes, strides)] += part.reshape(*part.shape[:3], *sizes)
    y = y.reshape(x.shape[0], g * w.shape[1], *y.shape[3:])
    cut: Any = (..., *(slice(pads[i], y.shape[2 + i] - pads[rank + i]) for i in range(rank)))
    y = np.asarray(y[cut])
    return y if b is None else y + b.reshape(1, -1, *[1] * rank)


def _erf(a: Attributes, x: np.ndarray) -> np.ndarray:
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(x))


def _gelu(a: Attributes, x: np.ndarray) -> np.ndarray:
    if a.get("approximate", b"none") == b"tanh":
        inner: np.ndarray = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    else:
        inner = _erf(a, x / math.sqrt(2))
    return np.asarray(x * (1 + inner) / 2)


def _shrink(a: Attributes, x: np.ndarray) -> np.ndarray:
    threshold, bias = a.get("lambd", 0.5), a.get("bias", 0.0)
    return np.where(x < -threshold, x + bias, np.where(x > threshold, x - bias, 0.0))


def _group_norm(a: Attributes, x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    groups = x.reshape(x.shape[0], a["num_groups"], -1)
    mean, var = groups.mean(-1, keepdims=True), groups.var(-1, keepdims=True)
    normal = ((groups - mean) / np.sqrt(var + a.get("epsilon", 1e-5))).reshape(x.shape)
    shape = (1, -1, *[1] * (x.ndim - 2))
    return np.asarray(normal * scale.reshape(shape) + bias.reshape(shape))


def _lrn(a: Attributes, x: np.ndarray) -> np.ndarray:
    """Divide each channel by its neighbors; the reference evaluator sums the first few channels only."""
    below = (a["size"] - 1) // 2
    around = np.pad(x**2, [(0, 0), (below, a["size"] - 1 - below), *[(0, 0)] * (x.ndim - 2)])
    total: np.ndarray = sum(around[:, i : i + x.shape[1]] for i in range(a["size"]))  # type: ignore[assignment]
    base = a.get("bias", 1.0) + a.get("alpha", 1e-4) / a["size"] * total
    return np.asarray(x / base ** a.get("beta", 0.75))


def _resize(a: Attributes, x: np.ndarray, roi: Any = None, scales: Any = None, sizes: Any = None) -> np.ndarray:
    """Apply one matrix per axis, from the runtime's float32 kernel: every mode is linear and separable."""
    if (
        a.get("keep_aspect_ratio_policy", b"stretch") != b"stretch"
        or a.get("coordinate_transformation_mode") == b"tf_crop_and_resize"
    ):
        raise Unavailable
    axes = [axis % x.ndim for axis in a.get("axes", range(x.ndim))]
    by_size = sizes is not None and len(sizes)
    for i, axis in enumerate(axes):
        if (by_size and sizes[i] == x.shape[axis]) or (not by_size and scales[i] == 1):
            continue
        matrix = _matrix(a, x.shape[axis], None if by_size else float(scales[i]), int(sizes[i]) if by_size else None)
        x = np.moveaxis(np.moveaxis(x, axis, -1) @ matrix, -1, axis)
    return x


def _matrix(a: Attributes, length: int, scale: float | None, size: int | None) -> np.ndarray:
    """The matrix whose rows are the responses to a unit impulse at each position of the axis."""
    kept = {k: v for k, v in a.items() if k != "axes"}
    infos = [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)]
    name, feed = (
        ("scales", np.array([1, 1, 1, scale], np.float32))
        if size is None
        else ("sizes", np.array([1, 1, length, size]))
    )
    infos.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(feed.dtype), None))
    inputs = ["x", "", "scales"] if size is None else ["x", "", "", "sizes"]
    node = helper.make_node("Resize", inputs, ["y"], **kept)
    graph = helper.make_graph([node], "resize", infos, [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    image = np.eye(length, dtype=np.float32)[None, None]
    result: np.ndarray = session(model, optimize=False).run(None, {"x": image, name: feed})[0][0, 0]
    return result.astype(np.float64)


def _dynamic_quantize_linear(a: Attributes, x: np.ndarray) -> tuple[np.ndarray, ...]:
    low, high = min(x.min(initial=0), 0.0), max(x.max(initial=0), 0.0)
    scale = (high - low) / 255 or 1.0
    zero = np.clip(np.rint(-low / scale), 0, 255)
    return np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.uint8), np.asarray(scale), zero.astype(np.uint8)


def _one_hot(a: Attributes, indices: np.ndarray, depth: np.ndarray, values: np.ndarray) -> np.ndarray:
    count, rank = int(np.asarray(depth).item()), indices.ndim + 1
    axis = a.get("axis", -1) % rank
    places = np.arange(count).reshape([-1 if i == axis else 1 for i in range(rank)])
    whole = np.expand_dims(indices.astype(np.int64), axis)
    return np.asarray(np.where(np.where(whole < 0, whole + count, whole) == places, values[1], values[0]))


def _mean_variance_norm(a: Attributes, x: np.ndarray) -> np.ndarray:
    axes = tuple(a.get("axes", (0, 2, 3)))
    centered = x - x.mean(axes, keepdims=True)
    return np.asarray(centered / (np.sqrt((centered**2).mean(axes, keepdims=True)) + 1e-9))


def _global_lp_pool(a: Attributes, x: np.ndarray) -> np.ndarray:
    p = a.get("p", 2)
    return np.asarray((np.abs(x) ** p).sum(tuple(range(2, x.ndim)), keepdims=True) ** (1 / p))


# -- recurrent operators, step by step and sample by sample, as specified ----------------------------------------------


def _rnn(a: Attributes, x: Array, w: Array, r: Array, *rest: Array | None) -> tuple[Array, ...]:
    """Y and Y_h."""

    def cell(d: int, functions: Sequence[Any], wx: Array, rb: Array, h: Array, c: Array) -> tuple[Array, Array]:
        return functions[0](wx + r[d] @ h + rb), c

    return _run(a, ["Tanh"], cell, x, w, r, rest)[:2]


def _gru(a: Attributes, x: Array, w: Array, r: Array, *rest: Array | None) -> tuple[Array, ...]:
    """Y and Y_h."""

    def cell(d: int, functions: Sequence[Any], wx: Array, rb: Array, h: Array, c: Array) -> tuple[Array, Array]:
        f, g = functions
        wz, wr, wh = np.split(wx, 3)
        (rz, rr, rh), (bz, br, bh) = np.split(r[d], 3), np.split(rb, 3)
        z, reset = f(wz + rz @ h + bz), f(wr + rr @ h + br)
        inner = reset * (rh @ h + bh) if a.get("linear_before_reset") else rh @ (reset * h) + bh
        return (1 - z) * g(wh + inner) + z * h, c

    return _run(a, ["Sigmoid", "Tanh"], cell, x, w, r, rest)[:2]


def _lstm(a: Attributes, x: Array, w: Array, r: Array, *rest: Array | None) -> tuple[Array, ...]:
    """Y, Y_h and Y_c."""
    p = rest[4] if len(rest) > 4 else None

    def cell(d: int, functions: Sequence[Any], wx: Array, rb: Array, h: Array, c: Array) -> tuple[Array, Array]:
        f, g, last = functions
        i, o, forget, new = np.split(wx + r[d] @ h + rb, 4)
        pi, po, pf = np.zeros((3, r.shape[2])) if p is None else np.split(p[d], 3)
        i = f(i + pi * c)
        forget = 1 - i if a.get("input_forget") else f(forget + pf * c)
        c = forget * c + i * g(new)
        return f(o + po * c) * last(c), c

    return _run(a, ["Sigmoid", "Tanh", "Tanh"], cell, x, w, r, rest)


def _run(
    a: Attributes,
    default: list[str],
    cell: Callable[..., tuple[Array, Array]],
    x: Array,
    w: Array,
    r: Array,
    rest: Sequence[Array | None],
) -> tuple[Array, Array, Array]:
    """Run the `cell` from (direction, activations, W x + b of W, b of R, h, c) to the next h and c."""
    b, lengths, *starts = (*rest, *[None] * 4)[:4]
    steps, batch = x.shape[:2]
    direction = a.get("direction", b"forward").decode()
    ways = ["forward", "reverse"] if direction == "bidirectional" else [direction]
    functions = _functions(a, default * len(ways))
    biases = np.zeros((len(ways), 2 * w.shape[1]), x.dtype) if b is None else b
    y = np.zeros((steps, len(ways), batch, r.shape[2]), x.dtype)
    finals = [np.zeros(y.shape[1:], x.dtype) if v is None else v.copy() for v in starts]
    for d, n in np.ndindex(len(ways), batch):
        order = range(steps if lengths is None else int(lengths[n]))
        chosen = functions[d * len(default) : (d + 1) * len(default)]
        wb, rb = np.split(biases[d], 2)
        if not order:  # ONNX Runtime does not give the initial state
            finals[0][d, n] = finals[1][d, n] = 0
        for t in order if ways[d] == "forward" else reversed(order):
            h, c = cell(d, chosen, w[d] @ x[t, n] + wb, rb, finals[0][d, n], finals[1][d, n])
            y[t, d, n] = h
            finals[0][d, n], finals[1][d, n] = h, c
    return y, finals[0], finals[1]


_FUNCTIONS: dict[str, tuple[Callable[..., Array], *tuple[float, ...]]] = {
    "relu": (lambda v: np.maximum(v, 0),),
    "tanh": (np.tanh,),
    "sigmoid": (lambda v: 1 / (1 + np.exp(-v)),),
    "softsign": (lambda v: v / (1 + np.abs(v)),),
    "softplus": (lambda v: np.logaddexp(v, 0),),
    "affine": (lambda v, alpha, beta: alpha * v + beta, 1.0, 0.0),
    "scaledtanh": (lambda v, alpha, beta: alpha * np.tanh(beta * v), 1.0, 1.0),
    "hardsigmoid": (lambda v, alpha, beta: np.clip(alpha * v + beta, 0, 1), 0.2, 0.5),
    "leakyrelu": (lambda v, alpha: np.where(v < 0, alpha * v, v), 0.01),
    "thresholdedrelu": (lambda v, alpha: np.where(v > alpha, v, 0), 1.0),
    "elu": (lambda v, alpha: np.where(v < 0, alpha * np.expm1(v), v), 1.0),
}
"""Activation -> its function, and the defaults of alpha and beta if it has them."""


def _functions(a: Attributes, default: Sequence[str]) -> list[Callable[[Array], Array]]:
    names = [n.decode().lower() for n in a.get("activations", [n.encode() for n in default])]
    given = [iter(a.get(name, ())) for name in ("activation_alpha", "activation_beta")]
    clip = a.get("clip") or np.inf
    made = []
    for i, name in enumerate(names):
        function, *defaults = _FUNCTIONS[name]
        values = [next(left, usual) for left, usual in zip(given, defaults, strict=False)]
        limit = np.inf if len(default) % 3 == 0 and i % 3 == 2 else clip  # the output of the cell is not clipped
        made.append(_clipped(function, values, limit))
    return made


def _clipped(function: Callable[..., Array], values: Sequence[float], limit: float) -> Callable[[Array], Array]:
    return lambda v: function(np.clip(v, -limit, limit), *values)


KERNELS: dict[str, Callable[..., np.ndarray | tuple[np.ndarray, ...]]] = {
    "AveragePool": _average_pool,
    "ConvTranspose": _conv_transpose,
    "DynamicQuantizeLinear": _dynamic_quantize_linear,
    "Erf": _erf,
    "Gelu": _gelu,
    "GRU": _gru,
    "GlobalLpPool": _global_lp_pool,
    "GlobalMaxPool": lambda a, x: x.max(tuple(range(2, x.ndim)), keepdims=True),
    "GroupNormalization": _group_norm,
    "LRN": _lrn,
    "LSTM": _lstm,
    "MeanVarianceNormalization": _mean_variance_norm,
    "OneHot": _one_hot,
    "RNN": _rnn,
    "Resize": _resize,
    "Shrink": _shrink,
}
"""Operator -> function of attributes and operands that returns the first result, or a tuple of results."""
