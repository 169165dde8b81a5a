"""Converters of recurrent layers, and of the Scan of opset 8 over a batch."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.opset.rewriter import Rewriter
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.loop_bodies import Layout, Slices, emit_loop, placeholder

_SWAPPED = (1, 0, 2)
_RESULTS = ((2, 0, 1, 3), _SWAPPED, _SWAPPED)
"""The order of the axes of Y, Y_h and Y_c with the batch first, among those with the sequence first."""


def batch_first(h: Rewriter) -> None:
    """LSTM, GRU and RNN with `layout=1`: transpose X, the initial states and the results."""
    if not h.int("layout", 0):
        return
    h.drop("layout")
    inputs = list(h.node.inputs)
    for index in (0, 5, 6):  # X, initial_h, initial_c
        value = h.operand(index)
        if value is not None:
            inputs[index] = h.e.op("Transpose", value, perm=_SWAPPED)
    h.set_inputs(*inputs)
    for result, perm in zip(h.node.outputs, _RESULTS, strict=False):
        if result.name:
            h.append(result, "Transpose", perm=perm)
            if result.shape is not None:
                result.shape = ir.Shape([result.shape[perm.index(axis)] for axis in range(len(perm))])


def scan_over_batch(h: Rewriter) -> list[ir.Value]:
    """The Scan of opset 8, which runs over the sequences of a batch, as a Scan over the batch of Scans over one sequence.

    With sequence lengths, each sample scans its first rows, and the joined results are padded with zeros. The states and
    sequences have a leading batch axis, which the body does not see.
    """
    e, lengths, operands = h.e, h.operand(0), [h.required(index) for index in range(1, len(h.node.inputs))]
    body, count = h.node.attributes["body"].as_graph(), h.int("num_scan_inputs", 0)
    states, start = len(operands) - count, len(e.emitted)
    if not 0 < count <= len(operands):
        raise UnsupportedCase(f"it has {count} sequences among {len(operands)} operands")
    of_sample = {
        placeholder(e, v, None if v.shape is None else ir.Shape(v.shape[1:])): Slices(v)
        for v in (*operands, *([] if lengths is None else [lengths]))
    }
    samples = list(of_sample)
    limit = None if lengths is None else e.op("Reshape", samples[-1], e.ints([1]))
    rows = samples[states : len(operands)]
    if limit is not None:
        rows = [e.op("Slice", v, e.ints([0]), limit, e.ints([0])) for v in rows]
    directions = h.ints("directions") or (0,) * count
    results = list(
        e.ops(
            "Scan", *samples[:states], *rows, outputs=len(h.node.outputs), body=body, num_scan_inputs=count,
            scan_input_directions=directions,
        )
    )  # fmt: skip
    for place, (result, inner) in enumerate(zip(results, body.outputs, strict=False)):
        e.typed(result, inner)
        if place >= states:
            result.shape = None if inner.shape is None else ir.Shape([None, *inner.shape])
            if limit is not None:
                missing = e.op("Sub", e.op("Shape", samples[states], start=0, end=1), limit)
                results[place] = _padded(e, result, missing)
    return emit_loop(e, start, [], of_sample, [(result, Layout()) for result in results])[1]


def _padded(e: Emitter, value: ir.Value, missing: ir.Value) -> ir.Value:
    """Append `missing` rows of zeros along the first axis."""
    if value.shape is None:
        raise UnsupportedCase("the rank of a result of its body is not known, to which zeros are added")
    return e.typed(e.pad(value, [0], [missing], [0]), value)
