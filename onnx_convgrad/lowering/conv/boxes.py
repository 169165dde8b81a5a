"""Convolutions that read mostly padding, as products that leave the padding out.

A kernel that is dilated by 24 reads an image of 28 points mostly from outside (atrous pyramids, long causal convolutions).
Outputs that the same taps reach from inside the image form a box, and each box is one product over its own taps:

    y[:, box] = sum over the taps t of the box of W[t] x[:, s box + d t - b]

Along each axis the boxes are ranges of outputs, so that three taps make at most five of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.ir.convolution import biased
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.geometry import Axis, ConvSpec
from onnx_convgrad.lowering.conv.both_ways import Images, both_ways
from onnx_convgrad.lowering.conv.layout import product_of_samples, zeros
from onnx_convgrad.lowering.conv.requirements import not_empty, one_group, several_taps, static_sizes, unit_stride
from onnx_convgrad.lowering.table import Query, Requirement

_MOST_BOXES = 49
_LEAST_PADDING = 0.5
"""Smallest share of padding in the reads of the taps; with less, moving the boxes costs more than it saves."""

_Part = tuple[range, list[int]]
"""Consecutive outputs that the same taps reach, and those taps."""


def _parts(axis: Axis) -> list[_Part]:
    reached = [axis.reached(t) for t in range(axis.kernel)]
    cuts = sorted({0, axis.y, *(edge for r in reached if r for edge in (r.start, r.stop))})
    return [(range(a, b), [t for t, r in enumerate(reached) if a in r]) for a, b in itertools.pairwise(cuts)]


def _much_padding(backward: bool) -> Requirement:
    def requirement(q: Query) -> str | None:
        axes = q.spec.back_axes if backward else q.spec.axes
        parts = [_parts(axis) for axis in axes]
        boxes = math.prod(len(found) for found in parts)
        if boxes > _MOST_BOXES:
            return f"the outputs form {boxes} boxes"
        read = math.prod(sum(len(outputs) * len(taps) for outputs, taps in found) for found in parts)
        padding = 1 - read / math.prod(axis.y * axis.kernel for axis in axes)
        return None if padding >= _LEAST_PADDING else f"only {padding:.0%} of what the taps read is padding"

    return requirement


@both_ways(
    "boxes",
    [not_empty, static_sizes, one_group, several_taps],
    lambda backward: [*([unit_stride] if backward else []), _much_padding(backward)],
)
def boxes(e: Emitter, spec: ConvSpec, images: Images) -> ir.Value:
    """One MatMul for each box of outputs, over the taps that read no padding there."""
    axes = spec.back_axes if images.backward else spec.axes
    batch, features = images.want[:2]
    matrices = _matrices(e, images, spec)

    def product(box: Sequence[_Part]) -> ir.Value:
        points = [len(where) for where, _ in box]
        chosen = list(itertools.product(*(taps for _, taps in box)))
        shape = [batch, features, *points]
        if not chosen:
            return zeros(e, images.v, shape)
        seen = []
        for tap in chosen:
            ranges = [axis.read(where, t) for axis, (where, _), t in zip(axes, box, tap, strict=True)]
            starts, ends = zip(*ranges, strict=True)
            seen.append(e.slice(images.v, starts, ends, spec.spatial_axes, [axis.stride for axis in axes]))
        matrix = e.concat([matrices[tap] for tap in chosen], axis=0 if images.backward else 1)
        if images.backward:
            matrix = e.transpose(matrix, [1, 0])
        sizes = [batch, features, e.size_mul(images.have[1], len(chosen)), math.prod(points)]
        return e.reshape(product_of_samples(e, matrix, e.concat(seen, axis=1), sizes, 1), shape)

    def joined(*box: _Part) -> ir.Value:
        if len(box) == len(axes):
            return product(box)
        return e.concat([joined(*box, part) for part in _parts(axes[len(box)])], axis=2 + len(box))

    return biased(e, joined(), images.bias, spec.rank)


def _matrices(e: Emitter, images: Images, spec: ConvSpec) -> dict[tuple[int, ...], ir.Value]:
    """The matrix [O, C] of every tap, with the taps reversed for the data gradient."""
    features, channels = (images.have[1], images.want[1]) if images.backward else (images.want[1], images.have[1])
    count = spec.taps or 1
    rows = e.transpose(e.reshape(images.w, [features, channels, count]), [2, 0, 1])
    each = [e.squeeze(e.slice(rows, [t], [t + 1], [0]), [0]) for t in range(count)]
    taps = itertools.product(*(range(axis.kernel) for axis in spec.axes))
    return dict(zip(taps, each[::-1] if images.backward else each, strict=True))
