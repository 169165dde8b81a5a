"""The model of a case, evaluated as precisely as can be: what numeric derivatives are taken of."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, inliner, numpy_helper

from onnx_convgrad.checking.case import FLOATS, Case
from onnx_convgrad.checking.nodewise import NodeWise
from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.runtime import session

__all__ = ["Evaluator", "to_float"]

_MULTILINEAR = frozenset(
    {"Conv", "ConvTranspose", "AveragePool", "GlobalAveragePool", "Resize", "MatMul", "Gemm", "Einsum", "Mean"}
)
_NUMPY = ("RNN", "GRU", "LSTM")
"""ONNX Runtime takes GRU and LSTM in float64, and fails when it comes to run them; the reference lacks attributes."""

_NARROW_INSIDE = ("GroupNormalization", "MeanVarianceNormalization")


def _to_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model that computes in float64: every floating tensor, input and Cast is widened.

    Operators that keep float32 inside, by specification or for want of a kernel, are replaced by their function bodies.
    """
    inlined = inliner.inline_selected_functions(
        model, [("", op) for op in _NARROW_INSIDE], inline_schema_functions=True
    )
    return _to_type(inlined, TensorProto.DOUBLE)


def to_float(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model that computes in float32."""
    return _to_type(model, TensorProto.FLOAT)


def _to_type(model: onnx.ModelProto, wanted: int) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    narrow = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE} - {wanted}
    dtype = helper.tensor_dtype_to_np_dtype(wanted)
    for info in (*result.graph.input, *result.graph.output):
        if info.type.tensor_type.elem_type in narrow:
            info.type.tensor_type.elem_type = wanted
    del result.graph.value_info[:]
    for i, tensor in enumerate(result.graph.initializer):
        if tensor.data_type in narrow:
            wide = numpy_helper.to_array(tensor).astype(dtype)
            result.graph.initializer[i].CopyFrom(numpy_helper.from_array(wide, tensor.name))
    for node in result.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in narrow:
                attribute.i = wanted
            if attribute.name == "value" and attribute.t.data_type in narrow:
                attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype(dtype)))
    return result


class Evaluator:
    """A model evaluated as precisely as can be, with the step that suits a central difference of it.

    In float64 by ONNX Runtime; where that lacks a kernel, operators that are linear in each operand run in float32 with
    a step of 1, which is exact for them, and the others in float64 by ONNX's reference evaluator, or, if that lacks the
    operator, in float32: then the case has to say a larger step.
    """

    def __init__(self, model: onnx.ModelProto, case: Case) -> None:
        self.names = [o.name for o in model.graph.output]
        self.step: float = case.step
        self.dtype: type = np.float64
        if case.op in _NUMPY:
            self._run: Any = NodeWise(_to_double(model))
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
