"""Weight gradients of depthwise convolutions by windows that overlap, over random geometry, against float64 PyTorch."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run

SETTINGS = settings(deadline=None, max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
LOWERINGS = ("masked_windows", "placed_windows", "batch_windows")
CONV = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}


@st.composite
def geometry(draw: st.DrawFn) -> dict:
    rank = draw(st.integers(1, 3))

    def each(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank))

    return {
        "channels": draw(st.integers(2, 3)),
        "per_channel": draw(st.integers(1, 2)),
        "batch": draw(st.integers(1, 3)),
        "size": each(1, {1: 12, 2: 8, 3: 5}[rank]),
        "kernel": each(1, {1: 7, 2: 5, 3: 3}[rank]),
        "strides": each(1, 3),
        "dilations": each(1, 3),
        "begin": each(0, 4),
        "end": each(0, 4),
    }


def _fits(g: dict) -> bool:
    spans = [d * (k - 1) + 1 for k, d in zip(g["kernel"], g["dilations"], strict=True)]
    return all(x + b + e >= s for x, b, e, s in zip(g["size"], g["begin"], g["end"], spans, strict=True))


def _conv(g: dict, batch: int | str) -> onnx.ModelProto:
    c, o = g["channels"], g["channels"] * g["per_channel"]
    node = helper.make_node(
        "Conv", ["x", "w"], ["y"], name="conv", strides=g["strides"], dilations=g["dilations"],
        pads=[*g["begin"], *g["end"]], group=c,
    )  # fmt: skip
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, c, *g["size"]]),
        helper.make_tensor_value_info("w", TensorProto.FLOAT, [o, 1, *g["kernel"]]),
    ]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _oracle(g: dict, x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A seed for y and the gradient of <y, seed> for w."""
    weight = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    pads = [p for b, e in reversed(list(zip(g["begin"], g["end"], strict=True))) for p in (b, e)]
    padded = torch.nn.functional.pad(torch.tensor(x, dtype=torch.float64), pads)
    y = CONV[len(g["size"])](padded, weight, None, g["strides"], 0, g["dilations"], g["channels"])
    seed = np.random.default_rng(2).standard_normal(y.shape).astype(np.float32)
    y.backward(torch.tensor(seed, dtype=torch.float64))
    assert weight.grad is not None
    return seed, weight.grad.numpy()


def _usable(name: str, g: dict, batch: int | str) -> bool:
    if name == "masked_windows" and (g["per_channel"] > 1 or set(g["strides"]) != {1}):
        return False
    return name == "batch_windows" or isinstance(batch, int)


