"""Conv, ConvTranspose and the two abstract operators that are the derivatives of Conv.

    T(x, w, g) = <g, conv(x, w)>

is linear in each of x, w and g. Its three partial derivatives are conv(x, w), ConvInputGrad(g, w) and ConvWeightGrad(x, g),
and the cotangents of each are the other two. So these rules close under any order of differentiation:

    Conv(x, w)              dx = ConvInputGrad(g, w)     dw = ConvWeightGrad(x, g)
    ConvInputGrad(dy, w)    ddy = Conv(g, w)             dw = ConvWeightGrad(g, dy)
    ConvWeightGrad(x, dy)   dx = ConvInputGrad(dy, g)    ddy = Conv(x, g)

ConvTranspose(x, w) is ConvInputGrad(dy=x, w): its result takes the place of the data operand.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.batching.walk import Batched, require_rule
from onnx_convgrad.autodiff.factors import SUM, Factors, having, mix, notation
from onnx_convgrad.autodiff.registry import Cotangents, batched, multilinear, vjp
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import covering, kernel_of, resolve_padding, spatial_rank, window
from onnx_convgrad.ir.emit import DOMAIN, Dim, Emitter, known
from onnx_convgrad.ir.geometry import Window
from onnx_convgrad.ir.half_sums import channel_sum, sums_halves

# -- emission ----------------------------------------------------------------------------------------------------------


def input_grad(e: Emitter, dy: ir.Value, w: ir.Value, like: ir.Value, win: Window) -> ir.Value:
    """ConvInputGrad, the gradient for the data operand, of the shape of `like`."""
    return e.op("ConvInputGrad", dy, w, like, domain=DOMAIN, **win.attributes)


def weight_grad(e: Emitter, x: ir.Value, dy: ir.Value, like: ir.Value, win: Window) -> ir.Value:
    """ConvWeightGrad, the gradient for the weight operand, of the shape of `like`."""
    return e.op("ConvWeightGrad", x, dy, like, domain=DOMAIN, **win.attributes)


def conv(e: Emitter, x: ir.Value, w: ir.Value, like: ir.Value | None, win: Window) -> ir.Value:
    """A forward convolution; negative padding, illegal in Conv, becomes a Slice."""
    x, win = trim(e, x, win)
    y = e.op("Conv", x, w, **win.attributes)
    return y if like is None else e.typed(y, like)


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


def bias_grad(e: Emitter, g: ir.Value, rank: int) -> ir.Value:
    """b[c] is added to every y[n, c, p]: db[c] = sum over n and p of g[n, c, p]."""
    if sums_halves(e, g):
        return e.cast(channel_sum(e, g), ir.DataType.FLOAT16)
    return e.reduce_sum(g, [0, *range(2, 2 + rank)], keepdims=False)


# -- Conv --------------------------------------------------------------------------------------------------------------


_WINDOWS = {"s": mix("convolves along"), "p": mix("convolves along"), "t": mix("places the kernel along")}
_DENSE = notation("n c *s, o c *t, o -> n o *p", broadcasts=True, c=SUM, **_WINDOWS)
_GROUPED = notation("n c *s, o k *t, o -> n o *p", broadcasts=True, c=mix("convolves groups of"), k=SUM, **_WINDOWS)


def _convolved(n: Call) -> Factors:
    """Channels of the input are summed over, in groups if there are several."""
    return (_DENSE if n.int("group", 1) == 1 else _GROUPED)(n)


@vjp("Conv", wrt=("X", "W", "B"), parameters=("W", "B"), factors=_convolved)
def conv_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y[n, o, p] = b[o] + sum over c, t of x[n, c, s p + d t - pad] w[o, c, t]:

    dx = ConvInputGrad(g, w), dw = ConvWeightGrad(x, g), db[o] = sum over n, p of g[n, o, p].
    """
    x, w, gy = n["X"], n["W"], g["Y"]
    require_vector(n.get("B"))
    seen, win, low = padded_data(e, n)

    def data() -> ir.Value:
        gx = input_grad(e, gy, w, seen, win)
        if low is None:
            return gx
        axes = list(range(2, 2 + win.rank))
        ends = [e.size_add(b, e.dim(x, axis)) for axis, b in zip(axes, low, strict=True)]
        return e.typed(e.slice(gx, low, ends, axes), x)

    return {
        "X": data,
        "W": lambda: weight_grad(e, seen, gy, w, win),
        "B": lambda: bias_grad(e, gy, win.rank),
    }


