"""Float32 masters of float16 and bfloat16 parameters: equal to PyTorch's optimizers on float32 copies, kept everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator

import onnx_convgrad as og
from tests.support.command_line import invoke
from tests.support.one_input import graph_of
from tests.support.training_nets import ProgramRun, check_halves

RNG = np.random.default_rng(0)
W, B = RNG.standard_normal((3, 4)), RNG.standard_normal(4)
KINDS: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float": np.float32}


def linear(kind: str = "float16") -> onnx.ModelProto:
    stored = {"w": W.astype(KINDS[kind]), "b": B.astype(KINDS[kind])}
    return graph_of(f"({kind}[N,3] x) => ({kind}[N,4] y) {{ h = MatMul (x, w) y = Add (h, b) }}", **stored)


def build(kind: str = "float16", **options: Any) -> og.TrainingProgram:
    return og.build_training(linear(kind), **{"loss": "mse", "optimizer": og.optim.SGD(0.125), **options})


def gradients(step: int, kind: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {f"{k}_grad": rng.standard_normal(v.shape).astype(KINDS[kind]) for k, v in (("w", W), ("b", B))}


OPTIMIZERS: dict[str, tuple[og.optim.Optimizer, Any]] = {
    "sgd": (og.optim.SGD(0.0625, momentum=0.9, weight_decay=0.5), lambda p: torch.optim.SGD(p, 0.0625, 0.9, 0, 0.5)),
    "adamw": (og.optim.AdamW(0.0078125, clip_norm=1.0), lambda p: torch.optim.AdamW(p, 0.0078125)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_updates_equal_those_of_pytorch_on_float32_copies(name: str, kind: str) -> None:
    ours, theirs = OPTIMIZERS[name]
    program = build(kind, optimizer=ours, loss="mse", ema=0.75)
    update = ReferenceEvaluator(program.update)
    types = {s.slot: s.dtype for s in program.manifest.state if s.of == "w"}
    assert types.pop("ema") == kind and set(types.values()) == {"float32"} and {"master", "ema_master"} <= types.keys()
    initial = {i.name: onnx.numpy_helper.to_array(i) for i in program.update.graph.initializer}
    state = {e.name: initial[e.name] for e in program.manifest.moving()}
    copies = {k: torch.tensor(state[k].astype(np.float32), requires_grad=True) for k in "wb"}
    averages = {k: v.detach().clone() for k, v in copies.items()}
    optimizer = theirs(list(copies.values()))
    for step in range(6):
        grad = gradients(step, kind)
        results = dict(
            zip([o.name for o in program.update.graph.output], update.run(None, {**state, **grad}), strict=True)
        )
        state |= {e.name: results[e.next] for e in program.manifest.moving() if e.next in results}
        for k, v in copies.items():
            v.grad = torch.tensor(grad[f"{k}_grad"].astype(np.float32))
        if ours.clip_norm:
            torch.nn.utils.clip_grad_norm_(list(copies.values()), ours.clip_norm)
        optimizer.step()
        for k, v in copies.items():
            averages[k] = v.detach().clone() if step == 0 else 0.75 * averages[k] + 0.25 * v.detach()
    for k, v in copies.items():
        np.testing.assert_allclose(state[f"{k}_master"], v.detach().numpy(), rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(state[f"{k}_ema_master"], averages[k].numpy(), rtol=2e-6, atol=1e-6)
        np.testing.assert_array_equal(state[k], state[f"{k}_master"].astype(KINDS[kind]))
        np.testing.assert_array_equal(state[f"{k}_ema"], state[f"{k}_ema_master"].astype(KINDS[kind]))
        assert state[k].dtype == KINDS[kind]


X = np.ones((2, 3), np.float16)


def test_small_updates_add_up_only_with_masters() -> None:
    batch = {"x": X, "target": np.zeros((2, 4), np.float16)}
    moved = {}
    for masters in (True, False):
        trainer = og.Trainer(
            build(optimizer=og.optim.SGD(2.0**-14), precision=og.MixedPrecision(master_weights=masters))
        )
        for _ in range(60):
            trainer.step(batch)
        change = np.abs(trainer.parameters()["w"].astype(float) - W.astype(np.float16))
        moved[masters] = change[np.abs(W) > 0.5].max()  # whose neighbors in float16 are 2^-11 away or more
        assert trainer.parameters()["w"].dtype == np.float16
        assert ("w_master" in trainer.state()) == masters
    assert moved[True] > 0.002 and moved[False] < 0.001


def test_float32_parameters_have_no_masters() -> None:
    manifest = build("float").manifest
    assert [s.name for s in manifest.state] == ["step"]
    assert {
        s.dtype for s in build(precision=og.MixedPrecision(master_weights=False), optimizer="adam").manifest.state
    } == {
        "int64",
        "float16",
    }
    with pytest.raises(og.errors.ArgumentError, match="master_weights must be True or False"):
        build(precision=og.MixedPrecision(master_weights="yes"))


def rows(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {"x": rng.standard_normal((4, 3)).astype("e"), "target": rng.standard_normal((4, 4)).astype("e")}


def test_runs_resume_bit_for_bit_and_export_the_dtype_of_the_model(tmp_path: Path) -> None:
    program = build(optimizer=og.optim.Adam(0.001), ema=0.9)
    check_halves(program, rows(0), 1e-3)  # ONNX Runtime leaves out roundings to float16 inside a graph
    program.save(tmp_path / "program")
    trainers = [og.Trainer(program), og.Trainer(tmp_path / "program")]
    for trainer in trainers:
        trainer.step(rows(0), rows(1))
        trainer.step(rows(2))
    resumed = og.Trainer(tmp_path / "program")
    resumed.restore(trainers[0].save(tmp_path / "checkpoint.safetensors"))
    for trainer in (*trainers, resumed):
        trainer.step(rows(3))
    for name, value in {**trainers[0].parameters(), **trainers[0].state()}.items():
        for other in (trainers[1], resumed):
            np.testing.assert_array_equal({**other.parameters(), **other.state()}[name], value)
    trainers[0].export(tmp_path / "trained.onnx", average=False)
    stored = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(tmp_path / "trained.onnx").graph.initializer}
    np.testing.assert_array_equal(stored["w"], trainers[0].parameters()["w"])
    assert stored["w"].dtype == np.float16


def test_masters_follow_parameters_that_are_loaded() -> None:
    trainer = og.Trainer(build(ema=0.9))
    trainer.step(rows(0))
    trainer.load({"w": np.full((3, 4), 0.1), "w_ema": np.full((3, 4), 0.2)})
    state = trainer.state()
    np.testing.assert_array_equal(state["w_master"], np.full((3, 4), np.float16(0.1), np.float32))
    np.testing.assert_array_equal(state["w_ema_master"], np.full((3, 4), np.float16(0.2), np.float32))
    trainer.load_flat(np.full(16, 0.5, np.float16))
    np.testing.assert_array_equal(trainer.state()["b_master"], np.full(4, 0.5))
    trainer.load({"w": np.full((3, 4), 0.1), "w_master": np.full((3, 4), 0.1)})
    np.testing.assert_array_equal(trainer.state()["w_master"], np.full((3, 4), 0.1, np.float32))


def test_a_step_that_overflows_changes_no_master() -> None:
    run = ProgramRun(build(precision="float16"))
    before = run({**rows(0), "loss_scale": np.array(8, np.float32)})
    run.state["loss_scale"] = np.array(np.inf, np.float32)
    after = run(rows(1))
    np.testing.assert_array_equal(after["w_master_next"], before["w_master_next"])
    np.testing.assert_array_equal(after["w_next"], before["w_next"])


def test_the_command(tmp_path: Path) -> None:
    onnx.save(linear(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **rows(0))  # type: ignore[arg-type]
    for name, option in (("kept", "--master-weights"), ("none", "--no-master-weights")):
        options = ["--loss", "mse", "--epochs", 1, "-q", option, "--out", tmp_path / name]
        invoke("train", tmp_path / "model.onnx", "--data", tmp_path / "data.npz", *options)
        program = og.TrainingProgram.load(tmp_path / name / "program")
        assert any(s.slot == "master" for s in program.manifest.state) == (name == "kept")
