"""Models of one operator, cases whose integer operands are graph inputs, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from onnx_convgrad import api
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, check, make_model

WINDOWS: list[dict[str, Any]] = [
    {"kernel_shape": [2, 2], "strides": [2, 2]},
    {"kernel_shape": [2, 2]},
    {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 0, 1]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1},
    {"kernel_shape": [2, 3], "strides": [1, 2], "dilations": [2, 1], "pads": [1, 1, 0, 2]},
    {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    {"kernel_shape": [3, 2], "strides": [2, 2], "dilations": [2, 1], "auto_pad": "SAME_UPPER"},
    {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_LOWER", "ceil_mode": 1},
    {"kernel_shape": [3, 2], "auto_pad": "SAME_LOWER"},
    {"kernel_shape": [3, 2], "strides": [3, 2], "auto_pad": "VALID", "ceil_mode": 1},
    {"kernel_shape": [2, 2], "strides": [3, 3], "ceil_mode": 1},
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [2, 2, 2, 2], "ceil_mode": 1},
    {"kernel_shape": [2, 2], "dilations": [4, 4], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [1, 1], "strides": [2, 2]},
]
"""Attributes of pools over two axes."""


def rule_test(cases: Sequence[Case]) -> Callable[[Case], None]:
    """A test that runs each case through the generic checker, to be named `test_rule`."""

    @pytest.mark.parametrize("case", cases, ids=str)
    def test_rule(case: Case) -> None:
        check(case)

    return test_rule


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int64)


def indices(values: npt.ArrayLike, dtype: npt.DTypeLike = np.int64) -> np.ndarray:
    return np.asarray(values, dtype)


def both(
    op: str, inputs: list[Any], attributes: dict[str, Any] | None = None, name: str = "", **kwargs: Any
) -> list[Case]:
    """A case with its integer operands as constants, and one with them as graph inputs."""
    return [
        Case(op, inputs, attributes or {}, name=name, **kwargs),
        fed(op, inputs, attributes or {}, name=name, **kwargs),
    ]


def fed(*args: Any, name: str = "", **kwargs: Any) -> Case:
    """A case whose integer operands are graph inputs."""
    return Case(*args, feed_integers=True, name=f"fed {name}".strip(), **kwargs)


def text_model(text: str, opset: int = 21, ir_version: int = 10) -> onnx.ModelProto:
    """A model from ONNX's text form: `(inputs) => (outputs) { nodes }`."""
    return onnx.parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["": {opset}]> g {text}')


def one_node(
    node: onnx.NodeProto, shapes: Mapping[str, Sequence[Any] | None], stored: Mapping[str, np.ndarray] | None = None
) -> onnx.ModelProto:
    """A model of one node with float inputs of these shapes (`None`: unknown rank) and stored operands."""
    inputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
    weights = [numpy_helper.from_array(array, name) for name, array in (stored or {}).items()]
    graph = helper.make_graph([node], "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def autograd(function: Callable[..., torch.Tensor], *arrays: npt.ArrayLike, seed: Any = None) -> list[np.ndarray]:
    """PyTorch's gradients, in float64, of a function of arrays, given the cotangent of its result (default: ones)."""
    leaves = [torch.tensor(np.asarray(a, np.float64), requires_grad=True) for a in arrays]
    y = function(*leaves)
    y.backward(torch.ones_like(y) if seed is None else torch.tensor(np.asarray(seed, np.float64)))
    return [np.asarray(leaf.grad) for leaf in leaves]


def gradient(case: Case, seed: np.ndarray, target: str = "cpu") -> np.ndarray:
    """The gradient for the first operand of a case, given the cotangent of its first result."""
    arrays = case.arrays
    model = api.augment(make_model(case, arrays), wrt=["x0"], of=["y0"], target=target)
    feed = {i.name: arrays[int(i.name[1:])] for i in model.graph.input if i.name != "y0_grad"}
    return np.asarray(run(model, {**feed, "y0_grad": seed})["x0_grad"])
