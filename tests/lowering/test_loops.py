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
    model = og.augment(proto, wrt=["x", "w"], target=og.Target(max_workspace=BUDGET))
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
    """As after other tools: then its own derivative is that of the loop, not that of the convolution."""
    model = _once("N")
    told = {p.key: p for p in model.metadata_props}[LOOPS]
    told.value = told.value.replace('"x"', '"elsewhere"')
    second = [og.vjp(m, wrt=["x"], of=["w_grad"], cotangents="ones") for m in (model, _once("N"))]
    feed = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    got, want = (run(m, {v.name: feed[v.name] for v in m.graph.input})["x_grad_1"] for m in second)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    kept = run(og.augment(model, wrt=["x"], of=["y"], cotangents="ones"), feed)
    np.testing.assert_allclose(kept["w_grad"], run(model, feed)["w_grad"], rtol=1e-6)


FORGED = {
    "another operator": lambda made: {**made, "op_type": "ConvInputGrad"},
    "a plain operator": lambda made: {**made, "op_type": "Neg", "domain": "", "inputs": ["x"], "attributes": {}},
    "other strides": lambda made: {**made, "attributes": {**made["attributes"], "strides": [2, 2]}},
    "other padding": lambda made: {**made, "attributes": {**made["attributes"], "pads": [0, 0, 2, 2]}},
    "another operand": lambda made: {**made, "inputs": [made["inputs"][0], made["inputs"][0], made["inputs"][2]]},
    "an unknown lowering": lambda made: {**made, "lowering": "none"},
    "no attributes": lambda made: {**made, "attributes": None},
    "huge numbers": lambda made: {**made, "chunks": 10**12},
    "another form": list,
    "nothing": lambda _: {},
}


@pytest.mark.parametrize("case", FORGED)
def test_metadata_that_the_nodes_do_not_confirm_changes_nothing(case: str) -> None:
    """Metadata can say anything: an abstract operator replaces a loop only if it gives the nodes that are there."""
    model = _once("3")
    feed = {name: np.random.default_rng(1).standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    want = run(model, feed)
    entry = next(p for p in model.metadata_props if p.key == LOOPS)
    entry.value = json.dumps({name: FORGED[case](made) for name, made in json.loads(entry.value).items()})
    got = run(og.augment(model, wrt=["x"], of=["y"], cotangents="ones"), feed)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"y": {}}',
        '{"y": []}',
        "1",
        '{"y": {"op_type": "Neg", "domain": "", "inputs": ["x"], "attributes": {}}}',
    ],
)
def test_metadata_of_no_form_is_ignored(text: str) -> None:
    model = graph_of("(float[3] x) => (float[3] y) { y = Tanh (x) }")
    model.metadata_props.add(key=LOOPS, value=text)
    x = np.float32([0.5, 1, 2])
    got = run(og.augment(model, wrt="inputs", cotangents="ones"), {"x": x})
    np.testing.assert_allclose(got["y"], np.tanh(x), rtol=1e-6)
    np.testing.assert_allclose(got["x_grad"], 1 - np.tanh(x) ** 2, rtol=1e-5)
