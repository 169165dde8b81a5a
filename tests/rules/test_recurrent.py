"""RNN, GRU and LSTM: derivatives of the recurrence for every attribute that ONNX Runtime supports."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper

import onnx_convgrad as og
from onnx_convgrad.checking.case import Evaluator
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, make_model, rand
from tests.support.families import export
from tests.support.numeric import check as numerically
from tests.support.operators import one_node, rule_test

TURNS, BATCH, INPUT, HIDDEN = 3, 2, 3, 2
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
LENGTHS = np.array([2, 3], np.int32)
NO_STEP = np.array([0, 3], np.int32)


def _case(
    op: str, *, ways: int = 1, order: int = 1, given: str = "", lengths: np.ndarray = LENGTHS, **attributes: Any
) -> Case:
    """`given`: the optional operands: b (bias), l (lengths), h, c (initial states), p (peepholes)."""
    gates = GATES[op]
    state = rand(ways, BATCH, HIDDEN)
    optional = {"b": rand(ways, 2 * gates * HIDDEN), "l": lengths, "h": state, "c": state, "p": rand(ways, 3 * HIDDEN)}
    inputs = [rand(TURNS, BATCH, INPUT), rand(ways, gates * HIDDEN, INPUT), rand(ways, gates * HIDDEN, HIDDEN)]
    inputs += [optional[letter] if letter in given else None for letter in ("blhcp" if op == "LSTM" else "blh")]
    while inputs[-1] is None:
        inputs.pop()
    outputs = 3 if op == "LSTM" else 2
    named = {"hidden_size": HIDDEN, **attributes}
    return Case(op, inputs, named, outputs, order=order, dynamic=False, name=f"{given} {lengths[0]}")


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
    *(_case(op, order=2, given="blhc", lengths=NO_STEP) for op in GATES),
    *(_case(op, ways=2, given="blhcp", lengths=NO_STEP, direction="bidirectional") for op in GATES),
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


def _of_any_length(case: Case) -> onnx.ModelProto:
    model = make_model(case, case.arrays)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    return model


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sequences_of_unknown_length_have_the_same_derivatives(case: Case) -> None:
    known, unknown = make_model(case, case.arrays), _of_any_length(case)
    wrt = [i.name for i in known.graph.input if i.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    for transform in (og.augment, og.jvp):
        _assert_equal(transform(known, wrt=wrt), transform(unknown, wrt=wrt), case)
    if case.order > 1:
        first = [og.augment(m, wrt=wrt) for m in (known, unknown)]
        second = [og.vjp(m, wrt=[*wrt, "y0_grad"], of=["x0_grad", "x2_grad"]) for m in first]
        _assert_equal(second[0], second[1], case)


def _assert_equal(known: onnx.ModelProto, unknown: onnx.ModelProto, case: Case) -> None:
    rng = np.random.default_rng(0)
    feed = {i.name: rng.uniform(-1, 1, [d.dim_value for d in i.type.tensor_type.shape.dim]) for i in known.graph.input}
    feed = {name: case.arrays[4] if name == "x4" else array.astype(np.float32) for name, array in feed.items()}
    want, got = run(known, feed), run(unknown, feed)
    assert "Scan" in {node.op_type for node in unknown.graph.node}
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5, err_msg=f"{case} {name}")


ORDER = {"RNN": [0], "GRU": [1, 0, 2], "LSTM": [0, 3, 1, 2]}
"""PyTorch's number of each of ONNX's gates."""


def _weights(module: torch.nn.RNNBase, op: str, values: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Tensors by PyTorch's names of the parameters of one layer, stacked and ordered as ONNX's operands."""

    def gates(name: str, end: str) -> np.ndarray:
        value = values[f"{name}_l0{end}"].detach().numpy()
        return np.concatenate([np.split(value, GATES[op])[g] for g in ORDER[op]])

    ends = ["", "_reverse"] if module.bidirectional else [""]
    stacked = {onnx_name: np.stack([gates(name, end) for end in ends]) for onnx_name, name in WEIGHTS.items()}
    return {"w": stacked["w"], "r": stacked["r"], "b": np.concatenate([stacked["wb"], stacked["rb"]], 1)}


