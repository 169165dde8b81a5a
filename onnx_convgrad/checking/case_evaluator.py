"""Evaluate the model of a case as precisely as possible, for numeric derivatives."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import inliner

from onnx_convgrad.checking.case import FLOATS, Case
from onnx_convgrad.checking.convert_floats import convert_floats
from onnx_convgrad.checking.float64_session import Float64Session
from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.runtime import session

_MULTILINEAR = frozenset(
    {"Conv", "ConvTranspose", "AveragePool", "GlobalAveragePool", "Resize", "MatMul", "Gemm", "Einsum", "Mean"}
)
_RECURRENT = ("RNN", "GRU", "LSTM")
"""ONNX Runtime loads GRU and LSTM in float64 but fails to run them."""

_FLOAT32_INSIDE = ("GroupNormalization", "MeanVarianceNormalization")
"""Operators that compute in float32, by specification or for want of a kernel; replaced by their function bodies."""


def _to_double(model: onnx.ModelProto) -> onnx.ModelProto:
    inlined = inliner.inline_selected_functions(
        model, [("", op) for op in _FLOAT32_INSIDE], inline_schema_functions=True
    )
    return _to_type(inlined, ir.DataType.DOUBLE)


def to_float(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model that computes in float32."""
    return _to_type(model, ir.DataType.FLOAT)


def _to_type(model: onnx.ModelProto, dtype: ir.DataType) -> onnx.ModelProto:
    result = ir.from_proto(model)
    convert_floats(result.graph, dtype)
    return ir.to_proto(result)


class Evaluator:
    """A model, evaluated as precisely as possible, with a suitable step for a central difference.

    ONNX Runtime evaluates in float64. Where it lacks a kernel, operators that are linear in each operand run in float32
    with a step of 1, which is exact for them; others run in float64 by ONNX's reference evaluator or, if that lacks the
    operator, in float32, for which the case needs a larger step.
    """

    def __init__(self, model: onnx.ModelProto, case: Case) -> None:
        self.names = [o.name for o in model.graph.output]
        self.step: float = case.step
        self.dtype: type = np.float64
        if case.op in _RECURRENT:
            self._run: Any = Float64Session(_to_double(model))
            return
        try:
            self._run = session(_to_double(model), optimize=False)
        except ExecutionError:
            if case.op in _MULTILINEAR:
                self.step, self.dtype = 1.0, np.float32
                self._run = session(to_float(model), optimize=False)
            else:
                from onnx.reference import ReferenceEvaluator
                from onnx.reference.op_run import RuntimeImplementationError

                try:
                    self._run = ReferenceEvaluator(_to_double(model))
                except RuntimeImplementationError:
                    self.dtype = np.float32
                    self._run = session(to_float(model), optimize=False)

    def __call__(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        cast = {k: np.asarray(v, self.dtype) if v.dtype in FLOATS else v for k, v in feed.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = self._run.run(self.names, cast)
        return {k: np.asarray(v).astype(np.float64) for k, v in zip(self.names, results, strict=True)}
