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

from onnx_convgrad.autodiff.batching import Batched, require_rule
from onnx_convgrad.autodiff.factors import SUM, FactorsOf, having, mix, notation
from onnx_convgrad.autodiff.registry import Cotangents, batched, multilinear, vjp
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import (
    CONVOLUTIONS,
    as_conv,
    conv,
    input_grad,
    kernel_of,
    padded_data,
    weight_grad,
    window,
)
from onnx_convgrad.ir.emit import DOMAIN, Emitter
from onnx_convgrad.ir.half_sums import channel_sum, sums_halves

# -- emission ----------------------------------------------------------------------------------------------------------


def bias_grad(e: Emitter, g: ir.Value, rank: int) -> ir.Value:
    """b[c] is added to every y[n, c, p]: db[c] = sum over n and p of g[n, c, p]."""
    if sums_halves(e, g):
        return e.cast(channel_sum(e, g), ir.DataType.FLOAT16)
    return e.reduce_sum(g, [0, *range(2, 2 + rank)], keepdims=False)


# -- Conv --------------------------------------------------------------------------------------------------------------


_WINDOWS = {"s": mix("convolves along"), "p": mix("convolves along"), "t": mix("places the kernel along")}
_DENSE = notation("n c *s, o c *t, o -> n o *p", broadcasts=True, c=SUM, **_WINDOWS)
_GROUPED = notation("n c *s, o k *t, o -> n o *p", broadcasts=True, c=mix("convolves groups of"), k=SUM, **_WINDOWS)


def _by_groups(dense: FactorsOf, grouped: FactorsOf) -> FactorsOf:
    """Channels of the input are summed over, in groups if there are several."""
    return lambda n: (dense if n.int("group", 1) == 1 else grouped)(n)


_LAYER: dict[str, Any] = {"wrt": ("X", "W", "B"), "parameters": ("W", "B"), "affine": ("X B", "W B")}


@vjp("Conv", **_LAYER, factors=_by_groups(_DENSE, _GROUPED))
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

    return {"X": data, "W": lambda: weight_grad(e, seen, gy, w, win), "B": lambda: bias_grad(e, gy, win.rank)}


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


# -- the abstract operators --------------------------------------------------------------------------------------------


_MIXED = dict.fromkeys("ockpst", mix("convolves along"))
_INPUT_GRAD = having(notation("n o *p, o k *t, n c *s -> n c *s", broadcasts=False, **_MIXED), unread=frozenset((2,)))
_WEIGHT_GRAD = having(
    notation("n c *s, n o *p, o k *t -> o k *t", broadcasts=False, n=SUM, **_MIXED), unread=frozenset((2,))
)


@multilinear(f"{DOMAIN}::ConvInputGrad", wrt=("dY", "W"), factors=_INPUT_GRAD, of=CONVOLUTIONS)
def conv_input_grad(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """<g, ConvInputGrad(dy, w)> = <dy, conv(g, w)>: ddy = conv(g, w), dw = ConvWeightGrad(g, dy)."""
    dy, w, gx = n["dY"], n["W"], g["dX"]
    win = window(n)
    return {"dY": lambda: conv(e, gx, w, dy, win), "W": lambda: weight_grad(e, gx, dy, w, win)}


@multilinear(f"{DOMAIN}::ConvWeightGrad", wrt=("X", "dY"), factors=_WEIGHT_GRAD, of=CONVOLUTIONS)
def conv_weight_grad(e: Emitter, n: Call, g: dict[str, Any]) -> Cotangents:
    """<g, ConvWeightGrad(x, dy)> = <dy, conv(x, g)>: dx = ConvInputGrad(dy, g), ddy = conv(x, g).

    If x and dy are one value and the kernel is 1x1, dx + ddy = conv(x, g + g').
    """
    x, dy, gw = n["X"], n["dY"], g["dW"]
    win = window(n)
    if x is dy and set(kernel_of(n, n["W_like"], win.rank)) == {1} and win.group == 1:
        both = e.add(gw, e.transpose(gw, [1, 0, *range(2, 2 + win.rank)]))
        return {"X": lambda: conv(e, x, both, x, win), "dY": lambda: None}
    return {"X": lambda: input_grad(e, dy, gw, x, win), "dY": lambda: conv(e, x, gw, dy, win)}


# -- ConvTranspose -----------------------------------------------------------------------------------------------------


_TRANSPOSED = notation("n c *s, c o *t, o -> n o *p", broadcasts=True, c=SUM, **_WINDOWS)
_TRANSPOSED_GROUPS = notation(
    "n c *s, i o *t, o -> n o *p",
    broadcasts=True,
    c=mix("convolves groups of"),
    i=SUM,
    o=mix("has features of groups along"),
    **_WINDOWS,
)


@vjp("ConvTranspose", **_LAYER, factors=_by_groups(_TRANSPOSED, _TRANSPOSED_GROUPS))
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
