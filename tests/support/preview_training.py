"""Models with the operators of `ai.onnx.preview.training`, and comparisons of the lowered models with autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch

import onnx_convgrad as og

DOMAIN = "ai.onnx.preview.training"
HEAD = """<ir_version: 8, opset_import: ["": {opset}, "{domain}": 1, "local": 1]>
    g ({inputs}) => ({outputs}) {{ {body} }} {tail}"""


def model(body: str, inputs: str, outputs: str, *, tail: str = "", opset: int = 17) -> onnx.ModelProto:
    """A model from the text of its nodes, in which `T.` abbreviates the domain."""
    text = HEAD.format(opset=opset, domain=DOMAIN, inputs=inputs, outputs=outputs, body=body, tail=tail)
    return onnx.parser.parse_model(text.replace("T.", f"{DOMAIN}."))


def lowered(given: onnx.ModelProto) -> onnx.ModelProto:
    """The lowered model, which has no operator of the domain and the same interface."""
    before = given.SerializeToString()
    done = og.transforms.lower_gradient_ops(given)
    assert given.SerializeToString() == before
    assert {(p.domain, p.version) for p in done.opset_import} == {("", 21)}
    assert [v.name for v in done.graph.input] == [v.name for v in given.graph.input]
    assert [v.name for v in done.graph.output] == [v.name for v in given.graph.output]
    return done


def lower(body: str, inputs: str, outputs: str, **options: Any) -> onnx.ModelProto:
    """The lowered form of a model that is given as text."""
    return lowered(model(body, inputs, outputs, **options))


def drawn(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: np.asarray(generator.standard_normal(shape), np.float32) for name, shape in shapes.items()}


def wide(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Leaves of autograd, in float64."""
    return {k: torch.tensor(a, dtype=torch.float64, requires_grad=True) for k, a in arrays.items()}


def close(got: np.ndarray, want: torch.Tensor, limit: float = 2e-6) -> None:
    expected = want.detach().numpy()
    assert got.shape == expected.shape
    assert np.linalg.norm(got - expected) <= limit * max(1.0, float(np.linalg.norm(expected)))
