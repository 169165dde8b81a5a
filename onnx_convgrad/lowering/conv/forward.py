"""Conv and ConvTranspose: by the runtime's operator, for all samples at once, or by products for types without a kernel.

A runtime that convolves sample by sample processes short rows where the images are small and the channels many. Such
images are cheap to move, so exchanging batch and channels first makes them one large convolution or product:

    x [N, C, *x]  ->  [1, C, N, *x]      a Conv with a kernel of one tap along the samples
    x [N, C, P]   ->  [C, N P]           a MatMul
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import biased
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.ir.samples import cut_samples, with_samples
from onnx_convgrad.lowering.conv.kernels import plain_conv
from onnx_convgrad.lowering.conv.layout import features_of, product_of_samples, x_dims
from onnx_convgrad.lowering.conv.patches import gather_patches, scatter_columns
from onnx_convgrad.lowering.conv.requirements import (
    conv_kernel,
    known_kernel,
    not_empty,
    products_of_samples,
    several_samples,
    several_taps,
    static_kernel,
)
from onnx_convgrad.lowering.table import lowering, needs


@lowering("Conv", "conv", requires=[not_empty, conv_kernel])
def conv_itself(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """The runtime's own Conv."""
    return e.conv(n["X"], n["W"], n.get("B"), **n.attributes())


@lowering("Conv", "im2col_gemm", requires=[not_empty, known_kernel, products_of_samples])
def conv_gemm(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """The forward convolution as slices and one MatMul, for dtypes without a convolution kernel (float64 on the CPU)."""
    x, w, bias = n["X"], n["W"], n.get("B")
    batch, channels, *have = x_dims(e, x, spec)
    y: list[Dim] = [
        size if size is not None else e.size_add(e.size_div(e.size_sub(e.size_add(d, b + t), span or 1), s), 1)
        for size, d, b, t, span, s in zip(spec.y, have, spec.begin, spec.end, spec.span, spec.strides, strict=True)
    ]
    features, g = features_of(e, w, spec), spec.groups
    inner, points = e.size_mul(e.size_div(channels, g), spec.taps or 1), e.size_mul(*y)
    columns = e.reshape(gather_patches(e, x, y, spec), [batch, g, inner, points])
    matrix = e.reshape(w, [g, e.size_div(features, g), inner])
    sizes = [batch, e.size_div(features, g), inner, points]
    result = e.reshape(product_of_samples(e, matrix, columns, sizes, g), [batch, features, *y])
    return biased(e, result, bias, spec.rank)


@lowering("ConvTranspose", "col2im_gemm", requires=[not_empty, known_kernel])
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
    return biased(e, scatter_columns(e, x, w, size, spec), bias, spec.rank)


# -- all samples at once -----------------------------------------------------------------------------------------------


free_axis = needs(lambda s: s.rank < 3, "the runtime convolves over three axes at most")
unpadded_point = needs(lambda s: s.taps == 1 and not any(s.pads), "the kernel is not 1x1 without padding")

# -- the batch as a spatial axis ---------------------------------------------------------------------------------------


@lowering(
    "Conv", "stacked_conv", requires=[not_empty, conv_kernel, free_axis, several_samples, static_kernel, several_taps]
)
def stacked_conv(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """One Conv over samples and space, for small images with many channels."""
    size, win, swap = x_dims(e, n["X"], spec), spec.window, [1, 0, *spec.spatial_axes]
    x = e.unsqueeze(e.transpose(with_samples(e, n["X"], size), swap), [0])
    flat = Window((1, *win.strides), (1, *win.dilations), (0, *win.begin), (0, *win.end), win.group)
    result = e.squeeze(plain_conv(e, x, e.unsqueeze(n["W"], [2]), flat, n.get("B")), [0])
    return e.transpose(cut_samples(e, result, size[0], 1), swap)


# -- the batch as columns ----------------------------------------------------------------------------------------------


def samples_as_columns(e: Emitter, v: ir.Value, batch: Dim, channels: Dim, points: Dim, groups: int) -> ir.Value:
    """[N, C, P] as one matrix per group, [C, N P] or [g, C/g, N P]."""
    v = e.transpose(e.reshape(v, [batch, channels, points]), [1, 0, 2])
    lead: list[Dim] = [channels] if groups == 1 else [groups, e.size_div(channels, groups)]
    return e.reshape(v, [*lead, e.size_mul(batch, points)])


@lowering("Conv", "folded_gemm", requires=[not_empty, several_samples, static_kernel, unpadded_point])
def folded_gemm(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """1x1: one MatMul for the whole batch."""
    x, w, bias = n["X"], n["W"], n.get("B")
    batch, channels, *size = x_dims(e, x, spec)
    x = e.slice(x, [0] * spec.rank, size, spec.spatial_axes, spec.strides)
    y = [e.size_div(e.size_add(d, s - 1), s) for d, s in zip(size, spec.strides, strict=True)]
    features = features_of(e, w, spec)
    inner = e.size_div(channels, spec.groups)
    lead: list[Dim] = [features] if spec.groups == 1 else [spec.groups, e.size_div(features, spec.groups)]
    points = e.size_mul(*y)
    product = e.matmul(e.reshape(w, [*lead, inner]), samples_as_columns(e, x, batch, channels, points, spec.groups))
    result = e.transpose(e.reshape(product, [features, batch, points]), [1, 0, 2])
    return e.reshape(biased(e, result, bias, 1), [batch, features, *y])
