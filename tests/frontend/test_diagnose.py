"""An invalid model is blamed for an unexpected error."""

from __future__ import annotations

from dataclasses import replace

import pytest

import onnx_convgrad as og
from onnx_convgrad.autodiff import registry
from onnx_convgrad.autodiff.registry import load_rules, lookup
from onnx_convgrad.frontend.diagnose import _runtime_complaint, checker_complaint
from tests.support.one_input import graph_of


def test_a_missing_shape_of_an_output_does_not_hide_a_fault() -> None:
    model = graph_of("(float[2, 3] x) => (float[] y) { y = MatMul (x, x) }")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(og.errors.ModelError, match="Incompatible dimensions"):
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
    with pytest.raises(og.errors.ModelError, match=f"The model is not valid: .*{message}"):
        og.augment(model, wrt="inputs")


def test_the_runtime_is_asked_what_onnx_does_not_notice() -> None:
    """It loads the model in a process of its own."""
    model = graph_of("(float[2,3] x) => (float[2,3] y) { y = Tanh (x) }")
    assert _runtime_complaint(model) is None
    model.graph.node[0].op_type = "NoSuchOperator"
    complaint = _runtime_complaint(model)
    assert complaint is not None and "NoSuchOperator" in complaint


def test_an_unforeseen_error_names_the_node_and_asks_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise KeyError("missing")

    load_rules()
    rule = replace(lookup("", "Tanh"), function=fails)
    monkeypatch.setitem(registry._RULES, ("", "Tanh"), rule)
    model = graph_of("(float[2,3] x) => (float[2,3] y) { [squash] y = Tanh (x) }")
    with pytest.raises(
        og.errors.InternalError, match=r"at node 'squash' \(Tanh\) \(KeyError: .*Please report it"
    ) as caught:
        og.augment(model, wrt="inputs")
    assert isinstance(caught.value.__cause__, og.errors.InternalError | KeyError)
    foreign = replace(rule, module="my_package.rules")
    monkeypatch.setitem(registry._RULES, ("", "Tanh"), foreign)
    with pytest.raises(
        og.errors.RuleContractError, match=r"Tanh in my_package.rules failed at node 'squash' \(Tanh\): KeyError"
    ):
        og.augment(model, wrt="inputs")


def test_an_exception_inside_the_checker_is_its_objection() -> None:
    text = "(float[4,2,2,2] x) => (float[] y) <int64[0] n = {}> { y = STFT (x, n) }"
    assert checker_complaint(graph_of(text))
