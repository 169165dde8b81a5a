"""Slice, Pad and CenterCropPad: cutting and padding with zeros are adjoint to each other.

Amounts may be constants or computed by the graph, axes may count from either end, and steps have any size and sign. If the
graph computes the axes or the steps, the cotangent is scattered to the positions that the operator selected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import AxesOf, along, numbers, operand, pick
from onnx_convgrad.autodiff.per_sample.shape_vectors import entries
from onnx_convgrad.autodiff.registry import Cotangents, linear
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Dim, Emitter, known
from onnx_convgrad.ir.scatter import insert_zeros
from onnx_convgrad.rules.movement import adjoint_by_positions, entry_of

_END = 2**63 - 1
_BEGIN = -(2**63) + 1
_LAST = (-1, 2**31 - 1, 2**63 - 1)
_FAR_BELOW = -(2**31)


def _numbers(e: Emitter, value: ir.Value | None) -> list[int] | None:
    """A constant vector as Python numbers."""
    array = e.constant_of(value)
    return None if array is None else [int(v) for v in array.reshape(-1)]


# -- Slice -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cut:
    """The elements that a Slice selects on one axis: `start, start + step, ...`, or all of them in reverse order."""

    axis: int
    start: Dim
    step: int
    reversal: bool


def _named(n: Call, rank: int) -> list[int]:
    """The operand `axes`; without it as many of the first axes as there are starts."""
    if n.get("axes") is not None:
        return numbers(n, "axes")
    count = known(n["starts"].shape[0]) if n["starts"].shape else None
    return list(range(len(numbers(n, "starts")) if count is None else count))


def _steps(n: Call, axes: Sequence[int]) -> list[int]:
    return numbers(n, "steps") if n.get("steps") is not None else [1] * len(axes)


def _sliced(n: Call, rank: int) -> list[int]:
    """The axes of which a part is taken; a slice from 0 to the end with step 1 is the whole axis."""
    starts, axes = n["starts"], _named(n, rank)
    bounds, steps = [constant_of(starts), constant_of(n["ends"])], _steps(n, axes)
    if any(bound is None for bound in bounds):
        return axes
    firsts, lasts = (np.ravel(bound).tolist() for bound in bounds if bound is not None)
    return [
        axis
        for axis, first, last, step in zip(axes, firsts, lasts, steps, strict=True)
        if first != 0 or last < _WHOLE or step != 1
    ]


_WHOLE = 2**31 - 1
"""Smallest end of a slice that exporters write for the end of any axis."""


@linear(
    "Slice", wrt="data", factors=along(_sliced, pick("takes part of"), AxesOf(_named, operand="axes")), moves="selects"
)
def slice_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[j] = x[b + s j]: dx[b + s j] = g[j], zero elsewhere."""
    x, gy = n["data"], g["output"]
    cuts = _cuts(e, n)
    strided = any(abs(cut.step) > 1 for cut in cuts or ())
    if cuts is None or (strided and x.shape is None and gy.shape is None):
        return adjoint_by_positions(e, lambda v: e.op("Slice", v, *n.inputs[1:]), x, gy, unique=True)
    return _unslice(e, x, gy, cuts)


def _cuts(e: Emitter, n: Call) -> list[_Cut] | None:
    """The cut on each axis of a Slice, `None` if its axes or steps are unknown."""
    try:
        axes = _named(n, 0)
        steps = _steps(n, axes)
    except UnsupportedCase:
        return None
    starts = [entry_of(e, n["starts"], i) for i in range(len(axes))]
    ends = _numbers(e, n["ends"]) or [0] * len(axes)
    return [
        _Cut(axis, start, step, reversal=step == -1 and end <= _FAR_BELOW and isinstance(start, int) and start in _LAST)
        for axis, start, end, step in zip(axes, starts, ends, steps, strict=True)
    ]


_FAR_STEP = 1024
"""Largest step whose zeros are inserted without a look at the sizes; more zeros may exceed the data."""


