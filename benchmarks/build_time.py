"""How long augmenting takes: an exported ResNet-50, and residual chains of 1,000 and 10,000 nodes.

    python benchmarks/build_time.py

Prints seconds after imports (median of three) and, for the chains, the time per node relative to the shortest.
"""

from __future__ import annotations

import io
import statistics
import time
import warnings

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import onnx_convgrad as og
from onnx_convgrad.registry import load_rules


class Bottleneck(nn.Module):
    def __init__(self, cin: int, width: int, stride: int) -> None:
        super().__init__()
        cout = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(cin, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, cout, 1, bias=False), nn.BatchNorm2d(cout)),
        )
        project = stride != 1 or cin != cout
        self.skip = (
            nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout)) if project else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + (x if self.skip is None else self.skip(x)))


def resnet50(*, training: bool) -> onnx.ModelProto:
    """ResNet-50 (He et al., 2015, table 1) with random weights, exported with a symbolic batch."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    cin = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            layers.append(Bottleneck(cin, width, stride if index == 0 else 1))
            cin = 4 * width
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)).train(training)
    buffer = io.BytesIO()
    mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (torch.randn(2, 3, 224, 224),),
            buffer,  # type: ignore[arg-type]
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "N"}, "y": {0: "N"}},
            opset_version=17,
            dynamo=False,
            training=mode,
            do_constant_folding=not training,
        )
    return onnx.load_from_string(buffer.getvalue())


def chain(blocks: int) -> onnx.ModelProto:
    """Residual blocks of five nodes: Conv, Relu, Conv, Add, Relu."""
    weight = np.random.default_rng(0).standard_normal((4, 4, 3, 3)).astype(np.float32)
    nodes, weights, top = [], [], "x"
    for i in range(blocks):
        weights += [numpy_helper.from_array(weight, f"w{i}a"), numpy_helper.from_array(weight, f"w{i}b")]
        nodes += [
            helper.make_node("Conv", [top, f"w{i}a"], [f"a{i}"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"a{i}"], [f"b{i}"]),
            helper.make_node("Conv", [f"b{i}", f"w{i}b"], [f"c{i}"], pads=[1, 1, 1, 1]),
            helper.make_node("Add", [f"c{i}", top], [f"d{i}"]),
            helper.make_node("Relu", [f"d{i}"], [f"e{i}"]),
        ]
        top = f"e{i}"
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4, 16, 16])]
    outputs = [helper.make_tensor_value_info(top, TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "chain", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def measure(model: onnx.ModelProto, runs: int = 3) -> tuple[float, int]:
    """Median seconds of `augment(wrt="all")`, and the number of nodes that come out."""
    laps = []
    for _ in range(runs):
        start = time.perf_counter()
        result = og.augment(model, wrt="all")
        laps.append(time.perf_counter() - start)
    return statistics.median(laps), len(result.graph.node)


def main() -> None:
    load_rules()
    print(f"{'model':<22}{'nodes':>7}{'after':>8}{'seconds':>9}{'us/node':>9}{'ratio':>7}")
    for name, model in (("ResNet-50", resnet50(training=False)), ("ResNet-50, training", resnet50(training=True))):
        seconds, after = measure(model)
        print(f"{name:<22}{len(model.graph.node):>7}{after:>8}{seconds:>9.2f}")
    base = None
    for blocks in (200, 2000):
        model = chain(blocks)
        seconds, after = measure(model)
        per_node = seconds / len(model.graph.node)
        base = base or per_node
        name = f"chain of {len(model.graph.node)}"
        print(
            f"{name:<22}{len(model.graph.node):>7}{after:>8}{seconds:>9.2f}{1e6 * per_node:>9.0f}{per_node / base:>7.2f}"
        )


if __name__ == "__main__":
    main()
