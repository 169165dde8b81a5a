"""The Scan of opset 8, which runs over the sequences of a batch, as a Scan over the batch of Scans over one sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.opset.rewriter import Rewriter


def batched(h: Rewriter) -> None:
    """Scan every sample alone; with sequence lengths, its first rows, and pad the joined results with zeros.

    The states and sequences of opset 8 have a leading batch axis, which its body does not see.
    """
    lengths, operands = h.operand(0), [h.required(index) for index in range(1, len(h.node.inputs))]
    body, count = h.node.attributes["body"].as_graph(), h.int("num_scan_inputs", 0)
    states = len(operands) - count
    if not 0 < count <= len(operands):
        raise UnsupportedCase(f"it has {count} sequences among {len(operands)} operands")
    whole = _Body(h)
    samples = [whole.input(v, 1) for v in operands]
    rows = samples[states:]
    limit = None if lengths is None else whole.op("Reshape", whole.input(lengths, 1), whole.ints([1]))
    if limit is not None:
        rows = [whole.op("Slice", v, whole.ints([0]), limit, whole.ints([0]), like=v) for v in rows]
    directions = h.ints("directions") or (0,) * count
    scan = ir.node(
        "Scan",
        [*samples[:states], *rows],
        {"body": body, "num_scan_inputs": count, "scan_input_directions": list(directions)},
        num_outputs=len(h.node.outputs),
    )
    results = whole.add(scan)
    for value, inner in zip(results, body.outputs, strict=False):
        value.type = ir.TensorType(inner.dtype or ir.DataType.FLOAT)
    if limit is not None:
        size = whole.op("Shape", samples[states], start=0, end=1)
        missing = whole.op("Sub", size, limit)
        for index in range(states, len(results)):
            results[index] = whole.padded(results[index], missing, body.outputs[index])
    own = [] if lengths is None else [lengths]
    h.become("Scan", *operands, *own, body=whole.graph(results), num_scan_inputs=len(operands) + len(own))


class _Body:
    """The body of the Scan over the batch, as it is written."""

    def __init__(self, h: Rewriter) -> None:
        self.h = h
        self.inputs: list[ir.Value] = []
        self.nodes: list[ir.Node] = []

    def _named(self, value: ir.Value) -> ir.Value:
        value.name = self.h.e.names.claim(f"{self.h.node.outputs[0].name}_sample")
        return value

    def input(self, whole: ir.Value, axes: int) -> ir.Value:
        """The part of `whole` that belongs to one sample: without its first `axes`."""
        shape = None if whole.shape is None else ir.Shape(whole.shape[axes:])
        value = ir.Value(shape=shape, type=ir.TensorType(whole.dtype or ir.DataType.FLOAT))
        self.inputs.append(self._named(value))
        return value

    def add(self, node: ir.Node) -> list[ir.Value]:
        self.nodes.append(node)
        node.name = self.h.e.names.claim(f"{self.h.node.outputs[0].name}_{node.op_type}")
        return [self._named(v) for v in node.outputs]

    def op(self, op_type: str, *inputs: ir.Value, like: ir.Value | None = None, **attributes: Any) -> ir.Value:
        (value,) = self.add(ir.node(op_type, inputs, attributes))
        if like is not None:
            value.type = like.type
        return value

    def ints(self, numbers: Sequence[int]) -> ir.Value:
        return self.op("Constant", value=ir.tensor(np.asarray(numbers, np.int64)))

    def padded(self, value: ir.Value, missing: ir.Value, row: ir.Value) -> ir.Value:
        """Append zeros along the first axis; `row` is one slice of the value."""
        if row.shape is None:
            raise UnsupportedCase(f"the rank of {row.name!r} in its body is not known, to which zeros are added")
        zeros = self.ints([0] * (row.shape.rank() + 1))
        behind = [missing] if row.shape.rank() == 0 else [missing, self.ints([0] * row.shape.rank())]
        pads = self.op("Concat", zeros, *behind, axis=0)
        return self.op("Pad", value, pads, like=value)

    def graph(self, results: Sequence[ir.Value]) -> ir.Graph:
        return ir.Graph(self.inputs, results, nodes=self.nodes, name="sample")
