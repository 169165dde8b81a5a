"""Cutting the batch of a gradient into chunks, so that what a lowering holds stays small.

A lowering becomes the body of a Scan over equal parts of the batch. Scan hands out its operands slice by slice and writes
its results in place, so nothing is copied to cut or to join; weight results are added up from part to part. What a
lowering computes from the weights alone stays in front of the loop. It serves a workspace budget, and it is faster where
what the lowering of a whole batch makes does not fit the cache and that of a few samples does.

Where even one sample is too much, the weight gradient is that of bands of its rows, added up: the body takes the rows of
the output, and those of the input that their windows reach, out of the whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.dims import static_dims
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.loop_bodies import emit_scan, take_body
from onnx_convgrad.ir.samples import cut_samples, filled, with_samples

__all__ = ["EACH", "counts", "emit_in_chunks", "part_of"]

Emit = Callable[[Emitter, Call, Any], ir.Value]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Operands that have the batch as their first axis, and whether the results are added."""

    operands: tuple[int, ...]
    added: bool


@dataclass(frozen=True, slots=True)
class _Bands:
    """Rows of the input and of the output's gradient, and what they depend on: the body's operand -> those of all turns."""

    x: ir.Value
    dy: ir.Value
    handed: dict[ir.Value, ir.Value]


_CUTS = {
    "ConvInputGrad": _Cut((0, 2), added=False),
    "ConvWeightGrad": _Cut((0, 1), added=True),
    "ConvPerSampleGrad": _Cut((0, 1), added=False),
    "ConvGradSquaredNorm": _Cut((0, 1), added=False),
    "Conv": _Cut((0,), added=False),
    "MaxPoolGrad": _Cut((0, 1), added=False),
}


EACH = 0
"""In place of a number of chunks: one for each sample, however many there are."""


_ROWS = 4
"""Rows of output that a band has at least."""


