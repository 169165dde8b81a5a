"""Timing in turns, and that both sides of each timed layer compute the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

import numpy as np
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.bench import timing
from onnx_convgrad.bench.layer import check_timed, forward, gradients, operands
from onnx_convgrad.bench.measure import predicted, time_lowerings
from onnx_convgrad.bench.timing import Bound, calm, interleave
from onnx_convgrad.bench.torch_side import TorchSide
from onnx_convgrad.errors import ArgumentError, ExecutionError
from onnx_convgrad.ir.geometry import ConvSpec, Window
from onnx_convgrad.pipeline.layer import conv_model

pytestmark = pytest.mark.usefixtures("hasty_timing")

# -- timing ------------------------------------------------------------------------------------------------------------


def test_sides_take_turns_and_medians_are_taken() -> None:
    order: list[str] = []
    times = {"a": iter([1.0, 9.0, 2.0]), "b": iter([5.0, 4.0, 6.0])}

    def side(name: str) -> timing.Side:
        def turn() -> float:
            order.append(name)
            return next(times[name])

        return turn

    assert interleave({"a": side("a"), "b": side("b")}, repeats=3) == {"a": 2.0, "b": 5.0}
    assert order == ["a", "b"] * 3


@pytest.mark.parametrize(
    ("times", "waits", "chosen"),  # the waits before and after each try
    [
        ([7.0, 5.0, 3.0], [0.0, 0.9, 1.0, 1.9, 2.0, 2.01], (3.0, True)),
        ([7.0, 5.0], [0.0, 50.0, 50.0, 60.0], (5.0, False)),
    ],
    ids=["until one is calm", "or the least disturbed"],
)
def test_a_disturbed_turn_is_repeated(
    times: list[float], waits: list[float], chosen: tuple[float, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    results, stalled, ticks = iter(times), iter(waits), itertools.count()
    monkeypatch.setattr(timing, "_stalled", lambda: next(stalled))
    monkeypatch.setattr(timing.time, "sleep", lambda _: None)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(ticks)))
    assert calm(lambda: next(results), tries=5 if chosen[1] else 2) == chosen


def test_bound_runs_a_model_and_refuses_an_invalid_one() -> None:
    layer = ConvSpec.layer((1, 2, 5), (3, 2, 3), Window((1,), (1,), (1,), (1,), 1))
    model, feed = conv_model(layer), operands(layer)
    run = Bound(model, feed, 1)
    run()
    x, w = (torch.from_numpy(feed[name]) for name in "xw")
    np.testing.assert_allclose(run.outputs()["y"], torch.conv1d(x, w, padding=1).numpy(), rtol=1e-5, atol=1e-6)
    model.graph.node(0).op_type = "Konv"
    with pytest.raises(ExecutionError, match="refused the model"):
        Bound(model, feed, 1)


# -- layers ------------------------------------------------------------------------------------------------------------

LAYERS = [
    ConvSpec.layer((2, 4, 9), (6, 2, 3), Window((2,), (1,), (1,), (1,), 2)),
    ConvSpec.layer((2, 3, 8, 7), (5, 3, 3, 2), Window((1, 2), (2, 1), (2, 0), (1, 1), 1)),
    ConvSpec.layer((1, 4, 5, 6, 5), (4, 1, 3, 3, 3), Window((1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1), 4)),
    ConvSpec.layer((2, 4, 5, 5), (4, 3, 2, 2), Window((2, 2), (1, 1), (0, 0), (0, 0), 1), transposed=True),
]


brief = attrgetter("brief")


@pytest.fixture(scope="module")
def side() -> Iterator[TorchSide]:
    with TorchSide(1) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("wrt", [["x"], ["w"], ["x", "w"]], ids="+".join)
@pytest.mark.parametrize("layer", LAYERS, ids=brief)
def test_both_sides_compute_the_same(layer: ConvSpec, wrt: list[str], side: TorchSide) -> None:
    ours = gradients(layer, wrt, 1)
    ours()
    assert side.side(layer, wrt)() > 0
    for got, want in zip(ours.outputs().values(), side.results(), strict=True):
        assert got.shape == want.shape
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if not layer.transposed], ids=brief)
def test_forward_by_any_lowering_is_the_convolution(layer: ConvSpec, side: TorchSide) -> None:
    run = Bound(conv_model(layer), operands(layer), 1)
    run()
    side.side(layer, [])
    np.testing.assert_allclose(run.outputs()["y"], side.results()[0], rtol=1e-4, atol=1e-4)
    for lowering in ("conv", "im2col_gemm"):
        lowered = forward(layer, 1, lowering)
        lowered()
        np.testing.assert_allclose(lowered.outputs()["y"], run.outputs()["y"], rtol=1e-4, atol=1e-4)


def test_an_ended_process_is_reported() -> None:
    with TorchSide(1) as process:
        process.process.kill()
        with pytest.raises(ExecutionError, match="PyTorch's process has ended"):
            process.side(LAYERS[0], ["x"])


def test_layer_of_a_spec() -> None:
    spec = ConvSpec(2, 4, 6, (9,), (3,), (5,), (2,), (1,), (1,), (1,), 2)
    assert spec == LAYERS[0]
    assert spec.brief == "2x4x9 * 6x2x3 s2 p1 g2"
    assert spec.shape("output") == (2, 6, 5)
    check_timed(spec)
    with pytest.raises(ArgumentError, match="size is unknown"):
        check_timed(replace(spec, batch=None))
    with pytest.raises(ArgumentError, match="negative padding"):
        check_timed(ConvSpec(2, 4, 6, (9,), (3,), (6,), (1,), (1,), (-1,), (0,), 2))


def test_constant_weights_are_part_of_the_model() -> None:
    """Nodes that depend on them alone are folded and not timed."""
    lowering = {"ConvInputGrad": "col2im"}
    sides = [gradients(LAYERS[1], ["x"], 1, lowering, constant=constant) for constant in (False, True)]
    assert [{v.name for v in side.session.get_inputs()} for side in sides] == [{"x", "w", "y_grad"}, {"x", "y_grad"}]
    for side in sides:
        side()
    np.testing.assert_array_equal(*(side.outputs()["x_grad"] for side in sides))


def test_every_lowering_that_applies_is_timed() -> None:
    layer = LAYERS[1]
    for choice in og.explain(conv_model(layer), wrt=["x", "w"]).choices:
        found = time_lowerings(choice, 1, 1, {"other": lambda: 3.0})
        assert set(found) == {*predicted(choice), "other"}
        assert found.pop("other") == 3.0
        assert min(found.values()) > 0


def test_a_lowering_without_room_in_memory_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS[0]
    choice = og.explain(conv_model(layer), wrt=["w"]).choices[0]
    largest = max((c for c in choice.candidates if c.name != choice.chosen), key=lambda c: c.workspace)
    monkeypatch.setattr("onnx_convgrad.bench.measure.machine_bytes", lambda: float(largest.workspace))
    found = time_lowerings(choice, 1, 1)
    assert choice.chosen in found
    assert largest.name not in found
