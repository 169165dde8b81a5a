"""Sizes that a model computes from constants become constants, at any opset."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of, op_types

EXPORTED_PAD = """
    minus = Constant<value_ints = [-1]>()
    given = Constant<value = int64[4] {2, 1, 0, 3}>()
    rest = Constant<value = int64[1] {4}>()
    zeros = ConstantOfShape<value = int64[1] {0}>(rest)
    all = Concat<axis = 0>(given, zeros)
    rows = Constant<value_ints = [-1, 2]>()
    pairs = Reshape(all, rows)
    from = Constant<value_ints = [-1]>()
    to = Constant<value_ints = [-9223372036854775807]>()
    first = Constant<value_ints = [0]>()
    turned = Slice(pairs, from, to, first, from)
    columns = Transpose<perm = [1, 0]>(turned)
    flat = Reshape(columns, minus)
    pads = Cast<to = 7>(flat)
    p = Pad<mode = "reflect">(x, pads)
    s = Shape(p)
    at = Constant<value = int64 {1}>()
    channels = Gather(s, at)
    u = Unsqueeze(channels, first)
    batch = Constant<value_ints = [0]>()
    shape = Concat<axis = 0>(batch, u, minus)
    r = Reshape(p, shape)
    y = Mul(r, r)
"""
"""PyTorch's export of `F.pad(x, (2, 1, 0, 3), "reflect").flatten(2)`."""


def _model(body: str, shape: str, opset: int = 17) -> onnx.ModelProto:
    model = graph_of(f"(float[{shape}] x) => (float[] y) {{ {body} }}", opset=opset)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


@pytest.mark.parametrize("batch", ["2", "n"])
def test_padding_of_an_exporter(batch: str) -> None:
    model = _model(EXPORTED_PAD, f"{batch}, 3, 6, 7")
    graph = canonicalize(ir.from_proto(model)).graph
    used = [node for node in graph if any(v.uses() or v.is_graph_output() for v in node.outputs)]
    assert [node.op_type for node in used] == ["Pad", "Reshape", "Mul"]
    shape = used[1].outputs[0].shape
    assert shape is not None
    assert list(shape[1:]) == [3, 90]
    gradient = og.augment(model, wrt=["x"], cotangents="ones")
    assert "ScatterElements" not in op_types(gradient)
    x = np.random.default_rng(0).normal(size=(2, 3, 6, 7)).astype(np.float32)
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.pad(leaf, (2, 1, 0, 3), "reflect").flatten(2).square()
    expected.sum().backward()
    found = run(gradient, {"x": x})
    np.testing.assert_allclose(found["y"], expected.detach().numpy(), rtol=1e-6)
    np.testing.assert_allclose(found["x_grad"], leaf.grad.numpy(), rtol=1e-6)


@pytest.mark.parametrize("opset", [12, 17])
def test_axes_that_were_attributes(opset: int) -> None:
    """A Squeeze or ReduceProd whose axes are an attribute is not mistaken for one without axes."""
    at = "Squeeze<axes = [0]>(two)" if opset < 13 else "Squeeze(two, zero)"
    body = f"""
        s = Shape(x)
        product = ReduceProd<axes = [0], keepdims = 1>(s)
        zero = Constant<value = int64[1] {{0}}>()
        two = Constant<value = int64[1, 1] {{1}}>()
        single = {at}
        shape = Concat<axis = 0>(single, product)
        e = Mul(x, x)
        w = Reshape(e, shape)
        y = Mul(w, w)
    """
    model = _model(body, "6", opset)
    x = np.arange(6, dtype=np.float32)
    found = run(og.augment(model, wrt=["x"], cotangents="ones"), {"x": x})
    np.testing.assert_array_equal(found["y"], x[None] ** 4)
    np.testing.assert_allclose(found["x_grad"], 4 * x**3)


def test_values_known_only_at_run_time_stay() -> None:
    body = """
        minus = Constant<value_ints = [-1]>()
        zero = Constant<value_float = 0.0>()
        positive = Greater(x, zero)
        where = NonZero(positive)
        flat = Reshape(where, minus)
        y = Gather(x, flat)
    """
    model = _model(body, "5")
    kept = [node.op_type for node in canonicalize(ir.from_proto(model)).graph]
    assert kept[:3] == ["Greater", "NonZero", "Reshape"]
    x = np.array([1, -2, 3, -4, 5], np.float32)
    found = run(og.augment(model, wrt=["x"], cotangents="ones"), {"x": x})
    np.testing.assert_array_equal(found["x_grad"], [1, 0, 1, 0, 1])


def test_an_integer_output_keeps_its_node() -> None:
    model = _model("y = Mul(x, x)  s = Shape(x)", "2, 3")
    model.graph.output.append(onnx.helper.make_tensor_value_info("s", onnx.TensorProto.INT64, [2]))
    found = run(og.augment(model, wrt=["x"], of="y", cotangents="ones"), {"x": np.ones((2, 3), np.float32)})
    np.testing.assert_array_equal(found["s"], [2, 3])
    np.testing.assert_array_equal(found["x_grad"], np.full((2, 3), 2, np.float32))


@pytest.mark.parametrize("shape", ["2, 3, 4", "n, 3, 4"])
@pytest.mark.parametrize("step", [-1, -2])
@pytest.mark.parametrize("end", [-(2**63) + 1, -(2**31), -5, -4, -3, -2, 0, 1, 2**31 - 1, 2**63 - 1])
@pytest.mark.parametrize("start", [-1, -2, 2, 2**63 - 1])
def test_vectors_that_are_read_backwards(shape: str, step: int, end: int, start: int) -> None:
    """Indices and sizes of a flip by PyTorch's older exporter, compared with the original model."""
    body = f"""
        start = Constant<value_ints = [{start}]>()
        end = Constant<value_ints = [{end}]>()
        zero = Constant<value_ints = [0]>()
        step = Constant<value_ints = [{step}]>()
        rest = Constant<value_ints = [-1]>()
        s = Shape(x)
        sizes = Slice(s, start, end, zero, step)
        asked = Concat<axis = 0>(sizes, rest)
        z = Reshape(x, asked)
        numbers = Constant<value_ints = [0, 1, 2]>()
        at = Slice(numbers, start, end, zero, step)
        y = Gather<axis = 1>(x, at)
    """
    model = _model(body, shape)
    model.graph.output.add(name="z")
    feed = {"x": np.arange(24, dtype=np.float32).reshape(2, 3, 4)}
    want, found = run(model, feed), run(og.augment(model, wrt=["x"], of="y", cotangents="ones"), feed)
    for name in ("y", "z"):
        assert found[name].shape == want[name].shape
        np.testing.assert_array_equal(found[name], want[name])
    flipped = np.zeros((2, 3, 4), np.float32)
    flipped[:, np.unique(want["y"] % 12 // 4).astype(int)] = 1
    np.testing.assert_array_equal(found["x_grad"], flipped)


def test_a_range_to_a_vector_of_one() -> None:
    """ONNX Runtime accepts it unless it is a constant."""
    body = """
        s = Shape(x)
        zero = Constant<value = int64 {0}>()
        one = Constant<value = int64 {1}>()
        first = Constant<value_ints = [0]>()
        size = Gather(s, first)
        at = Range(zero, size, one)
        picked = Gather(x, at)
        y = Mul(picked, picked)
    """
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    for shape in ("3, 2", "n, 2"):
        found = run(og.augment(_model(body, shape), wrt=["x"], cotangents="ones"), {"x": x})
        np.testing.assert_array_equal(found["y"], x**2)
        np.testing.assert_array_equal(found["x_grad"], 2 * x)
