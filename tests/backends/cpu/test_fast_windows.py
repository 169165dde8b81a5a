"""Images unfolded by Gather, as exporters write it, are sliced, and their gradient does not scatter elements."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import check_by_torch, graph_of, op_types


def _table(size: int, taps: int, dilation: int, stride: int) -> np.ndarray:
    return np.arange(taps)[:, None] * dilation + np.arange(0, size - (taps - 1) * dilation, stride)


def _model(body: str, shape: str, rows: np.ndarray, columns: np.ndarray) -> onnx.ModelProto:
    text = f"(float[{shape}] x) => (y) {{ {body} z = Mul(u, u) y = Mul(z, u) }}"
    return graph_of(text, opset=21, rows=rows, columns=columns)


UNFOLD = "a = Gather<axis = 2>(x, rows) b = Gather<axis = 4>(a, columns) u = Transpose<perm = [0, 1, 2, 4, 3, 5]>(b)"


@pytest.mark.parametrize("shape", ["2, 16, 28, 32", "N, 16, 28, 32"], ids=str)
@pytest.mark.parametrize(("taps", "dilation", "stride"), [(3, 1, 1), (2, 1, 2), (3, 2, 1)], ids=str)
def test_unfold(taps: int, dilation: int, stride: int, shape: str) -> None:
    """Values are equal to the bit, the gradient equals PyTorch's, and neither moves single elements."""
    x = np.random.default_rng(0).normal(size=(2, 16, 28, 32)).astype(np.float32)
    model = _model(UNFOLD, shape, *(_table(n, taps, dilation, stride) for n in (28, 32)))
    gradient = og.augment(model, wrt=["x"], cotangents="ones", training=True)
    ops = Counter(op_types(gradient))
    assert ops["Col2Im"] == 2
    assert not ops["ScatterElements"]
    if shape.startswith("2"):  # with an unknown number of samples it may not pay
        assert ops["Gather"] == 1
        assert ops["Slice"] == taps
        assert ops["Concat"] == 1

    got = run(gradient, {"x": x})
    np.testing.assert_array_equal(got["y"], run(model, {"x": x})["y"])
    unfold = partial(torch.nn.functional.unfold, kernel_size=taps, dilation=dilation, stride=stride)
    check_by_torch({"x_grad": got["x_grad"]}, lambda v: unfold(v).pow(3), x=x)


@pytest.mark.parametrize(
    ("body", "gathers"),
    [
        ("u = Gather<axis = 3>(x, columns)", 0),
        ("a = Gather<axis = 3>(x, columns) u = Transpose<perm = [0, 1, 2, 4, 3]>(a)", 0),
        ("a = Gather<axis = 3>(x, columns) b = Transpose<perm = [0, 3, 1, 2, 4]>(a) u = Sub(b, b)", 0),
        ("u = Gather<axis = 2>(x, rows)", 1),
    ],
    ids=["last axis", "windows turned", "taps first", "rows are copied whole"],
)
def test_gathers_that_are_sliced(body: str, gathers: int) -> None:
    x = np.random.default_rng(0).normal(size=(2, 16, 28, 32)).astype(np.float32)
    model = _model(body, "2, 16, 28, 32", _table(28, 3, 1, 1), _table(32, 3, 1, 1))
    gradient = og.augment(model, wrt=["x"], cotangents="ones", training=True)
    assert op_types(gradient).count("Gather") == gathers
    np.testing.assert_array_equal(run(gradient, {"x": x})["y"], run(model, {"x": x})["y"])


def test_an_empty_batch() -> None:
    model = _model(UNFOLD, "N, 16, 28, 32", _table(28, 3, 1, 1), _table(32, 3, 1, 1))
    gradient = og.augment(model, wrt=["x"], cotangents="ones")
    assert run(gradient, {"x": np.zeros((0, 16, 28, 32), np.float32)})["x_grad"].shape == (0, 16, 28, 32)
