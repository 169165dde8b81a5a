"""Empty and invalid models are refused, with the place of the fault."""

from __future__ import annotations

import pytest

import onnx_convgrad as og
from tests.support.one_input import of_rows


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{ a = Add (x, b) b = Relu (a) y = Relu (b) }", r"Node 'a' \(Add\) depends on its own result"),
        ("{ z = Relu (x) }", "The output 'y' is neither an input, nor an initializer, nor the result of a node"),
        ("{ y = Relu (x) y = Exp (x) }", "Output 'y' is redeclared in the current graph scope"),
        ("{ y = Einsum <equation = 'ab'> (x, x) }".replace("'", '"'), "The model is not valid"),
    ],
)
def test_wrong_models(body: str, message: str) -> None:
    with pytest.raises(og.ModelError, match=message):
        og.augment(of_rows(body), wrt="inputs")