@batched("Conv")
def conv_batched(b: Batched, n: Call) -> list[ir.Value]:
    """A weight for each example: `[N, B C, ...]` convolved by B times as many groups."""
    require_rule(n["W"] in b and isinstance(b.size, int) and b.size)
    e, x, w, bias = b.e, b.all(n["X"]), b[n["W"]], n.get("B")
    sizes, features = e.dims(x), e.size_mul(*e.dims(w)[:2])
    turned = e.transpose(x, [1, 0, *range(2, len(sizes))])
    joined = e.reshape(turned, [sizes[1], e.size_mul(b.size, sizes[2]), *sizes[3:]])
    weight = e.reshape(w, [features, *e.dims(w)[2:]])
    offset = None if bias is None else e.reshape(b.all(bias), [features])
    groups = e.size_mul(b.size, n.int("group", 1))
    y = e.op("Conv", joined, weight, offset, **{**n.attributes(), "group": groups})
    found = e.dims(y)
    split = e.reshape(y, [found[0], b.size, e.dims(w)[1], *found[2:]])
    return [e.transpose(split, [1, 0, *range(2, len(found) + 1)])]


def require_vector(bias: ir.Value | None) -> None:
    """Refuse a bias that is not a vector, which ONNX's checker accepts and some exporters write for an absent bias."""
    shape = None if bias is None else bias.shape
    require(
        shape is None or len(shape) == 1,
        f"its bias has shape {list(shape or ())}; it must have one number per feature.",
        "Leave the input B out, or export the model again: torch.onnx.export(..., optimize=True) leaves it out.",
    )


def padded_data(e: Emitter, n: Call) -> tuple[ir.Value, Window, list[Dim] | None]:
    """The data of a Conv, its window, and the begin padding already added to the data if that depends on run-time sizes."""
    x, w = n["X"], n["W"]
    rank = spatial_rank(e, n, x, w)
    win = window(n, rank)
    explicit = resolve_padding(n, win, x, kernel_of(n, w, rank))
    if explicit is not None:
        return x, explicit, None
    padded, low = _pad_same_at_run_time(e, n, win, x, kernel_of(n, w, rank))
    return padded, win.padded((0,) * rank, (0,) * rank), low


def _pad_same_at_run_time(
    e: Emitter, n: Call, win: Window, x: ir.Value, kernel: tuple[int | None, ...]
) -> tuple[ir.Value, list[Dim]]:
    """Pad x as `auto_pad=SAME_*` does, by sizes that the graph computes: total = max((ceil(x/s) - 1) s + span - x, 0)."""
    upper = n.string("auto_pad", "") == "SAME_UPPER"
    low: list[Dim] = []
    high: list[Dim] = []
    for axis in range(win.rank):
        k, s = kernel[axis], win.strides[axis]
        size = e.dim(x, 2 + axis)
        tap: Dim = k if k is not None else e.dim(n["W"], 2 + axis)
        span = e.size_add(e.size_mul(e.size_sub(tap, 1), win.dilations[axis]), 1)
        windows = e.size_div(e.size_add(size, s - 1), s)
        total = e.size_max(e.size_sub(e.size_add(e.size_mul(e.size_sub(windows, 1), s), span), size), 0)
        half = e.size_div(total, 2)
        rest = e.size_sub(total, half)
        low.append(half if upper else rest)
        high.append(rest if upper else half)
    return e.pad(x, low, high, list(range(2, 2 + win.rank))), low


# -- the abstract operators --------------------------------------------------------------------------------------------


CONVOLUTIONS = ("Conv", "ConvTranspose")
_MIXED = dict.fromkeys("ockpst", mix("convolves along"))
_INPUT_GRAD = having(notation("n o *p, o k *t, n c *s -> n c *s", broadcasts=False, **_MIXED), unread=frozenset((2,)))
_WEIGHT_GRAD = having(
    notation("n c *s, n o *p, o k *t -> o k *t", broadcasts=False, n=SUM, **_MIXED), unread=frozenset((2,))
)


