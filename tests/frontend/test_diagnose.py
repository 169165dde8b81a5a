"""An invalid model is blamed for an unexpected error."""

from __future__ import annotations

import pytest

import onnx_convgrad as og
from tests.support.one_input import graph_of


def test_a_missing_shape_of_an_output_does_not_hide_a_fault() -> None:
    model = graph_of("(float[2, 3] x) => (float[] y) <float[1, 1, 1] w = {2}> { y = Conv (x, w) }")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(og.ModelError, match="Input tensor must have at least 3 dimensions"):
        og.augment(model, wrt="inputs")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(float[2, 3] x) => (float[2, 2] y) { y = MatMul (x, x) }", "Incompatible dimensions"),
        ("(float[2] x, double[2] z) => (float[2] y) { y = Add (x, z) }", "inconsistent type"),
    ],
)
def test_an_invalid_model_is_blamed_rather_than_a_rule(text: str, message: str) -> None:
    model = graph_of(text)
    with pytest.raises(og.ModelError, match=f"The model is not valid: .*{message}"):
        og.augment(model, wrt="inputs")
