"""Files of TensorFlow and Keras converters: NHWC inputs behind Transposes, sizes named `?`, opset 9, SAME padding."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of
from tests.support.training_nets import off

RNG = np.random.default_rng(0)
KERNEL = RNG.standard_normal((5, 3, 3, 3)).astype(np.float32)
SCALE, SHIFT, MEAN = (RNG.standard_normal(5).astype(np.float32) for _ in range(3))
VARIANCE = RNG.uniform(0.5, 2, 5).astype(np.float32)
DENSE = (RNG.standard_normal((5, 4)) / 4).astype(np.float32)  # keeps the softmax away from saturation


TENSORS = {"kernel": KERNEL, "scale": SCALE, "shift": SHIFT, "mean": MEAN, "variance": VARIANCE, "dense": DENSE}


def converted(opset: int) -> onnx.ModelProto:
    listed = ", ".join(f"float[{','.join(map(str, array.shape))}] {name}" for name, array in TENSORS.items())
    text = f"""(float[a,b,c,3] input_1, {listed}) => (float[a,4] output_1) {{
        t = Transpose <perm = [0, 3, 1, 2]> (input_1)
        c = Conv <auto_pad = "SAME_UPPER", strides = [2, 2], kernel_shape = [3, 3]> (t, kernel, )
        b = BatchNormalization <epsilon = 1e-3> (c, scale, shift, mean, variance)
        a = LeakyRelu <alpha = 0.3> (b) p = GlobalAveragePool (a) s = Squeeze <axes = [2, 3]> (p)
        m = MatMul (s, dense) output_1 = Softmax <axis = 1> (m)
    }}"""
    model = graph_of(text, opset=opset, **TENSORS)
    model.ir_version = 3
    for info in (model.graph.input[0], model.graph.output[0]):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = "?"
    return model


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
            assert off(got[f"{name}_grad"], want) < 1e-4 or np.linalg.norm(got[f"{name}_grad"] - want) < 1e-7
