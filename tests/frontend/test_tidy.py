"""Nodes are sorted and get unique names."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import ROWS, of_rows, rows_gradient


def test_nodes_in_any_order_and_a_graph_without_a_name() -> None:
    model = of_rows("{ h = Tanh(x) y = Mul(h, x) }")
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    model.graph.name = ""
    np.testing.assert_allclose(rows_gradient(model), np.tanh(ROWS) + ROWS * (1 - np.tanh(ROWS) ** 2), rtol=1e-5)


def test_nodes_of_one_name_are_renamed() -> None:
    """The runtime refuses two nodes of one name, and a lowering is chosen by name."""
    model = of_rows("{ a = Tanh (x) b = Tanh (a) y = Exp (b) }")
    for node in model.graph.node:
        node.name = "same"
    made = og.augment(model, wrt="inputs", cotangents="ones")
    assert len({node.name for node in made.graph.node}) == len(made.graph.node)
    assert run(made, {"x": ROWS})["x_grad"].shape == ROWS.shape


@pytest.mark.parametrize("names", [["", "Tanh_0"], ["Tanh_1", ""], ["Tanh_2", "", ""], ["", "", "Tanh_0"]])
def test_nodes_without_a_name_get_a_free_one(names: list[str]) -> None:
    """The runtime refuses two nodes of one name; nodes with a name keep it."""
    values = ["x", *(f"h{i}" for i in range(len(names) - 1)), "y"]
    model = of_rows(f"{{ {' '.join(f'{b} = Tanh ({a})' for a, b in itertools.pairwise(values))} }}")
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    result = og.augment(model, wrt="inputs", cotangents="ones")
    given = [node.name for node in result.graph.node]
    assert len(set(given)) == len(given)
    assert all(new == old for new, old in zip(given, names, strict=False) if old)
    assert np.isfinite(run(result, {"x": ROWS})["x_grad"]).all()
