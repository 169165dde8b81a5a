"""Cutting the batch of a convolution gradient into chunks, so that what a lowering holds stays small.

Data results are laid side by side, weight results are added. It serves a workspace budget, and it is also faster where
the patches of a whole batch do not fit the cache and those of a few samples do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnx_convgrad.emit import Emitter
from onnx_convgrad.registry import Call

__all__ = ["counts", "emit_in_chunks"]

Emit = Callable[[Emitter, Call, Any], ir.Value]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Operands that have the batch as their first axis, and whether the results are added."""

    operands: tuple[int, ...]
    added: bool


_CUTS = {
    "ConvInputGrad": _Cut((0, 2), added=False),
    "ConvWeightGrad": _Cut((0, 1), added=True),
    "ConvPerSampleGrad": _Cut((0, 1), added=False),
    "ConvGradSquaredNorm": _Cut((0, 1), added=False),
    "Conv": _Cut((0,), added=False),
}


def counts(op_type: str, spec: Any, workspace: int, limit: float) -> Iterator[int]:
    """Numbers of equal chunks that could bring the workspace below `limit` bytes, from the fewest."""
    batch = getattr(spec, "batch", None)
    if op_type in _CUTS and batch is not None and workspace > limit:
        least = -(-workspace // max(int(limit), 1))
        yield from (n for n in range(min(least, batch), batch + 1) if n > 1 and batch % n == 0)


def emit_in_chunks(e: Emitter, node: ir.Node, spec: Any, chunks: int, emit: Emit) -> ir.Value:
    """Emit a lowering of `node` once for each of `chunks` equal parts of the batch, and join the results."""
    cut = _CUTS[node.op_type]
    part = spec.with_batch(spec.batch // chunks)
    results: list[ir.Value] = []
    for i in range(chunks):
        operands = list(node.inputs)
        for position in cut.operands:
            whole = operands[position]
            assert whole is not None, "the batch operands are never absent"
            operands[position] = e.slice(whole, [i * part.batch], [(i + 1) * part.batch], [0])
        # a node for the lowering to read; it is in no graph
        stand_in = ir.Node(node.domain, node.op_type, operands, list(node.attributes.values()), num_outputs=1)
        e.typed(stand_in.outputs[0], node.outputs[0])
        if not cut.added:
            stand_in.outputs[0].shape = None
        result = emit(e, Call(stand_in), part)
        if cut.added and results:  # at once, so that only one partial sum is ever held
            result = e.add(results.pop(), result)
        results.append(result)
        for position in range(len(operands)):
            stand_in.replace_input_with(position, None)
    return e.concat(results, 0)
