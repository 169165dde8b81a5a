"""Padding is written explicitly where ONNX Runtime and shape inference disagree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kernel", [(3, 3), (4, 2)], ids=str)
def test_dilated_convolutions_of_the_same_size(kernel: tuple[int, int], *, training: bool) -> None:
    """PyTorch's older exporter writes auto_pad with dilation, which ONNX Runtime refuses; the result runs."""
    text = """(float[N, 3, 9, 8] x, float[4, 3, a, b] w) => (float[N, 4, 9, 8] y) {
        y = Conv <auto_pad = "SAME_UPPER", dilations = [2, 3], kernel_shape = [KERNEL]> (x, w) }"""
    model = graph_of(text.replace("KERNEL", ", ".join(map(str, kernel))))
    built = og.augment(model, wrt=["x", "w"], training=training)
    rng = np.random.default_rng(0)
    feed = {"x": rng.standard_normal((2, 3, 9, 8)), "w": rng.standard_normal((4, 3, *kernel))}
    x, w = (torch.tensor(feed[name], requires_grad=True) for name in ("x", "w"))
    y = torch.nn.functional.conv2d(x, w, padding="same", dilation=(2, 3))
    seed = rng.standard_normal(y.shape)
    want = dict(zip(("x_grad", "w_grad"), torch.autograd.grad(y, [x, w], torch.tensor(seed)), strict=True))
    got = run(built, {name: value.astype(np.float32) for name, value in {**feed, "y_grad": seed}.items()})
    for name, value in {"y": y, **want}.items():
        np.testing.assert_allclose(got[name], value.detach().numpy(), rtol=0, atol=1e-4)
