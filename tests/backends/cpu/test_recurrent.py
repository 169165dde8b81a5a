"""In training, recurrent layers are computed once, in the form that their gradients need."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.families import export


class Net(torch.nn.Module):
    """A recurrent layer and a linear one on its last state or on all states."""

    def __init__(self, kind: str, *, last: bool, **options: Any) -> None:
        super().__init__()
        self.cell = getattr(torch.nn, kind)(3, 4, **options)
        self.last = last
        self.head = torch.nn.Linear(4 * (1 + options.get("bidirectional", False)), 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, final = self.cell(x)
        if not self.last:
            return self.head(states)
        return self.head((final[0] if isinstance(final, tuple) else final)[-1])


def _exported(module: torch.nn.Module, x: torch.Tensor) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about other batch sizes
        return export(module, x, dynamo=False, training=True, opset=17)


def _kinds(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize(
    ("kind", "last", "steps", "options"),
    [
        pytest.param("LSTM", False, 70, {"bidirectional": True}, marks=pytest.mark.slow),
        ("LSTM", True, 3, {}),
        pytest.param("GRU", True, 70, {}, marks=pytest.mark.slow),
        ("RNN", False, 70, {}),
    ],
)
def test_a_step(kind: str, last: bool, steps: int, options: dict[str, Any]) -> None:
    """The operator is gone; loss and gradients are those with `lowering="exact"`, which keeps it; the loss is PyTorch's."""
    torch.manual_seed(0)
    module, x = Net(kind, last=last, **options), torch.randn(steps, 2, 3)
    y = module(x)
    target = torch.randn(y.shape)
    model = _exported(module, x)
    assert _kinds(model)[kind] == 1
    found = []
    for lowering, kept in (("auto", 0), ("exact", 1)):
        program = og.build_training(model, loss="mse", optimizer=og.optim.SGD(0.1), target=og.Target(lowering=lowering))
        assert [_kinds(graph)[kind] for graph in (program.gradients, program.step)] == [kept] * 2
        m = program.manifest
        results = run(program.gradients, {m.data[0].name: x.numpy(), m.targets[0].name: target.numpy()})
        np.testing.assert_allclose(results[m.loss], torch.nn.functional.mse_loss(y, target).item(), rtol=1e-5)
        found.append([results[p.gradient] for p in m.parameters])
    for value, expected in zip(*found, strict=True):
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)


def test_what_keeps_the_operator() -> None:
    """A final state that is an output, weights that are not trained, and inference."""
    torch.manual_seed(0)
    x = torch.randn(4, 2, 3)
    model = _exported(torch.nn.LSTM(3, 4), x)  # with the final states as outputs
    assert _kinds(og.augment(model, of=model.graph.output[0].name, training=True))["LSTM"] == 1
    model = _exported(Net("LSTM", last=False), x)
    assert _kinds(og.augment(model, training=True))["LSTM"] == 0
    assert _kinds(og.augment(model))["LSTM"] == 1
    assert _kinds(og.augment(model, wrt="inputs", training=True))["LSTM"] == 1
    program = og.build_training(model, loss="mse", optimizer=og.optim.SGD(0.1))
    assert _kinds(program.evaluate)["LSTM"] == 1