def _unslice(e: Emitter, x: ir.Value, gy: ir.Value, cuts: list[_Cut]) -> ir.Value:
    """Reverse the axes with negative steps, insert s - 1 zeros after every element, and pad to the size of x."""
    partial = [cut for cut in cuts if not cut.reversal]
    for at, cut in enumerate(partial):
        if abs(cut.step) > _FAR_STEP and e.dim(gy, cut.axis) == 1:  # no zeros between elements if there is one
            partial[at] = replace(cut, step=cut.step // abs(cut.step))
    counts = [e.dim(gy, cut.axis) for cut in partial]
    for cut in cuts:
        if cut.step < 0:
            gy = e.slice(gy, [-1], [_BEGIN], [cut.axis], [-1])
    gy = insert_zeros(e, gy, x, {cut.axis: abs(cut.step) for cut in partial if abs(cut.step) > 1})
    begin: list[Dim] = []
    end: list[Dim] = []
    for cut, count in zip(partial, counts, strict=True):
        size = e.dim(x, cut.axis)
        first = _first(e, cut.start, size, backwards=cut.step < 0)
        if cut.step < 0:  # the lowest selected element
            first = e.size_sub(first, e.size_mul(e.size_sub(count, 1), -cut.step))
        begin.append(first)
        end.append(e.size_sub(size, e.size_add(first, e.size_mul(count, abs(cut.step)))))
    return e.pad(gy, begin, end, [cut.axis for cut in partial]) if partial else gy


def _first(e: Emitter, start: Dim, size: Dim, *, backwards: bool) -> Dim:
    """The first selected element: negative numbers count from the end, and the result is clamped to the axis."""
    top = e.size_sub(size, 1) if backwards else size
    if isinstance(start, int):
        if start < 0:
            return e.size_max(e.size_add(size, start), 0)
        # A start beyond the end selects nothing; the negative end padding then trims the excess begin padding.
        return e.size_min(start, top) if backwards or isinstance(size, int) else start
    absolute = e.where(e.compare("Less", start, 0), e.size_add(start, size), start)
    return e.size_max(e.size_min(absolute, top), 0)


# -- Pad ---------------------------------------------------------------------------------------------------------------


def _padded(n: Call, rank: int) -> list[int]:
    """The axes that a Pad makes longer or shorter, or may."""
    axes = numbers(n, "axes") if n.get("axes") is not None else list(range(rank))
    amounts = entries(n["pads"]) or [None] * 2 * len(axes)
    return [axis for at, axis in enumerate(axes) if any(amount != 0 for amount in amounts[at :: len(axes)])]


@linear("Pad", wrt=("data", "constant_value"), factors=along(_padded, pick("pads"), operand("axes")), moves="fills")
def pad_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[j] = x[p(j)], or the constant c outside: dx[i] = sum of g[j] over all j with p(j) = i, dc = sum of g outside."""
    x, gy = n["data"], g["output"]
    if n.string("mode", "constant") == "constant":
        return {"data": lambda: _unpad(e, n, gy), "constant_value": lambda: _outside(e, n, gy)}
    return {"data": lambda: _fold(e, n, x, gy), "constant_value": lambda: e.zeros_like(n["constant_value"])}


def _amounts(e: Emitter, n: Call) -> list[tuple[int, int, int]] | None:
    """(axis, begin, end) of every padded axis, if all are constants."""
    pads, axes = _numbers(e, n["pads"]), _numbers(e, n.get("axes"))
    if pads is None or (axes is None and n.get("axes") is not None):
        return None
    half = len(pads) // 2
    amounts = zip(axes or range(half), pads[:half], pads[half:], strict=True)
    return [(axis, begin, end) for axis, begin, end in amounts if begin or end]


def _unpad(e: Emitter, n: Call, gy: ir.Value) -> ir.Value:
    """The part of g over the data: a Slice, or a Pad with the opposite amounts if these are negative or unknown."""
    amounts = _amounts(e, n)
    if amounts is None:
        return e.op("Pad", gy, e.all_pads(gy, e.op("Neg", n["pads"]), n.get("axes")))
    axes = [axis for axis, _, _ in amounts]
    if any(min(begin, end) < 0 for _, begin, end in amounts):
        return e.pad(gy, [-begin for _, begin, _ in amounts], [-end for _, _, end in amounts], axes)
    return e.slice(gy, [begin for _, begin, _ in amounts], [-end if end else _END for _, _, end in amounts], axes)


def _outside(e: Emitter, n: Call, gy: ir.Value) -> ir.Value:
    """dc, as a sum over a mask; the difference of the total and the inside would cancel."""
    pads = e.all_pads(n["data"], n["pads"], n.get("axes"))
    frame = e.op("Pad", e.zeros_like(n["data"]), pads, e.scalar(1, gy))
    return e.reshape_like(e.op("ReduceSum", e.mul(gy, e.typed(frame, gy)), keepdims=0), n["constant_value"])


def _fold(e: Emitter, n: Call, x: ir.Value, gy: ir.Value) -> ir.Value:
    """Add the border to the rows that it was copied from, one axis after the other."""
    mode, amounts = n.string("mode", "constant"), _amounts(e, n)
    if amounts is None or not all(_foldable(mode, x, *amount) for amount in amounts):
        move = n.attributes()
        pads = e.all_pads(x, n["pads"], n.get("axes"))
        return adjoint_by_positions(e, lambda v: e.op("Pad", v, pads, **move), x, gy)
    for axis, begin, end in amounts:
        size = e.dim(x, axis)
        gy = _patched(e, gy, axis, begin, size, _border(e, mode, gy, axis, begin, end, size))
    return gy


def _foldable(mode: str, x: ir.Value, axis: int, begin: int, end: int) -> bool:
    """Whether the border is at most one copy of each row: not with negative padding or a border wider than the axis."""
    if mode not in ("reflect", "edge", "wrap") or min(begin, end) < 0:
        return False
    size = None if x.shape is None else known(x.shape[axis])
    return mode != "wrap" or (size is not None and size >= max(begin, end))


Patch = tuple[Dim, int, ir.Value]
"""A value to add to some rows: the first row, the number of rows, and the value."""


def _border(e: Emitter, mode: str, gy: ir.Value, axis: int, begin: int, end: int, size: Dim) -> list[Patch]:
    """The cotangents of the border: patches for the rows of x that it was copied from, in the order of these rows.

    reflect: y[b - 1 - t] = x[1 + t], y[b + n + t] = x[n - 2 - t]
    edge:    y[t] = x[0] for t < b,   y[b + n + t] = x[n - 1]
    wrap:    y[t] = x[n - b + t] for t < b,   y[b + n + t] = x[t]
    """
    front: Patch | None = None
    back: Patch | None = None
    if mode == "wrap":
        back = (0, end, e.slice(gy, [-end], [_END], [axis])) if end else None
        front = (e.size_sub(size, begin), begin, e.slice(gy, [0], [begin], [axis])) if begin else None
        return [patch for patch in (back, front) if patch is not None]
    if mode == "reflect":
        front = (1, begin, e.slice(gy, [begin - 1], [_BEGIN], [axis], [-1])) if begin else None
        back = (e.size_sub(size, 1 + end), end, e.slice(gy, [-1], [-1 - end], [axis], [-1])) if end else None
    else:
        front = (0, 1, e.reduce_sum(e.slice(gy, [0], [begin], [axis]), [axis])) if begin else None
        back = (e.size_sub(size, 1), 1, e.reduce_sum(e.slice(gy, [-end], [_END], [axis]), [axis])) if end else None
    return [patch for patch in (front, back) if patch is not None]


def _patched(e: Emitter, gy: ir.Value, axis: int, begin: int, size: Dim, patches: Sequence[Patch]) -> ir.Value:
    """The rows of gy over the data, from `begin` on, plus the patches: a Concat if all positions are known and disjoint."""
    parts: list[ir.Value] = []
    at = 0
    for row, count, value in patches:
        if not isinstance(row, int) or row < at:
            return _summed(e, gy, axis, begin, size, patches)
        if row > at:
            parts.append(e.slice(gy, [begin + at], [begin + row], [axis]))
        parts.append(e.add(e.slice(gy, [begin + row], [begin + row + count], [axis]), value))
        at = row + count
    if not isinstance(size, int) or at > size:
        return _summed(e, gy, axis, begin, size, patches)
    if at < size:
        parts.append(e.slice(gy, [begin + at], [begin + size], [axis]))
    return e.concat(parts, axis)


def _summed(e: Emitter, gy: ir.Value, axis: int, begin: int, size: Dim, patches: Sequence[Patch]) -> ir.Value:
    """The cotangent with patches that may overlap: the sum of all patches, each padded with zeros."""
    terms = [e.slice(gy, [begin], [e.size_add(size, begin)], [axis])]
    for row, count, value in patches:
        terms.append(e.pad(value, [row], [e.size_sub(e.size_sub(size, count), row)], [axis]))
    return e.sum(terms)


# -- CenterCropPad -----------------------------------------------------------------------------------------------------


_CROPPED = along(lambda n, rank: n.ints("axes") or range(rank), pick("crops or pads"))


@linear("CenterCropPad", wrt="input_data", factors=_CROPPED, moves="fills")
def center_crop_pad_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y = x cropped or padded from n to m rows: dx = g padded or cropped from m to n.

    Both leave floor(|n - m| / 2) rows in front, so each is the adjoint of the other.
    """
    x, axes = n["input_data"], n.ints("axes")
    shape = e.shape(x) if axes is None else e.vector([e.dim(x, axis) for axis in axes])
    return e.op("CenterCropPad", g["output_data"], shape, axes=axes)
