"""The canonical form: one opset, no functions, constants as initializers, and a second run that changes nothing."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from onnx import parser

from onnx_convgrad.errors import ModelError
from onnx_convgrad.frontend.canonicalize import canonicalize

MESSY = """<ir_version: 8, opset_import: ["" : 11, "local" : 1]>
g (float[N, 4] x, float[4] w) => (float[N, 1] y) <float[4] w = {1, 2, 3, 4}> {
    p = local.Scaled (x, w)
    s = ReduceSum <axes = [1]> (p)
    two = Constant <value = float {2}> ()
    y = Mul (s, two)
}
<domain: "local", opset_import: ["" : 11]> Scaled (a, b) => (c) { c = Mul (a, b) }"""


def _canonical(text: str = MESSY) -> ir.Model:
    return canonicalize(ir.from_proto(parser.parse_model(text)))


def test_the_canonical_form() -> None:
    model = _canonical()
    graph = model.graph
    assert not model.functions
    assert model.opset_imports[""] == 21
    assert [node.op_type for node in graph] == ["Mul", "ReduceSum", "Mul"]
    assert all(node.name for node in graph)
    assert [value.name for value in graph.inputs] == ["x"]
    assert {"w", "two"} <= set(graph.initializers)
    assert str(graph.outputs[0].shape) == "[N,1]"


def test_a_canonical_model_stays_as_it_is() -> None:
    once = _canonical()
    again = canonicalize(once.clone())
    assert ir.to_proto(again) == ir.to_proto(once)


@pytest.mark.parametrize("fold", [True, False])
def test_sizes_are_folded_on_request(fold: bool) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[2, 3] x) => (float[a, b] y) {
        s = Shape (x) y = Reshape (x, s)
    }"""
    model = canonicalize(ir.from_proto(parser.parse_model(text)), fold=fold)
    assert ("Shape" in {node.op_type for node in model.graph}) is not fold


def test_a_node_that_reads_nothing_is_refused() -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) { y = Add (x, nothing) }'
    with pytest.raises(ModelError, match="'nothing'"):
        _canonical(text)
