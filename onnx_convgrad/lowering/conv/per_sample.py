"""The weight gradient of a convolution for each sample of the batch, and its squared norm.

    dw[n, o, c, t] = sum over p of dy[n, o, p] x[n, c, s p + d t - b]

is the ordinary gradient without its sum over n. So every lowering of the weight gradient that multiplies matrices sample by
sample serves here too; or the samples become groups of one convolution: `[N, C] -> [1, N * C]` with `N * groups` groups.

The squared norm of a product L R^T over points p does not need the product: with the Gram matrices of the points,

    |L R^T|^2 = sum over p, q of (L^T L)[p, q] (R^T R)[p, q]

which is cheap where there are few points (Goodfellow 2015, arXiv:1510.01799; for convolutions Rochette et al. 2019,
arXiv:1912.06015).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.factors import having, mix, notation
from onnx_convgrad.autodiff.per_sample.batch import Batch
from onnx_convgrad.autodiff.registry import Cotangents, expansion, per_sample
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import CONVOLUTIONS, as_conv, padded_data, weight_grad, window
from onnx_convgrad.ir.emit import DOMAIN, Emitter, known
from onnx_convgrad.ir.geometry import HINT_BATCH, HINT_CHANNELS, HINT_SIZE, ConvSpec, Window
from onnx_convgrad.ir.samples import squares
from onnx_convgrad.lowering.chunks import stand_in
from onnx_convgrad.lowering.conv import interleaved  # noqa: F401 - its lowerings serve here too
from onnx_convgrad.lowering.conv.layout import zeros
from onnx_convgrad.lowering.conv.patches import gather_patches, patches_by_conv
from onnx_convgrad.lowering.conv.requirements import (
    conv_kernel,
    is_empty,
    known_batch,
    known_channels,
    known_kernel,
    not_empty,
    static_kernel,
)
from onnx_convgrad.lowering.conv.spec import grad_spec
from onnx_convgrad.lowering.conv.weight_grad import im2col_gemm, sizes_of
from onnx_convgrad.lowering.table import Requirement, lowering, lowerings_of, needs, spec_builder

# -- rules -------------------------------------------------------------------------------------------------------------


def sample_grads(e: Emitter, x: ir.Value, dy: ir.Value, like: ir.Value, win: Window) -> ir.Value:
    """The abstract gradient of each sample for the weight operand: `[N, *like.shape]`."""
    value = e.op("ConvPerSampleGrad", x, dy, like, domain=DOMAIN, **win.attributes)
    value.shape = None if like.shape is None else ir.Shape([None if x.shape is None else x.shape[0], *like.shape])
    return value


def _cotangents(e: Emitter, n: Call, gy: ir.Value, batch: Batch, operands: Callable[[], tuple[Any, ...]]) -> Cotangents:
    at = batch.of(n.y)

    def weight() -> ir.Value:
        x, dy, win = operands()
        grads = sample_grads(e, x, dy, n["W"], win)
        return grads if at.plain else batch.fit(grads, at, n["W"])

    return {"W": weight, "B": lambda: batch.sum(gy, at, [1])}


@per_sample("Conv")
def conv_per_sample(e: Emitter, n: Call, g: dict[str, Any], batch: Batch) -> Cotangents:
    """y[n, o, p] = b[o] + sum over c, t of x[n, c, s p + d t - pad] w[o, c, t]."""

    def operands() -> tuple[Any, ...]:
        x, win, _ = padded_data(e, n)
        return x, g["Y"], win

    return _cotangents(e, n, g["Y"], batch, operands)


@per_sample("ConvTranspose")
def conv_transpose_per_sample(e: Emitter, n: Call, g: dict[str, Any], batch: Batch) -> Cotangents:
    """y is the data gradient of a Conv whose output is x: the cotangent takes the role of the data."""

    def operands() -> tuple[Any, ...]:
        big, win = as_conv(e, n, g["Y"])
        return big, n["X"], win

    return _cotangents(e, n, g["Y"], batch, operands)


_MIXED = dict.fromkeys("ockpst", mix("convolves along"))
_EACH_GRAD = having(notation("n c *s, n o *p, o k *t -> n o k *t", broadcasts=False, **_MIXED), unread=frozenset((2,)))
_EACH_NORM = having(notation("n c *s, n o *p, o k *t -> n", broadcasts=False, **_MIXED), unread=frozenset((2,)))


@expansion(f"{DOMAIN}::ConvPerSampleGrad", wrt=("X", "dY"), factors=_EACH_GRAD, of=CONVOLUTIONS)
def conv_per_sample_grad(e: Emitter, n: Call) -> ir.Value:
    """The samples as groups of one ConvWeightGrad; if their number is unknown, the product with patches."""
    win = window(n)
    count = e.dim(n["X"], 0)
    if isinstance(count, int) and count > 0:
        x, dy, like = _folded(e, n, count)
        flat = Window(win.strides, win.dilations, win.begin, win.end, win.group * count)
        total = weight_grad(e, x, dy, like, flat)
        return e.typed(e.reshape(total, [count, *e.dims(n["W_like"])]), n.y)
    spec = grad_spec(n)
    require(spec.taps is not None, "the kernel size is not known while building.")
    return e.typed(im2col_gemm(e, n, spec), n.y)


@expansion(f"{DOMAIN}::ConvGradSquaredNorm", wrt=("X", "dY"), factors=_EACH_NORM, of=CONVOLUTIONS)
def conv_grad_squared_norm(e: Emitter, n: Call) -> ir.Value:
    """The sum of the squares of each sample's gradient."""
    win = window(n)
    return squares(e, sample_grads(e, n["X"], n["dY"], n["W_like"], win))


