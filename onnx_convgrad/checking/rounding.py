"""Estimate the rounding error of a float32 gradient by running its graph in float64.

Where values cancel or saturate (a softmax close to one-hot), a correct gradient in float32 may exceed any fixed limit.
Then the graph itself is checked in float64, and the rounding error is estimated by Monte Carlo arithmetic: every operand
and result is perturbed at random by up to one rounding, and the spread of several runs is the error of float32 (Parker,
"Monte Carlo Arithmetic", UCLA CSD-970002, 1997).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import onnx_ir as ir

from onnx_convgrad.checking.float64_model import Primal, cast_to_float32, prepared
from onnx_convgrad.pipeline.built import Built

_UNIT = 2.0**-24
_RUNS = 4
_MARGIN = 10.0
_ROUNDING = frozenset(
    """Add AveragePool BatchNormalization Conv ConvTranspose Cos Div Einsum Erf Exp Gelu Gemm GlobalAveragePool
    GroupNormalization HardSigmoid HardSwish InstanceNormalization LayerNormalization Log LogSoftmax MatMul Mean Mul Pow
    Reciprocal ReduceL2 ReduceLogSumExp ReduceMean ReduceProd ReduceSum ReduceSumSquare Resize ScatterElements ScatterND
    Sigmoid Sin Softmax Softplus Sqrt Sub Sum Tan Tanh""".split()
)
"""Operators that round. Others pass values on, and the masks of Relu and MaxPool compare these exactly."""

_INEXACT = frozenset({"DFT", "STFT"})
"""Operators whose kernels in ONNX Runtime lose more than one rounding: these run in float32 themselves."""

Arrays = Mapping[str, np.ndarray]


class Float64Gradients:
    """The gradients of one augmented model in float64, for one set of inputs and cotangents."""

    def __init__(self, built: Built, feed: Arrays) -> None:
        self.feed = feed
        self._names = dict(built.gradients)
        outputs = list(built.gradients.values())
        self._exact = self._named(Primal(prepared(built.model, outputs), double=True)(feed))
        self._jittered = Primal(prepared(built.model, outputs, change=_jitter), double=True)

    def __getitem__(self, name: str) -> np.ndarray:
        """The gradient of value `name`."""
        return self._exact[name]

    def resolution(self, name: str) -> float:
        """The error (Euclidean norm) that rounding alone may cause in a float32 gradient of value `name`."""
        return _MARGIN * float(np.sqrt(np.mean([np.sum((run[name] - self[name]) ** 2) for run in self._runs])))

    @cached_property
    def _runs(self) -> list[dict[str, np.ndarray]]:
        """The gradients of several runs with rounding errors."""
        return [self._named(self._jittered(self.feed)) for _ in range(_RUNS)]

    def _named(self, results: Arrays) -> dict[str, np.ndarray]:
        return {value: results[output] for value, output in self._names.items()}


def _jitter(graph: ir.Graph) -> None:
    """Multiply inputs, constants and rounded results by 1 + u, u uniform in +-2^-24; the seeds are fixed."""
    inexact = [node for node in graph if node.op_type in _INEXACT]
    places: list[tuple[ir.Value, ir.Node | None]] = [
        (v, None) for v in (*graph.inputs, *graph.initializers.values()) if v.shape is None or len(v.shape)
    ]
    places += [(v, node) for node in graph if node.op_type in _ROUNDING for v in node.outputs]
    for seed, (value, producer) in enumerate(places):
        if value.dtype != ir.DataType.DOUBLE or not (value.uses() or value.is_graph_output()):
            continue
        bounds = {"low": 1 - _UNIT, "high": 1 + _UNIT, "seed": float(seed)}
        factor = ir.node("RandomUniformLike", [value], attributes=bounds, name=f"jitter_{seed}")
        moved = ir.node("Mul", [value, factor.outputs[0]], name=f"jittered_{seed}")
        factor.outputs[0].dtype = moved.outputs[0].dtype = ir.DataType.DOUBLE
        name = value.name
        value.replace_all_uses_with(moved.outputs[0], replace_graph_outputs=producer is not None)
        for node in (factor, moved):
            node.replace_input_with(0, value)
        if producer is None:
            for node in (moved, factor):
                graph.insert_before(graph[0], node)
        else:
            graph.insert_after(producer, [factor, moved])
            if moved.outputs[0].is_graph_output():
                value.name, moved.outputs[0].name = f"{name}__exact", name
    for node in inexact:
        _run_in_float32(node)


def _run_in_float32(node: ir.Node) -> None:
    """Cast the operands of a node inside the graph to float32, and its result back."""
    result = node.outputs[0]
    if result.is_graph_output() or node.graph is None:
        return
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype == ir.DataType.DOUBLE:
            cast_to_float32(node, index)
    double = ir.Value(name=f"{result.name}__double", type=ir.TensorType(ir.DataType.DOUBLE), shape=result.shape)
    back = ir.node("Cast", [result], {"to": int(ir.DataType.DOUBLE)}, outputs=[double])
    result.replace_all_uses_with(double)
    back.replace_input_with(0, result)
    result.dtype = ir.DataType.FLOAT
    node.graph.insert_after(node, back)
