"""Models that compute y from x, written down in ONNX's text form, and their gradients by PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
import torch

Function = Callable[[torch.Tensor], torch.Tensor]


def parsed(body: str, shape: str, *initializers: np.ndarray) -> onnx.ModelProto:
    """`body` computes y from x and the arrays a, b."""
    text = f'<ir_version: 10, opset_import: ["" : 21]> g (float[{shape}] x) => (y) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    model.graph.output[0].CopyFrom(onnx.helper.make_empty_tensor_value_info("y"))
    for name, array in zip("ab", initializers, strict=False):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def op_types(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def by_torch(function: Function, x: np.ndarray) -> np.ndarray:
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    function(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad.numpy()
