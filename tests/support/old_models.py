"""Models of old opsets, run before and after the upgrade."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from onnx_convgrad.frontend.opset.functions import InlineFunctions
from onnx_convgrad.frontend.opset.upgrade import CANONICAL_OPSET, upgrade
from onnx_convgrad.runtime import run

_RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return _RNG.normal(size=shape).astype(np.float32)


class Const(np.ndarray):
    """An operand that is an initializer and not an input of the graph."""


def const(values: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> np.ndarray:
    array = np.asarray(values)
    return array.astype(array.dtype if dtype is None else dtype).view(Const)


@dataclasses.dataclass
class Case:
    """One node at one opset. `exact=False` where another kernel sums in another order."""

    op: str
    opset: int
    inputs: list[np.ndarray | None]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    outputs: int = 1
    exact: bool = True
    compare: int | None = None
    expect: str | None = None

    def __str__(self) -> str:
        attributes = ",".join(f"{k}={v}" for k, v in self.attributes.items())
        return f"{self.op}-{self.opset}({attributes})".replace(" ", "")


def model_of(
    nodes: list[onnx.NodeProto],
    feeds: dict[str, np.ndarray],
    outputs: list[str],
    opset: int,
    *,
    constants: dict[str, np.ndarray] | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for k, v in feeds.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        initializer=[numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def run_plainly(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Without fusions, with which the comparison would be one of kernels and not of operators."""
    return list(run(model, feeds, optimize=False).values())


def upgraded(model: onnx.ModelProto) -> onnx.ModelProto:
    intermediate = ir.from_proto(model)
    InlineFunctions()(intermediate)
    upgrade(intermediate)
    assert intermediate.opset_imports[""] == CANONICAL_OPSET
    assert all(node.version in (None, CANONICAL_OPSET) for node in intermediate.graph.all_nodes())
    result = ir.to_proto(intermediate)
    onnx.checker.check_model(result, full_check=True)
    return result


def declare(model: onnx.ModelProto, values: list[np.ndarray], *, shapes: bool) -> None:
    """Declare the outputs with the types of their values, which the checker requires."""
    for output, array in zip(model.graph.output, values, strict=True):
        shape = array.shape if shapes else [None] * array.ndim
        output.CopyFrom(helper.make_tensor_value_info(output.name, helper.np_dtype_to_tensor_dtype(array.dtype), shape))


def compare(model: onnx.ModelProto, *feeds: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Upgrade and run on each of the feeds."""
    before = [run_plainly(model, feed) for feed in feeds]
    declare(model, before[0], shapes=False)
    after = upgraded(model)
    for old, feed in zip(before, feeds, strict=True):
        assert_same(old, run_plainly(after, feed), exact=True)
    return after


def assert_same(before: list[np.ndarray], after: list[np.ndarray], *, exact: bool) -> None:
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert old.dtype == new.dtype
        if exact:
            np.testing.assert_array_equal(old, new)
        else:
            np.testing.assert_allclose(new, old, rtol=2e-3 if old.dtype == np.float16 else 1e-5, atol=1e-6)


def single(case: Case, *, declared: bool) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The case as a model. If not `declared`, operands are results of an Identity, so that rank and type are unknown."""
    feeds, constants, names, nodes = {}, {}, [], []
    for index, array in enumerate(case.inputs):
        name = "" if array is None else f"x{index}"
        if isinstance(array, Const):
            constants[name] = np.asarray(array)
        elif array is not None:
            feeds[name] = array
            if not declared:
                nodes.append(helper.make_node("Identity", [name], [f"{name}_hidden"]))
                name = f"{name}_hidden"
        names.append(name)
    outputs = [f"y{index}" for index in range(case.outputs)]
    # No node name: exporters are not obliged to give one.
    nodes.append(helper.make_node(case.op, names, outputs, **case.attributes))
    kept = outputs[: case.compare or case.outputs]
    return model_of(nodes, feeds, kept, case.opset, constants=constants), feeds
