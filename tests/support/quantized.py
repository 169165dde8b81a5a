"""Small convolutional networks for the tests of quantization, their data, and the operators that ONNX Runtime runs."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from onnx import TensorProto, helper
from torch import nn

from onnx_convgrad.quantization.insert import fold_batchnorm
from tests.support.families import export

X = np.random.default_rng(0).normal(size=(32, 1, 8, 8)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 10, 32)


class Depthwise(nn.Module):
    """A convolution with BatchNormalization, a depthwise and a pointwise one, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.c2, self.b2 = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.c3, self.fc = nn.Conv2d(8, 16, 1), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.b1(self.c1(x)))
        h = nn.functional.relu6(self.b2(self.c2(h)))
        return self.fc(torch.relu(self.c3(h)).mean((2, 3)))


@cache
def depthwise() -> onnx.ModelProto:
    """The network with statistics and scales that are not those of a fresh one, exported."""
    torch.manual_seed(0)
    net = Depthwise().eval()
    for norm in (net.b1, net.b2):
        for value, low, high in ((norm.running_mean, -0.5, 0.5), (norm.running_var, 0.5, 2.0)):
            assert value is not None
            value.uniform_(low, high)
        norm.weight.data.uniform_(0.5, 2)
        norm.bias.data.normal_()
    return export(net, torch.tensor(X[:2]), dynamo=False, training=False, dynamic_batch=True, fold=False)


@cache
def folded() -> onnx.ModelProto:
    """The depthwise network with its BatchNormalization folded into the convolutions."""
    model = ir.from_proto(depthwise())
    fold_batchnorm(model.graph)
    return ir.to_proto(model)


def fused_operators(model: onnx.ModelProto | Path, folder: Path) -> Counter[str]:
    """The operators of a model after ONNX Runtime's optimization."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(str(model) if isinstance(model, Path) else model.SerializeToString(), options)
    return Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


def model_of(
    text: str, stored: dict[str, tuple[int, np.ndarray]], shape: tuple[int | str, ...], *outputs: str
) -> onnx.ModelProto:
    """A model with the nodes of `text` on a float input x, float outputs and `stored` values."""
    parsed = onnx.parser.parse_graph(f"g (float[1] x) => (float[1] y) {{ {text} }}")
    for i, node in enumerate(parsed.node):
        node.name = f"{node.op_type}_{i}"
    tensors = [helper.make_tensor(n, kind, np.shape(a), np.ravel(a).tolist()) for n, (kind, a) in stored.items()]
    graph = helper.make_graph(
        list(parsed.node),
        "g",
        [helper.make_tensor_value_info("x", 1, shape)],
        [helper.make_tensor_value_info(name, 1, None) for name in outputs or ("y",)],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def quantizer(name: str, scale: float, zero: int, kind: int = TensorProto.UINT8) -> dict[str, tuple[int, np.ndarray]]:
    return {f"{name}s": (1, np.asarray(scale, np.float32)), f"{name}z": (kind, np.asarray(zero))}
