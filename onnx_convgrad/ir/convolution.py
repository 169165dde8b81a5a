"""Convolution nodes: their geometry, read from attributes and operands, and forward convolutions with any padding."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import DOMAIN, Dim, Emitter, known
from onnx_convgrad.ir.geometry import Window, same_padding

CONVOLUTIONS = ("Conv", "ConvTranspose")
"""Operators whose derivatives are the abstract convolutions."""


def declared_rank(n: Call) -> int | None:
    """Number of spatial axes, from the first attribute with numbers for each; `None` without such an attribute."""
    for name in ("kernel_shape", "strides", "dilations"):
        values = n.ints(name)
        if values:
            return len(values)
    pads = n.ints("pads")
    return len(pads) // 2 if pads else None


def window(n: Call, rank: int | None = None) -> Window:
    """The attributes of a node with `rank` spatial axes, by default as declared; `auto_pad` is resolved by the caller."""
    rank = declared_rank(n) or 0 if rank is None else rank
    pads = n.ints("pads") or (0,) * (2 * rank)
    require(len(pads) == 2 * rank, f"pads has {len(pads)} entries for {rank} spatial axes.")
    require(n.int("group", 1) > 0, f"group is {n.int('group', 1)}.")
    return Window(
        n.ints("strides") or (1,) * rank,
        n.ints("dilations") or (1,) * rank,
        tuple(pads[:rank]),
        tuple(pads[rank:]),
        n.int("group", 1),
    )


def kernel_of(n: Call, w: ir.Value, rank: int) -> tuple[int | None, ...]:
    """Kernel sizes, from the weight's shape or else from the attribute."""
    declared = n.ints("kernel_shape") or (None,) * rank
    if w.shape is None:
        return declared
    return tuple(known(d) or k for d, k in zip(list(w.shape)[2:], declared, strict=True))


def spatial_rank(e: Emitter, n: Call, x: ir.Value, w: ir.Value) -> int:
    """Number of spatial axes, from an attribute or operand that has it."""
    declared = declared_rank(n)
    return (
        declared
        if declared is not None
        else e.rank(w if w.shape is not None else x, "the gradient of a convolution") - 2
    )


def conv_window(n: Call, x: ir.Value, w: ir.Value, rank: int) -> Window | None:
    """The window of a Conv with `auto_pad` made explicit, or `None` where that needs a size known only at run time."""
    win, kernel, mode = window(n, rank), kernel_of(n, w, rank), n.string("auto_pad", "NOTSET")
    if mode in ("NOTSET", ""):
        return win
    if mode == "VALID":
        return win.padded((0,) * win.rank, (0,) * win.rank)
    begin, end = [], []
    for axis in range(win.rank):
        k = kernel[axis]
        size = None if x.shape is None else known(x.shape[2 + axis])
        if win.strides[axis] == 1:
            size = 1  # with unit stride the padding is span - 1 for any size
        if k is None or size is None:
            return None
        span = win.dilations[axis] * (k - 1) + 1
        low, high = same_padding(size, span, win.strides[axis], upper=mode == "SAME_UPPER")
        begin.append(low)
        end.append(high)
    return win.padded(tuple(begin), tuple(end))


def transposed_window(n: Call, x: ir.Value, w: ir.Value, rank: int) -> Window | None:
    """The window with which a Conv maps the result of a ConvTranspose to its operand x; `None` if that needs more sizes.

    No window covers the rows that `output_padding` adds at the end. Whole strides of them must be removed, because the Conv
    would otherwise have more rows than x: end' = end - op + op mod s (section ConvTranspose of the ONNX specification).
    """
    win, kernel = window(n, rank), kernel_of(n, w, rank)
    wanted, mode = n.ints("output_shape"), n.string("auto_pad", "NOTSET")
    begin, end = ([0] * rank, [0] * rank) if mode == "VALID" else (list(win.begin), list(win.end))
    extra = list(n.ints("output_padding") or (0,) * rank)
    for axis in range(rank if wanted is not None or mode.startswith("SAME") else 0):
        k, s = kernel[axis], win.strides[axis]
        size = None if x.shape is None else known(x.shape[2 + axis])
        if wanted is None:
            size = 1  # the total padding of SAME_* is span + op - s for every size
        if k is None or size is None:
            return None
        natural = s * (size - 1) + extra[axis] + win.dilations[axis] * (k - 1) + 1
        target = size * s if wanted is None else wanted[len(wanted) - rank + axis]
        total = max(natural - target, 0)
        begin[axis] = total // 2 if mode == "SAME_UPPER" else total - total // 2
        end[axis] = total - begin[axis]
        extra[axis] += max(target - natural, 0) if wanted is not None else 0
    covering = (e - o + o % s for e, o, s in zip(end, extra, win.strides, strict=True))
    return win.padded(tuple(begin), tuple(covering))


def biased(e: Emitter, y: ir.Value, bias: ir.Value | None, rank: int) -> ir.Value:
    """y with one number added per feature, if there is a bias; `rank` axes come after the features."""
    return y if bias is None else e.add(y, e.unsqueeze(bias, list(range(1, 1 + rank))))


