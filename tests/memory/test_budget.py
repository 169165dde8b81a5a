"""`memory_budget`: the least time within a budget, refusals, equal gradients, and measured memory."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.memory.budget import SHARES, BudgetError, Fit, MemoryPlan, fit
from onnx_convgrad.memory.timeline import timeline
from onnx_convgrad.runtime import run
from tests.support.command_line import invoke
from tests.support.families import export
from tests.support.memory import linux_only, measured_bytes

SIZES = {None: 100, 16: 90, 2: 70}
"""Workspace -> memory without recomputation, of a made-up graph."""


def _attempt(plan: MemoryPlan) -> tuple[int, float] | None:
    """A graph whose recomputation saves half of its share of the time."""
    if plan.max_workspace not in SIZES:
        return None
    memory, slower = SIZES[plan.max_workspace], {None: 1.0, 16: 1.2, 2: 1.5}[plan.max_workspace]
    return int(memory * (1 - plan.recompute / 2)), slower * (1 + plan.recompute)


# -- the search ------------------------------------------------------------------------------------------------------------


def test_nothing_is_done_where_it_fits() -> None:
    found = fit(_attempt, 128, None)
    assert (found.plan, found.peak, found.seconds) == (MemoryPlan(in_place=False), 100, 1.0)


def test_the_plan_of_least_time_is_taken() -> None:
    found = fit(_attempt, 80, None)  # 128 // 8 == 16
    assert found.peak <= 80
    assert found.seconds == pytest.approx(1.4)  # recomputation of 0.4 is faster than a small workspace


def test_no_more_is_recomputed_than_needed() -> None:
    """Between the share that fits and the one before, the least that may fit by interpolation is tried."""
    found = fit(_attempt, 92, None)  # of the shares, 0.2 is the first that fits, at 90
    assert (found.plan.recompute, found.peak) == (pytest.approx(0.15), 92)


def test_a_share_is_one_of_the_memory_without_a_budget() -> None:
    found = fit(_attempt, 0.8, None)
    assert (found.budget, found.peak_without) == (80, 100)


def test_a_refusal_tells_the_budget_and_what_is_needed_apart() -> None:
    assert str(BudgetError(2_040_000, 2_310_000)).startswith(
        "The memory budget is 2.0 MB, but this graph needs at least 2.3 MB."
    )
    assert "is 0.527 MB, but this graph needs at least 0.531 MB" in str(BudgetError(527_400, 531_100))
    assert "is 1.000001 MB, but this graph needs at least 1.000001 MB" in str(BudgetError(1_000_001, 1_000_001))


def test_the_least_memory_and_a_refusal_that_names_it() -> None:
    least = fit(_attempt, "min", None).peak
    assert least == 50
    with pytest.raises(ArgumentError, match="needs at least"):
        fit(_attempt, 10, None)


def _asked(budget: int, sizes: dict[int | None, list[int]]) -> tuple[list[tuple[float, int | None]], Fit]:
    """The plans that are tried in place for a graph that needs so many bytes with each share of recomputation."""
    asked: list[tuple[float, int | None]] = []

    def attempt(plan: MemoryPlan) -> tuple[int, float] | None:
        if plan.in_place:
            asked.append((plan.recompute, plan.max_workspace))
        found = sizes.get(plan.max_workspace)
        if found is None:
            return None
        peak = math.ceil(np.interp(plan.recompute, SHARES, found))
        return peak, 1 + plan.recompute + 0.01 * bool(plan.max_workspace)

    return asked, fit(attempt, budget, None)


def test_a_smaller_workspace_is_tried_with_less_recomputation() -> None:
    first = [100, 95, 85, 79, 60, 50]
    start = [(0.0, None), (0.05, None), (0.1, None), (0.2, None)]
    less = {None: first, 10: [90, 80, 75, 70, 60, 50]}
    asked, found = _asked(80, less)
    assert asked[:7] == [*start, (0.1, 10), (0.05, 10), (0.0, 10)]
    assert [share for share, _ in asked[7:]] == pytest.approx([0.0125, 0.025])  # those may fit, by interpolation
    assert (found.plan, found.peak) == (MemoryPlan(0.05, 10), 80)
    as_much = {None: first, 10: [99, 94, 84, 78, 60, 50]}
    asked, found = _asked(80, as_much)
    assert asked[4:6] == [(0.1, 10), (0.2, 10)]
    assert found.plan == MemoryPlan(0.2, None)
    as_before = {None: [100, 79, 79, 79, 79, 79], 10: [75, 70, 65, 60, 55, 50]}
    asked, found = _asked(80, as_before)
    assert asked[2] == (0.0, 10)
    assert found.plan == MemoryPlan(0.0, 10)


def test_a_fit_reads_well() -> None:
    found = Fit(500_000_000, 480_000_000, 900_000_000, 1.1, 1.0, MemoryPlan())
    assert (
        str(found) == "Memory of a run: 480.0 MB predicted (budget 500.0 MB; 900.0 MB without); predicted time +10.0 %"
    )
    named = replace(found, largest=(("conv", 51_400_000), ("pool", 900)))
    assert str(named) == f"{found}; largest results at its peak, by node: conv 51.4 MB, pool 900 bytes"


@pytest.mark.parametrize("budget", [0, -1, 1.5, True, "most", [1]], ids=repr)
def test_what_is_no_budget_is_refused(budget: Any) -> None:
    with pytest.raises(ArgumentError, match="The memory budget must be"):
        og.augment("missing.onnx", memory=budget)


def test_recompute_is_chosen_by_the_budget() -> None:
    with pytest.raises(ArgumentError, match="leave out recompute"):
        og.augment("missing.onnx", memory=og.Memory("min", recompute="auto"))


# -- graphs ----------------------------------------------------------------------------------------------------------------


def _network(draw: np.random.Generator) -> torch.nn.Module:
    """Convolutions, normalizations and residual sums of random widths."""
    layers: list[torch.nn.Module] = []
    width = 3
    for _ in range(int(draw.integers(3, 9))):
        after = int(draw.choice([8, 16, 24, 32]))
        layers += [torch.nn.Conv2d(width, after, int(draw.choice([1, 3])), padding="same")]
        layers += [torch.nn.BatchNorm2d(after)] if draw.random() < 0.6 else []
        layers += [torch.nn.ReLU() if draw.random() < 0.7 else torch.nn.SiLU()]
        width = after
    return torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, 5))


def _model(seed: int, size: int = 32, batch: int = 8) -> onnx.ModelProto:
    torch.manual_seed(seed)
    module = _network(np.random.default_rng(seed)).train()
    return export(module, torch.zeros(batch, 3, size, size), dynamo=False, training=True, fold=False)


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return _model(1)


def _gradients(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    feed = {
        i.name: draw.standard_normal([d.dim_value for d in i.type.tensor_type.shape.dim]).astype(np.float32)
        for i in model.graph.input
    }
    return run(model, feed)


@pytest.mark.slow
def test_gradients_within_a_budget_are_the_same(model: onnx.ModelProto) -> None:
    plain = og.augment(model, training=True)
    less = og.augment(model, training=True, memory=0.7)
    expected, found = _gradients(plain), _gradients(less)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=1e-4 * max(1.0, float(np.abs(value).max())))


def test_the_prediction_is_within_the_budget_and_reported(model: onnx.ModelProto) -> None:
    report = og.explain(model, training=True, memory=0.7)
    assert report.memory is not None
    assert report.memory.peak <= report.memory.budget == int(0.7 * report.memory.peak_without)
    assert str(report.memory) in str(report)
    nodes, sizes = zip(*report.memory.largest, strict=True)
    assert list(sizes) == sorted(sizes, reverse=True) and 0 < sum(sizes) <= report.memory.peak
    assert set(nodes) & {node.name for node in model.graph.node}


@pytest.mark.slow
def test_a_training_step_within_a_budget(model: onnx.ModelProto) -> None:
    def peak(**options: Any) -> int:
        program = og.build_training(model, loss="cross_entropy", optimizer="sgd", **options)
        return timeline(program.model("step").graph).peak

    before = peak()
    assert peak(memory=int(0.8 * before)) <= 0.8 * before


def test_bytes_need_known_sizes(model: onnx.ModelProto) -> None:
    free = onnx.ModelProto()
    free.CopyFrom(model)
    free.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    with pytest.raises(ArgumentError, match="sizes of the input"):
        og.augment(free, memory=10**9)


@pytest.mark.slow
def test_the_command_says_what_the_budget_takes(model: onnx.ModelProto, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    assert "Memory of a run:" in invoke("explain", path, "--training", "--memory-budget", "0.7").output
    refused = invoke("augment", path, "--training", "--memory-budget", "100kB", status=2).output
    assert "The memory budget is 0.10 MB, but the inputs and stored values of this graph alone take" in refused


@pytest.mark.slow
@linux_only
def test_the_measured_peak_keeps_the_budget(tmp_path: Path) -> None:
    ratios = [ratio for seed in range(5) if (ratio := measured_over_budget(seed, tmp_path)) is not None]
    assert len(ratios) >= 3
    assert max(ratios) <= 1.1


def measured_over_budget(seed: int, folder: Path) -> float | None:
    """The measured memory of a random network's step over a random budget; `None` if the budget is refused."""
    draw = np.random.default_rng(seed)
    model = _model(seed, size=int(draw.choice([64, 96])), batch=32)
    options: dict[str, Any] = {"loss": "cross_entropy", "optimizer": "sgd"}
    plain = timeline(og.build_training(model, **options).model("step").graph).peak
    budget = int(float(draw.uniform(0.6, 1)) * plain)
    try:
        step = og.build_training(model, memory=budget, **options).step
    except BudgetError:
        return None
    path = folder / f"{seed}.onnx"
    path.write_bytes(step.SerializeToString())
    return measured_bytes(path) / budget


