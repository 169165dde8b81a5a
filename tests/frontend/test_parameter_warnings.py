"""Warnings of parameters that an exporter computed, merged or left out."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from torch.nn import functional as F

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.families import export
from tests.support.one_input import FOLDED, KIND, graph_of, mark
from tests.support.training_nets import Formula, off


def test_warning_of_a_parameter_that_also_acts_through_a_folded_value() -> None:
    model = graph_of("""(float[2, 3] x) => (float[2, 3] y)
        <float[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}, float[3, 3] t = {1, 4, 7, 2, 5, 8, 3, 6, 9}>
        { h = MatMul (x, w) y = MatMul (h, t) }""")
    mark(model, "w", KIND, "PARAMETER")
    mark(model, "t", FOLDED, "['w']")
    with pytest.warns(UserWarning, match="computed 't' from 'w'.*optimize=False"):
        og.augment(model)
    og.augment(model, wrt="inputs")


def tied() -> Formula:
    """An encoder, and a decoder with the same kernels turned around."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(torch.tanh(m.encode(x)), m.encode.weight.transpose(0, 1).flip(2, 3), padding=2)

    return Formula(forward, encode=torch.nn.Conv2d(3, 4, 3, bias=False))


def computed() -> Formula:
    """A scale that is learned as its logarithm, and kernels that are standardized."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        w = m.conv.weight
        return F.conv2d(x, (w - w.mean((1, 2, 3), keepdim=True)) / w.norm()) * m.log_scale.exp()

    return Formula(forward, conv=torch.nn.Conv2d(3, 4, 3, bias=False), log_scale=Parameter(torch.randn(4, 1, 1)))


@pytest.mark.parametrize(
    ("make", "messages"),
    [
        (tied, ["from 'encode.weight', and it is a value of its own now"]),
        (computed, [f"from '{name}': the gradient is that of" for name in ("conv.weight", "log_scale")]),
    ],
)
def test_arithmetic_on_parameters(make: Callable[[], torch.nn.Module], messages: list[str]) -> None:
    """Declared parameters are trained wherever they act; a warning names values that the exporter computed from them."""
    torch.manual_seed(0)
    net, x = make(), torch.randn(2, 3, 6, 6)
    y = net(x)
    seed, parameters = torch.randn_like(y), dict(net.named_parameters())
    want = dict(zip(parameters, torch.autograd.grad(y, list(parameters.values()), seed), strict=True))
    folded, whole = (export(net, x, dynamo=True, training=False, fold=fold) for fold in (True, False))
    with pytest.warns(UserWarning, match="The exporter computed") as caught:
        og.vjp(folded, wrt="parameters")
    text = " ".join(str(warning.message) for warning in caught)
    assert all(message in text for message in messages)
    got = run(og.vjp(whole, wrt="parameters"), {"x": x.numpy(), "y_grad": seed.numpy()})
    assert set(got) == {f"{name}_grad" for name in want}
    for name, gradient in want.items():
        assert off(got[f"{name}_grad"], gradient) < 1e-5


def scaled() -> Formula:
    """A learned temperature and a learned exponent beside a convolution; a constant of the module's own."""
    pool = Formula(lambda _, x: x, p=Parameter(torch.ones(1) * 3), scale=Parameter(torch.tensor(0.7)))
    conv = torch.nn.Conv2d(3, 4, 3)
    return Formula(lambda m, x: m.conv(x).abs().pow(m.pool.p).mean((2, 3)) * m.pool.scale * 2, conv=conv, pool=pool)


def test_warning_of_values_that_may_be_parameters() -> None:
    """The older exporter does not declare whether scalars and exponents are parameters; the newer one does."""
    torch.manual_seed(0)
    net, x = scaled(), torch.randn(2, 3, 6, 6)
    older, newer = (export(net, x, dynamo=dynamo, training=False, fold=False) for dynamo in (False, True))
    with pytest.warns(UserWarning, match="'pool.p', 'pool.scale' may be parameters or constants.* Name them") as caught:
        assert {o.name for o in og.vjp(older, wrt="parameters").graph.output} == {"conv.weight_grad", "conv.bias_grad"}
    found = {o.name for o in og.vjp(newer, wrt="parameters").graph.output}
    remedies = re.findall(r"wrt=(\[.*\]) \((--wrt .*)\)", str(caught[0].message))
    assert remedies == [("['parameters', 'pool.p']", "--wrt parameters --wrt pool.p")]
    with pytest.warns(UserWarning, match="^'pool.scale' may be"):
        gradients = {o.name for o in og.vjp(older, wrt=ast.literal_eval(remedies[0][0])).graph.output}
    assert gradients == {"conv.weight_grad", "conv.bias_grad", "pool.p_grad"}
    with warnings.catch_warnings():  # what is named is not said to be left out
        warnings.simplefilter("error")
        og.vjp(older, wrt=["conv.*", "pool.*"])
        og.vjp(older, wrt=["*", "pool.p", "pool.scale"])
    assert found == {"conv.weight_grad", "conv.bias_grad", "pool.p_grad", "pool.scale_grad"}


