"""RNN, GRU and LSTM: derivatives of the recurrence for every attribute that ONNX Runtime supports."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

import onnx_convgrad as og
from onnx_convgrad.checking.case import Evaluator
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, make_model, rand
from tests.support.families import export
from tests.support.operators import one_node, rule_test

TURNS, BATCH, INPUT, HIDDEN = 3, 2, 3, 2
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
LENGTHS = np.array([2, 3], np.int32)


def _case(op: str, *, ways: int = 1, order: int = 1, given: str = "", **attributes: Any) -> Case:
    """`given`: the optional operands: b (bias), l (lengths), h, c (initial states), p (peepholes)."""
    gates = GATES[op]
    state = rand(ways, BATCH, HIDDEN)
    optional = {"b": rand(ways, 2 * gates * HIDDEN), "l": LENGTHS, "h": state, "c": state, "p": rand(ways, 3 * HIDDEN)}
    inputs = [rand(TURNS, BATCH, INPUT), rand(ways, gates * HIDDEN, INPUT), rand(ways, gates * HIDDEN, HIDDEN)]
    inputs += [optional[letter] if letter in given else None for letter in "blhcp"]
    while inputs[-1] is None:
        inputs.pop()
    outputs = 3 if op == "LSTM" else 2
    named = {"hidden_size": HIDDEN, **attributes}
    return Case(op, inputs, named, outputs, order=order, dynamic=False, name=given)


SCALED = {"activations": ["HardSigmoid", "ScaledTanh"], "activation_alpha": [0.3, 1.2], "activation_beta": [0.4, 0.7]}
AFFINE = {"activations": ["Affine", "Softsign"], "activation_alpha": [0.5]}


CASES = [
    _case("RNN", order=2, given="bh"),
    _case("RNN", ways=2, given="blh", direction="bidirectional", **AFFINE),
    _case("GRU", order=2, given="bh", linear_before_reset=1),
    _case("GRU", given="bl", direction="reverse"),
    _case("GRU", ways=2, given="bh", direction="bidirectional"),
    _case("GRU", given="bh", **SCALED),
    _case("LSTM", order=2, given="bhcp"),
    _case("LSTM", given="p", input_forget=1),
    _case("LSTM", ways=2, given="blhcp", direction="bidirectional"),
    _case("LSTM", given="bc", clip=0.6, activations=["Sigmoid", "LeakyRelu", "Elu"], activation_alpha=[0.2, 0.9]),
]

test_rule = rule_test(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_evaluator_for_finite_differences_equals_the_runtime(case: Case) -> None:
    model = make_model(case, case.arrays)
    present = {f"x{i}": a for i, a in enumerate(case.arrays) if a is not None}
    feed = {i.name: present[i.name] for i in model.graph.input}
    exact = Evaluator(model, case)(feed)
    for name, value in run(model, feed).items():
        np.testing.assert_allclose(value, exact[name], rtol=2e-5, atol=2e-6)


class Layers(torch.nn.Module):
    """Two bidirectional layers after a convolution over time, as in text recognition."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(4, 4, 3, padding=1)
        self.layers = getattr(torch.nn, op)(4, 3, num_layers=2, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(self.conv(x).permute(2, 0, 1))[0]
        return result


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("op", ["GRU", "LSTM"])
def test_gradients_are_those_of_pytorch(op: str, dynamo: bool) -> None:
    torch.manual_seed(0)
    module, x = Layers(op), torch.randn(2, 4, 5)
    model = export(module, x, dynamo=dynamo, training=False, fold=False)
    seed = torch.randn(5, 2, 6)
    got = run(og.vjp(model, wrt="all"), {"x": x.numpy(), "y_grad": seed.numpy()})
    x.requires_grad_()
    named = {"x": x, **dict(module.named_parameters())}
    for name, want in zip(named, torch.autograd.grad(module(x), list(named.values()), seed), strict=True):
        np.testing.assert_allclose(got[f"{name}_grad"], want.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


def _model(turns: int | str, **attributes: Any) -> onnx.ModelProto:
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], name="memory", hidden_size=1, **attributes)
    return one_node(node, {"x": [turns, 1, 1], "w": [1, 4, 1], "r": [1, 4, 1]})


@pytest.mark.parametrize(
    ("turns", "attributes", "reason"),
    [
        ("n", {}, "the length of its sequence is not known while building"),
        (300, {}, "it has 300 iterations; 1 to 256 are unrolled"),
        (4, {"layout": 1}, "its layout is 1"),
        (4, {"activations": ["Sigmoid", "Tanh"]}, "it has 2 activations, but needs 3"),
        (4, {"activations": ["Sigmoid", "Swish", "Tanh"]}, "its activation 'Swish' is not defined by ONNX"),
    ],
)
def test_refused(turns: int | str, attributes: dict[str, Any], reason: str) -> None:
    with pytest.raises(og.DifferentiationError, match=reason) as caught:
        og.augment(_model(turns, **attributes), wrt=["x"])
    assert "memory" in str(caught.value)
