"""Let reshapes follow a batch size that the caller has changed.

An exporter that traces one batch stores its size in the shape of every Reshape, such as that of a flattening: [1, 512].
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op


def former_batch(before: ir.Shape | None, after: ir.Shape | None) -> set[int]:
    """The batch size that an input had before, if its shape names another one now."""
    if not before or not after or before[0] == after[0]:
        return set()
    return {size for size in before[:1] if isinstance(size, int)}


def free_batch(graph: ir.Graph, batches: set[int]) -> None:
    """Let the first size of each Reshape follow the batch, if it is one of `batches`.

    For inputs of the former size nothing changes. Declared shapes are those of the former size, too.
    """
    e = Emitter(graph)
    for node in graph if batches else ():
        if not is_op(node, "Reshape") or node.inputs[0] is None or node.inputs[0].is_initializer():
            continue
        sizes = constant_of(node.inputs[1])
        if sizes is None or sizes.ndim != 1 or not sizes.size or sizes[0] not in batches:
            continue
        first = _following(node, sizes[1:].tolist(), batches)
        if first is not None:
            node.replace_input_with(1, e.ints([first, *sizes[1:].tolist()]))


def _following(node: ir.Node, others: list[int], batches: set[int]) -> int | None:
    """The size in a Reshape that stands for the batch: what is left, or that of the operand; `None` if neither fits."""
    if all(size > 0 for size in others):
        return -1
    before = node.inputs[0].shape if node.inputs[0] is not None else None
    copies = not node.attributes.get_int("allowzero", 0) and before and before[0] in batches
    return 0 if copies and 0 not in others else None