ARGUMENTS = {
    "ReLU6": torch.nn.functional.relu6,
    "bounds": lambda x: torch.nn.functional.hardtanh(x, -1.3, 2.3),
    "softplus": lambda x: torch.nn.functional.softplus(x, beta=1.7),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.37),
    "clamp": lambda x: x.clamp(0.13, 0.87),
}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("dynamo", [True, False], ids=["newer", "older"])
def test_numbers_in_calls_of_operators_are_constants(name: str, dynamo: bool) -> None:
    net = Formula(lambda m, x: ARGUMENTS[name](m.conv(x)), conv=torch.nn.Conv2d(3, 4, 3))
    model = export(net, torch.randn(2, 3, 6, 6), dynamo=dynamo, training=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients = {o.name for o in og.vjp(model, wrt="parameters").graph.output}
    assert gradients == {"conv.weight_grad", "conv.bias_grad"}


def test_groups_and_names_together() -> None:
    model = graph_of("(float[2,3] x) => (float[2,3] y) { h = MatMul(x, w) y = Mul(h, s) }", w=np.eye(3, dtype="f"),
                     s=np.array(0.3, "f"))  # fmt: skip
    for wrt, names in {
        ("inputs", "s"): ["x", "s"],
        ("s", "all"): ["x", "w", "s"],
        ("parameters", "h", "s"): ["w", "h", "s"],
    }.items():
        found = [o.name for o in og.vjp(model, wrt=wrt).graph.output]
        assert sorted(found) == sorted(f"{name}_grad" for name in names)
    named = graph_of("(float[2,3] x) => (float[2,3] y) { inputs = Mul(x, x) y = Exp(inputs) }")
    assert [o.name for o in og.vjp(named, wrt=["inputs"]).graph.output] == ["inputs_grad"]


def test_constants_that_an_exporter_names_with_dots_are_no_members() -> None:
    """Paddle's exporter names constants like this, and parameters as in conv2d_0.w_0."""
    body = """c = Conv (x, "conv2d_0.w_0") d = Clip (c, , "helper.constant.1")
        e = Div (d, "p2o.pd_op.full.0.0") y = Mul (e, "scale_0.w_0")"""
    stored = {"conv2d_0.w_0": [2, 3, 3, 3], "helper.constant.1": [], "p2o.pd_op.full.0.0": [1], "scale_0.w_0": [1]}
    weights = {name: np.full(shape, 6, np.float32) for name, shape in stored.items()}
    model = graph_of(f"(float[1,3,5,5] x) => (float[1,2,3,3] y) {{ {body} }}", opset=21, **weights)
    with pytest.warns(UserWarning, match="^'scale_0.w_0' may be parameters") as caught:
        og.augment(model)
    assert len(caught) == 1


def decay() -> Formula:
    """A rate that is learned as its logarithm and given an axis last, as in state space models."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return (m.seen(x)[:, None] * (-torch.exp(m.log_rate))[None]).exp().sum(1)

    return Formula(forward, log_rate=Parameter(torch.randn(3, 4)), seen=torch.nn.Linear(4, 4))


def experts() -> Formula:
    """Weights that are selected by the data, and a temperature that is learned as its logarithm."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        chosen = m.weights[m.gate(x).argmax(-1)]
        return (x[:, None] @ chosen)[:, 0] * m.log_scale.exp() + m.gate(x).mean()

    gate, weights = torch.nn.Linear(6, 4), Parameter(torch.randn(4, 6, 5))
    return Formula(forward, gate=gate, weights=weights, log_scale=Parameter(torch.tensor(0.3)))


def times(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Sines and cosines of a time, as diffusion networks embed it."""
    angles = x[:, None] * torch.exp(-np.log(100) * torch.arange(4, dtype=torch.float32) / 4)[None]
    return m.linear(torch.cat([angles.sin(), angles.cos()], 1))


def test_no_warning_of_values_computed_from_constants() -> None:
    model = export(Formula(times, linear=torch.nn.Linear(8, 3)), torch.randn(3), dynamo=True, training=False, fold=True)
    assert len(og.vjp(model, wrt="parameters").graph.output) == 2


def normalized() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())


@pytest.mark.parametrize(
    ("make", "shape", "message"),
    [
        (decay, (2, 4), "'unsqueeze_1' from 'log_rate': the gradient is that of 'unsqueeze_1'"),
        (experts, (3, 6), r"\(of 'log_scale'\).* may be parameters or constants"),
        (normalized, (2, 3, 6, 6), "folded BatchNormalizations into .*Conv.* keep their statistics"),
    ],
    ids=["arithmetic before a change of layout", "no operand for parameters", "normalization"],
)
def test_warning_of_a_folded_value(make: Callable[[], torch.nn.Module], shape: tuple[int, ...], message: str) -> None:
    torch.manual_seed(0)
    model = export(make(), torch.randn(shape), dynamo=True, training=False, fold=True)
    with pytest.warns(UserWarning, match=message):
        og.vjp(model, wrt="parameters")
