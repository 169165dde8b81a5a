"""The data gradient of a convolution: by ConvTranspose, by a Conv with the reversed kernel, or by products.

The rows of such a product are the taps, which Col2Im, a view or shifted sums add in place:

    columns[c, t, p] = sum over o of w[o, c, t] dy[o, p]        dx[c, s p + d t - b] += columns[c, t, p]

With one tap and unit stride the columns are the result. Weights are transposed before they are reshaped to a matrix, so
that the runtime does not fuse the Transpose into the product: it would then transpose them again for every sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.lowering.conv.forward import samples_as_columns
from onnx_convgrad.lowering.conv.kernels import plain_conv, reverse_taps
from onnx_convgrad.lowering.conv.layout import product_of_samples, x_dims, y_dims
from onnx_convgrad.lowering.conv.patches import scatter_columns
from onnx_convgrad.lowering.conv.requirements import (
    conv_kernel,
    is_empty,
    known_kernel,
    not_empty,
    products_of_samples,
    several_samples,
    static_groups,
    static_kernel,
    transposed_kernel,
    unit_stride,
)
from onnx_convgrad.lowering.table import Query, lowering, needs


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


# -- columns -----------------------------------------------------------------------------------------------------------


def has_col2im(q: Query) -> str | None:
    if not q.target.on_cpu or q.dtype != ir.DataType.FLOAT:
        return f"the {q.target.name} provider has no Col2Im for {q.dtype.name}"
    return None


is_pointwise = needs(lambda s: s.pointwise, "the kernel is not 1x1 with unit stride and no padding")


def col2im_geometry(q: Query) -> str | None:
    if q.spec.negative_padding:
        return "Col2Im takes no negative padding"
    if q.spec.pointwise:
        return "a 1x1 kernel leaves nothing to add up"
    if q.spec.rank > 2:
        return "ONNX Runtime before 1.28 adds up windows wrongly over three axes"
    return None


def tap_rows(e: Emitter, w: ir.Value, channels: Dim, features: Dim, spec: ConvSpec) -> ir.Value:
    """w [O, C/g, *k] as matrices [C taps, O], or [g, C/g taps, O/g]."""
    g, taps = spec.groups, spec.taps or 1
    inner, per = e.size_div(channels, g), e.size_div(features, g)
    if g == 1:
        w = e.transpose(e.reshape(w, [features, inner, taps]), [1, 2, 0])
        return e.reshape(w, [e.size_mul(inner, taps), features])
    w = e.transpose(e.reshape(w, [g, per, inner, taps]), [0, 2, 3, 1])
    return e.reshape(w, [g, e.size_mul(inner, taps), per])


def columns(e: Emitter, n: Call, spec: ConvSpec, *, folded: bool) -> ir.Value:
    """[N, C taps, P], by one product per group for each sample, or for the whole batch (`folded`)."""
    dy, g = n["dY"], spec.groups
    batch, features, *y = y_dims(e, dy, spec)
    channels, taps = x_dims(e, n["X_like"], spec)[1], spec.taps or 1
    if not folded:
        sizes = [batch, e.size_mul(e.size_div(channels, g), taps), e.size_div(features, g), e.size_mul(*y)]
        return product_of_samples(e, tap_rows(e, n["W"], channels, features, spec), dy, sizes, g)
    points = e.size_mul(*y)
    matrix = tap_rows(e, n["W"], channels, features, spec)
    product = e.matmul(matrix, samples_as_columns(e, dy, batch, features, points, g))
    product = e.reshape(product, [e.size_mul(channels, taps), batch, points])
    return e.transpose(product, [1, 0, 2])


def add_up(e: Emitter, product: ir.Value, n: Call, spec: ConvSpec) -> ir.Value:
    """The columns added into the gradient by Col2Im over two axes; over others it is wrong before ONNX Runtime 1.28."""
    size = x_dims(e, n["X_like"], spec)
    lead = 2 - spec.rank  # a row is an image of one row
    ones, zeros = (1,) * lead, (0,) * lead
    image = e.op(
        "Col2Im",
        product,
        e.vector([*ones, *size[2:]]),
        e.ints([*ones, *(k or 1 for k in spec.kernel)]),
        dilations=(*ones, *spec.dilations),
        pads=(*zeros, *spec.begin, *zeros, *spec.end),
        strides=(*ones, *spec.strides),
    )
    return e.reshape(image, size) if lead else image


FOLDED = [not_empty, several_samples]


@lowering("ConvInputGrad", "folded_gemm", requires=[*FOLDED, is_pointwise])
def folded_gemm(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """1x1: one MatMul for the whole batch."""
    return e.reshape(columns(e, n, spec, folded=True), x_dims(e, n["X_like"], spec))


COL2IM = [not_empty, has_col2im, known_kernel, col2im_geometry]


@lowering("ConvInputGrad", "col2im", requires=COL2IM)
def col2im(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """One MatMul per sample to columns, and Col2Im."""
    return add_up(e, columns(e, n, spec, folded=False), n, spec)


@lowering("ConvInputGrad", "folded_col2im", requires=[*COL2IM, *FOLDED])
def folded_col2im(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """One MatMul for the whole batch to columns, and Col2Im; for small images with many channels."""
    return add_up(e, columns(e, n, spec, folded=True), n, spec)
