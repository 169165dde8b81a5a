"""Losses written as onnxscript functions: their nodes are inlined into the graph.

`onnxscript` is never imported here: an `OnnxFunction` only exists where the caller has imported it.
"""

from __future__ import annotations

import sys
from typing import Any, TypeGuard

import onnx_ir as ir

from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.loop_bodies import emit_once
from onnx_convgrad.ir.nodes import subgraphs
from onnx_convgrad.programs.losses.elementwise import Spec


def is_onnxscript(function: object) -> TypeGuard[Any]:
    """Whether an object is an `onnxscript.OnnxFunction`; `Any`, because the package may not be installed."""
    module = sys.modules.get("onnxscript")
    return isinstance(function, getattr(module, "OnnxFunction", ()))


class ScriptLoss:
    """Emits the nodes of an `onnxscript.OnnxFunction` with the inputs `prediction` and `target` and one output.

    Raises:
        ArgumentError: The function has other inputs or outputs, or required attributes.
    """

    def __init__(self, function: Any) -> None:  # an OnnxFunction, see `is_onnxscript`
        self.__qualname__ = self.name = function.name
        try:
            self.model = ir.from_proto(function.to_model_proto())
        except ValueError as problem:
            raise self._error(str(problem)) from problem
        counts = len(self.model.graph.inputs), len(self.model.graph.outputs)
        if counts != (2, 1):
            raise self._error(f"It has {counts[0]} inputs and {counts[1]} outputs.")

    @property
    def classes(self) -> Spec | None:
        """Dtype and shape of the labels, if the function declares integers."""
        port = self.model.graph.inputs[1]
        return (port.dtype, port.shape) if port.dtype is not None and port.dtype.is_integer() else None

    def __call__(self, e: Emitter, *operands: ir.Value) -> ir.Value:
        """Inline the function at the emitter; operators are converted to the canonical opset."""
        model = self.model.clone()
        for port, value in zip(model.graph.inputs, operands, strict=True):
            port.type = value.type
            port.shape = None if value.shape is None else value.shape.copy()  # canonicalization changes shapes
        try:
            graph = canonicalize(model).graph
        except ModelError as problem:
            raise self._error(problem.message) from problem
        for node in graph:
            if any(subgraphs(node)):
                raise self._error(f"It has control flow ({node.op_type}).")
        return emit_once(e, graph, operands)[0]

    def _error(self, reason: str) -> ArgumentError:
        return ArgumentError(
            f"The onnxscript function {self.name!r} cannot be used as a loss. {reason}",
            hint="A loss takes a prediction and the labels and returns one value.",
        )
