"""Exponential moving averages of the parameters, against those of PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of
from tests.support.training_nets import Feeds, ProgramRun, TorchRun, arrays, batch, build, check_halves, net, off, same


def test_averages_equal_those_of_pytorch(tmp_path: Path) -> None:
    """The evaluation and the exported model use them, with the latest running statistics."""
    trainer = og.Trainer(build(ema=0.8))
    theirs = TorchRun(net(), lambda p: torch.optim.SGD(p, 0.05, 0.9))
    averaged = AveragedModel(theirs.module, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for step in range(10):
        trainer.step(arrays(step))
        theirs(**batch(step))
        averaged.update_parameters(theirs.module)
        if step in (0, 9):
            state = trainer.state()
            for name, value in averaged.module.named_parameters():
                assert off(state[f"{name}_ema"], value) < 1e-5, (step, name)
    held = batch(99)
    want = averaged.module.eval()(held["x"].double())
    got = trainer.evaluate_batch(arrays(99))
    assert off(got["y"], want) < 1e-4
    assert float(got["loss"]) == pytest.approx(F.cross_entropy(want, held["target"]).item(), rel=1e-4)
    assert trainer.evaluate(arrays(99))["loss"] == pytest.approx(float(got["loss"]), rel=1e-5)
    trainer.export(tmp_path / "a.onnx"), trainer.export(tmp_path / "b.onnx", average=False)
    a, b = (run(onnx.load(tmp_path / name), {"x": arrays(99)["x"]})["y"] for name in ("a.onnx", "b.onnx"))
    np.testing.assert_allclose(a, got["y"], rtol=1e-4, atol=1e-5)
    assert off(b, theirs.module.eval()(held["x"].double())) < 1e-4 < off(b, a)


def linear() -> onnx.ModelProto:
    w, b = np.eye(3, 4, dtype=np.float32), np.ones(4, np.float32)
    return graph_of("(float[N,3] x) => (float[N,4] y) { y = Gemm (x, w, b) }", w=w, b=b)


def rows(step: int) -> Feeds:
    rng = np.random.default_rng(step)
    return {"x": rng.standard_normal((6, 3)).astype(np.float32), "target": rng.integers(0, 4, 6)}


@pytest.mark.parametrize("way", ["arrays", "a trainer", "a vector"])
def test_averages_follow_what_is_loaded_before_the_first_step(way: str) -> None:
    """The first update would copy the parameters, too; later, averages stay."""
    other = og.Trainer(build(linear()))
    other.step(rows(0))
    trainer = og.Trainer(build(linear(), ema=0.9))
    if way == "a vector":
        trainer.load_flat(other.flat_parameters())
    else:
        trainer.load(other.parameters() if way == "arrays" else other)
    np.testing.assert_array_equal(trainer.evaluate_batch(rows(1))["y"], other.evaluate_batch(rows(1))["y"])
    trainer.step(rows(2))
    before = trainer.state()["w_ema"]
    trainer.load({"w": np.zeros((3, 4))})
    np.testing.assert_array_equal(trainer.state()["w_ema"], before)


def test_parameters_train_as_without_averages(tmp_path: Path) -> None:
    """In every graph of the program, also after it was saved, and with accumulated gradients."""
    plain, program = ProgramRun(build(linear())), build(linear(), ema=0.9)
    program.save(tmp_path / "program")
    averaging, loaded = ProgramRun(program), og.Trainer(tmp_path / "program")
    for step in range(3):
        plain(rows(step)), averaging(rows(step)), loaded.step(rows(step))
    same({k: v for k, v in averaging.state.items() if not k.endswith("_ema")}, plain.state)
    same({**loaded.parameters(), **loaded.state()}, averaging.state)
    assert {e.name for e in program.manifest.moving()} - {e.name for e in plain.program.manifest.moving()} == {
        f"{p.name}_ema" for p in program.manifest.parameters
    }
    check_halves(program, rows(0))
    loaded.save(tmp_path / "checkpoint.safetensors")
    resumed = og.Trainer(tmp_path / "program")
    resumed.restore(tmp_path / "checkpoint.safetensors")
    same(resumed.state(), loaded.state())
    halves = [{k: v[part] for k, v in rows(3).items()} for part in (slice(0, 3), slice(3, 6))]
    resumed.step(*halves)
    state, parameters = resumed.state(), resumed.parameters()
    before = loaded.state()
    for name, value in parameters.items():
        np.testing.assert_allclose(
            state[f"{name}_ema"], 0.9 * before[f"{name}_ema"] + 0.1 * value, rtol=1e-5, atol=1e-7
        )


def test_before_the_first_step_the_average_is_the_model() -> None:
    trainer = og.Trainer(build(linear(), ema=0.999))
    assert float(trainer.evaluate_batch(rows(0))["loss"]) == float(
        og.Trainer(build(linear())).evaluate_batch(rows(0))["loss"]
    )


def test_a_step_that_overflows_in_float16_leaves_the_average() -> None:
    program = build(ema=0.5, precision=og.MixedPrecision("float16", init_scale=2.0**100))
    trainer = og.Trainer(program)
    before = {**trainer.parameters(), **trainer.state()}
    trainer.step(arrays(0))
    after = {**trainer.parameters(), **trainer.state()}
    same(
        {k: v for k, v in after.items() if k.endswith("_ema")}, {k: v for k, v in before.items() if k.endswith("_ema")}
    )


@pytest.mark.parametrize("ema", [1.0, -0.1, "much"])
def test_refused_averages(ema: Any) -> None:
    with pytest.raises(og.errors.ArgumentError, match="ema must be"):
        build(linear(), ema=ema)


def test_there_is_no_average_to_export(tmp_path: Path) -> None:
    with pytest.raises(og.errors.ArgumentError, match="keeps no averages") as caught:
        og.Trainer(build(linear())).export(tmp_path / "a.onnx", average=True)
    assert "ema=0.999" in str(caught.value.hint)
