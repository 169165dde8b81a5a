"""Zeros that a Pad puts around an image for a convolution, as the convolution's own padding.

TensorFlow's and Keras' models pad before each stride (`ZeroPadding2D`), often in NHWC before a Transpose. Pad copies the
image on one thread, its gradient copies the way back, and the backward part keeps the copy; a Conv pads for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.nodes import is_op, sole_producer

__all__ = ["pad_inside"]


def pad_inside(graph: ir.Graph, keep: Collection[ir.Value] = (), *, asymmetric: bool = True) -> None:
    """Move constant zeros into the convolutions that read them, in place.

    Args:
        graph: A canonical graph, in topological order.
        keep: Values that must stay what they are.
        asymmetric: Whether what runs the graph has convolutions with different padding at the two ends.
    """
    for node in list(graph):
        if is_op(node, "Conv") and Call(node).string("auto_pad", "NOTSET") in ("", "NOTSET"):
            _pad_inside(graph, node, keep, asymmetric)


def _pad_inside(graph: ir.Graph, conv: ir.Node, keep: Collection[ir.Value], asymmetric: bool) -> None:
    turned = _made_by(conv.inputs[0], "Transpose", keep)
    perm = None if turned is None else Call(turned).ints("perm")
    pad = _made_by(conv.inputs[0] if turned is None else turned.inputs[0], "Pad", keep)
    if pad is None or (turned is not None and perm is None):
        return
    added = _zeros(pad)
    if added is None:
        return
    if perm is not None:
        added = [added[axis] for axis in perm]
    rank = len(added) - 2
    given = Call(conv).ints("pads") or (0,) * (2 * rank)
    begin = [old + low for old, (low, _) in zip(given[:rank], added[2:], strict=True)]
    end = [old + high for old, (_, high) in zip(given[rank:], added[2:], strict=True)]
    if any(pair != (0, 0) for pair in added[:2]) or not (asymmetric or begin == end):
        return
    source = pad.inputs[0]
    assert source is not None, "a Pad pads something"
    if turned is None:
        conv.replace_input_with(0, source)
    else:
        assert perm is not None
        turned.replace_input_with(0, source)
        turned.outputs[0].shape = None if source.shape is None else ir.Shape([source.shape[axis] for axis in perm])
    conv.attributes["pads"] = ir.AttrInt64s("pads", [*begin, *end])
    graph.remove(pad, safe=True)


def _made_by(value: ir.Value | None, op_type: str, keep: Collection[ir.Value]) -> ir.Node | None:
    """The node that makes a value for one reader alone, if it is of that type."""
    node = None if value in keep else sole_producer(value)
    return node if is_op(node, op_type) else None


def _zeros(pad: ir.Node) -> Sequence[tuple[int, int]] | None:
    """How many zeros are added before and after each axis; `None` if it is anything else, or not known."""
    n = Call(pad)
    data, amounts, filler, chosen = n["data"], n["pads"], n.get("constant_value"), n.get("axes")
    pads = constant_of(amounts)
    value = None if filler is None else constant_of(filler)
    axes = None if chosen is None else constant_of(chosen)
    if data.shape is None or pads is None or n.string("mode", "constant") != "constant" or (pads < 0).any():
        return None
    if (filler is not None and (value is None or value.any())) or (chosen is not None and axes is None):
        return None
    rank = len(data.shape)
    found = [(0, 0)] * rank
    where = range(rank) if axes is None else [int(axis) % rank for axis in axes.reshape(-1)]
    for axis, low, high in zip(where, *pads.reshape(2, -1).tolist(), strict=True):
        found[axis] = (low, high)
    return found
