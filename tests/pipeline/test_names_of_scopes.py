"""Names of values in programs of nested scopes: inputs and outputs keep theirs, and no name clashes with another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.operators import text_model
from tests.support.programs_of_scopes import Program

pytestmark = pytest.mark.filterwarnings("ignore:The derivative is zero")

WAYS: dict[str, Callable[[onnx.ModelProto, str], onnx.ModelProto]] = {
    "augment": lambda m, of: og.augment(m, wrt="inputs", of=of),
    "vjp": lambda m, of: og.vjp(m, wrt="inputs", of=of),
    "jvp": lambda m, of: og.jvp(m, wrt="inputs", of=of, outputs=True),
    "vmap": lambda m, _: og.vmap(m, in_axes={name: 0 for name in _names(m.graph.input) if name != "p"}),
    "twice": lambda m, of: og.augment(og.augment(m, wrt="inputs", of=of), wrt="inputs", of=of),
}


def _names(values: object) -> list[str]:
    return [value.name for value in values]  # type: ignore[attr-defined]


def _results(model: onnx.ModelProto, seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    feed = {}
    for value in model.graph.input:
        shape = [d.dim_value or 3 for d in value.type.tensor_type.shape.dim]  # vmap: three examples
        numbers = generator.uniform(-1, 1, shape).astype(np.float32)
        feed[value.name] = np.array(seed % 2 == 0) if value.name == "p" else numbers
    return list(run(model, feed).values())


def _check(seed: int, way: str) -> None:
    """The names stay, the result loads, and its values are those of the program in which no name repeats."""
    repeating, plain = (Program(seed, repeats=repeats).model() for repeats in (True, False))
    try:
        want = _results(repeating, seed)
    except og.errors.ExecutionError:  # ONNX Runtime has faults of its own where names repeat
        return
    for got, wanted in zip(_results(plain, seed), want, strict=True):
        np.testing.assert_array_equal(got, wanted)
    inputs, outputs = _names(repeating.graph.input), _names(repeating.graph.output)
    place = next(i for i, name in enumerate(outputs) if name not in inputs)
    made = [WAYS[way](m, m.graph.output[place].name) for m in (repeating, plain)]
    assert _names(made[0].graph.input)[: len(inputs)] == inputs
    if way != "vjp":
        assert _names(made[0].graph.output)[: len(outputs)] == outputs
    for got, wanted in zip(*(_results(m, seed) for m in made), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_names_that_repeat_change_nothing(way: str) -> None:
    for seed in range(12):
        _check(seed, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_names_that_repeat_change_nothing_in_many_programs(way: str) -> None:
    for seed in range(12, 120):
        _check(seed, way)


def test_an_input_that_is_an_output_and_a_member_of_a_sequence_keeps_its_name() -> None:
    members = "i = Constant <value: tensor = int64 {0}> () q = SequenceConstruct (x) v = SequenceAt (q, i)"
    made = og.augment(text_model(f"(double[2] x) => (double[2] y, double[2] x) {{ {members} y = Relu (v) }}"), wrt="x")
    assert _names(made.graph.input) == ["x", "y_grad", "x_grad"]
    assert _names(made.graph.output) == ["y", "x", "x_grad_1"]


def test_members_of_sequences_that_are_outputs_keep_their_names() -> None:
    """One input is the member that three outputs read."""
    ends = "u = SequenceAt (q, i) v = SequenceAt (q, i) w = ConcatFromSequence <axis = 0> (q)"
    nodes = f"i = Constant <value: tensor = int64 {{0}}> () q = SequenceConstruct (x) {ends} y = Exp (u)"
    model = text_model(f"(float[2] x) => (float[2] y, float[2] u, float[2] v, float[2] w) {{ {nodes} }}")
    made = og.augment(model, wrt="x", of="y")
    assert _names(made.graph.output) == ["y", "u", "v", "w", "x_grad"]
    x = np.array([1, 2], np.float32)
    found = run(made, {"x": x, "y_grad": x})
    assert all(np.array_equal(found[name], x) for name in ("u", "v", "w"))


def test_stored_values_with_names_that_results_would_get() -> None:
    """onnx_ir names results val_0, val_1 ..., which the model may have."""
    text = """(float[2] val_0) => (float[2] y) <float[2] val_1 = {1, 2}, float[2] val_2 = {3, 4}>
        { a = Mul (val_0, val_1) b = Sigmoid (a) y = Mul (b, val_2) }"""
    made = og.augment(text_model(text), wrt="all")
    assert _names(made.graph.input) == ["val_0", "y_grad"]
    x = np.array([1, 2], np.float32)
    s = 1 / (1 + np.exp(-x * [1, 2]))
    np.testing.assert_allclose(run(made, {"val_0": x, "y_grad": x})["val_2_grad"], s * x, rtol=1e-6)
