"""Build the spec of convolution nodes: sizes, strides and padding, as far as they are known while building."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import covering, declared_rank, kernel_of, resolve_padding, window
from onnx_convgrad.ir.emit import known
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.lowering.table import spec_builder


def _spec(n: Call, x: ir.Value, w: ir.Value, y: ir.Value, win: Window | None = None) -> ConvSpec:
    win = win or window(n)

    def sizes(value: ir.Value) -> list[int | None]:
        return [None] * (win.rank + 2) if value.shape is None else [known(d) for d in value.shape]

    return ConvSpec.of(win, kernel_of(n, w, win.rank), sizes(x), sizes(w), sizes(y))


@spec_builder("ConvInputGrad", ("y_shape", "w_shape", "x_shape"))
def _input_grad_spec(n: Call) -> ConvSpec:
    return _spec(n, n["X_like"], n["W"], n["dY"])


@spec_builder("ConvGradSquaredNorm", ("x_shape", "y_shape", "w_shape"))
@spec_builder("ConvPerSampleGrad", ("x_shape", "y_shape", "w_shape"))
@spec_builder("ConvWeightGrad", ("x_shape", "y_shape", "w_shape"))
def grad_spec(n: Call) -> ConvSpec:
    return _spec(n, n["X"], n["W_like"], n["dY"])


@spec_builder("Conv", ("x_shape", "w_shape", "b_shape"))
def _conv_spec(n: Call) -> ConvSpec:
    x, w = n["X"], n["W"]
    rank = declared_rank(n) or len(list(w.shape or ())[2:])
    win = resolve_padding(n, window(n, rank), x, kernel_of(n, w, rank))
    if win is None:
        raise ValueError("auto_pad with strides needs static sizes here")
    return _spec(n, x, w, n.y, win)


@spec_builder("ConvTranspose", ("y_shape", "w_shape", "c_shape"))
def _conv_transpose_spec(n: Call) -> ConvSpec:
    """The Conv that maps the result's size to the operand's."""
    x, w = n["X"], n["W"]
    rank = len(n.y.shape or w.shape or ()) - 2
    win = window(n, rank)
    end = covering(win.end, n.ints("output_padding") or (0,) * rank, win.strides)
    if n.string("auto_pad", "NOTSET") not in ("NOTSET", "") or n.ints("output_shape"):
        win, end = _static_transposed(n, x, n.y, win, kernel_of(n, w, rank))
    return _spec(n, n.y, w, x, win.padded(win.begin, end))


def _static_transposed(
    n: Call, x: ir.Value, y: ir.Value, win: Window, kernel: tuple[int | None, ...]
) -> tuple[Window, tuple[int, ...]]:
    """The explicit padding that `auto_pad` or `output_shape` stands for, from static sizes."""
    begin, end = [], []
    for axis, (k, s, d) in enumerate(zip(kernel, win.strides, win.dilations, strict=True)):
        sizes = [None if v.shape is None else known(v.shape[2 + axis]) for v in (x, y)]
        if k is None or sizes[0] is None or sizes[1] is None:
            raise ValueError("auto_pad and output_shape need static sizes here")
        excess = s * (sizes[0] - 1) + (n.ints("output_padding") or (0,) * win.rank)[axis] + d * (k - 1) + 1 - sizes[1]
        total = max(excess, 0)
        low = total // 2 if n.string("auto_pad", "") == "SAME_UPPER" else total - total // 2
        rows = sizes[1] + low - (s * (sizes[0] - 1) + d * (k - 1) + 1)
        begin.append(low)
        end.append(-rows + rows % s)
    return win.padded(tuple(begin), tuple(end)), tuple(end)
