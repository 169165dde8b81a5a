"""Emit a lowering as a loop over chunks of the batch, so that it holds less memory.

The lowering becomes the body of a Scan over equal parts of the batch. Scan passes its operands slice by slice and writes its
results in place, so nothing is copied to cut or to join; weight gradients are summed over the iterations. Nodes that read
only the weights stay in front of the loop. Chunks serve a workspace budget, and are faster where the intermediate values of
a whole batch do not fit the cache and those of a few samples do.

Where even one sample is too large, the weight gradient is summed over bands of its rows: the body gathers the rows of the
output, and the rows of the input that their windows read, from the whole arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.registry import lookup
from onnx_convgrad.base.limits import check_limit
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.dims import static_dims
from onnx_convgrad.ir.emit import DOMAIN, Dim, Emitter
from onnx_convgrad.ir.loop_bodies import emit_scan, take_body
from onnx_convgrad.ir.samples import cut_samples, filled, with_samples
from onnx_convgrad.lowering.table import reader_of

Emit = Callable[[Emitter, Call, Any], ir.Value]


@dataclass(frozen=True, slots=True)
class Cut:
    """Positions of operands that have the batch as their first axis, and whether the results are summed."""

    operands: tuple[int, ...]
    added: bool


def cut_of(op_type: str, spec: Any) -> Cut | None:
    """The operands that run along the batch, the first factor of the first of them; `None` if it cannot be cut."""
    rule = lookup(DOMAIN, op_type) or lookup("", op_type)
    if rule is None or rule.factors is None or rule.unnoted:
        return None
    operands = [ir.Value(shape=ir.Shape(getattr(spec, name))) for name in reader_of(op_type).operands]
    with stand_in(op_type, rule.domain, operands, []) as call:
        factors = rule.factors(call)
    (first, *_), result = factors.operands[0] or ("",), factors.results[0] or ("",)
    kind = factors.does(first).kind
    if kind != "sum" and (kind != "each" or result[0] != first):
        return None
    positions = tuple(i for i, axes in enumerate(factors.operands) if axes and axes[0] == first)
    return Cut(positions, added=kind == "sum")


EACH = 0
"""Number of chunks that stands for one per sample, at any batch size."""


_ROWS = 4
"""Least rows of output in a band."""

_MOST_TRIED = 4096
"""Most numbers of chunks that are tried as divisors of the batch or of the rows."""


def counts(op_type: str, spec: Any, workspace: int, limit: float) -> Iterator[int]:
    """Numbers of equal chunks that could bring the workspace below `limit` bytes, starting with the fewest.

    A batch of unknown size can only be cut into its samples. More chunks than samples are bands of rows.
    """
    cut = None if workspace <= limit else cut_of(op_type, spec)
    if cut is None:
        return
    batch = spec.batch
    if batch is None:
        yield EACH
        return
    least = -(-workspace // max(int(limit), 1))
    yield from (n for n in _tried(min(least, batch), batch) if n > 1 and batch % n == 0)
    if cut.added and least > batch > 0 and spec.rank > 1 and spec.static:
        rows = spec.y[0]
        yield from (batch * n for n in _tried(-(-least // batch), rows // _ROWS) if rows % n == 0)


def _tried(first: int, last: int) -> Iterator[int]:
    """The numbers from first to last, without most of very many."""
    yield from range(first, min(last, first + _MOST_TRIED) + 1)
    if last > first + _MOST_TRIED:
        yield last


def part_of(spec: Any, chunks: int) -> Any:
    """The geometry of one of `chunks` chunks."""
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
    cut = cut_of(node.op_type, spec)
    assert cut is not None, "the number of chunks comes from `counts`"
    batch: Dim = e.dim(_present(node, cut.operands[0]), 0) if spec.batch is None else spec.batch
    samples = filled(e, batch)  # a Scan refuses zero iterations
    count: Dim = chunks or samples
    part = part_of(spec, chunks)
    start = len(e.emitted)
    operands = list(node.inputs)
    slices: dict[ir.Value, ir.Value] = {}
    if spec.batch is not None and chunks > spec.batch:
        *operands[:2], slices = _bands(e, _present(node, 0), _present(node, 1), spec, part, chunks)
    else:
        for position in cut.operands:
            whole = _present(node, position)
            operands[position] = inner = _slice(e, whole, part.batch, position)
            slices[inner] = _parts(e, whole, batch, [count, part.batch])
    with stand_in(node.op_type, node.domain, operands, list(node.attributes.values())) as call:
        e.typed(call.node.outputs[0], node.outputs[0])
        if not cut.added:
            call.node.outputs[0].shape = None
        result = emit(e, call, part)
    slices = {inner: parts for inner, parts in slices.items() if inner.uses()}
    if not slices:  # no window reads an operand, so there is nothing to loop over
        return emit(e, Call(node), spec)
    scanned = list(slices.values())
    if cut.added:
        state = ir.Value(name=f"sum_{e.placed}", shape=result.shape, type=ir.TensorType(result.dtype or _FLOAT))
        body = _body(e, start, [state, *slices], e.op("Add", state, result))
        return e.typed(emit_scan(e, body, [e.zeros_like(_present(node, 2)), *scanned], len(scanned)), node.outputs[0])
    size = result.shape
    if size is not None and all(isinstance(d, int) for d in size[1:]):
        result = _without_view(e, result, set(e.emitted[start:]))
    joined = emit_scan(e, _body(e, start, list(slices), result), scanned, len(scanned))
    joined = _whole(e, joined, result, size, [count, samples, part.batch])
    return e.typed(cut_samples(e, joined, batch), node.outputs[0])


@contextmanager
def stand_in(
    op_type: str, domain: str, operands: Sequence[ir.Value | None], attributes: Sequence[ir.Attr]
) -> Iterator[Call]:
    """A node in no graph for a lowering to read; it releases its operands at the end of the block."""
    node = ir.Node(domain, op_type, operands, attributes, num_outputs=1)
    yield Call(node)
    for position in range(len(operands)):
        node.replace_input_with(position, None)


def _present(node: ir.Node, position: int) -> ir.Value:
    value = node.inputs[position]
    assert value is not None, "the operands of gradients are always present"
    return value


def _body(e: Emitter, start: int, inputs: list[ir.Value], result: ir.Value) -> ir.Graph:
    """The nodes emitted since `start` that depend on the inputs, as the body of a loop."""
    return ir.Graph(inputs, [result], nodes=take_body(e, start, inputs, [result]), name="chunk")


_FLOAT = ir.DataType.FLOAT


def _without_view(e: Emitter, result: ir.Value, body: Collection[ir.Node]) -> ir.Value:
    """The value that a result is a view of: a view at the end of a loop's body, or of a graph, is a copy on one thread.

    Rows gathered for a single sample get no axis for it, so that the loop joins them in the shape of the whole result.
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
    """The results `joined` of a loop reshaped to one value with all samples; each is `part`, a view of shape `size`.

    `counts`: the number of parts, of all samples, and of the samples in a part.
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
    """The slice of an operand in the body."""
    shape = None if whole.shape is None else ir.Shape([batch, *whole.shape[1:]])
    name = f"slice_{e.placed}_{position}"
    return ir.Value(name=name, shape=shape, type=ir.TensorType(whole.dtype or _FLOAT))


def _parts(e: Emitter, whole: ir.Value, batch: Dim, lead: list[Dim]) -> ir.Value:
    rest = [e.dim(whole, axis) for axis in range(1, e.rank(whole))]
    return e.reshape(with_samples(e, whole, [batch, *rest]), [*lead, *rest])


def _bands(
    e: Emitter, x: ir.Value, dy: ir.Value, spec: Any, part: Any, chunks: int
) -> tuple[ir.Value, ir.Value, dict[ir.Value, ir.Value]]:
    """The rows of one iteration, in the body, of the input and of the output's gradient, and the tables that it scans.

    A table is a value of the body -> the scanned value. Whole rows are gathered, channel by channel. Rows of the padding are
    any rows, set to zero.
    """
    bands = chunks // spec.batch
    entries = max(chunks * part.x[0], chunks * part.y[0], spec.channels, spec.features)
    check_limit("constant_bytes", 8 * entries, "A table of the rows of each band")
    tops = np.arange(bands)[:, None] * part.y[0]
    reached = tops * spec.strides[0] - spec.begin[0] + np.arange(part.x[0])
    inside = (reached >= 0) & (reached < spec.x[0])
    scanned: dict[ir.Value, ir.Value] = {}

    def entry(table: np.ndarray, dtype: ir.DataType, name: str) -> ir.Value:
        """One iteration's slice of a table `[bands, ...]` or `[chunks, ...]`."""
        repeated = np.tile(table, (chunks // len(table), *[1] * (table.ndim - 1)))
        value = ir.Value(name=f"{name}_{e.placed}", shape=ir.Shape(table.shape[1:]), type=ir.TensorType(dtype))
        scanned[value] = e.const(repeated)
        return value

    def rows(whole: ir.Value, numbers: np.ndarray, name: str) -> ir.Value:
        """`[1, C, rows, ...]`: the rows of an iteration, of each channel."""
        channels, height, *rest = e.dims(whole)[1:]
        assert isinstance(channels, int), "bands are of known sizes"
        assert isinstance(height, int), "bands are of known sizes"
        samples = np.arange(spec.batch)[:, None, None] * channels * height
        at = entry((samples + numbers).reshape(chunks, -1), ir.DataType.INT64, name)
        each = e.add(e.const(np.arange(channels)[:, None] * height), at)
        flat = e.reshape(whole, [spec.batch * channels * height, *rest])
        return e.unsqueeze(e.op("Gather", flat, each, axis=0), [0])

    band = rows(x, reached.clip(0, spec.x[0] - 1), "rows")
    if not inside.all():
        mask = entry(inside.reshape(bands, -1, *[1] * (spec.rank - 1)), ir.DataType.BOOL, "inside")
        band = e.where(mask, band, 0)
    return band, rows(dy, tops + np.arange(part.y[0]), "rows_y"), scanned
