"""The graphs of a training program as sessions: what moves is fed, so none holds a copy of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.frontend.files import write
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.serialize import PROTO_LIMIT
from onnx_convgrad.runtime import session
from onnx_convgrad.training.program.draft import NodeNames
from onnx_convgrad.training.program.manifest import Manifest, Parameter

__all__ = ["Accumulation", "blank", "defaults", "fed_session"]


def defaults(model: ir.Model, names: Iterable[str]) -> dict[str, np.ndarray]:
    """The values that a graph stores for inputs of these names."""
    stored = model.graph.initializers
    held = {name: stored[name].const_value for name in names if name in stored}
    return {name: np.array(tensor.numpy()) for name, tensor in held.items() if tensor is not None}


def fed_session(model: ir.Model, fed: Iterable[str], limit: int = PROTO_LIMIT, **options: Any) -> Any:
    """A session of a graph without the defaults of the inputs `fed`; `options` are those of `runtime.session`.

    More than `limit` bytes of constants go through a temporary file.
    """
    m = model.clone()
    for name in fed:
        m.graph.initializers.pop(name, None)
    if sum(v.const_value.nbytes for v in m.graph.initializers.values() if v.const_value is not None) <= limit:
        ir.external_data.load_to_model(m)
        return session(m, **options)
    with tempfile.TemporaryDirectory(prefix="onnx_convgrad-") as folder:
        path = Path(folder) / "graph.onnx"
        write(m, path, limit)
        return session(str(path), **options)


class Accumulation:
    """The graph `gradients` extended by sums: `sum_next = sum + weight * gradient`, or without `sum` in the first run.

    Attributes:
        model: The graph.
        weight: Input, a float32 scalar.
        first: Input, a bool scalar: whether to begin anew.
        reads: Input with the sum so far -> the gradient's name.
        writes: Output with the next sum -> the gradient's name.
    """

    def __init__(self, gradients: ir.Model, manifest: Manifest) -> None:
        self.model = gradients.clone()
        graph = self.model.graph
        e, node_names = Emitter(graph, opsets=graph.opset_imports), NodeNames(graph)
        names = e.names
        self.weight, self.first = names.claim("weight"), names.claim("first")
        weight = _input(graph, self.weight, ir.DataType.FLOAT, ())
        first = _input(graph, self.first, ir.DataType.BOOL, ())
        outputs = {v.name: i for i, v in enumerate(graph.outputs)}
        self.reads, self.writes = {}, {}
        for p in manifest.parameters:
            gradient = graph.outputs[outputs[p.gradient]]
            before = _input(graph, names.claim(f"{p.gradient}_sum"), gradient.dtype, p.shape or ())
            share = e.mul(gradient, e.cast(weight, gradient.dtype or ir.DataType.FLOAT))
            total = e.typed(e.add(e.where(first, 0, before), share), gradient)
            total.name = names.claim(f"{p.gradient}_sum_next")
            graph.outputs[outputs[p.gradient]] = total
            self.reads[before.name or ""] = self.writes[total.name] = p.gradient
        node_names.give(e.emitted, "accumulate")


def _input(graph: ir.Graph, name: str, dtype: ir.DataType | None, shape: Iterable[int | str | None]) -> ir.Value:
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype or ir.DataType.FLOAT))
    graph.inputs.append(value)
    return value


def blank(parameters: Iterable[Parameter]) -> dict[str, np.ndarray]:
    """Gradient -> zeros of its shape and dtype."""
    return {p.gradient: np.zeros([d for d in p.shape or () if isinstance(d, int)], p.dtype) for p in parameters}
