"""Gradients that PyTorch and JAX export themselves, as README and FAQ say.

PyTorch exports the gradient of a network of linear layers, but not that of a convolution; JAX exports both, as StableHLO.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from onnx_convgrad.runtime import run


def _gradient(net: nn.Module) -> Callable[[Tensor], Tensor]:
    """The gradient of a sum of squares of the network's results for its input."""
    return torch.func.grad(lambda x: (net(x) ** 2).sum())


def _export(net: nn.Module, x: Tensor, path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        traced = make_fx(_gradient(net))(x)
        torch.onnx.export(traced, (x,), str(path), dynamo=True, input_names=["x"], output_names=["g"], verbose=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_gradient_of_linear_layers_is_exported(tmp_path: Path) -> None:
    net, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(2, 6)
    _export(net, x, tmp_path / "g.onnx")
    found = run(str(tmp_path / "g.onnx"), {"x": x.numpy()})["g"]
    torch.testing.assert_close(torch.from_numpy(found), _gradient(net)(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layer", "operator"), [(nn.Conv2d(1, 2, 3), "convolution_backward"), (nn.AvgPool2d(2), "avg_pool2d_backward")]
)
def test_a_gradient_of_windows_is_not_exported(layer: nn.Module, operator: str, tmp_path: Path) -> None:
    """Once it is, correct the README, the FAQ and this test."""
    with pytest.raises(Exception, match=rf"aten\.{operator}"):
        _export(nn.Sequential(layer, nn.Tanh()), torch.randn(2, 1, 8, 8), tmp_path / "g.onnx")


@pytest.mark.peers
def test_jax_exports_a_gradient_of_a_convolution() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    from jax import export

    def loss(x: Any, w: Any) -> Any:
        return (jax.lax.conv(x, w, (1, 1), "SAME") ** 2).sum()

    draw = np.random.default_rng(0)
    x, w = draw.standard_normal((2, 3, 8, 8), np.float32), draw.standard_normal((4, 3, 3, 3), np.float32)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    exported = export.export(gradient)(x, w)
    assert "stablehlo.convolution" in exported.mlir_module()
    found = export.deserialize(exported.serialize()).call(x, w)
    for ours, theirs in zip(found, gradient(x, w), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
