"""Move the zeros of a Pad into the padding of the convolution that reads it.

Models of TensorFlow and Keras pad before each strided convolution (`ZeroPadding2D`), often in NHWC before a Transpose.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.convolution import window
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op, sole_producer
from onnx_convgrad.ir.passes import NodePass


class PadInConv(NodePass):
    """Move constant zeros into the Conv that reads them, through a Transpose if there is one.

    A Pad copies the image on one thread, its gradient copies it back, and the backward part keeps the copy; the padding of a
    Conv costs nothing.
    """

    operators = ("Conv",)
    label = "pad"

    def rewrite_node(self, e: Emitter, node: ir.Node) -> bool:
        """Connect the Conv to the operand of the Pad."""
        if Call(node).string("auto_pad", "NOTSET") not in ("", "NOTSET"):
            return False
        turned = self._sole_producer(node.inputs[0], "Transpose")
        perm = None if turned is None else Call(turned).ints("perm")
        pad = self._sole_producer(node.inputs[0] if turned is None else turned.inputs[0], "Pad")
        added = None if pad is None or (turned is not None and perm is None) else _zeros(pad)
        if pad is None or added is None:
            return False
        if perm is not None:
            added = [added[axis] for axis in perm]
        win = window(Call(node), len(added) - 2)
        begin = [old + low for old, (low, _) in zip(win.begin, added[2:], strict=True)]
        end = [old + high for old, (_, high) in zip(win.end, added[2:], strict=True)]
        if any(pair != (0, 0) for pair in added[:2]) or not (e.target.asymmetric_pads or begin == end):
            return False
        source = pad.inputs[0]
        assert source is not None, "a Pad pads something"
        (node if turned is None else turned).replace_input_with(0, source)
        if turned is not None and perm is not None:
            turned.outputs[0].shape = None if source.shape is None else ir.Shape([source.shape[axis] for axis in perm])
        node.attributes["pads"] = ir.AttrInt64s("pads", [*begin, *end])
        e.graph.remove(pad, safe=True)
        return True

    def _sole_producer(self, value: ir.Value | None, op_type: str) -> ir.Node | None:
        """The node of that type that computes a value with a single reader, unless the value is in `keep`."""
        node = None if value in self.keep else sole_producer(value)
        return node if is_op(node, op_type) else None


def _zeros(pad: ir.Node) -> Sequence[tuple[int, int]] | None:
    """Zeros that a Pad adds before and after each axis; `None` if it does anything else, or if that is unknown."""
    n = Call(pad)
    data, amounts, fill, chosen = n["data"], n["pads"], n.get("constant_value"), n.get("axes")
    pads = constant_of(amounts)
    value = None if fill is None else constant_of(fill)
    axes = None if chosen is None else constant_of(chosen)
    if data.shape is None or pads is None or n.string("mode", "constant") != "constant" or (pads < 0).any():
        return None
    if (fill is not None and (value is None or value.any())) or (chosen is not None and axes is None):
        return None
    rank = len(data.shape)
    added = [(0, 0)] * rank
    where = range(rank) if axes is None else [int(axis) % rank for axis in axes.reshape(-1)]
    for axis, low, high in zip(where, *pads.reshape(2, -1).tolist(), strict=True):
        added[axis] = (low, high)
    return added
