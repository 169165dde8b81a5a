"""Models whose inputs and outputs have the samples along other axes than the first, in everything that makes batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.evaluation import Mapper
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.programs.batch_axes import batch_axes
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of
from tests.support.training_nets import off

RNG = np.random.default_rng(0)
HIDDEN, INPUTS, TURNS, SAMPLES = 8, 4, 5, 7
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}

NAMES = {
    "named": ("B", "B", "B"),
    "unrelated": ("n1", "n2", "n3"),
    "unknown": ("", "", ""),
}
"""Sizes of the axis of samples in the input, the states and the outputs."""


def recurrent(op_type: str, *, first: bool, sizes: tuple[str, str, str], time: str = "T") -> onnx.ModelProto:
    """A bidirectional layer with its states as inputs and outputs; `first`: samples first in the input."""
    states = ["h", "c"] if op_type == "LSTM" else ["h"]
    a, b, c = sizes
    x = f"float[{a}, {time}, {INPUTS}] x" if first else f"float[{time}, {a}, {INPUTS}] x"
    given = ", ".join(f"float[2, {b}, {HIDDEN}] {s}" for s in states)
    made = ", ".join(f"float[2, {c}, {HIDDEN}] {s}n" for s in states)
    turn = "xt = Transpose <perm = [1, 0, 2]> (x)" if first else "xt = Identity (x)"
    weights = {
        "W": RNG.standard_normal((2, GATES[op_type] * HIDDEN, INPUTS)),
        "R": RNG.standard_normal((2, GATES[op_type] * HIDDEN, HIDDEN)),
        "V": RNG.standard_normal((HIDDEN, 3)),
    }
    text = f"""({x}, {given}) => (float[{c}, 3] y, {made}) <int64[1] zero = {{0}}> {{
        {turn}
        s, {", ".join(f"{s}n" for s in states)} = {op_type} <hidden_size = {HIDDEN}, direction = "bidirectional">
            (xt, W, R, , , {", ".join(states)})
        sum = ReduceSum <keepdims = 0> (hn, zero)
        y = MatMul (sum, V)
    }}"""
    return graph_of(text, **{name: array.astype(np.float32) / 3 for name, array in weights.items()})


def nameless(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without any symbolic size."""
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.Clear()
    return model


def feeds(op_type: str, *, first: bool, count: int = SAMPLES) -> dict[str, np.ndarray]:
    x = RNG.standard_normal((count, TURNS, INPUTS) if first else (TURNS, count, INPUTS))
    states = {s: RNG.standard_normal((2, count, HIDDEN)) for s in (["h", "c"] if op_type == "LSTM" else ["h"])}
    return {name: array.astype(np.float32) for name, array in {"x": x, **states}.items()}


CASES = [(op, first, kind) for op in GATES for first in (True, False) for kind in NAMES]


@pytest.mark.parametrize(("op_type", "first", "kind"), CASES)
def test_everything_that_makes_batches_takes_states(op_type: str, kind: str, *, first: bool) -> None:
    """Batches that divide the samples, and that do not: the results are those of one run over all samples."""
    sizes = NAMES["named" if kind == "unknown" else kind]
    model = recurrent(op_type, first=first, sizes=sizes)
    if kind == "unknown":
        model = nameless(model)
    data = feeds(op_type, first=first)
    want = run(model, data)
    trainer = og.Trainer(og.build_training(model, loss={"y": "mse"}, optimizer="sgd"))
    target = {trainer.manifest.targets[0].name: np.zeros((SAMPLES, 3), np.float32)}
    for size in (None, 1, 3, 7, 20):
        plain = og.predict(model, data, output="y", task="numbers", batch_size=size)
        own = trainer.predict(data, batch_size=size)
        for name in want:
            assert off(plain.outputs[name], want[name]) < 1e-5
            assert off(own[name], want[name]) < 1e-5
        assert off(plain.values, want["y"]) < 1e-5
        evaluated = og.evaluate(model, {**data, "target": np.zeros((SAMPLES, 3), np.float32)}, output="y", task="numbers",
                                batch_size=size)  # fmt: skip
        assert evaluated.samples == SAMPLES
        assert evaluated.metrics["mae"] == pytest.approx(np.abs(want["y"]).mean(), rel=1e-4)
    assert off(trainer.predict([data])["y"], want["y"]) < 1e-5
    trainer.fit({**data, **target}, epochs=2, batch_size=3, progress="none")
    assert trainer.progress.steps == 2 * 3
    assert trainer.evaluate({**data, **target}, batch_size=2)["loss"] == pytest.approx(
        trainer.evaluate_batch({**data, **target})["loss"], rel=1e-4
    )


