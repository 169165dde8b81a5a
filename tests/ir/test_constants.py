"""Folded constants equal the results of ONNX Runtime in value, shape and dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.ir.constants import _FOLDS, constant_of
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

I64, F32, BOOL = np.int64, np.float32, np.bool_
LOWEST = -(2**63)


def _i(*numbers: int) -> np.ndarray:
    return np.asarray(numbers, I64)


def _f(*numbers: float) -> np.ndarray:
    return np.asarray(numbers, F32)


GRID = np.arange(24, dtype=F32).reshape(2, 3, 4) - 7

CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("Identity", [GRID], {}),
    ("Gather", [GRID, _i(-1, 0)], {"axis": 1}),
    ("Gather", [_i(5, 6, 7), np.asarray(-2, I64)], {}),
    ("Concat", [GRID, GRID], {"axis": -2}),
    ("Unsqueeze", [GRID, _i(0, -1)], {}),
    ("Squeeze", [GRID[:1, :, :1], _i(0, -1)], {}),
    ("Squeeze", [GRID[:1, :, :1]], {}),
    ("Slice", [GRID, _i(1, -3), _i(100, -1), _i(1, 2)], {}),
    ("Slice", [GRID, _i(-1), _i(LOWEST), _i(2), _i(-1)], {}),
    ("Slice", [GRID, _i(100), _i(0), _i(-1), _i(-2)], {}),
    ("Slice", [GRID, _i(1, 1), _i(2, 3)], {}),
    ("Slice", [GRID, _i(-9), _i(-8), _i(2), _i(-1)], {}),
    ("Slice", [GRID, _i(-1), _i(-9), _i(1), _i(-2)], {}),
    ("Slice", [GRID, _i(2), _i(2), _i(1), _i(-1)], {}),
    ("Slice", [GRID[:0], _i(-1), _i(LOWEST), _i(0), _i(-1)], {}),
    ("Reshape", [GRID, _i(0, -1)], {}),
    ("Reshape", [GRID[:0], _i(0, 6)], {"allowzero": 1}),
    ("Transpose", [GRID], {}),
    ("Transpose", [GRID], {"perm": [0, 2, 1]}),
    ("Cast", [_f(1.9, -1.9, 0.0)], {"to": TensorProto.INT64}),
    ("Cast", [_f(1.9, -1.9, 0.0)], {"to": TensorProto.BOOL}),
    ("Cast", [_i(3, -4)], {"to": TensorProto.FLOAT}),
    ("Cast", [_f(0.1)], {"to": TensorProto.FLOAT16}),
    ("CastLike", [_f(1.9, -1.9, 0.0), _i(1)], {}),
    ("Add", [GRID, _f(1, 2, 3, 4)], {}),
    ("Sub", [_i(3), _i(5, 7)], {}),
    ("Mul", [_f(1.5), GRID], {}),
    ("Div", [_i(7, -7, 7, -7), _i(2, 2, -2, -2)], {}),
    ("Div", [_f(1, 5, -5, 7), _f(3, 2, 2, -0.5)], {}),
    ("Div", [np.asarray(1, np.float64), np.asarray(3, np.float64)], {}),
    ("Div", [np.asarray([1, 3], np.float16), np.asarray([3], np.float16)], {}),
    ("Mod", [_i(7, -7, 7, -7), _i(3, 3, -3, -3)], {}),
    ("Mod", [_i(7, -7, 7, -7), _i(3, 3, -3, -3)], {"fmod": 1}),
    ("Mod", [_f(7.5, -7.5), _f(2, 2)], {"fmod": 1}),
    ("Neg", [_i(3, -4)], {}),
    ("Min", [_f(1, 5), _f(3), _f(2, 2)], {}),
    ("Max", [_i(1, 5), _i(3)], {}),
    ("Equal", [_i(1, 2), _i(1)], {}),
    ("Greater", [_f(1, 2), _f(1)], {}),
    ("Less", [_f(1, 0.5), _f(1)], {}),
    ("LessOrEqual", [_f(1, 0.5, 2), _f(1)], {}),
    ("GreaterOrEqual", [_i(1, 0, 2), _i(1)], {}),
    ("Floor", [_f(1.5, -1.5)], {}),
    ("Ceil", [_f(1.5, -1.5)], {}),
    ("Not", [np.asarray([True, False])], {}),
    ("And", [np.asarray([True, False]), np.asarray([True])], {}),
    ("Or", [np.asarray([True, False]), np.asarray([False])], {}),
    ("Where", [np.asarray([True, False]), _f(1), _f(2, 3)], {}),
    ("ReduceProd", [_i(2, 3, 4)], {"keepdims": 0}),
    ("ReduceProd", [np.asarray([2, 3, 4], np.int32)], {}),
    ("ReduceProd", [GRID, _i(-1)], {}),
    ("ReduceSum", [GRID, _i(0, 2)], {"keepdims": 0}),
    ("ReduceSum", [GRID, _i()], {}),
    ("ReduceSum", [GRID, _i()], {"noop_with_empty_axes": 1}),
    ("ReduceSum", [GRID], {"noop_with_empty_axes": 1}),
    ("ReduceSum", [np.asarray([2, 3], np.int32)], {"keepdims": 0}),
    ("Range", [np.asarray(1, I64), np.asarray(9, I64), np.asarray(3, I64)], {}),
    ("Range", [np.asarray(9, I64), np.asarray(0, I64), np.asarray(-2, I64)], {}),
    ("Range", [np.asarray(0, F32), np.asarray(2, F32), np.asarray(0.5, F32)], {}),
    ("Range", [np.asarray(3, I64), np.asarray(0, I64), np.asarray(1, I64)], {}),
    ("Range", [np.asarray(0, F32), np.asarray(1, F32), np.asarray(0.1, F32)], {}),
    ("Range", [np.asarray(5, np.int32), np.asarray(-5, np.int32), np.asarray(-3, np.int32)], {}),
    ("Expand", [_f(1, 2), _i(3, 1)], {}),
    ("Tile", [GRID, _i(1, 2, 3)], {}),
    ("ConstantOfShape", [_i(2, 3)], {}),
    ("ConstantOfShape", [_i(2)], {"value": numpy_helper.from_array(_f(1.5))}),
    ("ConstantOfShape", [_i()], {"value": numpy_helper.from_array(_i(7))}),
]


def _model(op_type: str, operands: list[np.ndarray], attributes: dict[str, Any]) -> onnx.ModelProto:
    names = [f"x{i}" for i in range(len(operands))]
    stored = [numpy_helper.from_array(array, name) for array, name in zip(operands, names, strict=True)]
    node = helper.make_node(op_type, names, ["y"], **attributes)
    graph = helper.make_graph([node], "g", [], [helper.make_empty_tensor_value_info("y")], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def _folded(model: onnx.ModelProto) -> np.ndarray | None:
    return constant_of(ir.from_proto(model).graph.outputs[0])


def test_every_operator_that_is_folded_has_a_case() -> None:
    assert {op_type for op_type, *_ in CASES} == set(_FOLDS)


@pytest.mark.parametrize(("op_type", "operands", "attributes"), CASES)
def test_a_folded_value_is_the_runtime_s(op_type: str, operands: list[np.ndarray], attributes: dict[str, Any]) -> None:
    model = _model(op_type, operands, attributes)
    want, got = run(model, {})["y"], _folded(model)
    assert got is not None
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("op_type", "operands", "attributes"),
    [
        ("Div", [_i(1), _i(0)], {}),
        ("Range", [np.asarray(0, I64), np.asarray(10**12, I64), np.asarray(1, I64)], {}),
        ("Tile", [_f(1), _i(10**12)], {}),
        ("ConstantOfShape", [_i(10**6, 10**6)], {}),
        ("Sqrt", [_f(4)], {}),
    ],
)
def test_values_that_are_not_folded(op_type: str, operands: list[np.ndarray], attributes: dict[str, Any]) -> None:
    """Too large, or undefined."""
    assert _folded(_model(op_type, operands, attributes)) is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_exponent_that_is_a_quotient(dtype: type) -> None:
    """PyTorch's exporter writes the p-norm with the exponent 1 / p, divided in the graph."""
    kind = {np.float32: "float", np.float64: "double"}[dtype]
    body = "one = Constant<value_float = 1.0>() p = Constant<value_float = 3.0>() e = Div(one, p) y = Pow(x, e)"
    model = graph_of(f"({kind}[4] x) => (y) {{ {body} }}", opset=21)
    x = np.asarray([0.5, 1, 2, 3], dtype)
    got = run(og.vjp(model, wrt=["x"]), {"x": x, "y_grad": np.ones_like(x)})["x_grad"]
    np.testing.assert_allclose(got, x ** (-2 / 3) / 3, rtol=1e-5)
