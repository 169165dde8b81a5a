"""Stored values of one element: biases and slopes are trained, constants are not, and a warning names what is undecided."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import onnx_convgrad as og
from tests.support.families import export
from tests.support.one_input import gradients, graph_of
from tests.support.training_nets import Formula

W = np.arange(1, 9, dtype=np.float32).reshape(8, 1) / 8


def decided(model: onnx.ModelProto) -> tuple[list[str], str]:
    """The parameters of a model, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = gradients(og.augment(model))
    return names, " ".join(str(warning.message) for warning in caught)


PRODUCTS = {
    "MatMul": ("p = MatMul (x, w)", W, ([1], [1, 1])),
    "Gemm": ("p = Gemm (x, w)", W, ([1], [1, 1])),
    "Gemm transposed": ("p = Gemm <transB = 1> (x, w)", W.T, ([1], [1, 1])),
    "Conv": ("i = Unsqueeze (x, last) p = Conv (i, w)", W[None], ([1], [1, 1], [1, 1, 1])),
    "Conv of one dimension in two": (
        "i = Unsqueeze (x, lasts) c = Conv (i, w) p = Squeeze (c, end)",
        W[None, :, :, None],
        ([1], [1, 1], [1, 1, 1]),
    ),
    "ConvTranspose": ("i = Unsqueeze (x, last) p = ConvTranspose (i, w)", W[:, :, None], ([1], [1, 1, 1])),
}


@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for name, (_, _, shapes) in PRODUCTS.items() for shape in shapes]
)
@pytest.mark.parametrize("first", [True, False])
def test_the_bias_of_one_channel_is_a_parameter(name: str, shape: list[int], *, first: bool) -> None:
    """scikit-learn's converter writes intercepts as [1, 1], others as [1]; with one channel no size tells a bias."""
    body, weight, _ = PRODUCTS[name]
    add = "Add (b, p)" if first else "Add (p, b)"
    text = f"""(float[N, 8] x) => (y) <int64[1] last = {{2}}, int64[2] lasts = {{2, 3}}, int64[1] end = {{3}}>
        {{ {body} y = {add} }}"""
    model = graph_of(text, w=weight, b=np.full(shape, 0.3, np.float32))
    assert decided(model) == (["w", "b"], "")


@pytest.mark.parametrize(
    ("name", "trained"), [("const_fold_opt__9", True), ("/Constant_output_0", False), ("eps", False)]
)
def test_names_of_constants_are_no_biases(name: str, *, trained: bool) -> None:
    """But tf2onnx gives the same name to weights whose axes it has moved."""
    model = graph_of(f'(float[N, 8] x) => (y) {{ p = MatMul (x, w) y = Add (p, "{name}") }}', w=W)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([0.3]), name))
    assert decided(model) == (["w", name] if trained else ["w"], "")


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(("slot", "body"), [("slope", "y = PRelu (p, b)"), ("C", "y = Gemm (x, w, b)")])
def test_operands_that_only_hold_parameters_may_have_one_element(shape: tuple[int, ...], slot: str, body: str) -> None:
    model = graph_of(f"(float[N, 8] x) => (y) {{ p = MatMul (x, w) {body} }}", w=W, b=np.full(shape, 0.3, np.float32))
    assert decided(model) == (["w", "b"], ""), slot


CONSTANTS = {
    "eps": 1e-5, "scale_by": 0.125, "half": 0.5, "root": math.sqrt(2), "inverse_root": 1 / math.sqrt(96),
    "gelu": 0.044715, "gelu_too": math.sqrt(2 / math.pi), "mask": -1e9, "lowest": float(np.finfo(np.float32).min),
    "zero": 0.0, "one": 1.0, "pixels": 255.0, "per_pixel": 1 / 255, "Constant_17": 0.37, "const_fold_opt__3": 0.37,
    "/act/Constant_output_0": 0.37, "onnx::Mul_11": 0.37, "model/lambda/mul/y:0": 0.37, "Ad_Addcst": 0.37, "42": 0.37,
    "ortshared_1_0_1_0_token_3": 0.37, "val_5": 0.37, "batchnorm/epsilon": 0.37,
}  # fmt: skip
"""Name -> number: constants by their number or by their name."""


