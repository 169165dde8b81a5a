"""Two values are the same computation if their nodes, attributes, constants and bodies are equal."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnx_convgrad.ir.isomorphism import computes_the_same
from tests.support.one_input import graph_of

LOOP = (
    "{1} = Scan <num_scan_inputs = 1, body = b (float[3] s, float[3] t) => (float[3] u, float[3] v)"
    " {{ u = Add (s, t) v = {0} (u) }}> (z, x)"
)


def _same(first: str, second: str, **stored: np.ndarray) -> bool:
    model = ir.from_proto(graph_of(f"(float[4,3] x, float[3] z) => (a, b) {{ {first} {second} }}", **stored))
    return computes_the_same(*model.graph.outputs)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a = Tanh (x)", "b = Tanh (x)"),
        ("c = Neg (x) a = Mul (c, x)", "d = Neg (x) b = Mul (d, x)"),
        ("a = Softmax <axis = 1> (x)", "b = Softmax <axis = 1> (x)"),
        (
            "c = Constant <value = float[1] {2}> () a = Mul (x, c)",
            "d = Constant <value = float[1] {2}> () b = Mul (x, d)",
        ),
        (LOOP.format("Tanh", "p, a"), LOOP.format("Tanh", "q, b")),
    ],
)
def test_equal(first: str, second: str) -> None:
    assert _same(first, second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a = Tanh (x)", "b = Sin (x)"),
        ("a = Sub (x, z)", "b = Sub (z, x)"),
        ("a = Softmax <axis = 1> (x)", "b = Softmax <axis = 0> (x)"),
        ("a = Softmax <axis = 1> (x)", "b = Softmax (x)"),
        (
            "c = Constant <value = float[1] {2}> () a = Mul (x, c)",
            "d = Constant <value = float[1] {3}> () b = Mul (x, d)",
        ),
        ("c = Constant <value = float {2}> () a = Mul (x, c)", "d = Constant <value = float[1] {2}> () b = Mul (x, d)"),
        (LOOP.format("Tanh", "p, a"), LOOP.format("Sin", "q, b")),
        (LOOP.format("Tanh", "p, a"), LOOP.format("Tanh", "b, q")),
        ("a = Identity (x)", "b = Identity (z)"),
    ],
)
def test_different(first: str, second: str) -> None:
    assert not _same(first, second)
