"""Models in ONNX's text form, and gradients by PyTorch of those that compute y from x."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run

Function = Callable[[torch.Tensor], torch.Tensor]


def graph_of(text: str, *, opset: int = 17, domains: str = "", **initializers: np.ndarray) -> onnx.ModelProto:
    """A model of the graph `text`, from its inputs on; `domains` lists further opset imports."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}{domains}]> g {text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in initializers.items())
    return model


def parsed(body: str, shape: str, *initializers: np.ndarray) -> onnx.ModelProto:
    """A model whose `body` computes y from x and the arrays a and b."""
    model = graph_of(f"(float[{shape}] x) => (y) {{ {body} }}", opset=21)
    model.graph.output[0].CopyFrom(onnx.helper.make_empty_tensor_value_info("y"))
    for name, array in zip("ab", initializers, strict=False):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


ROWS = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)


def of_rows(body: str) -> onnx.ModelProto:
    """A model whose `body` computes y from x, both like `ROWS`."""
    return graph_of(f"(float[2,3] x) => (float[2,3] y) {body}", domains=', "local": 1')


def rows_gradient(model: onnx.ModelProto | Path) -> np.ndarray:
    """The gradient of the sum of the outputs by x at `ROWS`."""
    result = og.augment(model, wrt="inputs", seed="ones")
    onnx.checker.check_model(result, full_check=True)
    return run(result, {"x": ROWS})["x_grad"]


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def op_types(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def by_torch(function: Function, x: np.ndarray) -> np.ndarray:
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    function(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad.numpy()


KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
FOLDED = "pkg.onnxscript.optimizer.folded_from"


def gradients(made: onnx.ModelProto) -> list[str]:
    """The names of the values whose gradients a model gives."""
    names = [o.name for o in made.graph.output]
    assert names[0] == "y" or names[0].endswith("_grad")
    assert all(name.endswith("_grad") for name in names[1:])
    return [name.removesuffix("_grad") for name in names if name != "y"]


def gradient_map(made: onnx.ModelProto) -> dict[str, str]:
    """Values and the outputs that hold their gradients, by the metadata."""
    found: dict[str, str] = json.loads({p.key: p.value for p in made.metadata_props}["onnx_convgrad.gradients"])
    return found


def mark(model: onnx.ModelProto, name: str, key: str, value: str) -> None:
    """Add an exporter's note to an initializer."""
    stored = next(t for t in model.graph.initializer if t.name == name)
    info = onnx.helper.make_tensor_value_info(name, stored.data_type, stored.dims)
    info.metadata_props.add(key=key, value=value)
    model.graph.value_info.append(info)
