"""The scale of DequantizeLinear, and straight-through derivatives of QuantizeLinear with DequantizeLinear."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import onnx_convgrad as og
from onnx_convgrad.errors import DifferentiationError
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, rand
from tests.support.operators import one_node, rule_test

_INT8 = np.array([[3, -7, 100, 5, 0], [-128, 127, 1, -2, 9]], np.int8)

CASES = [
    Case("DequantizeLinear", [_INT8, rand(low=0.1)]),
    Case("DequantizeLinear", [_INT8, rand(1, low=0.1)]),
    Case("DequantizeLinear", [_INT8, rand(low=0.1), np.int8(3)]),
    Case("DequantizeLinear", [_INT8, rand(5, low=0.1), np.arange(5).astype(np.int8)]),
    Case("DequantizeLinear", [_INT8, rand(2, low=0.1)], {"axis": 0}),
    Case("DequantizeLinear", [_INT8, rand(5, low=0.1)], {"axis": -1}),
    Case("DequantizeLinear", [_INT8, rand(2, 2, low=0.1)], {"axis": 1, "block_size": 3}),
    Case("DequantizeLinear", [_INT8, rand(1, 5, low=0.1)], {"axis": 0, "block_size": 2}),
    Case("DequantizeLinear", [_INT8.view(np.uint8), rand(5, low=0.1)], dtype=np.float16),
]
test_rule = rule_test(CASES)


def _dequantized(**attributes: int) -> onnx.ModelProto:
    model = one_node(helper.make_node("DequantizeLinear", ["x", "s"], ["y"], **attributes), {"x": None, "s": None})
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT8
    return model


def test_scale_per_block_needs_a_rank() -> None:
    with pytest.raises(
        DifferentiationError, match="the rank of 'x' is unknown and the gradient of its scale per block"
    ):
        og.vjp(_dequantized(block_size=2), wrt="inputs")


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scale_per_axis_of_unknown_rank(axis: int) -> None:
    model = _dequantized(axis=axis)
    g = np.random.default_rng(0).normal(size=_INT8.shape).astype(np.float32)
    scale = np.ones(_INT8.shape[axis], np.float32)
    got = run(og.vjp(model, wrt="inputs"), {"x": _INT8, "s": scale, "y_grad": g})["s_grad"]
    unit = run(og.augment(model, wrt="inputs"), {"x": _INT8, "s": scale, "y_grad": g})["y"]
    np.testing.assert_allclose(got, (unit * g).sum(axis=(1 - axis) % 2 if axis >= 0 else 0), rtol=1e-5)


# -- straight-through --------------------------------------------------------------------------------------------------

_KINDS = {
    "int8": (TensorProto.INT8, -128, 127, np.int8),
    "uint8": (TensorProto.UINT8, 0, 255, np.uint8),
    "int4": (TensorProto.INT4, -8, 7, ml_dtypes.int4),
    "uint4": (TensorProto.UINT4, 0, 15, ml_dtypes.uint4),
    "int16": (TensorProto.INT16, -32768, 32767, np.int16),
    "uint16": (TensorProto.UINT16, 0, 65535, np.uint16),
}

_SHAPE = (3, 4, 5)


def _fake_quantizer(
    kind: int, scale: np.ndarray, zero: np.ndarray | None, *, dtype: int = 1, shape: Any = _SHAPE, **attributes: int
) -> onnx.ModelProto:
    """Y = d^2 with d = DequantizeLinear (QuantizeLinear (x))."""
    operands = ["s"] if zero is None else ["s", "z"]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", *operands], ["q"], name="Q", output_dtype=0 if zero is not None else kind,
                         **attributes),
        helper.make_node("DequantizeLinear", ["q", *operands], ["d"], name="DQ", **attributes),
        helper.make_node("Mul", ["d", "d"], ["y"], name="Square"),
    ]  # fmt: skip
    stored = [helper.make_tensor("s", dtype, scale.shape, scale.astype(np.float32).ravel().tolist())]
    if zero is not None:
        stored.append(helper.make_tensor("z", kind, zero.shape, zero.ravel().tolist()))
    graph = helper.make_graph(
        nodes, "quantized",
        [helper.make_tensor_value_info("x", dtype, shape)], [helper.make_tensor_value_info("y", dtype, shape)], stored,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _reference(
    x: np.ndarray, scale: np.ndarray, zero: np.ndarray, low: float, high: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Value, input gradient and gradient of the full-size scale, in float64, with the code of the paper of LSQ.

    `round_pass` and the clipping before it are those of appendix A of Esser et al. 2020.
    """

    def round_pass(v: torch.Tensor) -> torch.Tensor:
        return (v.round() - v).detach() + v

    xt = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    st = torch.tensor(np.broadcast_to(scale, x.shape).copy(), dtype=torch.float64, requires_grad=True)
    z = torch.tensor(zero.astype(np.float64))
    d = (round_pass(torch.clamp(xt / st + z, low, high)) - z) * st
    (d * d).sum().backward()
    assert xt.grad is not None
    assert st.grad is not None
    return (d * d).detach().numpy(), xt.grad.numpy(), st.grad.numpy()


