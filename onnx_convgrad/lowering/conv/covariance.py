"""Normalization of a pointwise convolution by the covariance of its data, in float16: three abstract operators.

With M points of C channels in X [N, C, ...], of means m:

    Center                X - m
    Covariance            X X' / M                               [C, C] in float32
    NormalizedKernel      [scale (diag(W S W') + eps)^(-1/2) W, B]   [K, C + 1] in float32

`backends.covariance` emits them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter, known
from onnx_convgrad.ir.geometry import HINT_BATCH
from onnx_convgrad.ir.half_sums import channel_sum
from onnx_convgrad.lowering.table import lowering, spec_builder

_SHARE = 2.0**-5
"""Part of each sample in sums over the batch, which float16 must hold."""


@dataclass(frozen=True)
class PointwiseSpec:
    """Shapes of X, with `None` for an unknown batch, and of the matrix W that is multiplied by each of its points."""

    x_shape: tuple[int | None, ...]
    w_shape: tuple[int, ...] = ()

    @property
    def per_feature(self) -> tuple[int, ...]:
        return self.w_shape[:1]

    @property
    def per_channel(self) -> tuple[int]:
        return (self.x_shape[1] or 1,)

    @property
    def square(self) -> tuple[int, int]:
        return self.x_shape[1] or 1, self.x_shape[1] or 1

    def hinted(self) -> PointwiseSpec:
        """This product with a typical batch, if the batch is unknown."""
        batch, *rest = self.x_shape
        return replace(self, x_shape=(HINT_BATCH if batch is None else batch, *rest))

    def __str__(self) -> str:
        sizes = ("x".join("?" if size is None else str(size) for size in s) for s in (self.x_shape, self.w_shape) if s)
        return f"Pointwise {', '.join(sizes)}"


@spec_builder("Center", ("x_shape",))
@spec_builder("Covariance", ("x_shape",))
def _data_spec(n: Call) -> PointwiseSpec:
    return PointwiseSpec(tuple(known(d) for d in n["X"].shape or ()))


_KERNEL_OPERANDS = "x_shape", "w_shape", "per_feature", "per_feature", "per_channel", "square", "w_shape", "per_feature"


@spec_builder("NormalizedKernel", _KERNEL_OPERANDS)
def _kernel_spec(n: Call) -> PointwiseSpec:
    return PointwiseSpec(tuple(known(d) for d in n["X"].shape or ()), tuple(known(d) or 1 for d in n["W"].shape or ()))


@lowering("Center", "subtract")
def center(e: Emitter, n: Call, _: PointwiseSpec) -> ir.Value:
    """Subtract the mean and what rounding left of it, as a BatchNormalization: in one pass, which adds in float32."""
    x = n["X"]
    dtype, mean = x.dtype or ir.DataType.FLOAT16, channel_sum(e, x, mean=True)
    rounded = e.cast(mean, dtype)
    rest = e.cast(e.sub(e.cast(rounded, ir.DataType.FLOAT), mean), dtype)
    ones = e.full_like(rounded, 1)
    return e.op("BatchNormalization", x, ones, rest, rounded, ones, epsilon=0.0)


@lowering("Covariance", "sample_products")
def sample_products(e: Emitter, n: Call, spec: PointwiseSpec) -> ir.Value:
    """One MatMul per sample, divided by its points before it is rounded, and the mean over the samples."""
    x = n["X"]
    channels, *sizes = (size or 1 for size in spec.x_shape[1:])
    batch, points = e.dim(x, 0), math.prod(sizes)
    rows = e.reshape(x, [batch, channels, points])
    each = e.matmul(e.mul(rows, 1 / points), e.transpose(rows, [0, 2, 1]))
    ones = e.op("Expand", e.const(np.full((1, 1), _SHARE), x.dtype), e.vector([1, batch]))
    total = e.cast(e.matmul(ones, e.reshape(each, [batch, channels**2])), ir.DataType.FLOAT)
    count = e.mul(e.size_as(batch, total), _SHARE)
    return e.reshape(e.div(total, count), [channels, channels])


@lowering("NormalizedKernel", "multiply")
def normalized_kernel(e: Emitter, n: Call, _: PointwiseSpec) -> ir.Value:
    """Multiply the kernel by the factors."""
    factor = e.unsqueeze(e.mul(n["scale"], n["inverse"]), [1])
    return e.concat([e.mul(n["W"], factor), e.unsqueeze(n["B"], [1])], 1)