RECURRENT = """g (float[64,4,16] x) => (float[64,4,32] y) {
    states, last, cell = LSTM <hidden_size = 32> (x, w, r)  y = Squeeze (states, one) }"""


def test_loops_compute_twice_what_the_budget_cannot_hold() -> None:
    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {RECURRENT}')
    weights = {"w": rng.standard_normal((1, 128, 16)), "r": rng.standard_normal((1, 128, 32)) / 6}
    arrays = {name: value.astype(np.float32) for name, value in weights.items()} | {"one": np.array([1])}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in arrays.items())
    plain, small = (og.augment(proto, wrt=["w", "r"], memory=budget) for budget in (None, "min"))
    peaks = [timeline(onnx_ir.from_proto(m).graph).peak for m in (plain, small)]
    assert peaks[1] < 0.8 * peaks[0]
    budget = (peaks[0] + peaks[1]) // 2
    held = og.augment(proto, wrt=["w", "r"], memory=budget)
    assert timeline(onnx_ir.from_proto(held).graph).peak <= budget
    with pytest.raises(ArgumentError, match="needs at least"):
        og.augment(proto, wrt=["w", "r"], memory=peaks[1] // 3)
    feed = {"x": rng.standard_normal((64, 4, 16)).astype(np.float32), "y_grad": np.ones((64, 4, 32), np.float32)}
    want, got = run(plain, feed), run(held, feed)
    for name in ("w_grad", "r_grad"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5)
