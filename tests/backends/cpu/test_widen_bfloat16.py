"""bfloat16 on the CPU: operators without a kernel compute in float32 and round, also in bodies and with several results."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.backends.cpu.widen_bfloat16 import WidenBfloat16
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.ir.passes import run_passes
from onnx_convgrad.runtime import run
from tests.support.operators import text_model

X = np.random.default_rng(0).standard_normal((3, 4)).astype(ml_dtypes.bfloat16).astype(np.float32)


def _wrapped(nodes: str, *, opset: int = 21) -> onnx.ModelProto:
    """A model whose nodes map the bfloat16 value `u` to `v`, between float32 `x` and `y`."""
    text = f"(float[3,4] x) => (float[n,m] y) {{ u = Cast <to = 16> (x) {nodes} y = Cast <to = 1> (v) }}"
    return text_model(text, opset)


def _round(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16).to(torch.float32)


def test_every_result_is_rounded() -> None:
    model = canonicalize(ir.from_proto(_wrapped("a = Mul (u, u) b = Add (a, u) v = Exp (b)")))
    assert run_passes(model, [WidenBfloat16()])
    x = torch.tensor(X)
    want = _round(torch.exp(_round(_round(x * x) + x)))
    np.testing.assert_array_equal(run(ir.to_proto(model), {"x": X})["y"], want)


GRAPHS = {
    "products": "w = Transpose <perm = [1, 0]> (u) v = MatMul (u, w)",
    "several results": "a, b = Split <axis = 1, num_outputs = 2> (u) c = Tanh (b) v = Mul (a, c)",
    "a body": "s = ReduceSum <keepdims = 0> (u) z = CastLike (zero, u) t = Greater (s, z)"
    " v = If <then_branch = g () => (bfloat16[3,4] p) { p = Mul (u, u) },"
    " else_branch = h () => (bfloat16[3,4] q) { q = Sin (u) }> (t)",
    "moving": "a = Concat <axis = 0> (u, u) i = Constant <value = int64[2] {4, 1}> () v = Gather (a, i)",
}


def _reference(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "products":
        return x @ x.T
    if name == "several results":
        return x[:, :2] * torch.tanh(x[:, 2:])
    if name == "a body":
        return x * x if bool(x.sum() > 0) else torch.sin(x)
    return torch.cat([x, x])[[4, 1]]


@pytest.mark.parametrize("name", GRAPHS)
def test_gradients(name: str) -> None:
    nodes = f"zero = Constant <value = float {{0}}> () {GRAPHS[name]}" if name == "a body" else GRAPHS[name]
    x = torch.tensor(X, dtype=torch.float64, requires_grad=True)
    y = _reference(name, x)
    seed = np.random.default_rng(1).standard_normal(tuple(y.shape)).astype(np.float32)
    y.backward(torch.tensor(seed, dtype=torch.float64))
    got = run(og.augment(_wrapped(nodes), wrt=["x"]), {"x": X, "y_grad": seed})
    np.testing.assert_allclose(got["y"], y.detach(), rtol=2e-2, atol=2e-2)
    assert x.grad is not None
    assert np.linalg.norm(got["x_grad"] - x.grad.numpy()) <= 2e-2 * float(x.grad.norm())


NEWER = {
    "einsum": ('v = Einsum <equation = "ij,kj->ik"> (u, u)', lambda x: x @ x.T),
    "elu": ("v = Elu (u)", torch.nn.functional.elu),
    "celu": ("v = Celu <alpha = 0.5> (u)", lambda x: torch.nn.functional.celu(x, 0.5)),
    "compress": ("c = Constant <value = bool[3] {1, 0, 1}> () v = Compress <axis = 0> (u, c)", lambda x: x[[0, 2]]),
}


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 28, reason="onnx has no opset 28")
@pytest.mark.parametrize("name", NEWER)
def test_operators_that_take_bfloat16_since_opset_28(name: str) -> None:
    nodes, function = NEWER[name]
    x = torch.tensor(X, dtype=torch.float64, requires_grad=True)
    y = function(x)
    y.sum().backward()
    got = run(og.augment(_wrapped(nodes, opset=28), wrt=["x"], cotangents="ones"), {"x": X})
    assert x.grad is not None
    assert np.linalg.norm(got["x_grad"] - x.grad.numpy()) <= 2e-2 * float(x.grad.norm())