@expansion(f"{DOMAIN}::ProductSquaredNorm", wrt=("A", "B"), of=("MatMul", "Gemm"))
def product_squared_norm(e: Emitter, n: Call) -> ir.Value:
    """The sum of the squares of each matrix A[n] B[n]."""
    return squares(e, e.matmul(n["A"], n["B"]))


# -- the samples as groups ---------------------------------------------------------------------------------------------


def _folded(e: Emitter, n: Call, count: int) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The operands of one ConvWeightGrad of a single sample, whose channels are those of all samples."""

    def fold(value: ir.Value) -> ir.Value:
        _, channels, *size = e.dims(value)
        return e.reshape(value, [1, e.size_mul(channels, count), *size])

    like = n["W_like"]
    features, *rest = e.dims(like)
    wide = e.op("Expand", like, e.vector([count, *[1] * (1 + len(rest))]))  # only its shape is read
    return fold(n["X"]), fold(n["dY"]), e.reshape(wide, [e.size_mul(features, count), *rest])


def _as_groups_too(requirement: Requirement) -> Requirement:
    return lambda q: known_batch(q) or not_empty(q) or requirement(replace(q, spec=q.spec.samples_as_groups()))


def _declare_grouped(source: str) -> None:
    """Declare a lowering of the weight gradient for the samples as groups, and for the squared norms of its results."""
    name = "grouped_conv" if source == "conv_swap" else f"grouped_{source}"
    entry = lowerings_of("ConvWeightGrad")[source]

    def grouped(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
        count = spec.batch or 1
        attributes = [a for a in n.node.attributes.values() if a.name != "group"]
        attributes.append(ir.AttrInt64("group", spec.groups * count))
        with stand_in("ConvWeightGrad", DOMAIN, _folded(e, n, count), attributes) as call:
            total = entry.emit(e, call, spec.samples_as_groups())
        return e.reshape(total, [count, *e.dims(n["W_like"])])

    def squared(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
        return squares(e, grouped(e, n, spec))

    grouped.__doc__ = f"The samples as groups of one convolution, then `{source}`: {entry.summary}"
    squared.__doc__ = f"The gradients by `{name}`, squared and summed."
    requires = [_as_groups_too(r) for r in entry.requires]
    lowering("ConvPerSampleGrad", name, requires=requires)(grouped)
    lowering("ConvGradSquaredNorm", f"{name}_squares", requires=requires)(squared)


_SOURCES = "conv_swap masked_windows placed_windows batch_windows bands channel_rows moved_channel_rows".split()
"""Lowerings that are direct sums: they round as little in groups."""

for _source in _SOURCES:
    _declare_grouped(_source)


@lowering("ConvPerSampleGrad", "zeros", requires=[is_empty])
def sample_zeros(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """An empty batch or image: the gradients are zero, and some kernels refuse it."""
    return zeros(e, n["X"], [e.dim(n["X"], 0), *e.dims(n["W_like"])])


@lowering("ConvGradSquaredNorm", "zeros", requires=[is_empty])
def norm_zeros(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """An empty batch or image: the norms are empty or zero."""
    return zeros(e, e.wide(n["X"]), [e.dim(n["X"], 0)])


# -- squared norms -----------------------------------------------------------------------------------------------------


@lowering("ConvGradSquaredNorm", "gram", requires=[not_empty, conv_kernel, static_kernel, known_channels])
def gram(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """Gram matrices of the patches and of dy over the points, multiplied and summed; for few points."""
    seen = n["X"] if spec.pointwise else patches_by_conv(e, n["X"], spec.kernel, spec.window, spec.channels or 1)
    return _by_patches(e, n, seen, spec)


@lowering("ConvGradSquaredNorm", "gram_gemm", requires=[not_empty, known_kernel])
def gram_gemm(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """`gram` with patches by one strided Slice per tap; runs for every dtype."""
    return _by_patches(e, n, gather_patches(e, n["X"], sizes_of(e, n, spec)[3], spec), spec)


def _by_patches(e: Emitter, n: Call, seen: ir.Value, spec: ConvSpec) -> ir.Value:
    """The norms from all patches of x, listed as [N, C, K, *y]."""
    batch, channels, features, y = sizes_of(e, n, spec)
    points, rows = e.size_mul(*y), e.size_mul(channels, spec.taps or 1)
    patches = e.reshape(e.wide(seen), [batch, spec.groups, rows, points])
    dy = e.reshape(e.wide(n["dY"]), [batch, spec.groups, features, points])
    return _of_grams(e, e.matmul(e.swap_last(patches), patches), e.matmul(e.swap_last(dy), dy))


def _of_grams(e: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    product = e.mul(a, b)
    return e.reduce_sum(product, range(1, len(e.dims(product))), keepdims=False)


@dataclass(frozen=True)
class ProductSpec:
    """One matrix product per sample: `[batch, rows, points] x [batch, points, columns]`; `None` for unknown sizes."""

    batch: int | None
    rows: int | None
    points: int | None
    columns: int | None

    @property
    def left(self) -> tuple[int | None, ...]:
        return self.batch, self.rows, self.points

    @property
    def right(self) -> tuple[int | None, ...]:
        return self.batch, self.points, self.columns

    def hinted(self) -> ProductSpec:
        """This product with a typical number for every unknown size."""
        hints = (HINT_BATCH, HINT_CHANNELS, HINT_SIZE, HINT_CHANNELS)
        sizes = (self.batch, self.rows, self.points, self.columns)
        return ProductSpec(*(hint if size is None else size for size, hint in zip(sizes, hints, strict=True)))

    def __str__(self) -> str:
        b, r, p, c = ("?" if size is None else str(size) for size in (self.batch, self.rows, self.points, self.columns))
        return f"MatMul {b}x{r}x{p} * {b}x{p}x{c}"


@spec_builder("ProductSquaredNorm", ("left", "right"))
def _product_spec(n: Call) -> ProductSpec:
    a, b = ([None if v.shape is None else known(v.shape[i]) for i in range(3)] for v in (n["A"], n["B"]))
    return ProductSpec(a[0], a[1], a[2] if a[2] is not None else b[1], b[2])


one_point = needs(lambda s: s.points == 1, lambda s: f"a sample has {s.points or 'an unknown number of'} rows, not one")


@lowering("ProductSquaredNorm", "product_squares")
def product_squares(e: Emitter, n: Call, spec: ProductSpec) -> ir.Value:
    """The gradients by MatMul, squared and summed."""
    return squares(e, e.matmul(n["A"], n["B"]))


@lowering("ProductSquaredNorm", "product_gram")
def product_gram(e: Emitter, n: Call, spec: ProductSpec) -> ir.Value:
    """Gram matrices of both operands over the rows of a sample, multiplied and summed; for few rows."""
    a, b = e.wide(n["A"]), e.wide(n["B"])
    return _of_grams(e, e.matmul(e.swap_last(a), a), e.matmul(b, e.swap_last(b)))


@lowering("ProductSquaredNorm", "rank_one", requires=[one_point])
def rank_one(e: Emitter, n: Call, spec: ProductSpec) -> ir.Value:
    """One row per sample: |a|^2 |g|^2."""
    return e.mul(squares(e, n["A"]), squares(e, n["B"]))
