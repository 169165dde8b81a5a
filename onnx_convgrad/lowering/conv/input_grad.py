"""The data gradient of a convolution by ConvTranspose, by a Conv with the reversed kernel, or by products and sums."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.lowering.conv.kernels import plain_conv, reverse_taps
from onnx_convgrad.lowering.conv.layout import x_dims
from onnx_convgrad.lowering.conv.patches import scatter_columns
from onnx_convgrad.lowering.conv.requirements import (
    conv_kernel,
    is_empty,
    known_kernel,
    not_empty,
    products_of_samples,
    static_groups,
    static_kernel,
    transposed_kernel,
    unit_stride,
)
from onnx_convgrad.lowering.table import lowering


@lowering("ConvInputGrad", "zeros", requires=[is_empty])
def input_zeros(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """A size is zero: the gradient is empty or zero, and some kernels refuse such operands."""
    return e.zeros_like(n["X_like"])


@lowering("ConvInputGrad", "conv_transpose", requires=[not_empty, conv_kernel, transposed_kernel])
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
    axes = spec.spatial_axes
    want = x_dims(e, like, spec)[2:]
    before = [max(-s, 0) for s in skip]
    starts = [max(s, 0) for s in skip]
    if any(before) or spec.negative_padding:
        have = [e.dim(full, a) for a in axes]
        after = [e.size_max(e.size_sub(e.size_add(w, s), h), 0) for w, s, h in zip(want, starts, have, strict=True)]
        full = e.pad(full, before, after, axes)
    return e.slice(full, starts, [e.size_add(s, w) for s, w in zip(starts, want, strict=True)], axes)


@lowering("ConvInputGrad", "flipped_conv", requires=[not_empty, conv_kernel, unit_stride, static_kernel, static_groups])
def flipped_conv(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """A Conv with the kernel reversed and its two channel axes exchanged; unit stride only."""
    return plain_conv(e, n["dY"], reverse_taps(e, n["W"], spec), spec.back_window)


@lowering("ConvInputGrad", "col2im_gemm", requires=[not_empty, known_kernel, products_of_samples])
def col2im_gemm(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """One MatMul to columns, each tap spread by the stride and added in place; runs for every dtype."""
    return scatter_columns(e, n["dY"], n["W"], x_dims(e, n["X_like"], spec)[1:], spec)
