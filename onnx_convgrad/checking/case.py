"""The test case of the rule checker: one use of an operator, and the model that holds it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnx_convgrad.ir.emit import CANONICAL_OPSET

FLOATS = (np.float16, np.float32, np.float64)


@dataclass(frozen=True)
class Random:
    """A floating operand with uniform random values in [low, high], which depend on the case only."""

    shape: tuple[int, ...]
    low: float = -2.0
    high: float = 2.0


def rand(*shape: int, low: float = -2.0, high: float = 2.0) -> Random:
    """A random operand of the given shape."""
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
        shapes = ",".join("x".join(map(str, np.shape(_template(i)))) if i is not None else "-" for i in self.inputs)
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


def _template(operand: Any) -> Any:
    return np.empty(operand.shape) if isinstance(operand, Random) else operand


def is_float(array: np.ndarray | None) -> bool:
    """Whether an operand is present and floating."""
    return array is not None and array.dtype in FLOATS


def result_names(case: Case) -> list[str]:
    """The names of the results; `""` for an absent result."""
    if isinstance(case.outputs, int):
        return [f"y{i}" for i in range(case.outputs)]
    return list(case.outputs)


def make_model(case: Case, arrays: Sequence[np.ndarray | None], *, shapes: str = "static") -> onnx.ModelProto:
    """Build the model of one node. `shapes` is `"static"`, `"symbolic"` or `"absent"`."""
    domain, _, op_type = case.op.rpartition("::")
    inputs, initializers, names = [], [], []
    for i, array in enumerate(arrays):
        if array is None:
            names.append("")
            continue
        names.append(f"x{i}")
        constant = i in case.constants or (not is_float(array) and not case.feed_integers)
        if constant:
            initializers.append(numpy_helper.from_array(array, f"x{i}"))
            continue
        dims: Sequence[Any] | None = array.shape
        if shapes == "symbolic":
            dims = [f"d{i}_{axis}" for axis in range(array.ndim)]
        inputs.append(
            helper.make_tensor_value_info(
                f"x{i}", helper.np_dtype_to_tensor_dtype(array.dtype), dims if shapes != "absent" else None
            )
        )
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
