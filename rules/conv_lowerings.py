"""Ways of computing the convolution gradients with plain operators, in any number of spatial dimensions.

Each lowering names its requirements, which answer with a reason when they do not hold, and its cost. All of them handle
groups; those that say so handle sizes that are known only at run time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.cost import Cost
from onnx_convgrad.emit import Dim, Emitter
from onnx_convgrad.geometry import ConvSpec
from onnx_convgrad.lowering import Query, lowering
from onnx_convgrad.registry import Call
from onnx_convgrad.rules.conv import Window, conv, trim

# Sizes that a symbolic dimension is costed at.
_BATCH, _SIZE = 8, 28


# -- requirements ------------------------------------------------------------------------------------------------------


def conv_kernel(q: Query) -> str | None:
    if q.dtype not in q.target.conv_dtypes:
        return f"the {q.target.name} provider has no convolution for {q.dtype.name}"
    return None


def unit_stride(q: Query) -> str | None:
    return None if q.spec.unit_stride else f"strides {list(q.spec.strides)} are not 1"


def static_kernel(q: Query) -> str | None:
    return None if q.spec.taps is not None else "the kernel size is not known while building"


def static_groups(q: Query) -> str | None:
    return None if q.spec.groups == 1 or q.spec.features is not None else "the number of features is not known"


def is_pointwise(q: Query) -> str | None:
    return None if q.spec.pointwise else "the kernel is not 1x1 with unit stride and no padding"


def not_empty(q: Query) -> str | None:
    return "a size is zero, so the gradient is" if _empty(q.spec) else None


def is_empty(q: Query) -> str | None:
    return None if _empty(q.spec) else "no size is known to be zero"


def _empty(spec: ConvSpec) -> bool:
    return 0 in (spec.batch, spec.channels, spec.features, *spec.x, *spec.y)


def static_batch(q: Query) -> str | None:
    """The batch becomes a channel count here, and may be empty: padding it costs a copy, so only the last resort does."""
    if q.spec.batch is not None or q.spec.taps is None:
        return None
    return "the batch size is not known and may be zero"


def known_channels(q: Query) -> str | None:
    return None if q.spec.channels is not None else "the number of channels is not known"


# -- cost --------------------------------------------------------------------------------------------------------------


def _work(spec: ConvSpec) -> tuple[float, float]:
    """Multiply-add operations (as flops) and elements of the gathered patches."""
    batch = _BATCH if spec.batch is None else spec.batch
    points = batch * math.prod(_SIZE if y is None else y for y in spec.y)
    taps = math.prod(3 if k is None else k for k in spec.kernel)
    channels = spec.channels or 64
    features = spec.features or 64
    return 2.0 * points * taps * (channels // spec.groups) * features, float(points * taps * channels)


def _width(spec: ConvSpec) -> float:
    """How well a GEMM with these few rows per group fills the machine."""
    return min(1.0, max(1, (spec.features or 64) // spec.groups) / 16)


def _weights(spec: ConvSpec) -> float:
    return float((spec.features or 64) * (spec.channels or 64) // spec.groups * (spec.taps or 9))


def _cost_transpose(q: Query) -> Cost:
    flops, patches = _work(q.spec)
    dense = q.spec.groups == 1 or _width(q.spec) == 1
    return Cost(flops, 4 * patches * (1.0 if dense else 3.0), 1 if q.spec.static or q.spec.unit_stride else 3)


def _cost_flipped(q: Query) -> Cost:
    flops, patches = _work(q.spec)
    depthwise = (q.spec.channels or 0) // q.spec.groups == 1
    return Cost(flops, 4 * (patches * (0.3 if depthwise else 1.0) + 4 * _weights(q.spec)), 3, 0.9)


def _cost_swap(q: Query) -> Cost:
    flops, patches = _work(q.spec)
    return Cost(flops, 4 * patches / max(1, q.spec.taps or 9) * 4, 5, 0.3 * _width(q.spec))


def _cost_im2col_conv(q: Query) -> Cost:
    flops, patches = _work(q.spec)
    return Cost(flops, 4 * patches * 1.4, 8)


def _cost_im2col(q: Query) -> Cost:
    flops, patches = _work(q.spec)
    return Cost(flops, 4 * patches * 3, 8 + (q.spec.taps or 9))


def _cost_pointwise(q: Query) -> Cost:
    flops, patches = _work(q.spec)
    return Cost(flops, 4 * patches, 5)


# -- shared pieces -----------------------------------------------------------------------------------------------------


def _window(spec: ConvSpec) -> Window:
    return Window(spec.strides, spec.dilations, spec.begin, spec.end, spec.groups)


def _axes(spec: ConvSpec) -> list[int]:
    return list(range(2, 2 + spec.rank))


def _dims(e: Emitter, value: ir.Value, sizes: Sequence[int | None]) -> list[Dim]:
    """Sizes of a value: those known to the spec, else read at run time."""
    return [size if size is not None else e.dim(value, axis) for axis, size in enumerate(sizes)]


def _x_dims(e: Emitter, x: ir.Value, spec: ConvSpec) -> list[Dim]:
    return _dims(e, x, (spec.batch, spec.channels, *spec.x))


def _y_dims(e: Emitter, dy: ir.Value, spec: ConvSpec) -> list[Dim]:
    return _dims(e, dy, (spec.batch, spec.features, *spec.y))


def _taps(spec: ConvSpec) -> list[tuple[int, ...]]:
    """Offsets of every kernel position in the padded input, in row-major order."""
    steps = [[t * d for t in range(k or 0)] for k, d in zip(spec.kernel, spec.dilations, strict=True)]
    return list(itertools.product(*steps))


def _gather(e: Emitter, x: ir.Value, y: list[Dim], spec: ConvSpec) -> ir.Value:
    """im2col by slices: [N, C, K, *y], one strided view of the padded input per tap."""
    x = e.pad(x, spec.begin, spec.end, _axes(spec))
    views = []
    for tap in _taps(spec):
        ends = [
            e.size_add(e.size_mul(e.size_sub(size, 1), s), t + 1)
            for size, s, t in zip(y, spec.strides, tap, strict=True)
        ]
        views.append(e.unsqueeze(e.slice(x, tap, ends, _axes(spec), spec.strides), [2]))
    return e.concat(views, axis=2)


def _columns(e: Emitter, x: ir.Value, y: list[Dim], spec: ConvSpec) -> ir.Value:
    """Patches as matrices, [N, g, Cg*K, P]."""
    n, c = _x_dims(e, x, spec)[:2]
    points = e.size_mul(*y)
    rows = e.size_mul(e.size_div(c, spec.groups), spec.taps or 1)
    return e.reshape(_gather(e, x, y, spec), [n, spec.groups, rows, points])


def _per_group(e: Emitter, dy: ir.Value, spec: ConvSpec) -> ir.Value:
    """The output gradient as matrices, [N, g, Og, P]."""
    n, o, *y = _y_dims(e, dy, spec)
    return e.reshape(dy, [n, spec.groups, e.size_div(o, spec.groups), e.size_mul(*y)])


@lowering("ConvInputGrad", "zeros", requires=[is_empty], cost=lambda _: Cost(0, 0, 1))
def input_zeros(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """An empty batch: the gradient is empty or zero, and some kernels refuse it."""
    return e.zeros_like(n["X_like"])


@lowering("ConvWeightGrad", "zeros", requires=[is_empty], cost=lambda _: Cost(0, 0, 1))
def weight_zeros(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """An empty batch: the gradient is zero, and some kernels refuse it."""
    return e.zeros_like(n["W_like"])


# -- ConvInputGrad -----------------------------------------------------------------------------------------------------


@lowering("ConvInputGrad", "conv_transpose", requires=[not_empty, conv_kernel], cost=_cost_transpose)
def conv_transpose(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """One ConvTranspose; `output_padding` gives the rows that no window reaches."""
    dy, w, like = n["dY"], n["W"], n["X_like"]
    begin, end = tuple(max(b, 0) for b in spec.begin), tuple(max(b, 0) for b in spec.end)
    even = e.target.asymmetric_pads or begin == end
    low = begin if even else (0,) * spec.rank
    high = end if even else (0,) * spec.rank
    exact = even and not spec.negative_padding and None not in spec.leftover
    extra = tuple(r or 0 for r in spec.leftover) if exact else tuple(s - 1 for s in spec.strides)
    full = e.op(
        "ConvTranspose",
        dy,
        w,
        strides=spec.strides,
        dilations=spec.dilations,
        group=spec.groups,
        pads=(*low, *high),
        output_padding=extra if any(extra) else None,
    )
    if exact:
        return full
    return _fit(e, full, like, [b - lo for b, lo in zip(spec.begin, low, strict=True)], spec)


def _fit(e: Emitter, full: ir.Value, like: ir.Value, skip: Sequence[int], spec: ConvSpec) -> ir.Value:
    """Cut `full` to the rows of `like`, starting at row `skip` (negative: rows of zeros that no window reaches)."""
    axes = _axes(spec)
    want = _x_dims(e, like, spec)[2:]
    before = [max(-s, 0) for s in skip]
    starts = [max(s, 0) for s in skip]
    if any(before) or spec.negative_padding:
        have = [e.dim(full, a) for a in axes]
        after = [e.size_max(e.size_sub(e.size_add(w, s), h), 0) for w, s, h in zip(want, starts, have, strict=True)]
        full = e.pad(full, before, after, axes)
    return e.slice(full, starts, [e.size_add(s, w) for s, w in zip(starts, want, strict=True)], axes)


@lowering(
    "ConvInputGrad",
    "flipped_conv",
    requires=[not_empty, conv_kernel, unit_stride, static_kernel, static_groups],
    cost=_cost_flipped,
)
def flipped_conv(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """A Conv with the kernel turned around and its two channel axes exchanged; unit stride only."""
    dy, w = n["dY"], n["W"]
    rank, g = spec.rank, spec.groups
    axes = [a for a, k in zip(_axes(spec), spec.kernel, strict=True) if k != 1]
    lowest = -(2**31)
    if axes:
        w = e.op(
            "Slice", w, e.ints([-1] * len(axes)), e.ints([lowest] * len(axes)), e.ints(axes), e.ints([-1] * len(axes))
        )
    kernel = [k or 0 for k in spec.kernel]
    if g == 1:
        w = e.transpose(w, [1, 0, *range(2, 2 + rank)])
    elif spec.features != g:
        per = (spec.features or g) // g
        inner: Dim = spec.channels // g if spec.channels is not None else e.dim(n["W"], 1)
        w = e.reshape(w, [g, per, inner, *kernel])
        w = e.transpose(w, [0, 2, 1, *range(3, 3 + rank)])
        w = e.reshape(w, [e.size_mul(inner, g), per, *kernel])
    elif spec.channels != g:  # one feature per group: [g, Cg, *k] already lists the channels in order
        inner = spec.channels // g if spec.channels is not None else e.dim(n["W"], 1)
        w = e.reshape(w, [e.size_mul(inner, g), 1, *kernel])
    spans = [s or 0 for s in spec.span]
    begin = tuple(s - 1 - b for s, b in zip(spans, spec.begin, strict=True))
    end = tuple(s - 1 - b for s, b in zip(spans, spec.end, strict=True))
    return conv(e, dy, w, None, Window((1,) * rank, spec.dilations, begin, end, g))


@lowering("ConvInputGrad", "col2im_gemm", requires=[not_empty, static_kernel], cost=_cost_im2col)
def col2im_gemm(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """One MatMul to columns, each tap spread by the stride and added in place; runs for every dtype."""
    return _scatter(e, n["dY"], n["W"], _x_dims(e, n["X_like"], spec)[1:], spec)


def _scatter(e: Emitter, dy: ir.Value, w: ir.Value, size: list[Dim], spec: ConvSpec) -> ir.Value:
    """The data gradient of channels and spatial sizes `size` by MatMul and shifted sums."""
    channels, *x = size
    batch, o, *y = _y_dims(e, dy, spec)
    per, inner, taps = e.size_div(o, spec.groups), e.size_div(channels, spec.groups), spec.taps or 1
    matrix = e.transpose(e.reshape(w, [spec.groups, per, e.size_mul(inner, taps)]), [0, 2, 1])
    columns = e.reshape(e.matmul(matrix, _per_group(e, dy, spec)), [batch, channels, taps, *y])
    total: ir.Value | None = None
    for index, tap in enumerate(_taps(spec)):
        part = e.squeeze(e.slice(columns, [index], [index + 1], [2]), [2]) if taps > 1 else e.squeeze(columns, [2])
        part = _place(e, part, [batch, channels], y, x, tap, spec)
        total = part if total is None else e.add(total, part)
    assert total is not None
    return total


def _place(
    e: Emitter, part: ir.Value, lead: list[Dim], y: list[Dim], x: list[Dim], tap: tuple[int, ...], spec: ConvSpec
) -> ir.Value:
    """Row p of the tap goes to row s p + t - begin of x: spread by the stride, then pad or trim."""
    if not spec.unit_stride:
        part = e.unsqueeze(part, [3 + 2 * i for i in range(spec.rank)])
        part = e.pad(part, [0] * spec.rank, [s - 1 for s in spec.strides], [3 + 2 * i for i in range(spec.rank)])
        part = e.reshape(part, [*lead, *(e.size_mul(size, s) for size, s in zip(y, spec.strides, strict=True))])
    before = [t - b for t, b in zip(tap, spec.begin, strict=True)]
    after = [
        e.size_sub(e.size_sub(want, e.size_mul(size, s)), b)
        for want, size, s, b in zip(x, y, spec.strides, before, strict=True)
    ]
    return e.pad(part, before, after, _axes(spec))


# -- ConvWeightGrad ----------------------------------------------------------------------------------------------------


@lowering("ConvWeightGrad", "pointwise", requires=[not_empty, is_pointwise], cost=_cost_pointwise)
def pointwise(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """1x1: one MatMul per sample and group over the rows, and a sum over the batch."""
    x, dy, like = n["X"], n["dY"], n["W_like"]
    batch, c, *size = _x_dims(e, x, spec)
    columns = e.reshape(x, [batch, spec.groups, e.size_div(c, spec.groups), e.size_mul(*size)])
    return _contract(e, _per_group(e, dy, spec), columns, like)


def _contract(e: Emitter, dy: ir.Value, columns: ir.Value, like: ir.Value) -> ir.Value:
    """sum over n of dy[n, g] columns[n, g]^T, shaped as the weight."""
    product = e.matmul(dy, e.op("Transpose", columns, perm=[0, 1, 3, 2]))
    return e.reshape_like(e.reduce_sum(product, [0], keepdims=False), like)


@lowering(
    "ConvWeightGrad",
    "conv_swap",
    requires=[not_empty, conv_kernel, static_batch],
    cost=_cost_swap,
)
def conv_swap(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Batch and channels trade places, so do stride and dilation; then narrow (PyTorch's double backward)."""
    x, dy, like = n["X"], n["dY"], n["W_like"]
    batch, channels = _x_dims(e, x, spec)[:2]
    x, win = trim(e, x, _window(spec))
    if (
        spec.batch is None
    ):  # a sample of zeros adds nothing, and ONNX Runtime never returns from a Conv over no channels
        x, dy, batch = e.pad(x, [0], [1], [0]), e.pad(dy, [0], [1], [0]), e.size_add(batch, 1)
    g = spec.groups
    spatial = list(range(2, 2 + spec.rank))
    if g == 1:
        x = e.transpose(x, [1, 0, *spatial])
    else:
        size: list[Dim] = [e.dim(x, a) for a in spatial]
        inner = e.size_div(channels, g)
        x = e.reshape(x, [batch, g, inner, *size])
        x = e.transpose(x, [2, 1, 0, *(a + 1 for a in spatial)])
        x = e.reshape(x, [inner, e.size_mul(batch, g), *size])
    swapped = Window(spec.dilations, spec.strides, win.begin, win.end, g)
    full = conv(e, x, e.transpose(dy, [1, 0, *spatial]), None, swapped)
    kernel = _dims(e, like, (None, None, *spec.kernel))[2:]
    if any(r is None or r >= d for r, d in zip(spec.leftover, spec.dilations, strict=True)):
        full = e.slice(full, [0] * spec.rank, kernel, spatial)
    return e.transpose(full, [1, 0, *spatial])


