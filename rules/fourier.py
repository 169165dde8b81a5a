"""DFT and STFT, which are linear in the signal: the adjoint of the transform is N times its inverse.

    y[k] = sum over n of w^(k n) x[n], w = exp(-2 pi i / N)        dx[n] = N (inverse transform of g)[n]

As in the operators, the last axis holds the real and the imaginary part; for a real signal its size is 1.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import along, mix, notation, numbers
from onnx_convgrad.autodiff.registry import Cotangents, linear, multilinear
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter, known
from onnx_convgrad.ir.scatter import add_windows, adds_windows
from onnx_convgrad.rules.movement import extent, size_in, ungather


def _transformed(n: Call, rank: int) -> list[int]:
    """The axis of the signal, and the last axis, which holds real and imaginary parts."""
    return [*(numbers(n, "axis") if n.get("axis") is not None else [-2]), -1]


@linear("DFT", wrt="input", factors=along(_transformed, mix("transforms along")))
def dft_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y = transform of x: dx = N (inverse transform of g). y = inverse transform of x: dx = (transform of g) / N.

    Where `dft_length` cuts x, dx is padded with zeros; where it pads x, dx is cut.
    """
    x, gy, axis = n["input"], g["output"], _axis(e, n)
    size, length = _size_along(e, x, axis), n.get("dft_length")
    if n.int("inverse", 0) and n.int("onesided", 0):
        gx = _half_inverse_adjoint(e, gy, axis, size)
    elif n.int("inverse", 0):
        count = _size_along(e, gy, axis)
        gx = e.averaged(_transform(e, gy, axis), count)
        gx = _fitted(e, gx, axis, count, size, length=length)
    else:
        count = size
        if length is not None:
            count = size_in(e, length) if n.int("onesided", 0) else _size_along(e, gy, axis)
        gx = _fitted(e, _forward_adjoint(e, gy, axis, count), axis, count, size, length=length)
    return e.typed(e.slice(gx, [0], [e.dim(x, -1)], [-1]), x)


Axis: TypeAlias = int | ir.Value
"""An axis, as a number or, where only the run knows it, as an int64 vector of one element, counted from the first."""


def _axis(e: Emitter, n: Call) -> Axis:
    axis = n.get("axis")
    number = -2 if axis is None else e.number_of(axis)
    if axis is None or number is not None:
        return int(number or 0)
    place = e.op("Reshape", e.cast(axis, ir.DataType.INT64), e.ints([1]))
    rank = e.op("Shape", e.shape(n["input"]))
    return e.where(e.compare("Less", place, 0), e.op("Add", place, rank), place)


def _size_along(e: Emitter, x: ir.Value, axis: Axis) -> Dim:
    return e.dim(x, axis) if isinstance(axis, int) else e.op("Gather", e.shape(x), axis, axis=0)


def _transform(
    e: Emitter, x: ir.Value, axis: Axis, count: Dim | None = None, *, inverse: int = 0, onesided: int = 0
) -> ir.Value:
    """A DFT of `count` points, by default the size of the axis."""
    points = None
    if count is not None:
        points = e.const(np.int64(count)) if isinstance(count, int) else e.op("Squeeze", count, e.ints([0]))
    place = e.const(np.int64(axis)) if isinstance(axis, int) else e.op("Squeeze", axis, e.ints([0]))
    return e.op("DFT", x, points, place, inverse=inverse, onesided=onesided)


def _forward_adjoint(e: Emitter, gy: ir.Value, axis: Axis, count: Dim) -> ir.Value:
    """N times the inverse transform of `count` points; frequencies that a one-sided transform leaves out count as zero."""
    have = None if gy.shape is None or not isinstance(axis, int) else known(gy.shape[axis])
    points = None if have is not None and have == count else count
    return e.multiplied(_transform(e, gy, axis, points, inverse=1), count)


_LISTED = 2**20
"""Most frequencies whose weights are a constant."""