WEIGHTS = {"w": "weight_ih", "r": "weight_hh", "wb": "bias_ih", "rb": "bias_hh"}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("op", GATES)
def test_sequences_of_any_length_have_the_gradients_of_pytorch(op: str, ways: int, *, padded: bool) -> None:
    torch.manual_seed(0)
    turns, sizes = 23, torch.tensor([23, 9, 1]) if padded else torch.tensor([23, 23, 23])
    module = getattr(torch.nn, op)(INPUT, HIDDEN, bidirectional=ways == 2)
    x, seed = torch.randn(turns, 3, INPUT, requires_grad=True), torch.randn(turns, 3, ways * HIDDEN)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, sizes)
    y, _ = torch.nn.utils.rnn.pad_packed_sequence(module(packed)[0])
    named = dict(module.named_parameters())
    dx, *dw = torch.autograd.grad(y, [x, *named.values()], seed)
    want = {"x": dx.numpy(), **_weights(module, op, dict(zip(named, dw, strict=True)))}

    gates, lengths = GATES[op], ["l"] if padded else []
    way = "bidirectional" if ways == 2 else "forward"
    attributes = {"linear_before_reset": 1} if op == "GRU" else {}
    node = helper.make_node(op, ["x", "w", "r", "b", *lengths], ["y"], hidden_size=HIDDEN, direction=way, **attributes)
    shapes = {"x": ["n", 3, INPUT], "w": [ways, gates * HIDDEN, INPUT], "r": [ways, gates * HIDDEN, HIDDEN]}
    shapes["b"] = [ways, 2 * gates * HIDDEN]
    model = one_node(node, shapes, {"l": sizes.numpy().astype(np.int32)} if padded else {})
    feed = {"x": x.detach().numpy(), **_weights(module, op, named)}
    feed["y_grad"] = seed.reshape(turns, 3, ways, HIDDEN).movedim(2, 1).numpy()
    got = run(og.augment(model, wrt=[*want]), feed)
    for name, value in want.items():
        np.testing.assert_allclose(got[f"{name}_grad"], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_numeric_derivatives_of_a_sequence_of_unknown_length() -> None:
    report = numerically(_of_any_length(_case("LSTM", given="bhcp")), wrt="inputs")
    assert all(row.verdict == "ok" and row.norm > 0 for row in report.rows)


@pytest.mark.parametrize("op", GATES)
def test_the_number_of_nodes_does_not_depend_on_the_length(op: str) -> None:
    counts = set()
    for turns in (200, 2_000, 10_000):
        node = helper.make_node(op, ["x", "w", "r"], ["y"], hidden_size=2, direction="bidirectional")
        shapes = {"x": [turns, 1, 1], "w": [2, 2 * GATES[op], 1], "r": [2, 2 * GATES[op], 2]}
        graph = ir.from_proto(og.augment(one_node(node, shapes), wrt=["x", "w", "r"])).graph
        counts.add(len(list(graph.all_nodes())))
    assert len(counts) == 1
    assert max(counts) < 300


def _model(turns: int | str, **attributes: Any) -> onnx.ModelProto:
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], name="memory", hidden_size=1, **attributes)
    return one_node(node, {"x": [turns, 1, 1], "w": [1, 4, 1], "r": [1, 4, 1]})


@pytest.mark.parametrize("sizes", [(0, 2), (2, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("known", [False, True], ids=["unknown", "known"])
@pytest.mark.parametrize("op", GATES)
def test_gradients_of_no_steps_and_of_no_samples_are_zero(op: str, *, known: bool, sizes: tuple[int, int]) -> None:
    """ONNX Runtime's operators end the process at some of these sizes; the gradients do not need them."""
    turns, batch = sizes
    case = _case(op, ways=2, given="bhcp" if op == "LSTM" else "bh", direction="bidirectional")
    shapes = {"x0": (turns, batch, INPUT), **dict.fromkeys(("x5", "x6"), (2, batch, HIDDEN))}
    arrays = [
        None if a is None else np.ones(shapes.get(f"x{i}", a.shape), np.float32) for i, a in enumerate(case.arrays)
    ]
    model = make_model(case, arrays)
    if not known:
        for value in model.graph.input:
            for axis in {"x0": (0, 1), "x5": (1,), "x6": (1,)}.get(value.name, ()):
                value.type.tensor_type.shape.dim[axis].dim_param = f"{value.name}_{axis}"
    first = og.vjp(model, wrt="inputs")
    for built in (first, og.vjp(first, wrt="inputs")):
        feed = {}
        for value in built.graph.input:
            name = value.name.removesuffix("_grad").removesuffix("_grad")
            like = {"y0": np.ones((turns, 2, batch, HIDDEN))}.get(name, np.ones((2, batch, HIDDEN)))
            feed[value.name] = np.asarray(arrays[int(name[1:])] if name[0] == "x" else like, np.float32)
        got = run(built, feed)
        assert got
        for name, value in got.items():
            assert value.shape == feed.get(name.removesuffix("_grad"), value).shape
            assert not value.any(), name


@pytest.mark.parametrize(
    ("turns", "attributes", "reason"),
    [
        (4, {"activations": ["Sigmoid", "Tanh"]}, "it has 2 activations, but needs 3"),
        (4, {"activations": ["Sigmoid", "Swish", "Tanh"]}, "its activation 'Swish' is not defined by ONNX"),
    ],
)
def test_refused(turns: int | str, attributes: dict[str, Any], reason: str) -> None:
    with pytest.raises(og.errors.DifferentiationError, match=reason) as caught:
        og.augment(_model(turns, **attributes), wrt=["x"])
    assert "memory" in str(caught.value)
