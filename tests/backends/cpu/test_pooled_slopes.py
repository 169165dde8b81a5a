"""The derivative of an activation before a MaxPool is multiplied into the cotangent of the pool."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import check_by_torch, graph_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Relu": torch.relu,
    "LeakyRelu<alpha = 0.1>": lambda v: F.leaky_relu(v, 0.1),
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
}

POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "kernel_shape = [2, 2], strides = [2, 2]": lambda v: F.max_pool2d(v, 2),
    "kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]": lambda v: F.max_pool2d(v, 3, 2, 1),
    "kernel_shape = [2, 3], strides = [2, 3]": lambda v: F.max_pool2d(v, (2, 3)),
}


def _model(body: str, shape: str = "2, 3, 6, 6") -> onnx.ModelProto:
    return graph_of(f"(float[{shape}] x) => (float z) {{ {body} }}", opset=21)


def _tail(y: str) -> str:
    """A loss whose cotangent differs between elements."""
    return f"[square] s = Mul({y}, {y}) [sum] z = ReduceSum<keepdims = 0>(s)"


def _check(model: onnx.ModelProto, function: Callable[[Tensor], Tensor]) -> onnx.ModelProto:
    """Return the gradient model after a comparison with PyTorch."""
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6)).astype(np.float32)
    gradient = og.vjp(model, wrt="x", cotangents="ones")
    (got,) = run(gradient, {"x": x}).values()
    check_by_torch({"x_grad": got}, lambda v: function(v).square(), x=x, rtol=1e-4)
    return gradient


@pytest.mark.parametrize("sizes", ["2, 3, 6, 6", "n, 3, h, w"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_slopes(activation: str, pool: str, sizes: str) -> None:
    """The pool is the only reader of the activation: its derivative is computed from the pool's result."""
    operator, _, attributes = activation.partition("<")
    act = f"[act] a = {operator}{'<' + attributes if attributes else ''} (x)"
    model = _model(f"{act} [pool] y = MaxPool<{pool}>(a) {_tail('y')}", sizes)
    gradient = _check(model, lambda v: POOLS[pool](ACTIVATIONS[activation](v)))
    readers = {node.op_type for node in gradient.graph.node if "a" in node.input}
    assert readers <= {"MaxPool", "Shape"}


def test_slopes_of_half_precision() -> None:
    text = _model(f"[act] a = Relu(x) [pool] y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(a) {_tail('y')}")
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6)).astype(np.float16)
    for value in (*text.graph.input, *text.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    (got,) = run(og.vjp(text, wrt="x", cotangents="ones"), {"x": x}).values()
    check_by_torch({"x_grad": got}, lambda v: F.max_pool2d(torch.relu(v), 2).square(), x=x, rtol=1e-2, atol=1e-2)


def test_shared_activation() -> None:
    """Another reader contributes a cotangent too, so the derivative is computed for all elements."""
    body = "[act] a = Relu(x) [pool] p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(a)"
    body += " [mean] q = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(a) [sub] y = Sub(p, q)"

    def function(v: Tensor) -> Tensor:
        a = torch.relu(v)
        return F.max_pool2d(a, 2) - F.avg_pool2d(a, 2)

    gradient = _check(_model(f"{body} {_tail('y')}"), function)
    assert any(node.op_type == "HardSigmoid" and "a" in node.input for node in gradient.graph.node)


def test_two_pools() -> None:
    """Each pool's cotangent is scattered separately, and their sum is multiplied by the slope."""
    body = "[act] a = Relu(x) [one] p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(a)"
    body += " [two] q = MaxPool<kernel_shape = [3, 3], strides = [3, 3]>(a)"
    body += " [t] s = Mul(p, p) [u] t = Mul(q, q) [v] u = ReduceSum<keepdims = 0>(s)"
    body += " [w] v = ReduceSum<keepdims = 0>(t) [x] z = Add(u, v)"

    def function(v: Tensor) -> Tensor:
        a = torch.relu(v)
        return torch.cat([F.max_pool2d(a, 2).flatten(), F.max_pool2d(a, 3).flatten()])

    _check(_model(body), function)


def test_factor_of_something_else() -> None:
    """A product with a value that was not pooled is not a slope."""
    body = "[act] a = Relu(x) [b] b = Tanh(x) [mul] c = Mul(a, b)"
    body += f" [pool] y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(c) {_tail('y')}"
    gradient = _check(_model(body), lambda v: F.max_pool2d(torch.relu(v) * torch.tanh(v), 2))
    assert any({"a", "b"} & set(node.input) for node in gradient.graph.node if node.op_type == "Mul")


def test_second_derivatives() -> None:
    body = "[act] a = Tanh(x) [pool] y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(a)"
    model = _model(f"{body} {_tail('y')}")
    rng = np.random.default_rng(1)
    x, v = (rng.standard_normal((2, 3, 6, 6)).astype(np.float32) for _ in range(2))
    hessian = og.hvp(model, of="z", wrt="x")
    direction = next(i.name for i in hessian.graph.input if i.name != "x")
    (got,) = run(hessian, {"x": x, direction: v}).values()
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)

    def loss(t: Tensor) -> Tensor:
        return F.max_pool2d(torch.tanh(t), 2).square().sum()

    _, wanted = torch.autograd.functional.hvp(loss, leaf, torch.tensor(v, dtype=torch.float64))
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-3, atol=1e-5)
