"""Express transposed convolutions of a training step as data gradients, which have many lowerings."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import is_constant
from onnx_convgrad.ir.convolution import biased, input_grad
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import origin_of
from onnx_convgrad.lowering.table import reader_of


@dataclass(frozen=True, slots=True)
class DataGradient:
    """An abstract `node` whose `result` is that of a ConvTranspose of `x`; `like` stands in for the shape of the result.

    `forward`: the ConvTranspose is one of the model, not of a derivative.
    """

    node: ir.Node
    x: ir.Value
    like: ir.Value
    result: ir.Value
    forward: bool

    def settle(self) -> None:
        """Replace `like` by `x`: only the batch, in which they agree, is read from it at run time."""
        for use in tuple(self.like.uses()):
            use.node.replace_input_with(use.idx, self.x)


def as_data_gradient(e: Emitter, node: ir.Node) -> DataGradient | None:
    """Emit the data gradient of the convolution that maps the result's size to the operand's, and add the bias.

    `None` where the weight is constant, so that the runtime prepares it, or where a size other than the batch is unknown, or
    one is 0.
    """
    n = Call(node)
    if not is_op(node, "ConvTranspose") or is_constant(n["W"]):
        return None
    x, y, bias = n["X"], n.y, n.get("B")
    try:
        spec = reader_of("ConvTranspose").build(n)
    except ValueError:
        return None
    sizes = (spec.channels, spec.features, *spec.x, *spec.kernel, *spec.y)
    if x.dtype not in e.target.conv_dtypes or y.shape is None or None in sizes or 0 in (*sizes, spec.batch):
        return None
    like = ir.Value(shape=y.shape, type=y.type)
    result = input_grad(e, x, n["W"], like, spec.window)
    emitted, result = e.emitted[-1], e.typed(result, y)
    return DataGradient(emitted, x, like, biased(e, result, bias, spec.rank), not origin_of(node))
