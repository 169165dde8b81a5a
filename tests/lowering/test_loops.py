"""Files whose gradients run in loops over the samples are differentiated again, as if there were no loops."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.ir.notes import GRADIENTS, LOOPS
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

SHAPES = {"x": (3, 8, 48, 48), "w": (8, 8, 3, 3), "y_grad": (3, 8, 48, 48)}
BUDGET = 200_000


def _once(batch: str) -> onnx.ModelProto:
    size = f"float[{batch},8,48,48]"
    body = "[conv] a = Conv <pads = [1, 1, 1, 1]> (x, w) y = Mul (a, a)"
    proto = graph_of(f"({size} x, float[8,8,3,3] w) => ({size} y) {{ {body} }}", opset=21)
    model = og.augment(proto, wrt=["x", "w"], max_workspace=BUDGET)
    assert {made["op_type"] for made in _metadata(model, LOOPS).values()} == {"ConvWeightGrad"}
    assert "Scan" in {node.op_type for node in model.graph.node}
    return model


def _metadata(model: onnx.ModelProto, key: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads({p.key: p.value for p in model.metadata_props}[key])
    return found


@pytest.mark.parametrize("batch", ["3", "N"])
def test_second_order_is_that_of_pytorch(batch: str) -> None:
    generator = np.random.default_rng(0)
    shapes = {**SHAPES, "x_grad_grad": SHAPES["x"], "w_grad_grad": SHAPES["w"]}
    feed = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    again = og.vjp(_once(batch), wrt=["x", "w", "y_grad"], of=["x_grad", "w_grad"])
    got = run(again, feed)
    t = {name: torch.tensor(a, dtype=torch.float64, requires_grad=True) for name, a in feed.items()}
    y = torch.nn.functional.conv2d(t["x"], t["w"], padding=1).square()
    first = torch.autograd.grad(y, [t["x"], t["w"]], t["y_grad"], create_graph=True)
    names = _metadata(again, GRADIENTS)
    for name, want in zip(
        names, torch.autograd.grad(first, [t[n] for n in names], [t["x_grad_grad"], t["w_grad_grad"]]), strict=True
    ):
        error = np.linalg.norm(got[names[name]] - want.numpy()) / np.linalg.norm(want.numpy())
        assert error < 1e-5, name


def test_a_loop_whose_operand_was_renamed_is_left_unchanged() -> None:
    """As after other tools: then only its own derivative is missing, and reported."""
    model = _once("N")
    told = {p.key: p for p in model.metadata_props}[LOOPS]
    told.value = told.value.replace('"x"', '"elsewhere"')
    with pytest.raises(og.DifferentiationError, match="its number of iterations is not known while building"):
        og.vjp(model, wrt=["x"], of=["w_grad"])
    feed = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    kept = run(og.augment(model, wrt=["x"], of=["y"], seed="ones"), feed)
    np.testing.assert_allclose(kept["w_grad"], run(model, feed)["w_grad"], rtol=1e-6)
