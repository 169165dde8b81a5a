"""Frozen weights that are replaced: as if the program had been built from a model that stores the others."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.families import export
from tests.support.one_input import graph_of
from tests.support.training_nets import off


class Net(nn.Module):
    """Layers of every kind, so that either half has some that the backward pass goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.strided, self.depthwise = nn.Conv2d(8, 8, 3, stride=2), nn.Conv2d(8, 8, 3, groups=8, padding=1)
        self.up, self.gru = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.GRU(4, 6, batch_first=True)
        self.fc, self.norm, self.last = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.depthwise(self.strided(self.bn(self.conv(x).relu()))).relu())
        h, _ = self.gru(h.mean(2).transpose(1, 2))
        return self.last(self.norm(self.fc(h[:, -1])))


X = np.random.default_rng(0).standard_normal((3, 3, 12, 12)).astype(np.float32)
BATCH = {"x": X, "target": X[:, 0, 0, :2]}


@pytest.fixture(scope="module")
def models() -> dict[str, onnx.ModelProto]:
    found = {}
    for seed, name in enumerate(("one", "other")):
        torch.manual_seed(seed)
        found[name] = export(Net(), torch.tensor(X), dynamo=False, training=True, fold=False)
    return found


def stored(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def mixed(models: dict[str, onnx.ModelProto], frozen: tuple[str, ...]) -> onnx.ModelProto:
    """The first model with the frozen weights of the other."""
    result, other = onnx.ModelProto(), stored(models["other"])
    result.CopyFrom(models["one"])
    for tensor in result.graph.initializer:
        if tensor.name in frozen:
            tensor.CopyFrom(numpy_helper.from_array(other[tensor.name], tensor.name))
    return result


def same(got: og.Trainer, want: og.Trainer, tmp_path: Path, limit: float) -> None:
    """Whether two trainers compute the same, in training and in inference, and export the same weights."""
    for more in ((), (), (BATCH,)):
        a, b = got.step(BATCH, *more), want.step(BATCH, *more)
        assert all(off(a[name], b[name]) < limit for name in a)
    for a, b in (
        (got.evaluate_batch(BATCH), want.evaluate_batch(BATCH)),
        (got.predict({"x": X}), want.predict({"x": X})),
    ):
        assert all(off(a[name], b[name]) < limit for name in a)
    exported = []
    for trainer, name in ((got, "got.onnx"), (want, "want.onnx")):
        trainer.export(tmp_path / name)
        exported.append(onnx.load(tmp_path / name))
    mine, theirs = map(stored, exported)
    assert mine.keys() == theirs.keys()
    assert all(off(mine[name], theirs[name]) < limit for name in mine if mine[name].dtype.kind == "f")


HALVES: dict[str, dict[str, Any]] = {
    "front": {"freeze": ["conv.*", "bn.*", "strided.*", "depthwise.*"]},
    "back": {"freeze": ["up.*", "gru.*", "fc.*", "norm.*", "last.*"]},
    "statistics": {"freeze": ["strided.*", "last.*"], "freeze_statistics": True},
    "float16": {"freeze": ["depthwise.*", "fc.*", "last.*"], "precision": "float16"},
    "average": {"freeze": ["conv.*", "norm.*"], "ema": 0.9},
    "chosen": {"wrt": ["fc.*"]},
    "budget": {"freeze": ["strided.*", "last.*"], "memory": "min"},
    "cuda": {"freeze": ["strided.*", "up.*", "depthwise.*"], "target": "cuda"},
    "web": {"freeze": ["strided.*", "up.*", "fc.*"], "target": "webgpu"},
}


QUICK = [("front", True), ("back", False), ("float16", True)]


@pytest.mark.parametrize(
    ("half", "saved"),
    [
        *QUICK,
        *(pytest.param(h, s, marks=pytest.mark.slow) for h in HALVES for s in (False, True) if (h, s) not in QUICK),
    ],
)
def test_replaced_weights_act_as_if_they_had_been_stored(
    models: dict[str, onnx.ModelProto], half: str, tmp_path: Path, *, saved: bool
) -> None:
    """Nothing that is built from the first weights, such as a folded product or cast, is left in any graph."""
    options = {"loss": "mse", "optimizer": "adam", **HALVES[half]}
    program = og.build_training(models["one"], **options)
    frozen = program.manifest.frozen
    assert frozen
    assert not {s.of for s in program.manifest.state} & set(frozen)
    if saved:
        program.save(tmp_path / "program")
        program = og.TrainingProgram.load(tmp_path / "program")
    trainer, want = og.Trainer(program), og.Trainer(og.build_training(mixed(models, frozen), **options))
    other = stored(models["other"])
    trainer.step(BATCH)
    trainer.load({**want.parameters(), **want.state(), **{name: other[name] for name in frozen}})
    same(trainer, want, tmp_path, 1e-2 if half == "float16" else 1e-4)


def test_weights_are_replaced_often(models: dict[str, onnx.ModelProto]) -> None:
    """Two programs of one model train its halves in turn; each takes what the other trained."""
    options = {"loss": "mse", "optimizer": "sgd"}
    front = og.Trainer(
        og.build_training(models["one"], freeze=["fc.*", "last.*", "norm.*", "gru.*", "up.*"], **options)
    )
    back = og.Trainer(og.build_training(models["one"], wrt=list(front.manifest.frozen), **options))
    losses = []
    for _ in range(3):
        losses.append(front.step(BATCH)["loss"])
        back.load(front)
        losses.append(back.step(BATCH)["loss"])
        front.load(back)
    assert losses == sorted(losses, reverse=True)


WIDE = "(float[N, 512] x) => (float[N, 512] y) { h = MatMul (x, front) y = MatMul (h, back) }"


def test_a_trainer_takes_the_weights_of_another_without_further_memory() -> None:
    """The weights are written over those that are there: no OrtValue moves, no array is made, and both train on."""
    rng = np.random.default_rng(0)
    model = graph_of(WIDE, **{n: rng.standard_normal((512, 512), np.float32) / 32 for n in ("front", "back")})
    batch = {"x": rng.standard_normal((4, 512), np.float32), "target": np.ones((4, 512), np.float32)}
    front, back = (
        og.Trainer(og.build_training(model, loss="mse", optimizer=og.optim.SGD(0.1, momentum=0.9), wrt=name))
        for name in ("front", "back")
    )
    back.load(front)  # the first time, frozen weights become inputs
    places = []
    for _ in range(3):
        front.step(batch)
        held = [trainer.engine._buffers for trainer in (front, back)]
        before, expected = [buffers.current("front").data_ptr() for buffers in held], front.parameters()["front"]
        momentum = back.state()
        tracemalloc.start()
        back.load(front)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < expected.nbytes / 8
        assert [buffers.current("front").data_ptr() for buffers in held] == before
        places.append(before[1])
        np.testing.assert_array_equal(held[1].read(["front"])["front"], expected)
        assert all(np.array_equal(array, momentum[name]) for name, array in back.state().items())
        back.step(batch)  # of other memory than the one that was read
        np.testing.assert_array_equal(front.parameters()["front"], expected)
        front.load(back)
    assert len(set(places)) == 1
    assert held[1].spare("front") is held[1].current("front")


def test_a_trainer_takes_what_the_other_trains(models: dict[str, onnx.ModelProto], tmp_path: Path) -> None:
    """Not its frozen weights, which may be older than those here, nor the state of its optimizer."""
    options = {"loss": "mse", "optimizer": og.optim.Adam(1e-2)}
    front = og.Trainer(og.build_training(models["one"], freeze=["fc.*", "last.*"], **options))
    back = og.Trainer(og.build_training(models["one"], wrt=["fc.*", "last.*"], **options))
    back.step(BATCH)
    own = back.parameters()
    front.step(BATCH)
    back.load(front)
    assert all(np.array_equal(array, own[name]) for name, array in back.parameters().items())
    front.load(back)
    for trainer, name in ((front, "front.onnx"), (back, "back.onnx")):
        trainer.export(tmp_path / name)
    one, other = (stored(onnx.load(tmp_path / name)) for name in ("front.onnx", "back.onnx"))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert off(one["conv.weight"], stored(models["one"])["conv.weight"]) > 0


@pytest.mark.parametrize("options", [{}, {"precision": "float16"}, {"ema": 0.9}], ids=str)
def test_a_copy_of_a_trainer_goes_on_with_its_weights(
    models: dict[str, onnx.ModelProto], options: dict[str, Any]
) -> None:
    program = og.build_training(models["one"], loss="mse", optimizer="sgd", **options)
    first, second = og.Trainer(program), og.Trainer(program)
    first.step(BATCH)
    second.load(first)
    for name, array in {**first.parameters(), **first.state()}.items():
        if name in {entry.name for entry in program.manifest.stored()}:
            np.testing.assert_array_equal({**second.parameters(), **second.state()}[name], array)
    assert all(np.array_equal(array, second.predict({"x": X})[name]) for name, array in first.predict({"x": X}).items())
    assert first.step(BATCH)["loss"] == second.step(BATCH)["loss"]


def test_masters_are_taken_as_they_are() -> None:
    """The float32 copies of float16 weights are not rounded on the way."""
    model = graph_of("(float16[N, 2] x) => (float16[N, 2] y) <float16[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }")
    program = og.build_training(model, loss="mse", optimizer=og.optim.SGD(1e-3), precision="float16")
    first, second = og.Trainer(program), og.Trainer(program)
    batch = {"x": np.ones((3, 2), np.float16), "target": np.ones((3, 2), np.float16)}
    first.step(batch)
    second.load(first)
    (name,) = (s.name for s in program.manifest.state if s.slot == "master")
    assert first.state()[name].astype(np.float16).astype(np.float32).tolist() != first.state()[name].tolist()
    np.testing.assert_array_equal(second.state()[name], first.state()[name])


def test_trainers_without_a_common_name_share_nothing(models: dict[str, onnx.ModelProto]) -> None:
    trainer = og.Trainer(og.build_training(models["one"], loss="mse", optimizer="sgd"))
    small = graph_of("(float[N, 2] x) => (float[N, 2] y) <float[2, 2] w = {1, 2, 3, 4}> { y = MatMul (x, w) }")
    other = og.Trainer(og.build_training(small, loss="mse", optimizer="sgd"))
    with pytest.raises(og.errors.ArgumentError, match=r"trains no weight of a name that this one has: 'w' there"):
        trainer.load(other)


def test_checkpoints_hold_what_was_replaced(models: dict[str, onnx.ModelProto], tmp_path: Path) -> None:
    program = og.build_training(models["one"], loss="mse", optimizer="adam", freeze="last.*")
    first, second = og.Trainer(program), og.Trainer(program)
    first.save(tmp_path / "original.safetensors")
    first.load({"last.bias": np.float32([5, 7])})
    first.save(tmp_path / "replaced.safetensors")
    second.restore(tmp_path / "replaced.safetensors")
    assert second.evaluate_batch(BATCH)["loss"] == first.evaluate_batch(BATCH)["loss"]
    second.restore(tmp_path / "original.safetensors")
    assert second.evaluate_batch(BATCH)["loss"] == og.Trainer(program).evaluate_batch(BATCH)["loss"]
    one = og.Trainer(
        og.build_training(models["one"], loss="mse", optimizer="adam", freeze="last.*", wrt=["last.*", "fc.*"])
    )
    with pytest.raises(og.errors.CheckpointError, match="another program"):
        one.restore(tmp_path / "replaced.safetensors")


def test_what_is_replaced_must_fit(models: dict[str, onnx.ModelProto]) -> None:
    trainer = og.Trainer(og.build_training(models["one"], loss="mse", optimizer="adam", freeze="last.*"))
    with pytest.raises(og.errors.ArgumentError, match=r"'last.bias' has shape \(2,\), not \(3,\)"):
        trainer.load({"last.bias": np.zeros(3)})
    with pytest.raises(og.errors.ArgumentError, match=r"Unknown parameter or state 'last\.bia'.*last\.bias"):
        trainer.load({"last.bia": np.zeros(2)})


def test_merged_and_constant_weights_are_exported_apart(tmp_path: Path) -> None:
    """A copy of an equal weight, and a Constant node, become stored values of the exported file once they are replaced."""
    model = graph_of(
        """(float[N, 2] x) => (float[N, 2] y) <float[2] "a.gain" = {1, 1}, float[2, 2] w = {1, 2, 3, 4}>
        { copied = Identity ("a.gain") p = Mul (x, "a.gain") q = Mul (p, copied) y = MatMul (q, w) }"""
    )
    model.graph.node[0].output[0] = "b.gain"
    model.graph.node[2].input[1] = "b.gain"
    trainer = og.Trainer(og.build_training(model, loss="mse", optimizer="sgd", wrt="w"))
    trainer.load({"b.gain": np.float32([3, 5])})
    trainer.export(tmp_path / "m.onnx")
    x = np.float32([[1, 1]])
    np.testing.assert_array_equal(run(onnx.load(tmp_path / "m.onnx"), {"x": x})["y"], [[3 + 15, 6 + 20]])
    np.testing.assert_array_equal(trainer.predict({"x": x})["y"], [[3 + 15, 6 + 20]])
