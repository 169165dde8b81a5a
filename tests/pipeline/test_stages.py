"""The stages in order: what is announced while they run, and that each says what it does."""

from __future__ import annotations

import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.base.progress import announce, listening
from onnx_convgrad.pipeline.complete import STAGES
from onnx_convgrad.pipeline.options import Memory, Options
from onnx_convgrad.pipeline.stages import build
from tests.support.conv_geometry import case, conv_model

FIRST = ["reading", "canonicalizing", "differentiating"]


@pytest.fixture
def model() -> onnx.ModelProto:
    return conv_model(case((4, 16, 32, 32), 16, (3, 3), begin=1))


@pytest.mark.parametrize(
    ("options", "between"),
    [
        pytest.param({}, ["lowering"], id="plain"),
        pytest.param({"memory": Memory(recompute="auto")}, ["lowering", "recomputing"], id="recompute"),
        pytest.param(
            {"memory": Memory(1.0)},
            [*(f"fitting the memory: plan {count}" for count in (1, 2, 3)), "lowering"],
            id="budget, whose trials are counted",
        ),
    ],
)
def test_what_begins_is_announced(model: onnx.ModelProto, options: dict[str, object], between: list[str]) -> None:
    lines: list[str] = []
    with listening(lines.append):
        build(model, Options(wrt=["x", "w"], **options))  # type: ignore[arg-type]
    assert lines == [*FIRST, *between, "verifying"]
    og.augment(model, wrt=["x", "w"])
    assert lines == [*FIRST, *between, "verifying"], "nobody listens any more"


def test_a_training_program_is_silent_within_something_that_was_announced() -> None:
    lines: list[str] = []
    with listening(lines.append):
        announce("building the program")
        og.build_training("examples/models/digits_cnn.onnx", loss="cross_entropy", optimizer="sgd")
    assert lines == ["building the program"]


def test_an_inner_listener_hears_what_the_outer_one_does_not() -> None:
    outer: list[str] = []
    inner: list[str] = []
    with listening(outer.append):
        announce("a")
        with listening(inner.append):
            announce("b")
        with listening(None):
            announce("c")
        announce("d")
    assert (outer, inner) == (["a", "d"], ["b"])


def test_a_build_is_silent_within_something_that_was_announced(model: onnx.ModelProto) -> None:
    lines: list[str] = []
    with listening(lines.append):
        announce("comparing")
        build(model, Options(wrt=["x"]))
    assert lines == ["comparing"]
    with listening(lines.append):
        build(model, Options(wrt=["x"]))
        build(model, Options(wrt=["x"]))
    assert lines == ["comparing", *2 * [*FIRST, "lowering", "verifying"]]


def test_every_stage_says_what_it_does() -> None:
    assert all(stage.__doc__ for stage in STAGES)
