"""Sum over axes on both sides of others in two stages, for ONNX Runtime's CUDA provider.

Sums over the last axes, and over the first ones, have kernels that run at the speed of memory. For all others, such as the
sums of each channel of a batch of images, the provider calls cuDNN's general reduction, which takes five times as long.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.passes import NodePass

_SECOND = {"ReduceSum": "ReduceSum", "ReduceMean": "ReduceMean", "ReduceSumSquare": "ReduceSum"}
"""Operator -> the operator of the second stage."""


class StageSums(NodePass):
    """Sum over the last axes first, and over the others of the small result; rests on quirks.CUDA_SCATTERED_SUMS."""

    operators = tuple(_SECOND)
    label = "staged"
    bodies = True

    def rewrite_node(self, e: Emitter, node: ir.Node) -> ir.Value | None:
        """Rewrite one reduction over known axes of a value of known rank."""
        if e.target.name != "cuda":
            return None
        stages = _stages(node)
        if stages is None:
            return None
        last, rest = stages
        x, keepdims = node.inputs[0], bool(Call(node).int("keepdims", 1))
        assert x is not None
        inner = e.reduce(node.op_type, x, last)
        total = e.reduce(_SECOND[node.op_type], inner, rest)
        return total if keepdims else e.squeeze(total, [*rest, *last])


def _stages(node: ir.Node) -> tuple[list[int], list[int]] | None:
    """The last axes that a node sums over, and the others; `None` if the axes are all together at one end."""
    x = node.inputs[0]
    axes = constant_of(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
    if x is None or x.shape is None or axes is None or not is_op(node, *_SECOND):
        return None
    sizes, rank = list(x.shape), len(x.shape)
    summed = {int(axis) % rank for axis in axes.reshape(-1)} if rank else set()
    wide = [axis for axis in range(rank) if sizes[axis] != 1]
    ends = [axis in summed for axis in wide]
    if not summed or ends == sorted(ends) or not ends[-1] or ends == sorted(ends, reverse=True):
        return None
    kept = max(axis for axis in wide if axis not in summed)
    last, rest = sorted(axis for axis in summed if axis > kept), sorted(axis for axis in summed if axis < kept)
    known = math.prod(size for axis in last if isinstance(size := sizes[axis], int))
    return (last, rest) if known != 0 and rest else None
