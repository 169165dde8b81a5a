"""The weight gradient of a convolution, as products with all patches of x, or as a convolution.

    dw[o, c, t] = sum over n and p of dy[n, o, p] x[n, c, s p + d t - b]

is a matrix product of dy with the patches of x. The lowerings here gather all patches, or need none; those of
`weight_grad_shift` gather some axes of them, or shift dy instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.registry import Decorator, F
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import conv, trim
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.ir.samples import filled, squares, with_samples
from onnx_convgrad.lowering.conv.layout import dims, x_dims, y_dims, zero_if_empty
from onnx_convgrad.lowering.conv.patches import gather_patches, patches_by_conv
from onnx_convgrad.lowering.conv.requirements import (
    conv_kernel,
    is_empty,
    known_channels,
    known_kernel,
    not_empty,
    several_samples,
    static_kernel,
)
from onnx_convgrad.lowering.table import Query, Requirement, lowering, needs

_LARGEST_WINDOW = 32
"""Most points of a kernel for which a GPU's convolutions are fast."""

# -- requirements ------------------------------------------------------------------------------------------------------


one_tap = needs(lambda s: s.taps == 1, "the kernel is not 1x1, or of a size that is not known while building")
no_padding = needs(lambda s: not any(s.pads), "the input is padded")


def window_of_usual_size(q: Query) -> str | None:
    """cuDNN's kernels are made for windows of a few rows; see quirks.CUDA_LARGE_WINDOWS."""
    y, kernel = q.spec.y, q.spec.taps
    if q.target.name != "cuda" or kernel is None:
        return None
    if q.dtype != ir.DataType.FLOAT16 and None not in y and math.prod(y) <= _LARGEST_WINDOW:
        return None
    return f"the {q.target.name} provider has no fast convolution with a kernel as large as the output gradient"


# -- the sum, each sample, and the norm of each ---------------------------------------------------------------------------


def of_samples(name: str, *, requires: Sequence[Requirement]) -> Decorator:
    """Declare a lowering that multiplies sample by sample: for the sum, for each sample, and for its squared norm."""

    def decorate(function: F) -> F:
        def squared(e: Emitter, n: Call, spec: ConvSpec) -> Any:
            return function(e, n, spec)  # `shaped` squares

        squared.__doc__ = f"The gradients by `{name}`, squared and summed."
        for op_type in ("ConvWeightGrad", "ConvPerSampleGrad"):
            lowering(op_type, name, requires=requires)(function)
        lowering("ConvGradSquaredNorm", f"{name}_squares", requires=requires)(squared)
        return function

    return decorate


# -- shared pieces -----------------------------------------------------------------------------------------------------


def keeps_samples(n: Call) -> bool:
    """Whether the gradient of each sample is wanted, not the sum: one product serves both."""
    return n.node.op_type != "ConvWeightGrad"


def only_norms(n: Call) -> bool:
    """Whether only the norm of each sample's gradient is wanted: then the order of its entries does not matter."""
    return n.node.op_type == "ConvGradSquaredNorm"


def leading(n: Call, batch: Dim) -> list[Dim]:
    """The axes in front of those of the weight."""
    return [batch] if keeps_samples(n) else []


def shaped(e: Emitter, n: Call, value: ir.Value, order: Sequence[int] | None = None) -> ir.Value:
    """A gradient, its axes permuted by `order`, in the shape of the weight; with samples first, or as squared norms.

    Which of the three depends on the operator.
    """
    like = n["W_like"]
    if only_norms(n):
        return squares(e, value)
    value = value if order is None else e.transpose(value, order)
    if not keeps_samples(n):
        return e.reshape_like(value, like)
    return e.reshape(value, [e.dim(n["X"], 0), *e.dims(like)])


def contract(
    e: Emitter, n: Call, dy: ir.Value, columns: ir.Value, batch: Dim, groups: int, sizes: tuple[Dim, Dim, Dim]
) -> ir.Value:
    """sum over samples n of dy[n, g] columns[n, g]^T: [g * O, R], for `sizes` O, R, P per group; or the terms of that sum.

    The operands list [n, g, O, P] and [n, g, R, P] in any shape. A matrix product on a CPU packs its second operand and
    reads the first in place, so the narrow one goes second, unless it is wide enough to pay for that: then the
    transposition of the result is saved.
    """
    features, rows, points = sizes
    dy = e.reshape(dy, [batch, groups, features, points])
    columns = e.reshape(columns, [batch, groups, rows, points])
    if isinstance(features, int) and isinstance(rows, int) and features < min(rows, 256):
        product = e.matmul(columns, e.transpose(dy, [0, 1, 3, 2]))
        if keeps_samples(n):
            return product if only_norms(n) else e.transpose(product, [0, 1, 3, 2])
        total = e.transpose(batch_sum(e, product, [batch, groups, rows, features]), [0, 2, 1])
    else:
        product = e.matmul(dy, e.transpose(columns, [0, 1, 3, 2]))
        if keeps_samples(n):
            return product
        total = batch_sum(e, product, [batch, groups, features, rows])
    return e.reshape(total, [e.size_mul(features, groups), rows])


