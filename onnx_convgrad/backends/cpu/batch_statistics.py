"""Compute the statistics of training-mode BatchNormalization once, for the forward pass and the gradient.

The node's other results are running statistics: blends of the stored ones with those of the batch. With momentum 0 they are
those of the batch, which the gradient needs; the blends then take two operations on one number per channel.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.passes import GraphPass

_WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


class ShareBatchStatistics(GraphPass):
    """Make every training-mode BatchNormalization return the statistics of its batch, and blend them outside.

    Otherwise the gradient passes over x again for the mean and again for the variance.

    Args:
        keep: Values that must stay what they are: nodes that return one of them as a running statistic are left alone.

    Attributes:
        moved: Running statistic -> the value that has taken its name and its uses.
    """

    def __init__(self, keep: Collection[ir.Value] = ()) -> None:
        super().__init__()
        self.keep = keep
        self.moved: dict[ir.Value, ir.Value] = {}

    def rewrite(self, model: ir.Model) -> bool:
        """Rewrite the nodes in order: a blend may be the stored statistic of a later node."""
        graph = model.graph
        e = Emitter(graph, opsets=graph.opset_imports)
        self.moved = {}
        for node, following in itertools.pairwise([*graph, None]):
            if node is not None and _blends(node) and not any(v in self.keep for v in node.outputs[1:]):
                stored = Call(node)["input_mean"], Call(node)["input_var"]
                with e.rewriting(node, "operand"):
                    _give_own_operands(e, node, stored)
                with e.rewriting(node, "running"):
                    e.anchor = following
                    self.moved.update(_unblend(e, node, stored))
        return bool(self.moved)


def _blends(node: ir.Node) -> bool:
    """Whether the node computes both running statistics, in a type precise enough for those of the batch."""
    if not is_op(node, "BatchNormalization") or len(node.outputs) != 3:
        return False
    n = Call(node)
    if not n.int("training_mode", 0) or any(v is None or v.dtype not in _WIDE for v in node.inputs[3:5]):
        return False
    return n.float("momentum", 0.9) != 0


def _give_own_operands(e: Emitter, node: ir.Node, stored: Sequence[ir.Value]) -> None:
    """Give the node scratch operands that its kernel may overwrite; see quirks.BATCH_NORMALIZATION_IN_PLACE.

    They depend on a number of x, so that they are computed per node and run, and differ from each other, so that they are
    not merged into one.
    """
    x = Call(node)["X"]
    rank = 0 if x.shape is None else len(x.shape)
    first = e.op("Slice", x, e.ints([0] * rank), e.ints([1] * rank)) if rank else x
    number = e.op("ReduceSum", first, keepdims=0)
    for at, value in enumerate(stored, 3):
        own = e.mul(value, e.cast(number, value.dtype or ir.DataType.FLOAT))
        node.replace_input_with(at, e.typed(own if at == 3 else e.neg(own), value))


def _unblend(e: Emitter, node: ir.Node, before: Sequence[ir.Value]) -> dict[ir.Value, ir.Value]:
    """Let the node return the statistics of the batch, and blend them with the stored ones `before` it."""
    momentum = Call(node).float("momentum", 0.9)
    node.attributes["momentum"] = ir.AttrFloat32("momentum", 0.0)
    moved = {}
    for batch, stored, which in zip(node.outputs[1:], before, ("mean", "var"), strict=True):
        share = e.mul(e.typed(batch, stored), 1 - momentum)
        running = e.typed(e.add(e.mul(stored, momentum), share), stored)
        batch.replace_all_uses_with(running, replace_graph_outputs=True)
        product = share.producer()
        assert product is not None
        product.replace_input_with(0, batch)
        own = e.names.claim(f"{node.outputs[0].name}_batch_{which}")
        batch.name, running.name = own, batch.name or running.name
        moved[batch] = running
    return moved
