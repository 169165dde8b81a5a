"""Conv and ConvTranspose themselves: by the runtime's operator, or by products for types that it does not convolve."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import biased
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.lowering.conv.empty_batch import product_of_samples
from onnx_convgrad.lowering.conv.layout import features_of, x_dims
from onnx_convgrad.lowering.conv.patches import gather_patches, scatter_columns
from onnx_convgrad.lowering.conv.requirements import conv_kernel, known_kernel, not_empty, products_of_samples
from onnx_convgrad.lowering.table import lowering


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
