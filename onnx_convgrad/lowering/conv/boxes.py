"""Convolutions whose padding is most of what their taps read: as products that leave it out.

A kernel that is dilated by 24 reads an image of 28 points mostly from outside (atrous pyramids, long causal convolutions).
Outputs that the same taps reach from inside the image form a box, and each box is one product over its own taps:

    y[:, box] = sum over the taps t of the box of W[t] x[:, s box + d t - b]

Along each axis the boxes are ranges of outputs, so that three taps make at most five of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import biased
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.lowering.conv.empty_batch import product_of_samples
from onnx_convgrad.lowering.conv.kernels import back_padding
from onnx_convgrad.lowering.conv.shared import (
    features_of,
    not_empty,
    one_group,
    several_taps,
    static_sizes,
    unit_stride,
    x_dims,
    y_dims,
)
from onnx_convgrad.lowering.table import Query, lowering

_MOST_BOXES = 49
_LEAST_PADDING = 0.5
"""Of what the taps read; with less of it, moving the boxes costs more than is left out."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a convolution, and what its taps read of the image."""

    have: int
    want: int
    kernel: int
    stride: int
    dilation: int
    begin: int

    def reached(self, tap: int) -> range:
        """The outputs p that a tap reads inside the image for: those with 0 <= s p + d t - b < size."""
        start = self.dilation * tap - self.begin
        low, high = max(0, -(start // self.stride)), min(self.want, (self.have - 1 - start) // self.stride + 1)
        return range(low, max(low, high))

    def read(self, outputs: range, tap: int) -> tuple[int, int]:
        """Where a tap reads for outputs in a row, in steps of the stride: start and end."""
        start = self.stride * outputs.start + self.dilation * tap - self.begin
        return start, start + self.stride * (len(outputs) - 1) + 1

    def parts(self) -> list[tuple[range, list[int]]]:
        """Outputs in a row that the same taps reach, and those taps."""
        reached = [self.reached(t) for t in range(self.kernel)]
        cuts = sorted({0, self.want, *(edge for r in reached if r for edge in (r.start, r.stop))})
        return [(range(a, b), [t for t, r in enumerate(reached) if a in r]) for a, b in itertools.pairwise(cuts)]


def forward_axes(spec: ConvSpec) -> list[Axis]:
    return [
        Axis(x or 1, y or 1, k or 1, s, d, b)
        for x, y, k, s, d, b in zip(spec.x, spec.y, spec.kernel, spec.strides, spec.dilations, spec.begin, strict=True)
    ]


def backward_axes(spec: ConvSpec) -> list[Axis]:
    """Of the convolution of dY, at unit stride, with the kernel turned around."""
    begin, _ = back_padding(spec)
    return [
        Axis(y or 1, x or 1, k or 1, 1, d, b)
        for x, y, k, d, b in zip(spec.x, spec.y, spec.kernel, spec.dilations, begin, strict=True)
    ]


# -- requirements ------------------------------------------------------------------------------------------------------


def much_padding(axes_of: Callable[[ConvSpec], list[Axis]]) -> Callable[[Query], str | None]:
    def requirement(q: Query) -> str | None:
        axes = axes_of(q.spec)
        parts = [axis.parts() for axis in axes]
        boxes = math.prod(len(found) for found in parts)
        if boxes > _MOST_BOXES:
            return f"the outputs form {boxes} boxes"
        read = math.prod(sum(len(outputs) * len(taps) for outputs, taps in found) for found in parts)
        padding = 1 - read / math.prod(axis.want * axis.kernel for axis in axes)
        return None if padding >= _LEAST_PADDING else f"only {padding:.0%} of what the taps read is padding"

    return requirement


# -- the products ------------------------------------------------------------------------------------------------------


def _boxes(
    e: Emitter,
    v: ir.Value,
    inner: Dim,
    matrices: dict[tuple[int, ...], ir.Value],
    axes: Sequence[Axis],
    size: list[Dim],
    *,
    turned: bool,
) -> ir.Value:
    """The convolution of v [N, K, *have] to `size` [N, M, *want], for the matrix of every tap: [M, K], or [K, M] turned."""
    batch, outputs, spatial = size[0], size[1], list(range(2, 2 + len(axes)))

    def product(box: Sequence[tuple[range, list[int]]]) -> ir.Value:
        points = [len(where) for where, _ in box]
        chosen = list(itertools.product(*(taps for _, taps in box)))
        shape: list[Dim] = [batch, outputs, *points]
        if not chosen:
            return e.op("Expand", e.scalar(0, v), e.vector(shape))
        seen = []
        for tap in chosen:
            starts, ends = zip(
                *(a.read(where, t) for a, (where, _), t in zip(axes, box, tap, strict=True)), strict=True
            )
            seen.append(e.slice(v, starts, ends, spatial, [a.stride for a in axes]))
        matrix = e.concat([matrices[tap] for tap in chosen], axis=0 if turned else 1)
        if turned:
            matrix = e.transpose(matrix, [1, 0])
        sizes = [batch, outputs, e.size_mul(inner, len(chosen)), math.prod(points)]
        return e.reshape(product_of_samples(e, matrix, e.concat(seen, axis=1), sizes, 1), shape)

    def joined(*box: tuple[range, list[int]]) -> ir.Value:
        if len(box) == len(axes):
            return product(box)
        return e.concat([joined(*box, part) for part in axes[len(box)].parts()], axis=2 + len(box))

    return joined()


def _matrices(e: Emitter, w: ir.Value, spec: ConvSpec, *, turned: bool) -> dict[tuple[int, ...], ir.Value]:
    """The matrix [O, C] of every tap, of the kernel turned around if asked for."""
    features = features_of(e, w, spec)
    channels: Dim = spec.channels if spec.channels is not None else e.dim(w, 1)
    count = spec.taps or 1
    rows = e.transpose(e.reshape(w, [features, channels, count]), [2, 0, 1])
    each = [e.squeeze(e.slice(rows, [t], [t + 1], [0]), [0]) for t in range(count)]
    taps = itertools.product(*(range(k or 1) for k in spec.kernel))
    return dict(zip(taps, each[::-1] if turned else each, strict=True))


_REQUIRES = [not_empty, static_sizes, one_group, several_taps]


@lowering("Conv", "boxes", requires=[*_REQUIRES, much_padding(forward_axes)])
def boxes_forward(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """One MatMul for each box of outputs, over the taps that read no padding there."""
    x, w, bias, axes = n["X"], n["W"], n.get("B"), forward_axes(spec)
    features = features_of(e, w, spec)
    batch, channels, *_ = x_dims(e, x, spec)
    size = [batch, features, *(axis.want for axis in axes)]
    result = _boxes(e, x, channels, _matrices(e, w, spec, turned=False), axes, size, turned=False)
    return biased(e, result, bias, spec.rank)


@lowering("ConvInputGrad", "boxes", requires=[*_REQUIRES, unit_stride, much_padding(backward_axes)])
def boxes_input_grad(e: Emitter, n: Call, spec: ConvSpec) -> ir.Value:
    """`flipped_conv` as one MatMul for each box of outputs, over the taps that read no padding there."""
    dy, size = n["dY"], x_dims(e, n["X_like"], spec)
    features = y_dims(e, dy, spec)[1]
    matrices = _matrices(e, n["W"], spec, turned=True)
    return _boxes(e, dy, features, matrices, backward_axes(spec), size, turned=True)
