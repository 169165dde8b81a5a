"""Replaced results keep the names of graph outputs, and claimed names are unique."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.replace import OutputPlaces, put_in_place
from tests.support.one_input import graph_of


def _graph() -> ir.Graph:
    text = "(float[3] x) => (float[3] y, float[3] z) { y = Neg (x) t = Abs (x) z = Relu (t) }"
    return ir.from_proto(graph_of(text, opset=21)).graph


@pytest.mark.parametrize("source", ["x", "z", "t"])
def test_an_output_keeps_its_name_and_place(source: str) -> None:
    """By an input or another output through an Identity, by any other value directly."""
    graph = _graph()
    values = {v.name: v for v in (*graph.inputs, *(v for n in graph for v in n.outputs))}
    result = put_in_place(Emitter(graph), OutputPlaces(graph), values["y"], values[source], new=False)
    assert [v.name for v in graph.outputs] == ["y", "z"]
    assert graph.outputs[0] is result
    assert (result is values[source]) == (source == "t")


def test_names_are_claimed_once() -> None:
    names = Namespace(["a", "a_1"])
    assert [names.claim("a"), names.claim("a"), names.claim("b"), names.claim("b", also={"b_1"})] == [
        "a_2",
        "a_3",
        "b",
        "b_2",
    ]


def test_equal_nodes_are_emitted_once() -> None:
    graph = _graph()
    e = Emitter(graph)
    x = graph.inputs[0]
    assert e.op("Exp", x) is e.op("Exp", x)
    assert e.op("Dropout", x) is not e.op("Dropout", x)
