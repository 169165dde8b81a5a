"""Functions of a model are inlined, whatever their opset."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from tests.support.old_models import compare, floats, model_of
from tests.support.one_input import ROWS, of_rows, rows_gradient


def test_a_function_of_an_older_opset() -> None:
    """Its ReduceSum has the axes as an attribute, that of the model as an operand."""
    model = of_rows(
        """{ y = local.F (x) }
        <domain: "local", opset_import: ["": 12]> F (a) => (b) { s = ReduceSum <axes = [1]> (a) b = Mul (s, a) }"""
    )
    np.testing.assert_allclose(rows_gradient(model), 2 * ROWS.sum(1, keepdims=True) + 0 * ROWS, rtol=1e-5)


def test_function_with_attribute_parameters() -> None:
    """A call of a function is replaced by its body, with the attributes of the call."""
    function = helper.make_function(
        "local",
        "Reduced",
        ["ROWS"],
        ["Y"],
        [
            helper.make_node("Clip", ["ROWS"], ["L"]),
            helper.make_node("ReduceMean", ["L"], ["M"], keepdims=0),
            helper.make_node("Unsqueeze", ["M"], ["U"], axes=[0]),
            helper.make_node("Sub", ["ROWS", "U"], ["Y"]),
        ],
        opset_imports=[helper.make_opsetid("", 11)],
        attributes=["axes"],
    )
    reference = function.node[1].attribute.add()
    reference.name, reference.ref_attr_name, reference.type = "axes", "axes", onnx.AttributeProto.INTS
    call = helper.make_node("Reduced", ["x"], ["y"], domain="local", axes=[0])
    feeds = {"x": floats(2, 3)}
    model = model_of([call], feeds, ["y"], 11, functions=[function], domains=("local",))
    after = compare(model, feeds)
    assert not after.functions