def _check(name: str, g: dict, batch: int | str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((g["batch"], g["channels"], *g["size"])).astype(np.float32)
    w = rng.standard_normal((g["channels"] * g["per_channel"], 1, *g["kernel"])).astype(np.float32)
    seed, want = _oracle(g, x, w)
    model = _conv(g, batch)
    if not _usable(name, g, batch):
        with pytest.raises(og.LoweringError, match=r"but (a group has several|strides|the batch size)"):
            og.vjp(model, wrt=["w"], lowering={"ConvWeightGrad": name})
        return
    backward = og.vjp(model, wrt=["w"], lowering={"ConvWeightGrad": name})
    feed = {"x": x, "w": w, "y_grad": seed}
    if math.prod(seed.shape) == 1 and isinstance(batch, int):  # a scalar needs no seed
        want, feed = want / seed.reshape(()), {"x": x, "w": w}
    got = run(backward, {i.name: feed[i.name] for i in backward.graph.input})["w_grad"]
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= 1e-5 * max(float(np.linalg.norm(want)), 1e-6)


@pytest.mark.parametrize("name", LOWERINGS)
@SETTINGS
@given(geometry().filter(_fits))
def test_windows(name: str, g: dict) -> None:
    if name == "masked_windows":
        g = {**g, "per_channel": 1, "strides": [1] * len(g["size"])}
    _check(name, g, g["batch"])


@pytest.mark.parametrize("name", LOWERINGS)
@SETTINGS
@given(geometry().filter(_fits))
def test_an_unknown_batch(name: str, g: dict) -> None:
    _check(name, g, "batch")


@pytest.mark.parametrize("name", LOWERINGS)
def test_refusals(name: str) -> None:
    g = {
        "channels": 2, "per_channel": 2, "batch": 2, "size": [5, 5], "kernel": [3, 3], "strides": [2, 2],
        "dilations": [1, 1], "begin": [1, 1], "end": [1, 1],
    }  # fmt: skip
    if not _usable(name, g, 2):
        _check(name, g, 2)
    with pytest.raises(og.LoweringError, match="the web provider copies windows that overlap in memory"):
        og.vjp(_conv(g, 2), wrt=["w"], target="web", lowering={"ConvWeightGrad": name})


def test_an_empty_batch_of_unknown_size() -> None:
    g = {
        "channels": 2, "per_channel": 1, "batch": 0, "size": [5, 4], "kernel": [3, 3], "strides": [1, 1],
        "dilations": [1, 1], "begin": [1, 1], "end": [1, 1],
    }  # fmt: skip
    backward = og.vjp(_conv(g, "batch"), wrt=["w"], lowering={"ConvWeightGrad": "batch_windows"})
    none = np.zeros((0, 2, 5, 4), np.float32)
    got = run(backward, {k: none if k != "w" else np.ones((2, 1, 3, 3), np.float32) for k in ("x", "w", "y_grad")
                         if k in {i.name for i in backward.graph.input}})["w_grad"]  # fmt: skip
    assert got.shape == (2, 1, 3, 3)
    assert not got.any()


def test_negative_padding() -> None:
    """The gradients of a transposed convolution are convolutions whose padding may be negative."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    w = rng.standard_normal((3, 1, 3, 2)).astype(np.float32)
    for strides in ([1, 1], [2, 3]):
        node = helper.make_node(
            "ConvTranspose", ["x", "w"], ["y"], group=3, strides=strides, pads=[0, 1, 1, 0], output_padding=[0, 0]
        )
        inputs = [helper.make_tensor_value_info(k, TensorProto.FLOAT, v.shape) for k, v in (("x", x), ("w", w))]
        graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        weight = torch.tensor(w, dtype=torch.float64, requires_grad=True)
        y = torch.nn.functional.conv_transpose2d(torch.tensor(x).double(), weight, None, strides, 0, 0, 3)
        y = torch.nn.functional.pad(y, (-1, 0, 0, -1))
        seed = rng.standard_normal(y.shape).astype(np.float32)
        y.backward(torch.tensor(seed, dtype=torch.float64))
        assert weight.grad is not None
        want = weight.grad.numpy()
        for name in LOWERINGS:
            if name == "masked_windows" and strides != [1, 1]:
                continue
            backward = og.vjp(model, wrt=["w"], lowering={"ConvWeightGrad": name})
            got = run(backward, {"x": x, "w": w, "y_grad": seed})["w_grad"]
            assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want), (name, strides)


@pytest.mark.parametrize("name", LOWERINGS)
def test_windows_are_not_copied(name: str) -> None:
    """Every convolution but the one that thins x has a kernel as wide as its input, which is what makes it fast."""
    g = {
        "channels": 16, "per_channel": 1, "batch": 2, "size": [8, 8], "kernel": [3, 3], "strides": [1, 1],
        "dilations": [1, 1], "begin": [1, 1], "end": [1, 1],
    }  # fmt: skip
    backward = og.vjp(_conv(g, 2), wrt=["w"], lowering={"ConvWeightGrad": name})
    shaped = onnx.shape_inference.infer_shapes(backward)
    known = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in shaped.graph.value_info}
    convs = [n for n in backward.graph.node if n.op_type == "Conv" and len(known[n.input[0]]) == 4]
    assert len(convs) == {"masked_windows": 3, "placed_windows": 3, "batch_windows": 1}[name]
    for conv in convs:
        assert known[conv.input[0]][3] == known[conv.input[1]][3]
        assert not {a.name for a in conv.attribute} & {"pads", "strides", "dilations"}
    assert ort.InferenceSession(backward.SerializeToString(), providers=["CPUExecutionProvider"])