def conv(e: Emitter, x: ir.Value, w: ir.Value, like: ir.Value | None, win: Window) -> ir.Value:
    """A forward convolution; negative padding, illegal in Conv, becomes a Slice."""
    x, win = trim(e, x, win)
    y = e.conv(x, w, **win.attributes)
    return y if like is None else e.typed(y, like)


def input_grad(e: Emitter, dy: ir.Value, w: ir.Value, like: ir.Value, win: Window) -> ir.Value:
    """ConvInputGrad, the gradient for the data operand, of the shape of `like`."""
    return e.op("ConvInputGrad", dy, w, like, domain=DOMAIN, **win.attributes)


def weight_grad(e: Emitter, x: ir.Value, dy: ir.Value, like: ir.Value, win: Window) -> ir.Value:
    """ConvWeightGrad, the gradient for the weight operand, of the shape of `like`."""
    return e.op("ConvWeightGrad", x, dy, like, domain=DOMAIN, **win.attributes)


def trim(e: Emitter, x: ir.Value, win: Window) -> tuple[ir.Value, Window]:
    """Slice off the rows that negative padding removes; the returned window has no negative padding."""
    if min((*win.begin, *win.end), default=0) >= 0:
        return x, win
    axes = range(2, 2 + win.rank)
    starts = [max(-b, 0) for b in win.begin]
    ends: list[Dim] = []
    for axis, pad in zip(axes, win.end, strict=True):
        size = e.dim(x, axis)
        ends.append(e.size_sub(size, -pad) if pad < 0 else size)
    x = e.slice(x, starts, ends, list(axes))
    return x, win.padded(tuple(max(b, 0) for b in win.begin), tuple(max(p, 0) for p in win.end))


def padded_data(e: Emitter, n: Call) -> tuple[ir.Value, Window, list[Dim] | None]:
    """The data of a Conv, its window, and the begin padding already added to the data if that depends on run-time sizes."""
    x, w = n["X"], n["W"]
    rank = spatial_rank(e, n, x, w)
    explicit = conv_window(n, x, w, rank)
    return _pad_same_at_run_time(e, n, x, w, window(n, rank)) if explicit is None else (x, explicit, None)


def _pad_same_at_run_time(
    e: Emitter, n: Call, x: ir.Value, w: ir.Value, win: Window
) -> tuple[ir.Value, Window, list[Dim]]:
    """Pad x as `auto_pad=SAME_*` does, by sizes that the graph computes: total = max((ceil(x/s) - 1) s + span - x, 0)."""
    upper, kernel = n.string("auto_pad", "") == "SAME_UPPER", kernel_of(n, w, win.rank)
    low: list[Dim] = []
    high: list[Dim] = []
    for axis in range(win.rank):
        k, s = kernel[axis], win.strides[axis]
        size = e.dim(x, 2 + axis)
        tap: Dim = k if k is not None else e.dim(w, 2 + axis)
        span = e.size_add(e.size_mul(e.size_sub(tap, 1), win.dilations[axis]), 1)
        windows = e.size_div(e.size_add(size, s - 1), s)
        total = e.size_max(e.size_sub(e.size_add(e.size_mul(e.size_sub(windows, 1), s), span), size), 0)
        half = e.size_div(total, 2)
        rest = e.size_sub(total, half)
        low.append(half if upper else rest)
        high.append(rest if upper else half)
    flat = (0,) * win.rank
    return e.pad(x, low, high, list(range(2, 2 + win.rank))), win.padded(flat, flat), low


def as_conv(e: Emitter, n: Call, gy: ir.Value) -> tuple[ir.Value, Window]:
    """The cotangent of a ConvTranspose and the window with which a Conv maps the size of y to that of x."""
    x, w = n["X"], n["W"]
    rank = spatial_rank(e, n, x, w)
    win = transposed_window(n, x, w, rank)
    return _cut_at_run_time(e, n, x, w, gy, window(n, rank)) if win is None else (gy, win)


def _cut_at_run_time(
    e: Emitter, n: Call, x: ir.Value, w: ir.Value, gy: ir.Value, win: Window
) -> tuple[ir.Value, Window]:
    """For sizes known only at run time, pad or cut the cotangent to the size that an unpadded Conv expects."""
    upper = n.string("auto_pad", "NOTSET") == "SAME_UPPER"
    extra = n.ints("output_padding") or (0,) * win.rank
    low: list[Dim] = []
    high: list[Dim] = []
    for axis in range(win.rank):
        s = win.strides[axis]
        span = e.size_add(e.size_mul(e.size_sub(e.dim(w, 2 + axis), 1), win.dilations[axis]), 1)
        full = e.size_add(e.size_mul(e.size_sub(e.dim(x, 2 + axis), 1), s), span)
        have = e.dim(gy, 2 + axis)
        total = e.size_max(e.size_sub(e.size_add(full, extra[axis]), have), 0)
        half = e.size_div(total, 2)
        begin = half if upper else e.size_sub(total, half)
        low.append(begin)
        high.append(e.size_sub(e.size_sub(full, have), begin))
    flat = (0,) * win.rank
    return e.pad(gy, low, high, list(range(2, 2 + win.rank))), win.padded(flat, flat)
