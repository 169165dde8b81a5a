"""Ways of computing the gradient for a convolution's weight."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_convgrad.emit import Dim, Emitter
from onnx_convgrad.geometry import ConvSpec
from onnx_convgrad.lowering import lowering
from onnx_convgrad.registry import Call
from onnx_convgrad.rules.conv import Window, conv, trim
from onnx_convgrad.rules.conv_shared import (
    contract,
    conv_kernel,
    dims,
    im2col,
    is_empty,
    is_pointwise,
    known_channels,
    not_empty,
    per_group,
    static_batch,
    static_kernel,
    window,
    x_dims,
    y_dims,
)


@lowering("ConvWeightGrad", "zeros", requires=[is_empty])
def weight_zeros(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """An empty batch: the gradient is zero, and some kernels refuse it."""
    return e.zeros_like(n["W_like"])


@lowering("ConvWeightGrad", "pointwise", requires=[not_empty, is_pointwise])
def pointwise(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """1x1: one MatMul per sample and group over the rows, and a sum over the batch."""
    x, dy, like = n["X"], n["dY"], n["W_like"]
    batch, c, *size = x_dims(e, x, spec)
    columns = e.reshape(x, [batch, spec.groups, e.size_div(c, spec.groups), e.size_mul(*size)])
    return contract(e, per_group(e, dy, spec), columns, like)


@lowering(
    "ConvWeightGrad",
    "conv_swap",
    requires=[not_empty, conv_kernel, static_batch],
)
def conv_swap(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Batch and channels trade places, so do stride and dilation; then narrow (PyTorch's double backward)."""
    x, dy, like = n["X"], n["dY"], n["W_like"]
    batch, channels = x_dims(e, x, spec)[:2]
    x, win = trim(e, x, window(spec))
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
    kernel = dims(e, like, (None, None, *spec.kernel))[2:]
    if any(r is None or r >= d for r, d in zip(spec.leftover, spec.dilations, strict=True)):
        full = e.slice(full, [0] * spec.rank, kernel, spatial)
    return e.transpose(full, [1, 0, *spatial])


@lowering(
    "ConvWeightGrad",
    "im2col_conv",
    requires=[not_empty, conv_kernel, static_kernel, known_channels],
)
def im2col_conv(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """im2col as one depthwise Conv with one-hot kernels, then one MatMul per sample and group.

    The runtime's own convolution gathers the patches, with every stride, padding and size, so that nothing here depends
    on a spatial size.
    """
    x, dy, like = n["X"], n["dY"], n["W_like"]
    taps, channels = spec.taps or 1, spec.channels or 1
    x, win = trim(e, x, window(spec))
    one_hot = e.const(np.eye(taps).reshape(taps, 1, *(k or 1 for k in spec.kernel)), x.dtype or ir.DataType.FLOAT)
    kernels = e.op("Tile", one_hot, e.ints([channels, *[1] * (spec.rank + 1)])) if channels > 1 else one_hot
    patches = conv(e, x, kernels, None, Window(win.strides, win.dilations, win.begin, win.end, channels))
    batch, _, *y = y_dims(e, dy, spec)
    rows = channels // spec.groups * taps
    columns = e.reshape(patches, [batch, spec.groups, rows, e.size_mul(*y)])
    return contract(e, per_group(e, dy, spec), columns, like)


@lowering("ConvWeightGrad", "im2col_gemm", requires=[not_empty, static_kernel])
def im2col_gemm(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """im2col by one strided Slice per tap, then one MatMul per sample and group; runs for every dtype."""
    x, dy, like = n["X"], n["dY"], n["W_like"]
    y = y_dims(e, dy, spec)[2:]
    return contract(e, per_group(e, dy, spec), im2col(e, x, y, spec), like)
