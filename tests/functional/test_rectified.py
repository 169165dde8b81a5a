"""Convolutions with a ReLU, and an addition before it, agree with autograd, and are one node for ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad.functional as F
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.functional import plans, sessions
from tests.support.optimizer import optimized

SIZES: list[tuple[int, dict[str, Any]]] = [
    (1, {"stride": 2, "padding": 1}),
    (2, {"padding": "same", "groups": 2}),
    (2, {"dilation": 2, "padding": (1, 0)}),
    (3, {}),
]


def _arrays(rank: int, options: dict[str, Any], dtype: str) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(rank)
    x = rng.standard_normal((2, 4, *[6] * rank)).astype(dtype)
    w = rng.standard_normal((6, 4 // options.get("groups", 1), *[3] * rank)).astype(dtype)
    b = rng.standard_normal(6).astype(dtype)
    y = F.convolution(x, w, b, **options)
    return x, w, b, *(rng.standard_normal(y.shape).astype(dtype) for _ in range(2))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("rank", "options"), SIZES, ids=str)
def test_values_and_gradients(rank: int, options: dict[str, Any], dtype: str) -> None:
    x, w, b, z, g = _arrays(rank, options, dtype)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 1e-10, "atol": 1e-12}
    conv = getattr(torch.nn.functional, f"conv{rank}d")
    exact = [torch.tensor(a.astype(float), requires_grad=True) for a in (x, w, z, b)]
    for add, alpha in ((False, None), (True, None if dtype == "float32" else 0.5)):
        operands = exact if add else [exact[0], exact[1], exact[3]]
        total = conv(exact[0], exact[1], exact[3], **options) + (exact[2] * (alpha or 1) if add else 0)
        expected = torch.relu(total)
        gradients = torch.autograd.grad(expected, operands, torch.tensor(g.astype(float)))
        if add:
            y = F.convolution_add_relu(x, w, z, alpha, b, **options)
            found = F.convolution_add_relu_backward(g, y, x, w, alpha, [6], **options)
        else:
            y = F.convolution_relu(x, w, b, **options)
            found = F.convolution_relu_backward(g, y, x, w, [6], **options)
        assert y.dtype == dtype
        np.testing.assert_allclose(y, expected.detach(), **tolerance)
        for value, gradient in zip(found, gradients, strict=True):
            np.testing.assert_allclose(value, gradient, **tolerance)


def test_the_mask_of_the_results() -> None:
    """Only wanted gradients are computed; infinite cotangents of zeros vanish, and a NaN passes, as in PyTorch."""
    x, w, _, z, g = _arrays(1, {}, "float64")
    y = F.convolution_add_relu(x, w, z)
    dx, dw, dz, db = F.convolution_add_relu_backward(g, y, x, w, output_mask=(False, False, True, False))
    assert (dx, dw, db) == (None, None, None)
    np.testing.assert_array_equal(dz, np.where(y > 0, g, 0))
    y[0, 0, :2], g[0, 0, :2] = [0, np.nan], [np.inf, 7]
    threshold = torch.ops.aten.threshold_backward(torch.tensor(g), torch.tensor(y), 0).numpy()
    mask = (False, False, True, False)
    np.testing.assert_array_equal(F.convolution_add_relu_backward(g, y, x, w, output_mask=mask)[2], threshold)


def test_without_batch_and_empty() -> None:
    x, w, b, z, g = _arrays(2, {}, "float32")
    y = F.convolution_add_relu(x, w, z, bias=b)
    np.testing.assert_array_equal(F.convolution_add_relu(x[0], w, z[0], bias=b), y[0])
    gradients = F.convolution_add_relu_backward(g[0], y[0], x[0], w)
    assert [value.shape for value in gradients] == [x.shape[1:], w.shape, z.shape[1:], b.shape]
    y = F.convolution_relu(x[:0], w, b)
    assert y.shape == (0, *z.shape[1:])
    dx, dw, db = F.convolution_relu_backward(y, y, x[:0], w)
    assert (dx.shape, dw.any(), db.any()) == (x[:0].shape, False, False)


@pytest.mark.parametrize("add", [False, True])
def test_one_node(add: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime makes one FusedConv of the convolution, the addition and the ReLU."""
    models = []
    original = sessions.session
    monkeypatch.setattr(sessions, "session", lambda model, **rest: models.append(model) or original(model, **rest))
    plans.plan.cache_clear()
    sessions._open.clear()
    x, w, b, z, _ = _arrays(2, {}, "float32")
    if add:
        F.convolution_add_relu(x, w, z, None, b)
    else:
        F.convolution_relu(x, w, b)
    assert [node.op_type for node in optimized(onnx.load_from_string(models[-1]), tmp_path).graph.node] == ["FusedConv"]


def test_refused() -> None:
    x, w, b, z, g = _arrays(1, {}, "float64")
    with pytest.raises(ArgumentError, match="convolution_relu is not supported for complex types"):
        F.convolution_relu(x.astype(complex), w.astype(complex))
    with pytest.raises(ArgumentError, match=r"Expected z to have the size of the output, \[2, 6, 4\], but got"):
        F.convolution_add_relu(x, w, z[..., :1])
    with pytest.raises(ArgumentError, match="z must be an array, not None"):
        F.convolution_add_relu(x, w, None)
    for alpha in ("1", np.nan, 1j, b):
        with pytest.raises(ArgumentError, match="alpha must be a finite number"):
            F.convolution_add_relu(x, w, z, alpha)
    with pytest.raises(ArgumentError, match="output to have the size"):
        F.convolution_relu_backward(g, g[1:], x, w)
    with pytest.raises(ArgumentError, match="output must be an array, not None"):
        F.convolution_relu_backward(g, None, x, w)