@multilinear(f"{DOMAIN}::ConvInputGrad", wrt=("dY", "W"), factors=_INPUT_GRAD, of=CONVOLUTIONS)
def conv_input_grad(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """<g, ConvInputGrad(dy, w)> = <dy, conv(g, w)>: ddy = conv(g, w), dw = ConvWeightGrad(g, dy)."""
    dy, w, gx = n["dY"], n["W"], g["dX"]
    win = window(n, len(n.ints("strides") or ()))
    return {"dY": lambda: conv(e, gx, w, dy, win), "W": lambda: weight_grad(e, gx, dy, w, win)}


@multilinear(f"{DOMAIN}::ConvWeightGrad", wrt=("X", "dY"), factors=_WEIGHT_GRAD, of=CONVOLUTIONS)
def conv_weight_grad(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """<g, ConvWeightGrad(x, dy)> = <dy, conv(x, g)>: dx = ConvInputGrad(dy, g), ddy = conv(x, g).

    If x and dy are one value and the kernel is 1x1, dx + ddy = conv(x, g + g').
    """
    x, dy, gw = n["X"], n["dY"], g["dW"]
    win = window(n, len(n.ints("strides") or ()))
    if x is dy and set(kernel_of(n, n["W_like"], win.rank)) == {1} and win.group == 1:
        both = e.add(gw, e.transpose(gw, [1, 0, *range(2, 2 + win.rank)]))
        return {"X": lambda: conv(e, x, both, x, win), "dY": lambda: None}
    return {"X": lambda: input_grad(e, dy, gw, x, win), "dY": lambda: conv(e, x, gw, dy, win)}


# -- ConvTranspose -----------------------------------------------------------------------------------------------------


_TRANSPOSED = notation("n c *s, c o *t, o -> n o *p", broadcasts=True, c=SUM, **_WINDOWS)
_TRANSPOSED_GROUPS = notation(
    "n c *s, c k *t, o -> n o *p",
    broadcasts=True,
    c=mix("convolves groups of"),
    k=mix("has features of groups along"),
    o=mix("has features of groups along"),
    **_WINDOWS,
)


def _transposed(n: Call) -> Factors:
    """Channels of the input are summed over, in groups if there are several."""
    return (_TRANSPOSED if n.int("group", 1) == 1 else _TRANSPOSED_GROUPS)(n)


@vjp("ConvTranspose", wrt=("X", "W", "B"), parameters=("W", "B"), factors=_transposed)
def conv_transpose_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """y = ConvInputGrad(x, w) + b: dx = conv(g, w), dw = ConvWeightGrad(g, x)."""
    x, w, gy = n["X"], n["W"], g["Y"]
    require_vector(n.get("B"))
    big, win = as_conv(e, n, gy)
    return {
        "X": lambda: conv(e, big, w, x, win),
        "W": lambda: weight_grad(e, big, x, w, win),
        "B": lambda: bias_grad(e, gy, win.rank),
    }


def as_conv(e: Emitter, n: Call, gy: ir.Value) -> tuple[ir.Value, Window]:
    """The cotangent of a ConvTranspose and the window with which a Conv maps the size of y to that of x.

    No window covers the rows that `output_padding` adds at the end. Whole strides of them must be removed, because the Conv
    would otherwise have more rows than x: end' = end - op + op mod s (section ConvTranspose of the ONNX specification).
    """
    x, w = n["X"], n["W"]
    rank = spatial_rank(e, n, x, w)
    win, kernel = window(n, rank), kernel_of(n, w, rank)
    extra = n.ints("output_padding") or (0,) * rank
    wanted = n.ints("output_shape")
    mode = n.string("auto_pad", "NOTSET")
    if wanted is None and mode in ("NOTSET", "", "VALID"):
        flat = (0,) * rank
        begin, end = (flat, flat) if mode == "VALID" else (win.begin, win.end)
        return gy, win.padded(begin, covering(end, extra, win.strides))
    begin_: list[int] = []
    end_: list[int] = []
    for axis in range(rank):
        k, s = kernel[axis], win.strides[axis]
        size = None if x.shape is None else known(x.shape[2 + axis])
        if wanted is None:
            size = 1  # the total padding of SAME_* is span + op - s for every size
        if k is None or size is None:
            return _cut_at_run_time(e, n, x, w, gy, win)
        natural = s * (size - 1) + extra[axis] + win.dilations[axis] * (k - 1) + 1
        target = size * s if wanted is None else wanted[len(wanted) - rank + axis]
        total = max(natural - target, 0)
        low = total // 2 if mode == "SAME_UPPER" else total - total // 2
        grown = max(target - natural, 0) if wanted is not None else 0
        begin_.append(low)
        end_.append(covering((total - low,), (extra[axis] + grown,), (s,))[0])
    return gy, win.padded(tuple(begin_), tuple(end_))


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
