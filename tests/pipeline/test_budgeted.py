"""Builds that are repeated until the graph that ONNX Runtime makes of them keeps the memory budget."""

from __future__ import annotations

import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.ir.targets import TARGETS, Target
from onnx_convgrad.memory.timeline import timeline
from onnx_convgrad.pipeline import budgeted
from onnx_convgrad.pipeline.options import Options
from tests.support.conv_geometry import case, conv_model


def augmented() -> ir.Model:
    model = conv_model(case((4, 16, 32, 32), 16, (3, 3), begin=1))
    return ir.from_proto(og.augment(model, wrt=["x", "w"]))


def test_the_rewritten_graph_needs_about_what_is_predicted() -> None:
    model = augmented()
    needed = budgeted.rewritten_bytes(model)
    assert needed is not None
    assert 0.7 < needed / timeline(model.graph).peak < 1.3


def test_a_model_that_the_runtime_refuses_has_no_rewritten_graph() -> None:
    model = augmented()
    next(iter(model.graph)).op_type = "Konv"
    assert budgeted.rewritten_bytes(model) is None


def factors(budget: int, needed: list[int | None], monkeypatch: pytest.MonkeyPatch, target: str = "cpu") -> list[float]:
    """The factors of the builds, if the runtime's graphs need so many bytes."""
    model, used, answers = augmented(), [], iter(needed)
    monkeypatch.setattr(budgeted, "rewritten_bytes", lambda _: next(answers))

    def run(_: Options, target: Target) -> ir.Model:
        used.append(target.memory_factor)
        return model

    found = budgeted.within_budget(Options(memory_budget=budget), TARGETS[target], run, lambda m: m)
    assert found is model
    return used


def test_predictions_are_raised_until_the_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = timeline(augmented().graph).peak
    assert factors(1000, [1000], monkeypatch) == [1.0]
    assert factors(1000, [None], monkeypatch) == [1.0]
    assert factors(1000, [1300, 1010], monkeypatch) == [1.0, 1300 / predicted]
    assert factors(1000, [1300, 1200], monkeypatch) == [1.0, 1300 / predicted, 1200 / predicted]
    assert factors(1000, [], monkeypatch, target="cuda") == [1.0]


def test_a_refusal_names_what_the_rewritten_graph_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = conv_model(case((4, 16, 32, 32), 16, (3, 3), begin=1))
    budget = timeline(ir.from_proto(og.augment(model, wrt=["x", "w"])).graph).peak
    monkeypatch.setattr(budgeted, "rewritten_bytes", lambda _: 100 * budget)
    with pytest.raises(og.ArgumentError, match="needs at least") as caught:
        og.augment(model, wrt=["x", "w"], memory_budget=budget)
    least = float(str(caught.value).split("needs at least ")[1].split()[0])
    assert least * 1e6 > 5 * budget
