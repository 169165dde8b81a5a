"""In training graphs a Pad with zeros becomes the padding of the convolution that reads it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import check_by_torch, graph_of

W = np.random.default_rng(0).normal(size=(4, 2, 3, 3)).astype(np.float32)
CONV = "y = Conv <strides = [2, 2], pads = [0, 1, 0, 0]> (p, w)"


def model(nodes: str, x: str = "3, 2, 6, 7", *outputs: str) -> onnx.ModelProto:
    """`y = Conv(Pad(x), w)` in one of its forms, with its constants."""
    text = f"""(float[{x}] x) => (y{"".join(f", {o}" for o in outputs)})
    <int64[8] right = {{0, 0, 0, 0, 0, 0, 1, 2}}, int64[4] left = {{1, 0, 1, 2}}, int64[2] last = {{2, -1}},
     int64[8] nhwc = {{0, 1, 0, 0, 0, 1, 2, 0}},
     float zero = {{0}}, float one = {{1}}> {{ {nodes} }}"""
    return graph_of(text, opset=21, w=W)


@pytest.mark.parametrize(
    ("nodes", "shape", "pads"),
    [
        (f"p = Pad (x, right) {CONV}", (3, 2, 6, 7), (1, 2, 0, 1)),
        (f"p = Pad (x, left, zero, last) {CONV}", (3, 2, 6, 7), (1, 2, 1, 1)),
        (f"q = Pad (x, nhwc) p = Transpose <perm = [0, 3, 1, 2]> (q) {CONV}", (3, 6, 7, 2), (1, 2, 1, 1)),
    ],
    ids=["at the end", "of two axes", "before a Transpose"],
)
def test_equals_pytorch(nodes: str, shape: tuple[int, ...], pads: tuple[int, ...]) -> None:
    """`pads` are PyTorch's: left, right, top, bottom, with those of the convolution."""
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    g = og.augment(model(nodes, ", ".join(map(str, shape))), wrt="all", training=True)
    assert "Pad" not in {n.op_type for n in g.graph.node}

    def function(v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        image = v.permute(0, 3, 1, 2) if "Transpose" in nodes else v
        return torch.nn.functional.conv2d(torch.nn.functional.pad(image, pads), w, stride=2)

    shape_of_y = function(torch.tensor(x), torch.tensor(W)).shape
    dy = np.random.default_rng(2).normal(size=shape_of_y).astype(np.float32)
    got = run(g, {"x": x, "y_grad": dy})
    assert got.keys() == {"y", "x_grad", "w_grad"}
    check_by_torch(got, function, seed=dy, x=x, w=W)


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [
        (f"p = Pad (x, right, one) {CONV}", ()),
        (f'p = Pad <mode = "reflect"> (x, right) {CONV}', ()),
        (f"p = Pad (x, right) {CONV} z = Tanh (p)", ("z",)),
        (f"p = Pad (x, right) {CONV}", ("p",)),
    ],
    ids=["ones", "a mirror", "another reader", "an output"],
)
def test_other_pads_stay(nodes: str, outputs: tuple[str, ...]) -> None:
    m = model(nodes, "3, 2, 6, 7", *outputs)
    g = og.augment(m, wrt=["w"], of=["y"], training=True)
    x = np.random.default_rng(1).normal(size=(3, 2, 6, 7)).astype(np.float32)
    assert "Pad" in {n.op_type for n in g.graph.node}
    want = run(m, {"x": x})
    got = run(g, {"x": x, "y_grad": np.zeros_like(want["y"])})
    np.testing.assert_allclose(got["y"], want["y"], rtol=1e-5, atol=1e-5)


def test_differentiated_values_stay() -> None:
    g = og.augment(model(f"p = Pad (x, right) {CONV}"), wrt=["p"], cotangents="ones", training=True)
    assert "Pad" in {n.op_type for n in g.graph.node}
    x = np.zeros((3, 2, 6, 7), np.float32)
    assert run(g, {"x": x})["p_grad"].shape == (3, 2, 7, 9)


def test_no_asymmetric_padding_on_other_targets() -> None:
    g = og.augment(model(f"p = Pad (x, right) {CONV}"), wrt=["w"], training=True, target="cuda")
    assert "Pad" in {n.op_type for n in g.graph.node}
