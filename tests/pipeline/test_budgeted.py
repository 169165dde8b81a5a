"""Builds that are repeated until the graph that ONNX Runtime makes of them keeps the memory budget."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.ir.targets import TARGETS, TargetInfo
from onnx_convgrad.memory.budget import BudgetError, MemoryPlan
from onnx_convgrad.memory.timeline import timeline
from onnx_convgrad.pipeline import budgeted
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.fit_memory import remembered
from onnx_convgrad.pipeline.options import Memory, Options
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

    def make(options: Options, target: TargetInfo) -> Built:
        return Built(model, options, target, model)

    def note(built: Built) -> None:
        used.append(built.trials.factor)

    found = budgeted.within_budget(Options(memory=Memory(budget)), TARGETS[target], make, [note])
    assert found.model is model
    return used


def test_predictions_are_raised_until_the_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = timeline(augmented().graph).peak
    assert factors(1000, [1000], monkeypatch) == [1.0]
    assert factors(1000, [None], monkeypatch) == [1.0]
    assert factors(1000, [1300, 1010], monkeypatch) == [1.0, 1300 / predicted]
    assert factors(1000, [1300, 1200], monkeypatch) == [1.0, 1300 / predicted, 1200 / predicted]
    assert factors(1000, [], monkeypatch, target="cuda") == [1.0]


@pytest.mark.parametrize(
    ("least", "needed", "builds"),
    [
        pytest.param(1100, [1020], [1000, 1100], id="what needs least fits"),
        pytest.param(1100, [1060, 1010], [1000, 1100, 1144], id="another needs less"),
        pytest.param(1100, [1060, 1030, 1070, 1080], [1000, 1100, 1144, 1188, "min"], id="nothing fits"),
        pytest.param(1300, [], [1000], id="far off"),
    ],
)
def test_before_a_close_refusal_the_least_is_loaded(
    least: int, needed: list[int], builds: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked, answers = augmented(), [], iter(needed)
    monkeypatch.setattr(budgeted, "rewritten_bytes", lambda _: next(answers))

    def make(options: Options, target: TargetInfo) -> Built:
        asked.append(options.memory.budget)
        if options.memory.budget == 1000:
            raise BudgetError(1000, least)
        return Built(model, options, target, model)

    def build() -> ir.Model:
        return budgeted.within_budget(Options(memory=Memory(1000)), TARGETS["cpu"], make, []).model

    if needed and needed[-1] <= 1020:
        assert build() is model
    else:
        with pytest.raises(BudgetError) as caught:
            build()
        assert caught.value.least == min([least, *needed])
    assert asked == builds


def test_a_refusal_names_what_the_rewritten_graph_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = conv_model(case((4, 16, 32, 32), 16, (3, 3), begin=1))
    budget = timeline(ir.from_proto(og.augment(model, wrt=["x", "w"])).graph).peak
    monkeypatch.setattr(budgeted, "rewritten_bytes", lambda _: 100 * budget)
    with pytest.raises(og.errors.ArgumentError, match="needs at least") as caught:
        og.augment(model, wrt=["x", "w"], memory=budget)
    least = float(str(caught.value).split("needs at least ")[1].split()[0])
    assert least * 1e6 > 5 * budget


def test_no_plan_is_tried_twice_in_the_builds_of_a_model() -> None:
    asked: list[MemoryPlan] = []

    def attempt(plan: MemoryPlan) -> tuple[int, float] | None:
        asked.append(plan)
        return (100, 2.0) if plan.max_workspace is None else None

    model, plans = augmented(), [MemoryPlan(), MemoryPlan(max_workspace=8)]
    built = Built(model, Options(), TARGETS["cpu"], model)
    again = remembered(attempt, built)
    assert [again(plan) for plan in plans] == [(100, 2.0), None]
    built.trials.factor = 1.5
    assert [again(plan) for plan in plans] == [(150, 2.0), None]
    assert asked == plans
    built.target = replace(built.target, stored=lambda *_: ())
    assert again(MemoryPlan()) == (150, 2.0), "loops store otherwise"
    assert len(asked) == 3


def test_the_builds_of_a_model_share_the_plans_that_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = augmented(), []
    monkeypatch.setattr(budgeted, "rewritten_bytes", lambda _: 1300)

    def make(options: Options, target: TargetInfo) -> Built:
        return Built(model, options, target, model)

    def note(built: Built) -> None:
        seen.append(built.trials.tried)

    for _ in range(2):
        budgeted.within_budget(Options(memory=Memory(1000)), TARGETS["cpu"], make, [note])
    assert seen[0] is seen[1] is seen[2] is not None
    assert seen[3] is seen[4] is seen[5] is not seen[0]
