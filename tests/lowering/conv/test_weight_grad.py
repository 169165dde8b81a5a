"""Each lowering of the weight gradient where it matters: against float64 PyTorch, and what it refuses, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run

CONV = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}


@dataclass(frozen=True)
class Layer:
    """One convolution; `pads` in ONNX order."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    strides: tuple[int, ...] = (1, 1)
    pads: tuple[int, ...] = (0, 0, 0, 0)
    dilations: tuple[int, ...] = (1, 1)
    group: int = 1

    @property
    def attributes(self) -> dict[str, object]:
        return {"strides": self.strides, "pads": self.pads, "dilations": self.dilations, "group": self.group}


SAME = Layer((2, 4, 7, 6), (5, 4, 3, 3), pads=(1, 1, 1, 1))
GROUPED = Layer((2, 6, 7, 6), (9, 2, 3, 3), pads=(1, 0, 2, 1), group=3)
DILATED = Layer((2, 3, 6, 9), (4, 3, 3, 2), pads=(4, 0, 4, 3), dilations=(4, 2))
STRIDED = Layer((3, 4, 9, 8), (5, 4, 3, 3), (1, 2), (1, 0, 2, 1))
BOTH_STRIDED = Layer((2, 3, 9, 11), (4, 3, 5, 4), (2, 3), (2, 1, 1, 2))
OUTSIDE = Layer((1, 3, 2, 3), (4, 3, 3, 3), pads=(3, 1, 3, 1), dilations=(2, 1))
SIGNAL = Layer((2, 4, 11), (6, 2, 3), (1,), (1, 2), (2,), group=2)
VOLUME = Layer((2, 3, 4, 5, 6), (4, 3, 3, 2, 3), (1, 2, 1), (1, 0, 1, 1, 1, 1), (1, 1, 1))
POINTS = Layer((3, 4, 5, 6), (6, 2, 1, 1), group=2)
STEPS = Layer((3, 4, 8, 7), (6, 2, 1, 1), (2, 3), group=2)
TILES = Layer((2, 3, 9, 11), (4, 3, 2, 3), (2, 3), (1, 0, 0, 2))
WIDE = Layer((2, 3, 5, 5), (300, 3, 3, 3), pads=(1, 1, 1, 1))
ONE = Layer((1, 3, 5, 5), (4, 3, 3, 3))
CHANNELS = Layer((3, 4, 14, 9), (4, 1, 3, 3), (2, 2), (1, 1, 1, 1), group=4)
BEYOND = Layer((2, 3, 7, 8), (3, 1, 5, 2), (1, 3), (2, 0, 4, 2), (2, 1), 3)
ROWS = Layer((2, 2, 40), (2, 1, 7), (3,), (3, 3), (1,), 2)

CASES = {
    "pointwise": [POINTS, STEPS, Layer((2, 3, 7), (4, 3, 1), (2,), (0, 0), (1,))],
    "pointwise_gemm": [POINTS, STEPS, Layer((2, 3, 2, 3, 4), (4, 3, 1, 1, 1), (1,) * 3, (0,) * 6, (1,) * 3)],
    "im2col_conv": [SAME, GROUPED, DILATED, BOTH_STRIDED, SIGNAL, VOLUME, WIDE, ONE],
    "im2col_gemm": [SAME, GROUPED, DILATED, BOTH_STRIDED, SIGNAL, VOLUME, WIDE, ONE],
    "row_shift": [SAME, GROUPED, DILATED, STRIDED, OUTSIDE, SIGNAL, VOLUME, WIDE, ONE],
    "split_shift": [SAME, GROUPED, DILATED, STRIDED, OUTSIDE, SIGNAL, VOLUME, WIDE, ONE],
    "moved_channel_rows": [SAME, GROUPED, DILATED, STRIDED, VOLUME, WIDE, ONE],
    "taps": [SAME, DILATED, STRIDED, BOTH_STRIDED, OUTSIDE, TILES, VOLUME, ONE],
    "bands": [CHANNELS, BEYOND, ROWS],
    "patches": [
        TILES,
        Layer((2, 3, 8), (4, 3, 4), (4,), (0, 0), (1,)),
        Layer((2, 3, 4, 6, 2), (4, 3, 2, 3, 2), (2, 3, 2), (0,) * 6, (1,) * 3),
    ],
}
GROUPLESS = {"taps", "patches"}
FIXED_BATCH = {"pointwise_gemm", "bands"}


