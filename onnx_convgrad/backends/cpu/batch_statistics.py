"""Statistics of training-mode BatchNormalization, computed once for the forward pass and the gradient.

The node gives running statistics, blends of what was stored and the batch. With momentum 0 they are those of the batch,
which is what the gradient needs; the blends are then two operations on a number per channel.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op

__all__ = ["share_statistics"]

_WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def share_statistics(graph: ir.Graph, keep: Collection[ir.Value] = ()) -> dict[ir.Value, ir.Value]:
    """Make every training-mode BatchNormalization of `graph` give the statistics of its batch, in place.

    Args:
        graph: A canonical graph.
        keep: Values that must stay what they are: nodes that give one of them as a running statistic are left alone.

    Returns:
        Running statistic -> the value that has taken its name and its uses.
    """
    e = Emitter(graph, opsets=graph.opset_imports)
    moved: dict[ir.Value, ir.Value] = {}
    for node, following in itertools.pairwise([*graph, None]):
        if node is not None and _blends(node) and not any(v in keep for v in node.outputs[1:]):
            stored = node.inputs[3:5]
            e.anchor = node
            _give_own_operands(e, node)
            e.anchor = following
            moved.update(_unblend(e, node, stored))
    return moved


def _blends(node: ir.Node) -> bool:
    """Whether the node computes both running statistics, in a type that keeps the digits of the batch's."""
    if not is_op(node, "BatchNormalization") or len(node.outputs) != 3:
        return False
    n = Call(node)
    if not n.int("training_mode", 0) or any(v is None or v.dtype not in _WIDE for v in node.inputs[3:5]):
        return False
    return n.float("momentum", 0.9) != 0


def _give_own_operands(e: Emitter, node: ir.Node) -> None:
    """Statistics of no account: ONNX Runtime writes the results over these operands, stored ones and all.

    A number of x makes them the node's own: nothing computes them beforehand, or once for two nodes. Nor once for both:
    equal statistics would share their memory, and the mean would be read where the variance was written.
    """
    x, start = node.inputs[0], len(e.emitted)
    assert x is not None
    rank = 0 if x.shape is None else len(x.shape)
    first = e.op("Slice", x, e.ints([0] * rank), e.ints([1] * rank)) if rank else x
    number = e.op("ReduceSum", first, keepdims=0)
    for at in (3, 4):
        stored = node.inputs[at]
        assert stored is not None
        assert stored.dtype is not None
        own = e.mul(stored, e.cast(number, stored.dtype))
        node.replace_input_with(at, e.typed(own if at == 3 else e.neg(own), stored))
    _name(e, start, f"{node.name}/operand")


def _name(e: Emitter, start: int, stem: str) -> None:
    for count, made in enumerate(e.emitted[start:], 1):
        made.name = f"{stem}_{count}"


def _unblend(e: Emitter, node: ir.Node, before: Sequence[ir.Value | None]) -> dict[ir.Value, ir.Value]:
    momentum, start = Call(node).float("momentum", 0.9), len(e.emitted)
    node.attributes["momentum"] = ir.AttrFloat32("momentum", 0.0)
    moved = {}
    for batch, stored, which in zip(node.outputs[1:], before, ("mean", "var"), strict=True):
        assert stored is not None
        share = e.mul(e.typed(batch, stored), 1 - momentum)
        running = e.typed(e.add(e.mul(stored, momentum), share), stored)
        batch.replace_all_uses_with(running, replace_graph_outputs=True)
        product = share.producer()
        assert product is not None
        product.replace_input_with(0, batch)
        own = e.names.claim(f"{node.outputs[0].name}_batch_{which}")
        batch.name, running.name = own, batch.name or running.name
        moved[batch] = running
    _name(e, start, f"{node.name}/running")
    return moved
