"""The geometry of a convolution node, read from its attributes: strides, dilations, padding, groups, kernel."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter, known
from onnx_convgrad.ir.geometry import Window, same_padding


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
