"""Files of TensorFlow and Keras converters: NHWC inputs behind Transposes, sizes named `?`, opset 9, SAME padding."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run

RNG = np.random.default_rng(0)
KERNEL = RNG.standard_normal((5, 3, 3, 3)).astype(np.float32)
SCALE, SHIFT, MEAN = (RNG.standard_normal(5).astype(np.float32) for _ in range(3))
VARIANCE = RNG.uniform(0.5, 2, 5).astype(np.float32)
DENSE = (RNG.standard_normal((5, 4)) / 4).astype(np.float32)  # keeps the softmax away from saturation


def converted(opset: int) -> onnx.ModelProto:
    tensors = {"kernel": KERNEL, "scale": SCALE, "shift": SHIFT, "mean": MEAN, "variance": VARIANCE, "dense": DENSE}
    nodes = [
        helper.make_node("Transpose", ["input_1"], ["t"], perm=[0, 3, 1, 2]),
        helper.make_node(
            "Conv", ["t", "kernel", ""], ["c"], auto_pad="SAME_UPPER", strides=[2, 2], kernel_shape=[3, 3]
        ),
        helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "variance"], ["b"], epsilon=1e-3),
        helper.make_node("LeakyRelu", ["b"], ["a"], alpha=0.3),
        helper.make_node("GlobalAveragePool", ["a"], ["p"]),
        helper.make_node("Squeeze", ["p"], ["s"], axes=[2, 3]),
        helper.make_node("MatMul", ["s", "dense"], ["m"]),
        helper.make_node("Softmax", ["m"], ["output_1"], axis=1),
    ]
    inputs = [helper.make_tensor_value_info("input_1", TensorProto.FLOAT, ["?", "?", "?", 3])]
    inputs += [helper.make_tensor_value_info(k, TensorProto.FLOAT, v.shape) for k, v in tensors.items()]
    outputs = [helper.make_tensor_value_info("output_1", TensorProto.FLOAT, ["?", 4])]
    graph = helper.make_graph(
        nodes, "converted", inputs, outputs, [numpy_helper.from_array(v, k) for k, v in tensors.items()]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=3)


def oracle(x: np.ndarray, seed: np.ndarray) -> dict[str, np.ndarray]:
    t = {
        k: torch.tensor(v, dtype=torch.float64, requires_grad=True)
        for k, v in {"input_1": x, "kernel": KERNEL, "scale": SCALE, "shift": SHIFT, "dense": DENSE}.items()
    }
    pads = []
    for size in (x.shape[2], x.shape[1]):
        total = max((-(-size // 2) - 1) * 2 + 3 - size, 0)
        pads += [total // 2, total - total // 2]
    h = torch.nn.functional.conv2d(
        torch.nn.functional.pad(t["input_1"].permute(0, 3, 1, 2), pads), t["kernel"], stride=2
    )
    mean, variance = (torch.tensor(v, dtype=torch.float64) for v in (MEAN, VARIANCE))
    h = torch.nn.functional.batch_norm(h, mean, variance, t["scale"], t["shift"], eps=1e-3)
    y = torch.softmax(torch.nn.functional.leaky_relu(h, 0.3).mean((2, 3)) @ t["dense"], 1)
    y.backward(torch.tensor(seed, dtype=torch.float64))
    return {k: v.grad.numpy() for k, v in t.items()}


@pytest.mark.parametrize("opset", [9, 11])
def test_one_file_for_all_sizes(opset: int) -> None:
    augmented = og.augment(converted(opset), wrt="all")
    for shape in ((1, 8, 8, 3), (3, 9, 6, 3), (2, 5, 7, 3)):
        x = RNG.standard_normal(shape).astype(np.float32)
        seed = RNG.standard_normal((shape[0], 4)).astype(np.float32)
        got = run(augmented, {"input_1": x, "output_1_grad": seed})
        for name, want in oracle(x, seed).items():
            result = got[f"{name}_grad"]
            assert result.shape == want.shape
            assert np.linalg.norm(result - want) < 1e-4 * max(np.linalg.norm(want), 1e-3)
