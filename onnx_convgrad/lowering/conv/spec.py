"""Build the spec of convolution nodes: sizes, strides and padding, as far as they are known while building."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.convolution import conv_window, declared_rank, kernel_of, transposed_window, window
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
    win = conv_window(n, x, w, rank)
    if win is None:
        raise ValueError("auto_pad with strides needs static sizes here")
    return _spec(n, x, w, n.y, win)


@spec_builder("ConvTranspose", ("y_shape", "w_shape", "c_shape"))
def _conv_transpose_spec(n: Call) -> ConvSpec:
    """The Conv that maps the result's size to the operand's."""
    x, w = n["X"], n["W"]
    win = transposed_window(n, x, w, len(n.y.shape or w.shape or ()) - 2)
    if win is None:
        raise ValueError("auto_pad and output_shape need static sizes here")
    return _spec(n, n.y, w, x, win)
