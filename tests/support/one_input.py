"""Models in ONNX's text form, and gradients by PyTorch of those that compute y from x."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.operators import autograd

Function = Callable[[torch.Tensor], torch.Tensor]


def graph_of(text: str, *, opset: int = 17, domains: str = "", **stored: np.ndarray) -> onnx.ModelProto:
    """A model of the graph `text`, from its inputs on; `domains` lists further opset imports, `stored` initializers.

    Outputs without a type are left to inference.
    """
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}{domains}]> g {text}')
    for output in model.graph.output:
        if output.type.HasField("tensor_type") and not output.type.tensor_type.elem_type:
            output.CopyFrom(onnx.helper.make_empty_tensor_value_info(output.name))
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in stored.items())
    return model


def parsed(body: str, shape: str, *initializers: np.ndarray) -> onnx.ModelProto:
    """A model whose `body` computes y from x and the arrays a and b."""
    stored = dict(zip("ab", initializers, strict=False))
    return graph_of(f"(float[{shape}] x) => (y) {{ {body} }}", opset=21, **stored)


def dims(shape: Iterable[int | str]) -> str:
    return ", ".join(map(str, shape))


def node_of(op: str, *operands: str, **attributes: Any) -> str:
    """A node in ONNX's text form, without its outputs."""
    written = ", ".join(f"{name} = {json.dumps(value)}" for name, value in attributes.items())
    return f"{op} <{written}> ({', '.join(operands)})" if written else f"{op} ({', '.join(operands)})"


ROWS = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)


def of_rows(body: str) -> onnx.ModelProto:
    """A model whose `body` computes y from x, both like `ROWS`."""
    return graph_of(f"(float[2,3] x) => (float[2,3] y) {body}", domains=', "local": 1')


def rows_gradient(model: onnx.ModelProto | Path) -> np.ndarray:
    """The gradient of the sum of the outputs by x at `ROWS`."""
    result = og.augment(model, wrt="inputs", cotangents="ones")
    onnx.checker.check_model(result, full_check=True)
    return run(result, {"x": ROWS})["x_grad"]


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def op_types(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def by_torch(function: Function, x: np.ndarray) -> np.ndarray:
    return autograd(lambda leaf: function(leaf).sum(), x)[0]


def check_by_torch(
    got: Mapping[str, np.ndarray],
    function: Callable[..., torch.Tensor],
    *,
    seed: np.ndarray | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    **arrays: np.ndarray,
) -> None:
    """Compare y and its gradients with those of a function of the arrays in float64, given the cotangent of y."""
    leaves = {name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in arrays.items()}
    y = function(*leaves.values())
    y.backward(torch.ones_like(y) if seed is None else torch.tensor(seed, dtype=torch.float64))
    want = {"y": y, **{f"{name}_grad": leaf.grad for name, leaf in leaves.items()}}
    for name, value in got.items():
        np.testing.assert_allclose(value, want[name].detach().numpy(), rtol=rtol, atol=atol, err_msg=name)


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