def batch_sum(e: Emitter, value: ir.Value, shape: Sequence[Dim]) -> ir.Value:
    """The sum over the first axis of a value of this shape.

    By a product with a row of ones: ONNX Runtime's ReduceSum takes five times as long across rows.
    """
    batch, *rest = shape
    if batch == 1:
        return e.reshape(value, rest)
    ones = e.op("Expand", e.scalar(1, value), e.vector([1, batch]))
    return e.reshape(e.matmul(ones, e.reshape(value, [batch, e.size_mul(*rest)])), rest)


def sizes_of(e: Emitter, n: Call, spec: ConvSpec) -> tuple[Dim, Dim, Dim, list[Dim]]:
    """Batch, channels and features per group, and the sizes of the output."""
    batch, channels = x_dims(e, n["X"], spec)[:2]
    _, features, *y = y_dims(e, n["dY"], spec)
    return batch, e.size_div(channels, spec.groups), e.size_div(features, spec.groups), y


def _from_patches(e: Emitter, n: Call, patches: ir.Value, spec: ConvSpec) -> ir.Value:
    """The gradient from all patches of x, listed as [N, C, K, *y]."""
    batch, channels, features, y = sizes_of(e, n, spec)
    sizes = features, e.size_mul(channels, spec.taps or 1), e.size_mul(*y)
    return shaped(e, n, contract(e, n, n["dY"], patches, batch, spec.groups, sizes))


# -- lowerings ---------------------------------------------------------------------------------------------------------


@lowering("ConvWeightGrad", "zeros", requires=[is_empty])
def weight_zeros(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """A size is zero: the gradient is zero, and some kernels refuse such operands."""
    return e.zeros_like(n["W_like"])


def _visited(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """The points of x that a kernel of one tap reads."""
    if spec.unit_stride:
        return n["X"]
    y = y_dims(e, n["dY"], spec)[2:]
    ends = [e.size_add(e.size_mul(e.size_sub(size, 1), s), 1) for size, s in zip(y, spec.strides, strict=True)]
    return e.slice(n["X"], [0] * spec.rank, ends, spec.spatial_axes, spec.strides)


@of_samples("pointwise", requires=[not_empty, one_tap, no_padding])
def pointwise(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """1x1: one MatMul per sample and group over the points, and a sum over the batch."""
    return _from_patches(e, n, _visited(e, n, spec), spec)


@lowering("ConvWeightGrad", "pointwise_gemm", requires=[not_empty, one_tap, no_padding, several_samples])
def pointwise_gemm(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """1x1: one MatMul per group over the points of all samples, laid side by side; for samples with few."""
    batch, channels, features, y = sizes_of(e, n, spec)
    points = e.size_mul(*y)

    def merged(value: ir.Value, count: Dim) -> ir.Value:
        return e.transpose(e.reshape(value, [batch, e.size_mul(count, spec.groups), points]), [1, 0, 2])

    columns, dy = merged(_visited(e, n, spec), channels), merged(n["dY"], features)
    total = contract(e, n, dy, columns, 1, spec.groups, (features, channels, e.size_mul(batch, points)))
    if spec.groups > 1:
        total = zero_if_empty(e, total, batch)
    return e.reshape_like(total, n["W_like"])


@lowering("ConvWeightGrad", "conv_swap", requires=[not_empty, conv_kernel, window_of_usual_size])
def conv_swap(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """A Conv with batch and channels exchanged, and stride and dilation, then narrowed (PyTorch's double backward)."""
    x, dy, like = n["X"], n["dY"], n["W_like"]
    batch, channels, *size = x_dims(e, x, spec)
    x = with_samples(e, x, [batch, channels, *size])  # ONNX Runtime never returns from a Conv over no channels
    dy = with_samples(e, dy, [batch, *y_dims(e, dy, spec)[1:]])
    batch = filled(e, batch)
    x, win = trim(e, x, spec.window)
    g = spec.groups
    spatial = spec.spatial_axes
    if g == 1:
        x = e.transpose(x, [1, 0, *spatial])
    else:
        size = [e.dim(x, a) for a in spatial]
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


@of_samples("im2col_conv", requires=[not_empty, conv_kernel, static_kernel, known_channels])
def im2col_conv(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """im2col as one depthwise Conv with one-hot kernels, then one MatMul per sample and group."""
    return _from_patches(e, n, patches_by_conv(e, n["X"], spec.kernel, spec.window, spec.channels or 1), spec)


@of_samples("im2col_gemm", requires=[not_empty, known_kernel])
def im2col_gemm(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """im2col by one strided Slice per tap, then one MatMul per sample and group; runs for every dtype."""
    return _from_patches(e, n, gather_patches(e, n["X"], y_dims(e, n["dY"], spec)[2:], spec), spec)
