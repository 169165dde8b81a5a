"""Errors about wrong arguments begin with PyTorch's own text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import onnx_convgrad.functional as F
from onnx_convgrad.errors import ArgumentError

W = (6, 4, 3, 3)
CASES: list[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ("conv2d", (2, 3, 7, 7), W, {}),
    ("conv2d", (3, 7, 7), W, {}),
    ("conv2d", (2, 4, 7, 7), W, {"groups": 2}),
    ("conv2d", (2, 4, 7, 7), (7, 2, 3, 3), {"groups": 3}),
    ("conv2d", (2, 4, 7, 7), (2, 2, 3, 3), {"groups": 3}),
    ("conv2d", (2, 4, 7, 7), W, {"groups": 0}),
    ("conv2d", (2, 4, 7, 7), W, {"bias": 5}),
    ("conv2d", (2, 4, 7, 7), W, {"stride": 0}),
    ("conv2d", (2, 4, 7, 7), W, {"stride": (1, 2, 3)}),
    ("conv2d", (2, 4, 7, 7), W, {"padding": (0, -2)}),
    ("conv2d", (2, 4, 7, 7), W, {"padding": "full"}),
    ("conv2d", (2, 4, 7, 7), W, {"padding": "same", "stride": 2}),
    ("conv2d", (2, 4, 7, 7), W, {"dilation": 4}),
    ("conv2d", (2, 4, 7, 7), W, {"dilation": 0}),
    ("conv2d", (2, 4, 0, 7), W, {"padding": 2}),
    ("conv2d", (7, 7), W, {}),
    ("conv1d", (2, 3, 4, 7), (6, 4, 3), {}),
    ("conv3d", (2, 3, 7), (6, 4, 3, 3, 3), {}),
    ("conv2d", (2, 4, 7, 7), (6, 4), {}),
    ("conv_transpose2d", (2, 3, 7, 7), W, {}),
    ("conv_transpose2d", (4, 7, 7), W, {}),
    ("conv_transpose2d", (2, 4, 7, 7), (4, 3, 3, 3), {"bias": 4}),
    *(
        (f"conv_transpose{r}d", (2, 4, *[7] * r), (4, 3, *[3] * r), options)
        for r in (1, 2, 3)
        for options in ({"output_padding": 2, "stride": 2}, {"padding": 5}, {"output_padding": -1, "stride": 2})
    ),
]


@pytest.mark.parametrize(("name", "input_size", "weight_size", "options"), CASES, ids=str)
def test_forward(name: str, input_size: tuple[int, ...], weight_size: tuple[int, ...], options: dict[str, Any]) -> None:
    bias = options.get("bias")
    rest = {k: v for k, v in options.items() if k != "bias"}
    arrays = [np.ones(input_size), np.ones(weight_size), *([] if bias is None else [np.ones(bias)])]
    with pytest.raises(RuntimeError) as theirs:
        getattr(torch.nn.functional, name)(*map(torch.tensor, arrays), **rest)
    with pytest.raises(ArgumentError) as ours:
        getattr(F, name)(*arrays, **rest)
    assert str(ours.value).startswith(str(theirs.value).splitlines()[0].rstrip("."))


@pytest.mark.parametrize("transposed", [False, True])
def test_backward(transposed: bool) -> None:
    x, w, g = np.ones((2, 3, 7, 7)), np.ones(W), np.ones((2, 6, 5, 5))
    numbers = ([1, 1], [0, 0], [1, 1], transposed, [0, 0], 1)
    with pytest.raises(RuntimeError, match=f"Given {'transposed=1' if transposed else 'groups=1'}") as theirs:
        torch.ops.aten.convolution_backward(*map(torch.tensor, (g, x, w)), [6], *numbers, [True] * 3)
    with pytest.raises(ArgumentError) as ours:
        F.convolution_backward(g, x, w, [6], *numbers)
    assert str(ours.value).startswith(str(theirs.value))
    if not transposed:
        with pytest.raises(RuntimeError) as theirs:
            torch.nn.grad.conv2d_input((2, 3, 7, 7), torch.tensor(w), torch.tensor(g))
        with pytest.raises(ArgumentError) as ours:
            F.conv2d_input((2, 3, 7, 7), w, g)
        assert str(ours.value).startswith(str(theirs.value))
