"""Create the sessions of a training program: without the defaults of values that are fed, and with accumulation."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.memory.in_place import written_over, written_safely
from onnx_convgrad.programs.draft import name_nodes
from onnx_convgrad.programs.manifest import Manifest
from onnx_convgrad.programs.summands import SHARE
from onnx_convgrad.runtime import session


def defaults(model: ir.Model, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Copy the stored default values of inputs."""
    stored = model.graph.initializers
    tensors = {name: stored[name].const_value for name in names if name in stored}
    return {name: np.array(tensor.numpy()) for name, tensor in tensors.items() if tensor is not None}


def fed_session(model: ir.Model, fed: Iterable[str], **options: Any) -> Any:
    """Create a session of a graph without the defaults of the inputs `fed`, so that it holds no copy of them.

    OpenVINO computes wrong gradients with defaults: see quirks.OPENVINO_DEFAULTS.
    `options` are those of `runtime.session`; the result, an `InferenceSession`, is `Any` because ONNX Runtime is untyped.
    """
    m = model.clone()
    for name in fed:
        m.graph.initializers.pop(name, None)
    return session(m, **options)


def checked_session(model: ir.Model, fed: Iterable[str], **options: Any) -> tuple[Any, set[str]]:
    """Open a session as `fed_session` does; also return the inputs that nothing reads late in the graph that it runs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rewritten.onnx"
        try:
            live = fed_session(model, fed, rewritten=str(path), **options)
        except ExecutionError:  # the graph with its weights exceeds 2 GB
            return fed_session(model, fed, **options), set()
        following = {output.name or "": held.name or "" for output, held in written_over(model.graph).items()}
        return live, written_safely(ir.load(path).graph, following)


class Accumulation:
    """The graph `gradients` with sums: `sum_next = sum + weight * gradient`, or without `sum` in the first run.

    Attributes:
        model: The graph.
        weight: Input, a float64 scalar.
        first: Input, a bool scalar: whether this is the first run.
        share: Input with the shares in the summands of the loss of a union, if the graph has it.
        reads: Input with a sum -> name of the gradient.
        writes: Output with the next sum -> name of the gradient; in the order in which the graph computes these.
    """

    def __init__(self, gradients: ir.Model, manifest: Manifest) -> None:
        self.model = gradients.clone()
        graph = self.model.graph
        e = Emitter(graph, opsets=graph.opset_imports)
        names = e.names
        self.weight, self.first = names.claim("weight"), names.claim("first")
        known = set(manifest.inputs())
        shares = [v.name for v in graph.inputs if (v.name or "").startswith(SHARE) and v.name not in known]
        self.share = shares[0] if shares else None
        weight = _input(graph, self.weight, ir.DataType.DOUBLE, ())
        first = _input(graph, self.first, ir.DataType.BOOL, ())
        outputs = {v.name: i for i, v in enumerate(graph.outputs)}
        made = {v: number for number, node in enumerate(graph) for v in node.outputs}
        self.reads, self.writes = {}, {}
        for p in sorted(manifest.parameters, key=lambda p: made.get(graph.outputs[outputs[p.gradient]], -1)):
            gradient = graph.outputs[outputs[p.gradient]]
            before = _input(graph, names.claim(f"{p.gradient}_sum"), gradient.dtype, p.shape or ())
            share = e.mul(gradient, e.cast(weight, gradient.dtype or ir.DataType.FLOAT))
            total = e.typed(e.add(e.where(first, 0, before), share), gradient)
            total.name = names.claim(f"{p.gradient}_sum_next")
            graph.outputs[outputs[p.gradient]] = total
            self.reads[before.name or ""] = self.writes[total.name] = p.gradient
        name_nodes(Namespace.of_nodes(graph), e.emitted, "accumulate")


def _input(graph: ir.Graph, name: str, dtype: ir.DataType | None, shape: Iterable[int | str | None]) -> ir.Value:
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype or ir.DataType.FLOAT))
    graph.inputs.append(value)
    return value
