"""Questions about nodes are answered by the facts of their operators."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnx_convgrad.autodiff.facts import (
    arranges,
    is_activation,
    is_view,
    kept_axes,
    moved_operands,
    placed_operands,
    reads_numbers,
)
from tests.support.one_input import graph_of


def node_of(text: str) -> ir.Node:
    model = ir.from_proto(graph_of(f"(float[2,3] x, float[2,3] z, bool[2,3] c) => (y) {{ y = {text} }}", opset=21))
    return next(iter(model.graph))


@pytest.mark.parametrize(
    ("text", "view", "arranged", "moved", "placed", "activation"),
    [
        ("Identity (x)", True, True, "x", "x", False),
        ("Flatten (x)", True, True, "x", "", False),
        ("Transpose (x)", False, True, "x", "", False),
        ("Cast <to = 10> (x)", False, True, "", "x", False),
        ("Concat <axis = 0> (x, z)", False, False, "xz", "", False),
        ("Where (c, x, z)", False, False, "xz", "cxz", False),
        ("Max (x, z)", False, False, "xz", "xz", False),
        ("Add (x, z)", False, False, "", "xz", False),
        ("Tanh (x)", False, False, "", "x", True),
        ("Clip (x)", False, False, "x", "x", True),
        ("Softmax (x)", False, False, "", "", False),
    ],
)
def test_nodes_move_or_compute(
    text: str, view: bool, arranged: bool, moved: str, placed: str, activation: bool
) -> None:
    node = node_of(text)
    assert (is_view(node), arranges(node), is_activation(node)) == (view, arranged, activation)
    assert "".join(v.name or "" for v in moved_operands(node)) == moved
    assert "".join(v.name or "" for v in placed_operands(node) if v is not None) == placed


def test_shapes_hold_no_numbers() -> None:
    assert not reads_numbers(node_of("Shape (x)"))
    assert not reads_numbers(node_of("EyeLike (x)"))
    assert reads_numbers(node_of("Relu (x)"))


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("Transpose (x)", [1, 0]),
        ("Relu (x)", [0, 1]),
        ("ReduceSum <keepdims = 0> (x)", [None, None]),
        ("Flatten (x)", []),
        ("NonZero (x)", []),
    ],
)
def test_axes_are_followed_through_a_node(text: str, places: list[int | None]) -> None:
    assert kept_axes(node_of(text)) == places