def _data(scale: np.ndarray, low: float, high: float, zero: np.ndarray, shape: tuple[int, ...] = _SHAPE) -> np.ndarray:
    """Numbers inside and outside the range, not at the borders of levels."""
    generator = np.random.default_rng(3)
    middle, reach = (low + high) / 2 - zero.astype(np.float64), (high - low) / 2
    levels = np.trunc(middle + generator.uniform(-1.4, 1.4, shape) * reach) + generator.uniform(-0.4, 0.4, shape)
    return (levels * scale).astype(np.float32)


@pytest.mark.parametrize("name", _KINDS)
@pytest.mark.parametrize("granularity", ["tensor", "vector of one", "channel", "last axis", "block"])
def test_gradients_equal_those_of_learned_step_size_quantization(name: str, granularity: str) -> None:
    kind, low, high, dtype = _KINDS[name]
    generator = np.random.default_rng(1)
    shapes = {"tensor": (), "vector of one": (1,), "channel": (4,), "last axis": (5,), "block": (3, 2, 5)}
    attributes = {"channel": {"axis": 1}, "last axis": {"axis": -1}, "block": {"axis": 1, "block_size": 3}}
    shape = shapes[granularity]
    scale = generator.uniform(0.5, 1.5, shape).astype(np.float32) * (20 / (high - low))
    zero = generator.integers(max(low, -5), min(high, 12), shape).astype(np.float32)

    def spread(a: np.ndarray) -> np.ndarray:
        if granularity == "channel":
            return a[:, None]
        return np.repeat(a, 3, axis=1)[:, :4] if granularity == "block" else a

    x = _data(spread(scale), low, high, spread(zero))
    model = _fake_quantizer(kind, scale, zero.astype(dtype), **attributes.get(granularity, {}))
    gradients = og.augment(model, wrt=["x", "s"], cotangents="ones")
    got = run(gradients, {"x": x})
    y, dx, ds = _reference(x, spread(scale), spread(zero), low, high)
    np.testing.assert_array_equal(got["y"], run(model, {"x": x})["y"])
    np.testing.assert_allclose(got["y"], y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["x_grad"], dx, rtol=1e-5, atol=1e-5)
    full = np.zeros_like(ds, shape=(3, 6, 5))
    full[:, :4] = ds
    sums = {
        "channel": ds.sum((0, 2)),
        "last axis": ds.sum((0, 1)),
        "block": full.reshape(3, 2, 3, 5).sum(2),
    }
    want = sums.get(granularity, ds.sum().reshape(shape) if granularity in ("tensor", "vector of one") else None)
    assert want is not None
    np.testing.assert_allclose(got["s_grad"], want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("rank", ["symbolic", "unknown"])
def test_undeclared_shapes(rank: str) -> None:
    shape = None if rank == "unknown" else ["N", "C", "L"]
    model = _fake_quantizer(TensorProto.INT8, np.float32(0.1), np.int8(3), shape=shape)
    x = _data(np.float32(0.1), -128, 127, np.int8(3))
    got = run(og.augment(model, wrt=["x", "s"], cotangents="ones"), {"x": x})
    _, dx, ds = _reference(x, np.float32(0.1), np.int8(3), -128, 127)
    np.testing.assert_allclose(got["x_grad"], dx, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["s_grad"], ds.sum(), rtol=1e-5)


def test_a_scale_per_axis_needs_a_rank() -> None:
    model = _fake_quantizer(TensorProto.INT8, np.full(4, 0.1, np.float32), None, shape=None, axis=1)
    with pytest.raises(DifferentiationError, match="the rank of 'x' is unknown and the range of its scale per axis"):
        og.augment(model, wrt=["x"], cotangents="ones")


def test_float16() -> None:
    model = _fake_quantizer(TensorProto.INT8, np.float32(0.125), np.int8(3), dtype=TensorProto.FLOAT16)
    x = _data(np.float32(0.125), -128, 127, np.int8(3)).astype(np.float16)
    got = run(og.augment(model, wrt=["x"], cotangents="ones"), {"x": x})["x_grad"]
    _, dx, _ = _reference(x.astype(np.float32), np.float32(0.125), np.int8(3), -128, 127)
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, dx, rtol=2e-3)