@pytest.mark.parametrize("op_type", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_constants_are_neither_trained_nor_named(op_type: str, shape: tuple[int, ...]) -> None:
    body = "s0 = Relu (p) " + " ".join(f's{i + 1} = {op_type} (s{i}, "{n}")' for i, n in enumerate(CONSTANTS))
    stored = {name: np.full(shape, number, np.float32) for name, number in CONSTANTS.items()}
    text = f"(float[N, 8] x) => (y) {{ p = MatMul (x, w) {body} y = Identity (s{len(CONSTANTS)}) }}"
    assert decided(graph_of(text, w=W, **stored)) == (["w"], "")


def test_bounds_and_exponents_are_neither_trained_nor_named() -> None:
    text = "(float[N, 8] x) => (y) { p = MatMul (x, w) c = Clip (p, low, high) y = Pow (c, power) }"
    bounds = {name: np.array(number, np.float32) for name, number in (("low", -2.7), ("high", 3.3), ("power", 1.7))}
    assert decided(graph_of(text, w=W, **bounds)) == (["w"], "")


@pytest.mark.parametrize("op_type", ["Add", "Sub", "Mul", "Div"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize(
    ("weight", "name", "number"),
    [
        ("a.weight", "alpha", 0.0),
        ("a.weight", "logit_scale", 1.0),
        ("a.weight", "a.gain", 0.5),
        ("w", "a.b.layer_scale", 1e-5),
        ("w", "model/dense/mul/ReadVariableOp:0", 1.0),
        ("w", "temperature", 0.0731),
    ],
)
def test_a_warning_names_what_may_be_a_parameter(
    op_type: str, shape: tuple[int, ...], weight: str, name: str, number: float
) -> None:
    """Names of members of modules and of variables, whatever their number, and numbers that nobody writes."""
    text = f'(float[N, 8] x) => (y) {{ p = MatMul (x, "{weight}") r = Relu (p) y = {op_type} (r, "{name}") }}'
    model = graph_of(text, **{weight: W, name: np.full(shape, number, np.float32)})
    names, said = decided(model)
    assert names == [weight]
    assert f"'{name}' may be parameters or constants" in said


def learnable() -> Formula:
    """Learned scalars and vectors of one element in the module and in its members, and constants of every kind."""
    part = Formula(lambda m, x: x + m.alpha * m.act(m.linear(x)) * m.scale, linear=nn.Linear(4, 4), act=nn.PReLU(),
                   alpha=nn.Parameter(torch.zeros(1)))  # fmt: skip
    part.register_buffer("scale", torch.tensor(4**-0.5))

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.gelu(m.part(x)).clamp(-3, 6) * 0.5 / (x.abs() + 1e-6) ** 2
        return m.last(h + m.rezero * h) * m.logit_scale.exp() / math.sqrt(4) - m.shift

    scalars = {name: nn.Parameter(torch.tensor(value)) for name, value in (("rezero", 0.0), ("logit_scale", 2.6))}
    return Formula(forward, part=part, last=nn.Linear(4, 1), shift=nn.Parameter(torch.ones(1, 1)), **scalars)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("dynamo", [pytest.param(True, marks=pytest.mark.slow), False])
def test_every_learned_number_of_a_module_is_trained_or_named(*, dynamo: bool, fold: bool) -> None:
    """No buffer and no constant is trained."""
    torch.manual_seed(0)
    net = learnable()
    trained, said = decided(export(net, torch.randn(3, 4), dynamo=dynamo, training=False, fold=fold))
    left = [name for name, p in net.named_parameters() if name not in trained and p.numel() == 1]
    assert "part.act.weight" in trained or fold
    assert "last.bias" in trained
    assert not {"part.scale", *(n for n in trained if "onstant" in n)} & set(trained)
    if not fold:
        assert [name for name in left if f"'{name}'" not in said] == []
        assert bool(left) is not dynamo


def test_slopes_that_were_equal_are_separate() -> None:
    """The older exporter stores equal tensors once, also those of one element: each module has its own slope."""
    net = nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 4), nn.PReLU())
    trained, _ = decided(export(net, torch.randn(3, 4), dynamo=False, training=False, fold=False))
    assert {"1.weight", "3.weight"} <= set(trained)