def counts(op_type: str, spec: Any, workspace: int, limit: float) -> Iterator[int]:
    """Numbers of equal chunks that could bring the workspace below `limit` bytes, from the fewest.

    A batch of unknown size can only be cut into its samples. More chunks than samples are bands of their rows.
    """
    if op_type not in _CUTS or workspace <= limit:
        return
    batch = spec.batch
    if batch is None:
        yield EACH
        return
    least = -(-workspace // max(int(limit), 1))
    yield from (n for n in range(min(least, batch), batch + 1) if n > 1 and batch % n == 0)
    if op_type == "ConvWeightGrad" and least > batch > 0 and spec.rank > 1 and spec.static:
        rows = spec.y[0]
        yield from (batch * n for n in range(-(-least // batch), rows // _ROWS + 1) if rows % n == 0)


def part_of(spec: Any, chunks: int) -> Any:
    """The geometry of one of so many chunks."""
    if chunks in (1, EACH):
        return spec.with_batch(1) if chunks == EACH else spec
    if chunks <= spec.batch:
        return spec.with_batch(spec.batch // chunks)
    rows = spec.y[0] * spec.batch // chunks
    reach = (rows - 1) * spec.strides[0] + spec.span[0]
    return replace(
        spec,
        batch=1,
        x=(reach, *spec.x[1:]),
        y=(rows, *spec.y[1:]),
        begin=(0, *spec.begin[1:]),
        end=(0, *spec.end[1:]),
    )


def emit_in_chunks(e: Emitter, node: ir.Node, spec: Any, chunks: int, emit: Emit) -> ir.Value:
    """Emit a lowering of `node` as the body of a Scan over `chunks` equal parts of the batch, or over its samples."""
    cut = _CUTS[node.op_type]
    first = node.inputs[cut.operands[0]]
    assert first is not None, "the batch operands are never absent"
    batch: Dim = e.dim(first, 0) if spec.batch is None else spec.batch
    samples = filled(e, batch)  # a Scan refuses to run not even once
    count: Dim = chunks or samples
    part = part_of(spec, chunks)
    start = len(e.emitted)
    operands = list(node.inputs)
    slices: dict[ir.Value, ir.Value] = {}
    if spec.batch is not None and chunks > spec.batch:
        x, dy = operands[:2]
        assert x is not None, "the batch operands are never absent"
        assert dy is not None, "the batch operands are never absent"
        bands = _bands(e, x, dy, spec, part, chunks)
        operands[:2], slices = [bands.x, bands.dy], bands.handed
    else:
        for position in cut.operands:
            whole = operands[position]
            assert whole is not None, "the batch operands are never absent"
            operands[position] = own = _slice(e, whole, part.batch, position)
            slices[own] = _parts(e, whole, batch, [count, part.batch])
    # a node for the lowering to read; it is in no graph
    stand_in = ir.Node(node.domain, node.op_type, operands, list(node.attributes.values()), num_outputs=1)
    e.typed(stand_in.outputs[0], node.outputs[0])
    if not cut.added:
        stand_in.outputs[0].shape = None
    result = emit(e, Call(stand_in), part)
    state: ir.Value | None = None
    if cut.added:
        state = ir.Value(name=f"sum_{len(e.order)}", shape=result.shape, type=ir.TensorType(result.dtype or _FLOAT))
        result = e.op("Add", state, result)
    size = result.shape
    if not cut.added and size is not None and all(isinstance(d, int) for d in size[1:]):
        result = _made(e, result, set(e.emitted[start:]))
    for position in range(len(operands)):
        stand_in.replace_input_with(position, None)
    slices = {own: parts for own, parts in slices.items() if own.uses()}
    if not slices:  # no window reads an operand, so there is nothing to hand out
        return emit(e, Call(node), spec)
    inner = [*([state] if state else []), *slices]
    body = ir.Graph(inner, [result], nodes=take_body(e, start, inner, result), name="chunk")
    scanned = list(slices.values())
    if state is not None:
        like = node.inputs[2]
        assert like is not None, "the shape of a weight gradient is that of an operand"
        return e.typed(emit_scan(e, body, [e.zeros_like(like), *scanned], len(scanned)), node.outputs[0])
    joined = emit_scan(e, body, scanned, len(scanned))
    joined = _whole(e, joined, result, size, [count, samples, part.batch])
    return e.typed(cut_samples(e, joined, batch), node.outputs[0])


_FLOAT = ir.DataType.FLOAT


def _made(e: Emitter, result: ir.Value, body: Collection[ir.Node]) -> ir.Value:
    """What a result is a view of: a view at the end of a loop's body, or of a graph, is a copy on one thread.

    Rows gathered for a single sample get no axis for it, so that the loop puts the result together as it is wanted.
    """
    node = result.producer()
    while node is not None and node in body and node.op_type == "Reshape":
        viewed = node.inputs[0]
        if viewed is None or viewed.producer() not in body or viewed.shape is None:
            break
        result, node = viewed, viewed.producer()
    if node is None or node not in body or node.op_type != "Gather" or result.shape is None or result.shape[0] != 1:
        return result
    data, index = node.inputs
    axis, size = node.attributes["axis"].as_int(), None if data is None else static_dims(data)
    if data is None or size is None or axis == 0:
        return result
    rest = [d for d in size[1:] if d is not None]
    if len(rest) < len(size) - 1:
        return result
    return e.op("Gather", e.reshape(data, rest), index, axis=axis - 1)


def _whole(e: Emitter, joined: ir.Value, part: ir.Value, size: ir.Shape | None, counts: Sequence[Dim]) -> ir.Value:
    """What a loop puts together from results `part`, which stand for values of shape `size`, as one with all samples.

    `counts` are those of the parts, of all samples, and of the samples of a part.
    """
    count, samples, each = counts
    if size is None or part.shape is None:
        return e.op("Reshape", joined, e.op("Concat", e.vector([samples]), e.op("Shape", joined, start=2), axis=0))
    lead = count if isinstance(count, int) else None
    joined.shape = ir.Shape([lead, *part.shape])
    if isinstance(count, int) and isinstance(each, int) and list(joined.shape) == [count * each, *size[1:]]:
        return joined
    rest = [d if isinstance(d, int) else e.dim(joined, 2 + axis) for axis, d in enumerate(size[1:])]
    return e.reshape(joined, [samples, *rest])


def _slice(e: Emitter, whole: ir.Value, batch: int, position: int) -> ir.Value:
    """What the body sees of an operand."""
    shape = None if whole.shape is None else ir.Shape([batch, *whole.shape[1:]])
    name = f"slice_{len(e.order)}_{position}"
    return ir.Value(name=name, shape=shape, type=ir.TensorType(whole.dtype or _FLOAT))


def _parts(e: Emitter, whole: ir.Value, batch: Dim, lead: list[Dim]) -> ir.Value:
    rest = [e.dim(whole, axis) for axis in range(1, e.rank(whole))]
    return e.reshape(with_samples(e, whole, [batch, *rest]), [*lead, *rest])


def _bands(e: Emitter, x: ir.Value, dy: ir.Value, spec: Any, part: Any, chunks: int) -> _Bands:
    """What the body sees of the input and of the output's gradient, and the constants that the loop hands out for it.

    Rows are gathered as wholes, channel by channel. Those of the padding are other rows, set to zero.
    """
    bands = chunks // spec.batch
    tops = np.arange(bands)[:, None] * part.y[0]
    reached = tops * spec.strides[0] - spec.begin[0] + np.arange(part.x[0])
    inside = (reached >= 0) & (reached < spec.x[0])
    handed: dict[ir.Value, ir.Value] = {}

    def turn(table: np.ndarray, dtype: ir.DataType, name: str) -> ir.Value:
        """One turn's slice of a table `[bands, ...]` or `[chunks, ...]`."""
        repeated = np.tile(table, (chunks // len(table), *[1] * (table.ndim - 1)))
        value = ir.Value(name=f"{name}_{len(e.order)}", shape=ir.Shape(table.shape[1:]), type=ir.TensorType(dtype))
        handed[value] = e.const(repeated)
        return value

    def rows(whole: ir.Value, numbers: np.ndarray, name: str) -> ir.Value:
        """`[1, C, rows, ...]`: for each of a turn's row numbers that row of each channel."""
        channels, height, *rest = e.dims(whole)[1:]
        assert isinstance(channels, int), "bands are of known sizes"
        assert isinstance(height, int), "bands are of known sizes"
        samples = np.arange(spec.batch)[:, None, None] * channels * height
        at = turn((samples + numbers).reshape(chunks, -1), ir.DataType.INT64, name)
        each = e.add(e.const(np.arange(channels)[:, None] * height), at)
        flat = e.reshape(whole, [spec.batch * channels * height, *rest])
        return e.unsqueeze(e.op("Gather", flat, each, axis=0), [0])

    band = rows(x, reached.clip(0, spec.x[0] - 1), "rows")
    if not inside.all():
        mask = turn(inside.reshape(bands, -1, *[1] * (spec.rank - 1)), ir.DataType.BOOL, "inside")
        band = e.where(mask, band, 0)
    return _Bands(band, rows(dy, tops + np.arange(part.y[0]), "rows_y"), handed)
