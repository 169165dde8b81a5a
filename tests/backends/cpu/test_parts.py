"""In training graphs the convolution of a concatenation becomes a sum of convolutions."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import check_by_torch, graph_of

SHAPES = {"x": (2, 16, 12, 11), "z": (2, 32, 12, 11)}
STORED = {
    "w": np.random.default_rng(0).normal(0, 0.05, (5, 48, 3, 3)).astype(np.float32),
    "b": np.random.default_rng(1).normal(size=5).astype(np.float32),
}
CONV = "u = Conv <strides = [2, 1], pads = [1, 0, 0, 1]> (c, w, b) y = Tanh (u)"


def model(nodes: str, *outputs: str, **stored: np.ndarray) -> onnx.ModelProto:
    inputs = ", ".join(f"float[{', '.join(map(str, shape))}] {name}" for name, shape in SHAPES.items())
    return graph_of(f"({inputs}) => (y{''.join(f', {o}' for o in outputs)}) {{ {nodes} }}", opset=21, **STORED | stored)


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_equals_pytorch() -> None:
    rng = np.random.default_rng(2)
    feed = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    built = og.augment(model(f"c = Concat <axis = 1> (x, z) {CONV}"), wrt="all", training=True)
    assert {"x", "z"} <= {node.input[0] for node in built.graph.node if node.op_type == "Conv"}

    def function(x: torch.Tensor, z: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        joined = torch.nn.functional.pad(torch.cat([x, z], 1), (0, 1, 1, 0))
        return torch.nn.functional.conv2d(joined, w, b, stride=(2, 1)).tanh()

    dy = rng.normal(size=function(*(torch.tensor(v) for v in (*feed.values(), *STORED.values()))).shape)
    got = run(built, feed | {"y_grad": dy.astype(np.float32)})
    check_by_torch(got, function, seed=dy.astype(np.float32), **feed, **STORED)


@pytest.mark.parametrize(
    ("nodes", "outputs", "options", "joined"),
    [
        (f"c = Concat <axis = 1> (x, z) {CONV}", (), {}, False),
        (f"c = Concat <axis = 1> (x, z, x) {CONV.replace('(c, w', '(c, v')}", (), {}, False),
        (f"c = Concat <axis = 1> (x, z) {CONV}", ("c",), {}, True),
        (f"c = Concat <axis = 1> (x, z) {CONV} t = Tanh (c)", ("t",), {}, True),
        (f"c = Concat <axis = 1> (x, z) {CONV}", (), {"target": og.Target(lowering="exact")}, True),
        (f"c = Concat <axis = 1> (x, z) {CONV}", (), {"training": False}, True),
        (f"c = Concat <axis = 1> (x, z) {CONV}", (), {"target": "cuda"}, True),
    ],
)
def test_where_it_applies(nodes: str, outputs: tuple[str, ...], options: dict[str, object], joined: bool) -> None:
    wider = np.concatenate([STORED["w"], STORED["w"][:, :16]], 1)
    built = og.augment(model(nodes, *outputs, v=wider), wrt="inputs", of="y", **{"training": True} | options)
    forward = [n for n in built.graph.node if n.op_type == "Concat" and set(n.input) <= {"x", "z"}]
    assert bool(forward) == joined


def test_odd_parts_and_large_kernels_are_left_alone() -> None:
    for x, z, y in ((8, 40, 5), (16, 32, 2000)):
        kernel = np.zeros((y, x + z, 1, 1), np.float32)
        text = (
            f"(float[2, {x}, 3, 3] x, float[2, {z}, 3, 3] z) => (y) {{ c = Concat <axis = 1> (x, z) y = Conv (c, w) }}"
        )
        assert "Concat" in operators(og.augment(graph_of(text, opset=21, w=kernel), wrt="inputs", training=True))
