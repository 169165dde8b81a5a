"""Images unfolded by Gather, as exporters write it, are sliced, and their gradient is no scatter of elements."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run


def _table(size: int, taps: int, dilation: int, stride: int) -> np.ndarray:
    return np.arange(taps)[:, None] * dilation + np.arange(0, size - (taps - 1) * dilation, stride)


def _model(body: str, shape: str, rows: np.ndarray, columns: np.ndarray) -> onnx.ModelProto:
    text = f'<ir_version: 10, opset_import: ["" : 21]> g (float[{shape}] x) => (y) {{ {body} z = Mul(u, u) y = Mul(z, u) }}'
    model = onnx.parser.parse_model(text)
    model.graph.output[0].CopyFrom(onnx.helper.make_empty_tensor_value_info("y"))
    for name, array in (("rows", rows), ("columns", columns)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


UNFOLD = "a = Gather<axis = 2>(x, rows) b = Gather<axis = 4>(a, columns) u = Transpose<perm = [0, 1, 2, 4, 3, 5]>(b)"


@pytest.mark.parametrize("shape", ["2, 16, 28, 32", "N, 16, 28, 32"], ids=str)
@pytest.mark.parametrize(("taps", "dilation", "stride"), [(3, 1, 1), (2, 1, 2), (3, 2, 1)], ids=str)
def test_unfold(taps: int, dilation: int, stride: int, shape: str) -> None:
    """Values are equal to the bit, the gradient equals PyTorch's, and neither moves single elements."""
    x = np.random.default_rng(0).normal(size=(2, 16, 28, 32)).astype(np.float32)
    model = _model(UNFOLD, shape, *(_table(n, taps, dilation, stride) for n in (28, 32)))
    gradient = og.augment(model, wrt=["x"], seed="ones", training=True)
    ops = Counter(node.op_type for node in gradient.graph.node)
    assert ops["Col2Im"] == 2
    assert not ops["ScatterElements"]
    if shape.startswith("2"):  # with an unknown number of samples it may not pay
        assert ops["Gather"] == 1
        assert ops["Slice"] == taps
        assert ops["Concat"] == 1

    got = run(gradient, {"x": x})
    np.testing.assert_array_equal(got["y"], run(model, {"x": x})["y"])
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    unfolded = torch.nn.functional.unfold(leaf, taps, dilation=dilation, stride=stride)
    unfolded.pow(3).sum().backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(got["x_grad"], leaf.grad.numpy(), rtol=1e-5, atol=1e-5)


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
    gradient = og.augment(model, wrt=["x"], seed="ones", training=True)
    assert [node.op_type for node in gradient.graph.node].count("Gather") == gathers
    np.testing.assert_array_equal(run(gradient, {"x": x})["y"], run(model, {"x": x})["y"])


def test_an_empty_batch() -> None:
    model = _model(UNFOLD, "N, 16, 28, 32", _table(28, 3, 1, 1), _table(32, 3, 1, 1))
    gradient = og.augment(model, wrt=["x"], seed="ones")
    assert run(gradient, {"x": np.zeros((0, 16, 28, 32), np.float32)})["x_grad"].shape == (0, 16, 28, 32)
