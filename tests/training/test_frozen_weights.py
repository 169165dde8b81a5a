"""Frozen weights that are replaced: as if the program had been built from a model that stores the others."""

from __future__ import annotations

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
        back.load(
            {name: a for name, a in {**front.parameters(), **front.state()}.items() if name in back.manifest.frozen}
        )
        losses.append(back.step(BATCH)["loss"])
        front.load(back.parameters())
    assert losses == sorted(losses, reverse=True)


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