@lowering(
    "ConvWeightGrad",
    "im2col_conv",
    requires=[not_empty, conv_kernel, static_kernel, known_channels],
    cost=_cost_im2col_conv,
)
def im2col_conv(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """im2col as one depthwise Conv with one-hot kernels, then one MatMul per sample and group.

    The runtime's own convolution gathers the patches, with every stride, padding and size, so that nothing here depends
    on a spatial size.
    """
    x, dy, like = n["X"], n["dY"], n["W_like"]
    taps, channels = spec.taps or 1, spec.channels or 1
    x, win = trim(e, x, _window(spec))
    one_hot = e.const(np.eye(taps).reshape(taps, 1, *(k or 1 for k in spec.kernel)), x.dtype or ir.DataType.FLOAT)
    kernels = e.op("Tile", one_hot, e.ints([channels, *[1] * (spec.rank + 1)])) if channels > 1 else one_hot
    patches = conv(e, x, kernels, None, Window(win.strides, win.dilations, win.begin, win.end, channels))
    batch, _, *y = _y_dims(e, dy, spec)
    rows = channels // spec.groups * taps
    columns = e.reshape(patches, [batch, spec.groups, rows, e.size_mul(*y)])
    return _contract(e, _per_group(e, dy, spec), columns, like)


@lowering("ConvWeightGrad", "im2col_gemm", requires=[not_empty, static_kernel], cost=_cost_im2col)
def im2col_gemm(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """im2col by one strided Slice per tap, then one MatMul per sample and group; runs for every dtype."""
    x, dy, like = n["X"], n["dY"], n["W_like"]
    y = _y_dims(e, dy, spec)[2:]
    return _contract(e, _per_group(e, dy, spec), _columns(e, x, y, spec), like)


# -- Conv and ConvTranspose themselves, where the provider lacks the dtype ---------------------------------------------


@lowering("Conv", "im2col_gemm", requires=[not_empty, static_kernel], cost=_cost_im2col)
def conv_gemm(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """The forward convolution as slices and one MatMul, for dtypes without a convolution kernel (float64 on the CPU)."""
    x, w, bias = n["X"], n["W"], n.get("B")
    axes = _axes(spec)
    sizes = _x_dims(e, x, spec)
    y: list[Dim] = [
        size if size is not None else e.size_add(e.size_div(e.size_sub(e.size_add(sizes[a], b + t), span or 1), s), 1)
        for size, a, b, t, span, s in zip(spec.y, axes, spec.begin, spec.end, spec.span, spec.strides, strict=True)
    ]
    features: Dim = spec.features if spec.features is not None else e.dim(w, 0)
    columns = _columns(e, x, y, spec)
    inner = e.size_mul(e.size_div(sizes[1], spec.groups), spec.taps or 1)
    matrix = e.reshape(w, [spec.groups, e.size_div(features, spec.groups), inner])
    result = e.reshape(e.matmul(matrix, columns), [sizes[0], features, *y])
    return result if bias is None else e.add(result, e.unsqueeze(bias, [1 + i for i in range(spec.rank)]))


@lowering("ConvTranspose", "col2im_gemm", requires=[not_empty, static_kernel], cost=_cost_im2col)
def conv_transpose_gemm(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """The forward transposed convolution as one MatMul and shifted sums, for dtypes without a kernel."""
    x, w, bias = n["X"], n["W"], n.get("B")
    extra = n.ints("output_padding") or (0,) * spec.rank
    size: list[Dim] = [e.size_mul(e.dim(w, 1), spec.groups)]
    for axis in range(spec.rank):
        span, s = spec.span[axis] or 1, spec.strides[axis]
        offset = span - s + extra[axis] - spec.begin[axis] - spec.end[axis]
        have = spec.x[axis]
        size.append(have if have is not None else e.size_add(e.size_mul(e.dim(x, 2 + axis), s), offset))
    result = _scatter(e, x, w, size, spec)
    return result if bias is None else e.add(result, e.unsqueeze(bias, [1 + i for i in range(spec.rank)]))
