"""Derivatives stop at an Identity whose note says that it is PyTorch's `detach`."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.ir.notes import OPERATION
from onnx_convgrad.runtime import run
from tests.support.numeric import check
from tests.support.one_input import graph_of

X, G = np.array([[0.5, -1, 2]], np.float32), np.array([[1, 3, -2]], np.float32)
GATE = 1 / (1 + np.exp(-X))


def gated(operation: str = "detach.default", reader: str = "mul.Tensor") -> onnx.ModelProto:
    """x * sigmoid(x), of which the second factor is detached."""
    model = graph_of("(float[1, 3] x) => (float[1, 3] y) { s = Sigmoid (x) d = Identity (s) y = Mul (x, d) }")
    for node, name in zip(model.graph.node[1:], (operation, reader), strict=True):
        node.metadata_props.add(key=OPERATION, value=f"%{node.output[0]} : call_function[target=torch.ops.aten.{name}]")
    return model


def gradient(model: onnx.ModelProto, **settings: bool) -> np.ndarray:
    return run(og.vjp(model, wrt="x", **settings), {"x": X, "y_grad": G})["x_grad"]


def through(g: np.ndarray) -> np.ndarray:
    """The derivative of x * sigmoid(x) along or against `g`."""
    return g * (GATE + X * GATE * (1 - GATE))


def test_both_modes_stop() -> None:
    np.testing.assert_allclose(gradient(gated()), G * GATE, rtol=1e-6)
    tangent = run(og.jvp(gated(), wrt="x"), {"x": X, "x_tangent": G})["y_tangent"]
    np.testing.assert_allclose(tangent, G * GATE, rtol=1e-6)


def test_gradients_per_sample_stop() -> None:
    """The gradient of the gate does not reach the weight."""
    model = graph_of("""(float[2, 3] x) => (float[2, 3] y) <float[3] w = {1, 2, 3}>
        { z = Mul (x, w) s = Sigmoid (z) d = Identity (s) y = Mul (z, d) }""")
    model.graph.node[2].metadata_props.add(key=OPERATION, value="torch.ops.aten.detach.default")
    x, g = np.arange(6, dtype=np.float32).reshape(2, 3) / 4, np.ones((2, 3), np.float32)
    got = run(og.vjp(model, wrt="w", per_sample=True), {"x": x, "y_grad": g})["w_grad"]
    np.testing.assert_allclose(got, x / (1 + np.exp(-x * [1, 2, 3])), rtol=1e-6)


@pytest.mark.parametrize("model", [gated("clone.default"), gated(reader="embedding_renorm.default")])
def test_derivatives_pass_other_copies(model: onnx.ModelProto) -> None:
    """The weight of `Embedding(max_norm=...)` is detached only to be scaled in place."""
    np.testing.assert_allclose(gradient(model), through(G), rtol=1e-5)


def test_without_straight_through_the_numbers_are_differentiated() -> None:
    np.testing.assert_allclose(gradient(gated(), straight_through=False), through(G), rtol=1e-5)
    assert check(gated(), wrt="x").passed


def test_a_gradient_that_is_zero_for_it_says_so() -> None:
    with pytest.warns(UserWarning, match=r"of `of` depends on 's' but through values that PyTorch detaches: '.*'\."):
        og.vjp(gated(), wrt="s")


def test_a_detach_that_an_optimizer_removed_is_told_where_it_matters() -> None:
    """The note of the reader calls its operand by the name of a node that is gone."""
    model = graph_of("(float[1, 3] x, float[1, 3] z) => (float[1, 3] y) { s = Sigmoid (x) y = Mul (z, s) }")
    note = "%mul : call_function[target=torch.ops.aten.mul.Tensor](args = (%z, %detach_1), kwargs = {})"
    model.graph.node[1].metadata_props.add(key=OPERATION, value=note)
    with pytest.warns(UserWarning, match=r"PyTorch detaches what .* reads.*Export with optimize=False"):
        og.vjp(model, wrt="x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        og.vjp(model, wrt="z")
    model.graph.input[0].name = model.graph.node[0].input[0] = "detach_1"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        og.vjp(model, wrt="detach_1")


# -- copies of nodes: in bodies, for all examples, at other points, and computed again ---------------------------------

BODIES = {
    "If": """(float[1, 3] x, bool yes) => (float[1, 3] y) { y = If (yes) <
        then_branch = t () => (float[1, 3] u) { s = Sigmoid (x) d = Identity (s) u = Mul (x, d) },
        else_branch = e () => (float[1, 3] w) { w = Neg (x) }> }""",
    "Loop": """(float[1, 3] x, bool yes, int64 n) => (float[1, 3] y) { y = Loop (n, yes, x) <
        body = b (int64 i, bool on, float[1, 3] h) => (bool next, float[1, 3] p)
        { next = Identity (on) s = Sigmoid (h) d = Identity (s) p = Mul (h, d) }> }""",
    "unrolled Loop": """(float[1, 3] x) => (float[1, 3] y) <int64 n = {1}, bool yes = {1}> { y = Loop (n, yes, x) <
        body = b (int64 i, bool on, float[1, 3] h) => (bool next, float[1, 3] p)
        { next = Identity (on) s = Sigmoid (h) d = Identity (s) p = Mul (h, d) }> }""",
    "Scan": """(float[1, 3] x) => (float[1, 3] y) { y = Scan (x) <num_scan_inputs = 1,
        body = b (float[3] r) => (float[3] p) { s = Sigmoid (r) d = Identity (s) p = Mul (r, d) }> }""",
    "none": "(float[1, 3] x) => (float[1, 3] y) { s = Sigmoid (x) d = Identity (s) y = Mul (x, d) }",
}


def detached(text: str) -> onnx.ModelProto:
    """A model in which every Identity that makes d is PyTorch's `detach`."""
    model = graph_of(text)

    def note(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.output[0] == "d":
                node.metadata_props.add(key=OPERATION, value="torch.ops.aten.detach.default")
            for attribute in node.attribute:
                note(attribute.g)

    note(model.graph)
    return model


def fed(model: onnx.ModelProto, **arrays: np.ndarray) -> dict[str, np.ndarray]:
    known = {"x": X, "yes": np.array(True), "n": np.array(1), **arrays}
    return run(model, {v.name: known[v.name] for v in model.graph.input})


@pytest.mark.parametrize("name", BODIES)
def test_derivatives_stop_in_bodies(name: str) -> None:
    model = detached(BODIES[name])
    np.testing.assert_allclose(fed(og.vjp(model, wrt="x"), y_grad=G)["x_grad"], G * GATE, rtol=1e-6)
    np.testing.assert_allclose(fed(og.jvp(model, wrt="x"), x_tangent=G)["y_tangent"], G * GATE, rtol=1e-6)


@pytest.mark.parametrize("name", BODIES)
def test_derivatives_stop_in_stacks_of_examples(name: str) -> None:
    stacked = og.vmap(detached(BODIES[name]), in_axes={"x": 0})
    got = fed(og.vjp(stacked, wrt="x"), x=X[None], y_grad=G[None])["x_grad"]
    np.testing.assert_allclose(got, (G * GATE)[None], rtol=1e-6)


def test_derivatives_stop_at_the_points_of_a_path() -> None:
    """The gradient at the point a x is sigmoid(a x) alone."""
    model = og.attribution.integrated_gradients(detached(BODIES["none"]), label=1, steps=200)
    got = next(array for name, array in run(model, {"x": X}).items() if name != "y")
    shares = (np.arange(200) + 0.5) / 200
    want = X[0, 1] * (1 / (1 + np.exp(-shares * X[0, 1]))).mean()
    np.testing.assert_allclose(got, [[0, want, 0]], rtol=1e-4)


def test_derivatives_of_gradients_stop_at_values_that_are_computed_again() -> None:
    model = detached("""(float[1, 3] x) => (float[1, 3] y)
        { e = Exp (x) s = Sigmoid (e) d = Identity (s) q = Mul (x, d) y = Mul (q, q) }""")
    found = []
    for memory in (None, og.Memory(recompute="*")):
        first = og.augment(model, wrt="x", cotangents="ones", memory=memory)
        second = og.vjp(first, wrt="x", of="x_grad", cotangents="ones")
        found.append(run(second, {"x": X})[second.graph.output[0].name])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
    gate = 1 / (1 + np.exp(-np.exp(X)))
    np.testing.assert_allclose(found[0], 2 * gate**2, rtol=1e-5)
