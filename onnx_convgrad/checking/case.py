"""The test case of the rule checker: one use of an operator, the model that holds it, and its precise evaluation."""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, inliner, numpy_helper

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.numbers import factors, whole
from onnx_convgrad.checking.float64_model import convert_floats
from onnx_convgrad.checking.float64_session import Float64Session
from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.ir.emit import CANONICAL_OPSET
from onnx_convgrad.runtime import session

FLOATS = (np.float16, np.float32, np.float64)


@dataclass(frozen=True)
class Random:
    """A floating operand with uniform random values in [low, high], which depend on the case only.

    Args:
        shape: Its shape.
        low: Least value.
        high: Largest value.
    """

    shape: tuple[int, ...]
    low: float = -2.0
    high: float = 2.0

    def __post_init__(self) -> None:
        for size in self.shape:
            whole(size, "A size of a random operand", 0)
        factors((self.low, self.high), "low and high")


def rand(*shape: int, low: float = -2.0, high: float = 2.0) -> Random:
    """A random operand; arguments as for `Random`."""
    return Random(shape, low, high)


@dataclass(frozen=True)
class Case:
    """One use of an operator.

    Args:
        op: Operator, or `"domain::Op"`; with `body`, a name for the case, such as `"local::Name"`.
        inputs: Operands by position: `rand(...)`, an array (integers and booleans become initializers, floating arrays
            graph inputs), or `None` where absent.
        attributes: Attributes of the node.
        outputs: Number of results, or their names with `""` for absent ones.
        wrt: Positions of the operands to differentiate; every floating one by default.
        of: Positions of the results to differentiate; every floating one by default.
        constants: Positions of floating operands that become initializers.
        feed_integers: Make integer operands graph inputs, so that the rule cannot read their values.
        opset: ai.onnx version of the model.
        dtype: Floating type of random operands.
        order: 2 also checks the gradient of the gradient.
        dynamic: Whether to check with symbolic and with undeclared shapes too.
        tolerance: Relative L2 error allowed against the float64 numeric derivative.
        step: Step of the central difference in float64.
        name: Added to the test id where operator and attributes are not unique.
        body: Several operators instead of one: the lines of an ONNX function in textual form, with operands `x0`, `x1`,
            ... and results `y0`, `y1`, ...
    """

    op: str
    inputs: Sequence[Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int | Sequence[str] = 1
    wrt: Sequence[int] | None = None
    of: Sequence[int] | None = None
    constants: Sequence[int] = ()
    feed_integers: bool = False
    opset: int = CANONICAL_OPSET
    dtype: type = np.float32
    order: int = 2
    dynamic: bool = True
    tolerance: float = 2e-4
    step: float = 1e-5
    name: str = ""
    body: str = ""

    def __str__(self) -> str:
        sizes = [i.shape if isinstance(i, Random) else np.shape(i) for i in self.inputs]
        shapes = ",".join("-" if i is None else "x".join(map(str, s)) for i, s in zip(self.inputs, sizes, strict=True))
        extra = ",".join(f"{k}={v}" for k, v in self.attributes.items() if not isinstance(v, onnx.GraphProto))
        label = " ".join(filter(None, (self.op, self.name, shapes, extra, np.dtype(self.dtype).name)))
        return label.replace("\n", "") if self.dtype is not np.float32 else label.rsplit(" ", 1)[0]

    @property
    def arrays(self) -> list[np.ndarray | None]:
        """The values of the operands."""
        generator = np.random.default_rng(zlib.crc32(str(self).encode()))
        drawn: list[np.ndarray | None] = []
        for operand in self.inputs:
            if isinstance(operand, Random):
                drawn.append(generator.uniform(operand.low, operand.high, operand.shape).astype(self.dtype))
            else:
                drawn.append(None if operand is None else np.asarray(operand))
        return drawn


def is_float(array: np.ndarray | None) -> bool:
    """Whether an operand is present and floating."""
    return array is not None and array.dtype in FLOATS


def result_names(case: Case) -> list[str]:
    """The names of the results; `""` for an absent result."""
    if isinstance(case.outputs, int):
        return [f"y{i}" for i in range(case.outputs)]
    return list(case.outputs)


@typed_errors
def make_model(case: Case, arrays: Sequence[np.ndarray | None], *, shapes: str = "static") -> onnx.ModelProto:
    """Build the model of one node.

    Args:
        case: The case.
        arrays: Its operands; `None` for an absent one.
        shapes: `"static"`, `"symbolic"` or `"absent"`.
    """
    domain, _, op_type = case.op.rpartition("::")
    inputs, initializers, names = [], [], []
    for i, array in enumerate(arrays):
        if array is None:
            names.append("")
            continue
        names.append(f"x{i}")
        if i in case.constants or (not is_float(array) and not case.feed_integers):
            initializers.append(numpy_helper.from_array(array, f"x{i}"))
            continue
        symbols = [f"d{i}_{axis}" for axis in range(array.ndim)]
        dims: Any = {"static": array.shape, "symbolic": symbols, "absent": None}[shapes]
        inputs.append(helper.make_tensor_value_info(f"x{i}", helper.np_dtype_to_tensor_dtype(array.dtype), dims))
    while names and not names[-1]:
        names.pop()
    results = result_names(case)
    node = helper.make_node(op_type, names, results, name="node", domain=domain, **case.attributes)
    outputs = [helper.make_empty_tensor_value_info(r) for r in results if r]
    graph = helper.make_graph([node], "case", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", case.opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    functions = [_function(case, names)] if case.body else []
    return helper.make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)


def _function(case: Case, operands: Sequence[str]) -> onnx.FunctionProto:
    domain, _, name = case.op.rpartition("::")
    header = f'<domain: "{domain}", opset_import: ["": {case.opset}]>'
    return onnx.parser.parse_function(
        f"{header} {name} ({', '.join(operands)}) => ({', '.join(result_names(case))}) {{ {case.body} }}"
    )


_MULTILINEAR = frozenset(
    {"Conv", "ConvTranspose", "AveragePool", "GlobalAveragePool", "Resize", "MatMul", "Gemm", "Einsum", "Mean"}
)
"""Operators that are linear in each operand: the rules do not say so here, because they are what is tested."""

_RECURRENT = ("RNN", "GRU", "LSTM")
"""Operators that are not run in float64: ONNX Runtime loads GRU and LSTM of that type but fails to run them."""

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
        double = _to_double(model)
        with contextlib.suppress(ExecutionError):
            self._run: Any = Float64Session(double) if case.op in _RECURRENT else session(double, optimize=False)
            return
        if case.op not in _MULTILINEAR:
            from onnx.reference import ReferenceEvaluator
            from onnx.reference.op_run import RuntimeImplementationError

            with contextlib.suppress(RuntimeImplementationError):
                self._run = ReferenceEvaluator(double)
                return
        else:
            self.step = 1.0
        self.dtype = np.float32
        self._run = session(to_float(model), optimize=False)

    def __call__(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        cast = {k: np.asarray(v, self.dtype) if v.dtype in FLOATS else v for k, v in feed.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = self._run.run(self.names, cast)
        return {k: np.asarray(v).astype(np.float64) for k, v in zip(self.names, results, strict=True)}