def _half_inverse_adjoint(e: Emitter, gy: ir.Value, axis: Axis, size: Dim) -> ir.Value:
    """y[n] = sum over k of c[k] Re(w^(-k n) x[k]) / N: dx[k] = c[k] / N (transform of g)[k].

    A frequency k also stands for N - k, so c = 2; for k = 0 and k = N/2 these are equal, and c = 1.
    """
    count = _size_along(e, gy, axis)
    bins = e.size_add(e.size_div(count, 2), 1)
    if isinstance(size, int) and isinstance(bins, int):
        require(size == bins, f"it reads {size} frequencies where {count} real points have {bins}.")
    twice = e.arange(bins, 2)
    if isinstance(count, int) and isinstance(bins, int) and bins <= _LISTED:
        weights = e.const(np.where(2 * np.arange(bins) % count == 0, 1, 2) / count, gy.dtype or ir.DataType.FLOAT)
    else:
        alone = e.compare("Equal", e.op("Mod", twice, count if isinstance(count, ir.Value) else e.ints([count])), 0)
        pairs = e.where(alone, e.scalar(1, gy), e.scalar(2, gy))
        weights = e.averaged(pairs, count)
    half = _transform(e, gy, axis, onesided=1)
    if not isinstance(axis, int):
        shape = e.op("Shape", half)
        is_axis = e.compare("Equal", e.arange(e.op("Shape", shape)), axis)
        return e.mul(half, e.op("Reshape", weights, e.where(is_axis, shape, 1)))
    after = -axis - 1 if axis < 0 else e.rank(gy) - axis - 1
    return e.mul(half, e.unsqueeze(weights, range(1, 1 + after)))


def _fitted(e: Emitter, gx: ir.Value, axis: Axis, count: Dim, size: Dim, *, length: ir.Value | None) -> ir.Value:
    """Padded with zeros or cut from `count` points to the `size` of the signal, if the node has the operand `length`."""
    if length is None:
        return gx
    missing = e.size_sub(size, count)
    if isinstance(axis, int):
        return e.pad(gx, [0], [missing], [axis])
    return e.typed(e.op("Pad", gx, e.all_pads(gx, e.vector([0, missing]), axis)), gx)


_FRAMES = notation("n *s -> n *f", s=mix("transforms along"), f=mix("transforms along"))


@multilinear("STFT", wrt=("signal", "window"), factors=_FRAMES)
def stft_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[b, f, k] = sum over n of w^(k n) window[n] signal[b, step f + n]. With h[b, f] = N (inverse transform of g[b, f]):

    dsignal[b, m] = sum over f of window[m - step f] h[b, f, m - step f]
    dwindow[n] = sum over b, f of signal[b, step f + n] h[b, f, n]
    """
    x, window, gy = n["signal"], n.get("window"), g["output"]
    step = size_in(e, n["frame_step"])
    length = n.get("frame_length")
    size = e.dim(x, 1)
    count = size_in(e, length) if length is not None else size if window is None else e.dim(window, 0)
    width: Dim = 1 if n.int("onesided", 1) else extent(e, x, 2)  # one-sided signals are real; without a last axis, 1

    def frames_grad() -> ir.Value:
        """h, `[batch, frames, N, 1 or 2]`."""
        return e.slice(_forward_adjoint(e, gy, 2, count), [0], [width], [3])

    def signal() -> ir.Value:
        frames = frames_grad()
        if window is not None:
            frames = e.mul(frames, e.unsqueeze(window, [1]))
        if not isinstance(step, int) or not isinstance(width, int) or not adds_windows(e, gy):
            return e.reshape_like(ungather(e, parts(x), places(), frames, 1), x)
        total = add_windows(e, frames, e.dim(x, 0), width, taps=e.dim(gy, 1), tap=step, starts=count)
        return e.reshape_like(e.pad(total, [0], [e.size_sub(size, e.dim(total, 1))], [1]), x)

    def parts(value: ir.Value) -> ir.Value:
        return e.reshape(value, [e.dim(x, 0), size, width])

    def places() -> ir.Value:
        """The position in the signal of element n of frame f: `[frames, N]`."""
        first = e.op("Mul", e.arange(e.dim(gy, 1)), e.ints([step]) if isinstance(step, int) else step)
        return e.op("Add", e.unsqueeze(first, [1]), e.arange(count))

    def window_grad() -> ir.Value:
        read = e.op("Gather", parts(x), places(), axis=1)
        return e.typed(e.reduce_sum(e.mul(read, frames_grad()), [0, 1, 3], keepdims=False), n["window"])

    return {"signal": signal, "window": window_grad}
