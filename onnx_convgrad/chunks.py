"""Cutting the batch of a convolution gradient into chunks, so that what a lowering holds stays small.

A lowering becomes the body of a Scan over equal parts of the batch. Scan hands out its operands slice by slice and writes
its results in place, so nothing is copied to cut or to join; weight results are added up from part to part. What a
lowering computes from the weights alone stays in front of the loop. It serves a workspace budget, and it is faster where
what the lowering of a whole batch makes does not fit the cache and that of a few samples does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnx_convgrad.activity import captured_values
from onnx_convgrad.emit import Dim, Emitter
from onnx_convgrad.registry import Call
from onnx_convgrad.samples import cut_samples, filled, with_samples

__all__ = ["EACH", "counts", "emit_in_chunks", "reaching"]

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


EACH = 0
"""In place of a number of chunks: one for each sample, however many there are."""


def counts(op_type: str, spec: Any, workspace: int, limit: float) -> Iterator[int]:
    """Numbers of equal chunks that could bring the workspace below `limit` bytes, from the fewest.

    A batch of unknown size can only be cut into its samples.
    """
    if op_type not in _CUTS or workspace <= limit:
        return
    batch = spec.batch
    if batch is None:
        yield EACH
    else:
        least = -(-workspace // max(int(limit), 1))
        yield from (n for n in range(min(least, batch), batch + 1) if n > 1 and batch % n == 0)


def emit_in_chunks(e: Emitter, node: ir.Node, spec: Any, chunks: int, emit: Emit) -> ir.Value:
    """Emit a lowering of `node` as the body of a Scan over `chunks` equal parts of the batch, or over its samples."""
    cut = _CUTS[node.op_type]
    first = node.inputs[cut.operands[0]]
    assert first is not None, "the batch operands are never absent"
    batch: Dim = e.dim(first, 0) if spec.batch is None else spec.batch
    samples = filled(e, batch)  # a Scan refuses to run not even once
    count: Dim = chunks or samples
    part = spec.with_batch(1 if chunks == EACH else spec.batch // chunks)
    operands = list(node.inputs)
    slices: dict[ir.Value, ir.Value] = {}
    for position in cut.operands:
        whole = operands[position]
        assert whole is not None, "the batch operands are never absent"
        operands[position] = own = _slice(e, whole, part.batch, position)
        slices[own] = whole
    # a node for the lowering to read; it is in no graph
    stand_in = ir.Node(node.domain, node.op_type, operands, list(node.attributes.values()), num_outputs=1)
    e.typed(stand_in.outputs[0], node.outputs[0])
    if not cut.added:
        stand_in.outputs[0].shape = None
    start = len(e.emitted)
    result = emit(e, Call(stand_in), part)
    state: ir.Value | None = None
    if cut.added:
        state = ir.Value(name=f"sum_{len(e.order)}", shape=result.shape, type=ir.TensorType(result.dtype or _FLOAT))
        result = e.op("Add", state, result)
    for position in range(len(operands)):
        stand_in.replace_input_with(position, None)
    slices = {own: whole for own, whole in slices.items() if own.uses()}
    inner = [*([state] if state else []), *slices]
    body = ir.Graph(inner, [result], nodes=_taken(e, start, inner, result), name="chunk")
    scanned = [_parts(e, whole, batch, [count, part.batch]) for whole in slices.values()]
    if state is not None:
        like = node.inputs[2]
        assert like is not None, "the shape of a weight gradient is that of an operand"
        return e.typed(_scan(e, body, [e.zeros_like(like), *scanned], len(scanned)), node.outputs[0])
    joined = _scan(e, body, scanned, len(scanned))
    if result.shape is None:
        size = e.op("Concat", e.vector([samples]), e.op("Shape", joined, start=2), axis=0)
        joined = e.op("Reshape", joined, size)
    else:
        joined.shape = ir.Shape([count if isinstance(count, int) else None, *result.shape])
        rest = [e.dim(joined, 2 + axis) for axis in range(len(result.shape) - 1)]
        joined = e.reshape(joined, [samples, *rest])
    return e.typed(cut_samples(e, joined, batch), node.outputs[0])


_FLOAT = ir.DataType.FLOAT


def _slice(e: Emitter, whole: ir.Value, batch: int, position: int) -> ir.Value:
    """What the body sees of an operand."""
    shape = None if whole.shape is None else ir.Shape([batch, *whole.shape[1:]])
    name = f"slice_{len(e.order)}_{position}"
    return ir.Value(name=name, shape=shape, type=ir.TensorType(whole.dtype or _FLOAT))


def _parts(e: Emitter, whole: ir.Value, batch: Dim, lead: list[Dim]) -> ir.Value:
    rest = [e.dim(whole, axis) for axis in range(1, e.rank(whole))]
    return e.reshape(with_samples(e, whole, [batch, *rest]), [*lead, *rest])


def _taken(e: Emitter, start: int, inner: Collection[ir.Value], result: ir.Value) -> Sequence[ir.Node]:
    """Remove from the graph what was emitted since `start` and depends on values of the body; those that count."""
    depending = set(inner)
    moved = []
    for node in e.emitted[start:]:
        if any(v in depending for v in node.inputs):
            moved.append(node)
            depending.update(node.outputs)
    gone = set(moved)
    e.emitted[start:] = [node for node in e.emitted[start:] if node not in gone]
    e.graph.remove(moved)
    kept = reaching(result)
    body = [node for node in moved if node in kept]
    names = itertools.count()
    for node in body:
        node.metadata_props.pop("onnx_convgrad.origin", None)
        node.name = f"chunk_{len(e.order)}_{next(names)}"
        for value in node.outputs:  # a graph around it names its own values without looking here
            value.name = f"chunk_{len(e.order)}_{next(names)}"
    for node in moved:
        if node not in kept:
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
    return body


def _scan(e: Emitter, body: ir.Graph, operands: Sequence[ir.Value], scanned: int) -> ir.Value:
    attributes = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", scanned)]
    node = ir.Node("", "Scan", operands, attributes, num_outputs=1)
    e.place(node)
    result = node.outputs[0]
    result.dtype = body.outputs[0].dtype or _FLOAT
    return result


def reaching(result: ir.Value) -> set[ir.Node]:
    """The nodes that a value depends on: the rest of what was emitted with it will be removed."""
    found: set[ir.Node] = set()
    todo = [result.producer()]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [v.producer() for v in (*node.inputs, *captured_values(node)) if v is not None]
    return found