def _model(layer: Layer, *, batch: str | None = None, dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", **layer.attributes)
    inputs = [
        helper.make_tensor_value_info("x", dtype, [batch or layer.x[0], *layer.x[1:]]),
        helper.make_tensor_value_info("w", dtype, layer.w),
    ]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", dtype, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _case(layer: Layer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random x and output gradient, and the weight gradient of float64 PyTorch."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(layer.x).astype(np.float32)
    rank = len(layer.strides)
    pads = [p for axis in reversed(range(rank)) for p in (layer.pads[axis], layer.pads[rank + axis])]
    w = torch.zeros(layer.w, dtype=torch.float64, requires_grad=True)
    padded = torch.nn.functional.pad(torch.tensor(x, dtype=torch.float64), pads)
    y = CONV[rank](padded, w, None, layer.strides, 0, layer.dilations, layer.group)
    seed = rng.standard_normal(y.shape).astype(np.float32)
    (want,) = torch.autograd.grad(y, w, torch.tensor(seed, dtype=torch.float64))
    return x, seed, want.numpy()


def _gradient(model: onnx.ModelProto, layer: Layer, name: str, x: np.ndarray, seed: np.ndarray) -> np.ndarray:
    lowered = og.vjp(model, wrt="w", lowering={"ConvWeightGrad": name})
    feed = {"x": x, "w": np.zeros(layer.w, x.dtype), "y_grad": seed}
    return run(lowered, {i.name: feed[i.name] for i in lowered.graph.input})["w_grad"]


def _error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize(("name", "layer"), [(name, layer) for name, layers in CASES.items() for layer in layers])
@pytest.mark.parametrize("batch", [None, "N"])
def test_equals_pytorch(name: str, layer: Layer, batch: str | None) -> None:
    if name in GROUPLESS and layer.group > 1:
        layer = Layer(layer.x, (layer.w[0], layer.x[1], *layer.w[2:]), layer.strides, layer.pads, layer.dilations)
    if name in FIXED_BATCH and batch:
        pytest.skip("needs the batch size")
    x, seed, want = _case(layer)
    got = _gradient(_model(layer, batch=batch), layer, name, x, seed)
    assert got.shape == want.shape
    assert _error(got, want) < 1e-6


@pytest.mark.parametrize("name", [name for name in CASES if name not in FIXED_BATCH])
def test_an_empty_batch_gives_zeros(name: str) -> None:
    layer = CASES[name][0]
    if name in GROUPLESS:
        layer = Layer(layer.x, (layer.w[0], layer.x[1], *layer.w[2:]), layer.strides, layer.pads, layer.dilations)
    x, seed, want = _case(layer)
    got = _gradient(_model(layer, batch="N"), layer, name, x[:0], seed[:0])
    assert got.shape == want.shape
    assert not got.any()


@pytest.mark.parametrize("name", ["im2col_gemm", "taps"])
def test_float64(name: str) -> None:
    x, seed, want = _case(SAME)
    got = _gradient(_model(SAME, dtype=TensorProto.DOUBLE), SAME, name, x.astype(np.float64), seed.astype(np.float64))
    assert _error(got, want) < 1e-12


@pytest.mark.parametrize(
    "name", ["im2col_conv", "im2col_gemm", "row_shift", "split_shift", "moved_channel_rows", "taps"]
)
def test_negative_padding(name: str) -> None:
    """The weight gradient of a ConvTranspose padded by more than its kernel is that of a convolution with negative pads."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 3, 9, 8)).astype(np.float32), rng.standard_normal((3, 4, 2, 3)).astype(np.float32)
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], name="conv", pads=[3, 2, 2, 4])
    inputs = [helper.make_tensor_value_info(k, TensorProto.FLOAT, v.shape) for k, v in (("x", x), ("w", w))]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    seed = rng.standard_normal(run(model, {"x": x, "w": w})["y"].shape).astype(np.float32)
    t = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.conv_transpose2d(torch.tensor(x, dtype=torch.float64), t)[:, :, 3:-2, 2:-4]
    (want,) = torch.autograd.grad(y, t, torch.tensor(seed, dtype=torch.float64))
    lowered = og.vjp(model, wrt="w", lowering={"ConvWeightGrad": name})
    got = run(lowered, {i.name: {"x": x, "w": w, "y_grad": seed}[i.name] for i in lowered.graph.input})["w_grad"]
    assert _error(got, want.numpy()) < 1e-6


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("pointwise", SAME, "the kernel is not 1x1"),
        ("pointwise", Layer((1, 2, 3, 3), (2, 2, 1, 1), pads=(1, 1, 1, 1)), "the input is padded"),
        ("pointwise_gemm", Layer((1, 2, 3, 3), (2, 2, 1, 1)), "there is one sample"),
        ("row_shift", Layer((1, 2, 3, 5), (2, 2, 1, 3)), "the kernel has one row"),
        ("row_shift", BOTH_STRIDED, "the stride along the first axis is 2"),
        ("split_shift", BOTH_STRIDED, "the stride along the first axis is 2"),
        ("moved_channel_rows", BOTH_STRIDED, "the stride along the first axis is 2"),
        ("moved_channel_rows", SIGNAL, "there is one spatial axis"),
        ("taps", GROUPED, "there are 3 groups"),
        ("taps", Layer((1, 1, 9, 9), (1, 1, 9, 8)), "the kernel has 72 taps"),
        ("patches", SAME, "the windows overlap or leave gaps"),
    ],
)
def test_refusals(name: str, layer: Layer, reason: str) -> None:
    with pytest.raises(og.LoweringError, match=reason):
        og.vjp(_model(layer), wrt="w", lowering={"ConvWeightGrad": name})
