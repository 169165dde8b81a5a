"""Functions of a model are inlined, whatever their opset."""

from __future__ import annotations

import numpy as np

import onnx_convgrad as og
from tests.support.old_models import compare, floats
from tests.support.one_input import ROWS, graph_of, of_rows, rows_gradient


def test_a_function_of_an_older_opset() -> None:
    """Its ReduceSum has the axes as an attribute, that of the model as an operand."""
    model = of_rows(
        """{ y = local.F (x) }
        <domain: "local", opset_import: ["": 12]> F (a) => (b) { s = ReduceSum <axes = [1]> (a) b = Mul (s, a) }"""
    )
    np.testing.assert_allclose(rows_gradient(model), 2 * ROWS.sum(1, keepdims=True) + 0 * ROWS, rtol=1e-5)


def test_function_with_attribute_parameters() -> None:
    """A call of a function is replaced by its body, with the attributes of the call."""
    text = """(float[2,3] x) => (float[] y) { y = local.Reduced <axes = [0]> (x) }
        <domain: "local", opset_import: ["": 11]> Reduced <axes> (a) => (b) {
            l = Clip (a) m = ReduceMean <axes: ints = @axes, keepdims = 0> (l) u = Unsqueeze <axes = [0]> (m) b = Sub (a, u)
        }"""
    after = compare(graph_of(text, opset=11, domains=', "local": 1'), {"x": floats(2, 3)})
    assert not after.functions


def test_an_unwanted_output_of_a_standard_body_leaves_no_shape_behind() -> None:
    """The outputs present_key and present_value are skipped; their shapes are not that of Y."""
    shapes = {"q": (2, 3, 4, 8), "k": (2, 3, 6, 8), "v": (2, 3, 6, 8)}
    inputs = ", ".join(f"float[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    text = f"({inputs}) => (float[] y, float[] qk) {{ y, , , qk = Attention (q, k, v) }}"
    made = og.augment(graph_of(text, opset=23), wrt="inputs", of="y")
    declared = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in made.graph.output}
    assert {name: declared[f"{name}_grad"] for name in shapes} == shapes
    assert declared["y"] == (2, 3, 4, 8)