@pytest.mark.parametrize("op_type", GATES)
@pytest.mark.parametrize("kind", ["named", "unrelated"])
def test_gradients_of_samples(op_type: str, kind: str) -> None:
    model, data = recurrent(op_type, first=True, sizes=NAMES[kind]), feeds(op_type, first=True)
    gradients = run(og.vjp(model, wrt="inputs", of="y", cotangents="ones"), data)
    found = Mapper(model, of="y", batch_size=3)(data)
    for name in data:
        assert off(found[f"{name}_grad"], gradients[f"{name}_grad"]) < 1e-5
    norms = Mapper(model, of="y", batch_size=3, norms=True)(data)
    for name in data:
        assert norms[f"{name}_norm"].shape == (SAMPLES,)


@pytest.mark.parametrize("op_type", GATES)
def test_a_fixed_number_of_samples(op_type: str) -> None:
    """The last batch is padded along the axis of the samples; too large a batch is refused."""
    model = recurrent(op_type, first=True, sizes=("3", "3", "3"), time=str(TURNS))
    data = feeds(op_type, first=True)
    parts = [{n: a[rows] if n == "x" else a[:, rows] for n, a in data.items()} for rows in (slice(3), slice(4, 7))]
    want = [run(model, part)["y"] for part in parts]
    trainer = og.Trainer(og.build_training(model, loss={"y": "mse"}, optimizer="sgd"))
    for found in (og.predict(model, data, output="y", task="numbers").outputs["y"], trainer.predict(data)["y"]):
        assert found.shape == (SAMPLES, 3)
        assert off(found[:3], want[0]) < 1e-5
        assert off(found[4:], want[1]) < 1e-5
    for call in (lambda: trainer.predict([data]), lambda: og.predict(model, [data], output="y")):
        with pytest.raises(og.errors.ArgumentError, match=r"takes batches of 3, not of 7|takes"):
            call()


def test_arrays_that_fit_no_axis_are_refused() -> None:
    model, data = recurrent("GRU", first=True, sizes=NAMES["named"]), feeds("GRU", first=True)
    with pytest.raises(og.errors.ArgumentError, match=r"'x' has 7 samples, but 'h' has 5.*axis 1 of 'h'"):
        og.predict(model, {**data, "h": data["h"][:, :5]}, output="y")


AXES: dict[str, tuple[str, dict[str, int]]] = {
    "samples first": ("(float[N, T, 4] x) => (float[N, T, 4] y) { y = Relu (x) }", {}),
    "one input and an output without the time": (
        "(float[T, B, 4] x) => (float[B, 4] y) <int64[1] zero = {0}> { y = ReduceSum <keepdims = 0> (x, zero) }",
        {"x": 1},
    ),
    "caches": (
        "(float[B, 1, 4] x, float[2, B, 3, 4] k) => (float[B, 1, 4] y, float[2, B, 3, 4] l) { y = Relu (x) l = Relu (k) }",
        {"k": 1, "l": 1},
    ),
    "a rate without an axis": (
        "(float[B, 4] x, float[2, B, 4] s, int64 rate) => (float[B, 4] y) { f = Cast <to = 1> (rate) y = Mul (x, f) }",
        {"s": 1},
    ),
    "nothing in common": ("(float[N, 4] x, float[4, M] w) => (float[N, M] y) { y = MatMul (x, w) }", {}),
    "nothing known": ("(float[2, 4] x, float[4, 3] w) => (float[2, 3] y) { y = MatMul (x, w) }", {}),
    "layers of states": (
        """(float[a, T, 4] x, float[2, b, 8] h) => (float[2, c, 8] hn) {
            t = Transpose <perm = [1, 0, 2]> (x)
            h1, h2 = Split <axis = 0, num_outputs = 2> (h)
            s, h1n = GRU <hidden_size = 8> (t, W, R, , , h1)
            u = Squeeze (s, one)
            v, h2n = GRU <hidden_size = 8> (u, W2, R, , , h2)
            hn = Concat <axis = 0> (h1n, h2n)
        }""",
        {"h": 1, "hn": 1},
    ),
    "a state that is gathered": (
        """(float[T, a, 4] x, float[b, 3, 8] h) => (float[c, 8] hn, float[T, d, 8] y) {
            t = Transpose <perm = [1, 0, 2]> (h)
            g = Gather <axis = 0> (t, i)
            k = Unsqueeze (g, zero)
            s, m = GRU <hidden_size = 8> (x, W, R, , , k)
            hn = Squeeze (m, zero)
            y = Squeeze (s, one)
        }""",
        {"x": 1, "y": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AXES)
def test_the_axes_of_samples(name: str) -> None:
    text, want = AXES[name]
    weights: dict[str, Any] = {"W": np.zeros((1, 24, 4)), "W2": np.zeros((1, 24, 8)), "R": np.zeros((1, 24, 8))}
    stored = {key: array.astype(np.float32) for key, array in weights.items() if f"{key}," in text}
    stored |= {
        key: np.array([n]) for key, n in (("zero", 0), ("one", 1)) if f", {key})" in text and f"{key} =" not in text
    }
    stored |= {"i": np.array(0)} if ", i)" in text else {}
    model = canonicalize(ir.from_proto(graph_of(text, opset=21, **stored)))
    assert (
        batch_axes(model, [v.name or "" for v in model.graph.inputs if v.name not in model.graph.initializers]) == want
    )