@pytest.mark.parametrize(
    ("kind", "dtype", "limit"),
    [(TensorProto.FLOAT8E4M3FN, ml_dtypes.float8_e4m3fn, 448.0), (TensorProto.FLOAT8E5M2, ml_dtypes.float8_e5m2, 57344.0)],
)  # fmt: skip
def test_float8_rounds_straight_through(kind: int, dtype: Any, limit: float) -> None:
    """Inside the range dx = g and ds = sum of g (y - x) / s; outside 0 and g limit."""
    scale = np.float32(0.5)
    model = _fake_quantizer(kind, scale, None)
    x = np.random.default_rng(0).uniform(-1.5, 1.5, _SHAPE).astype(np.float32) * np.float32(limit * scale)
    got = run(og.augment(model, wrt=["x", "s"], of=["d"], cotangents="ones"), {"x": x})
    inside = np.abs(x) <= limit * scale
    rounded = (np.clip(x / scale, -limit, limit)).astype(dtype).astype(np.float64)
    np.testing.assert_array_equal(got["x_grad"], inside)
    want = np.where(inside, rounded - x.astype(np.float64) / scale, np.sign(x) * limit).sum()
    np.testing.assert_allclose(got["s_grad"], want, rtol=1e-4)


def test_forward_mode_is_the_adjoint() -> None:
    model = _fake_quantizer(TensorProto.UINT8, np.float32(0.1), np.uint8(100))
    generator = np.random.default_rng(2)
    x = _data(np.float32(0.1), 0, 255, np.uint8(100))
    tangents = {"x_tangent": generator.normal(size=_SHAPE).astype(np.float32), "s_tangent": np.asarray(0.7, np.float32)}
    seed = generator.normal(size=_SHAPE).astype(np.float32)
    pushed = run(og.jvp(model, wrt=["x", "s"]), {"x": x, **tangents})["y_tangent"]
    pulled = run(og.augment(model, wrt=["x", "s"]), {"x": x, "y_grad": seed})
    right = sum(np.vdot(tangents[f"{n}_tangent"], pulled[f"{n}_grad"]) for n in "xs")
    np.testing.assert_allclose(np.vdot(pushed, seed), right, rtol=1e-4)


def test_second_order_by_the_input() -> None:
    """Of sum d^2 inside the range the Hessian is 2 on the diagonal: the estimator is applied to each derivative."""
    model = _fake_quantizer(TensorProto.UINT8, np.float32(0.1), np.uint8(100))
    model.graph.node.append(helper.make_node("ReduceSum", ["y"], ["loss"], keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("loss", 1, []))
    x = _data(np.float32(0.1), 0, 255, np.uint8(100))
    v = np.random.default_rng(4).normal(size=_SHAPE).astype(np.float32)
    got = run(og.hvp(model, wrt=["x"], of="loss"), {"x": x, "x_tangent": v})["x_grad_tangent"]
    inside = (x >= -10) & (x <= 15.5)
    np.testing.assert_allclose(got, np.where(inside, 2 * v, 0), rtol=1e-5)


def test_gradients_of_each_sample() -> None:
    """A weight before a quantizer per channel: the gradients of the samples add up to the ordinary gradient."""
    generator = np.random.default_rng(5)
    w = generator.normal(size=(4, 3)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="Product"),
        helper.make_node("QuantizeLinear", ["h", "s", "z"], ["q"], name="Q", axis=1),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], name="DQ", axis=1),
        helper.make_node("Mul", ["d", "d"], ["y"], name="Square"),
    ]
    stored = [
        helper.make_tensor("w", 1, w.shape, w.ravel().tolist()),
        helper.make_tensor("s", 1, [3], [0.01, 0.02, 0.03]),
        helper.make_tensor("z", TensorProto.INT8, [3], [0, 1, -2]),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [info("x", 1, ["N", 4])], [info("y", 1, ["N", 3])], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x = generator.normal(size=(5, 4)).astype(np.float32)
    whole = run(og.augment(model, wrt=["w"], cotangents="ones"), {"x": x})["w_grad"]
    each = run(og.augment(model, wrt=["w"], cotangents="ones", per_sample=True), {"x": x})["w_grad"]
    assert each.shape == (5, 4, 3)
    assert np.abs(whole).max() > 0
    np.testing.assert_allclose(each.sum(0), whole, rtol=1e-4, atol=1e-5)
