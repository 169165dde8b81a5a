"""PyTorch exports the gradient of a network of linear layers, and not that of a convolution, as README and FAQ say."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

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
def test_a_gradient_of_a_convolution_is_not_exported(tmp_path: Path) -> None:
    """Once it is, correct the README, the FAQ and this test."""
    net, x = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Tanh()), torch.randn(2, 1, 8)
    with pytest.raises(Exception, match=r"aten\.convolution_backward"):
        _export(net, x, tmp_path / "g.onnx")
