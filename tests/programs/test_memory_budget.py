"""A program with a memory budget is refused when it is built, or all of its graphs can be used."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.memory.budget import BudgetError
from onnx_convgrad.pipeline import fit_memory
from tests.support.one_input import graph_of

LAYERS, WIDTH = 4, 64


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """Many parameters and a small batch, so that the gradients of all take most of the memory."""
    body, x = "", "x"
    for i in range(LAYERS):
        body, x = f"{body} h{i} = MatMul ({x}, w{i}) r{i} = Relu (h{i})", f"r{i}"
    rng = np.random.default_rng(0)
    weights = {f"w{i}": (rng.standard_normal((WIDTH, WIDTH)) / 8).astype(np.float32) for i in range(LAYERS)}
    head = f"(float[8,{WIDTH}] x) => (float[8,{WIDTH}] y)"
    return graph_of(f"{head} {{ {body} y = Identity ({x}) }}", **weights)


BATCH = {name: np.random.default_rng(1).random((8, WIDTH)).astype(np.float32) for name in ("x", "target")}


@pytest.mark.filterwarnings("ignore:The step keeps the memory budget")
@pytest.mark.parametrize("budget", [0.95, 0.8, 0.6, 0.3, 0.05, "min", 1000, 90_000, 190_000, 250_000, 10_000_000])
@pytest.mark.parametrize("optimizer", [og.optim.SGD(0.01, momentum=0.9), og.optim.Adam(1e-3)])
def test_what_is_built_can_be_used(
    model: onnx.ModelProto, budget: float | str, optimizer: og.optim.Optimizer, tmp_path: Path
) -> None:
    try:
        program = og.build_training(model, loss="mse", optimizer=optimizer, memory=budget)
    except BudgetError:
        assert budget not in ("min", 10_000_000)
        return
    trainer = og.Trainer(program)
    trainer.step(BATCH)
    trainer.step(BATCH, BATCH)
    trainer.evaluate_batch(BATCH)
    program.save(tmp_path / "program")
    assert np.isfinite(og.Trainer(tmp_path / "program").step(BATCH, BATCH)["loss"])


def test_a_warning_names_the_graph_that_exceeds_the_budget(model: onnx.ModelProto) -> None:
    program = og.build_training(model, loss="mse", optimizer="sgd", memory=0.6)
    with pytest.warns(UserWarning, match=r"but the graph of gradients, .* takes as little as possible, about 0\.\d MB"):
        program.model("gradients")


@pytest.mark.parametrize("training", [True, False])
def test_a_hopeless_budget_is_refused_before_anything_is_tried(
    model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch, *, training: bool
) -> None:
    """The message has bytes where megabytes would be 0.0."""
    monkeypatch.setattr(fit_memory, "lower", lambda *_, **__: pytest.fail("lowered"))
    alone = (
        r"The memory budget is 1,000 bytes, but the inputs and stored values of this graph alone take \d\d,\d{3} bytes"
    )
    make = partial(og.build_training, loss="mse", optimizer="sgd") if training else og.augment
    with pytest.raises(og.errors.ArgumentError, match=alone):
        make(model, memory=1000)
