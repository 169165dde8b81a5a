"""Running statistics of float16 models are averaged in float32 and never become infinite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.base.numbers import LARGEST
from tests.support.one_input import graph_of
from tests.support.thread_ranks import ThreadRank, on_ranks
from tests.support.training_nets import Feeds

BEYOND = 300.0
"""A deviation whose square no float16 number reaches."""


def net(kind: type[np.floating[Any]] = np.float16, shared: bool = False) -> onnx.ModelProto:
    name = {np.float16: "float16", np.float32: "float"}[kind]  # type: ignore[index]
    stored = {"scale": np.ones(2), "bias": np.zeros(2), "mean": np.zeros(2), "var": np.ones(2)}
    again = "z = BatchNormalization (h, scale, bias, mean, var)  y = Identity (z)" if shared else "y = Identity (h)"
    return graph_of(
        f"({name}[N,2,3,3] x) => ({name}[N,2,3,3] y) {{ h = BatchNormalization (x, scale, bias, mean, var)  {again} }}",
        opset=21,
        **{key: value.astype(kind) for key, value in stored.items()},
    )


def batch(step: int, kind: type[np.floating[Any]] = np.float16, size: int = 8) -> Feeds:
    rng = np.random.default_rng(step)
    x = rng.standard_normal((size, 2, 3, 3)) * np.array([1, BEYOND]).reshape(1, 2, 1, 1)
    return {
        "x": x.astype(np.float16).astype(kind),
        "target": rng.standard_normal(x.shape).astype(np.float16).astype(kind),
    }


def values(trainer: og.Trainer) -> Feeds:
    return {**trainer.parameters(), **trainer.state()}


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"optimizer": "adam"}, {"shared": True}], ids=str)
def test_a_variance_beyond_the_largest_float16_number_spoils_nothing(masters: bool, options: dict[str, Any]) -> None:
    optimizer = options.get("optimizer", og.optim.SGD(0.01, clip_norm=1.0))
    half, full = (
        og.Trainer(
            og.build_training(
                net(kind, "shared" in options),
                loss="mse",
                optimizer=optimizer,
                precision=og.MixedPrecision(master_weights=masters),
            )
        )
        for kind in (np.float16, np.float32)
    )
    count = options.get("accumulate", 1)
    for step in range(30):
        half.step(*(batch(step + 100 * i) for i in range(count)))
        full.step(*(batch(step + 100 * i, np.float32) for i in range(count)))
    got, want = values(half), values(full)
    assert all(np.isfinite(array.astype(np.float32)).all() for array in got.values())
    largest = LARGEST["float16"]
    np.testing.assert_allclose(got["var"].astype(np.float32), np.minimum(want["var"], largest), rtol=2e-2)
    assert want["var"][1] > largest * 1.2 or "shared" in options
    if masters:
        np.testing.assert_allclose(got["var_master"], want["var"], rtol=1e-3)
    np.testing.assert_allclose(got["scale"].astype(np.float32), want["scale"], rtol=2e-2)


def test_masters_of_statistics_are_kept_saved_and_follow_what_is_loaded(tmp_path: Path) -> None:
    program = og.build_training(net(), loss="mse", optimizer=og.optim.SGD(0.01))
    program.save(tmp_path / "program")
    first, second = og.Trainer(program), og.Trainer(tmp_path / "program")
    for step in range(3):
        first.step(batch(step))
    second.restore(first.save(tmp_path / "checkpoint.safetensors"))
    for trainer in (first, second):
        trainer.step(batch(7), batch(8))
    for name, value in values(first).items():
        np.testing.assert_array_equal(values(second)[name], value)
    first.load({"var": np.full(2, 5.0)})
    np.testing.assert_array_equal(first.state()["var_master"], np.full(2, 5, np.float32))


def test_the_exported_model_has_the_largest_number_and_a_warning_says_so(tmp_path: Path) -> None:
    trainer = og.Trainer(og.build_training(net(), loss="mse", optimizer=og.optim.SGD(0.01)))
    for step in range(30):
        trainer.step(batch(step))
    with pytest.warns(UserWarning, match=r"'var' is beyond 65504, the largest float16 number, in 1 channels"):
        trainer.export(tmp_path / "trained.onnx")
    stored = {i.name: onnx.numpy_helper.to_array(i) for i in onnx.load(tmp_path / "trained.onnx").graph.initializer}
    assert stored["var"].dtype == np.float16
    assert stored["var"][1] == LARGEST["float16"]


@pytest.mark.parametrize("together", [False, True])
def test_ranks_average_them_in_float32(together: bool) -> None:
    program = og.build_training(net(), loss="mse", optimizer=og.optim.SGD(0.01), sync_batchnorm=together)
    one = og.Trainer(program)

    def work(own: ThreadRank) -> Feeds:
        trainer = og.Trainer(program, distributed=own)
        for step in range(30):
            trainer.step({name: array[4 * own.rank : 4 * own.rank + 4] for name, array in batch(step).items()})
        return values(trainer)

    for step in range(30):
        one.step(batch(step))
    first, second = on_ranks(2, work)
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array)
        assert np.isfinite(array.astype(np.float32)).all()
    np.testing.assert_allclose(first["var_master"], one.state()["var_master"], rtol=1e-3 if together else 0.1)
    assert first["var"][1] == LARGEST["float16"]


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_they_are_those_of_a_float32_model_in_mixed_precision(masters: bool, shared: bool) -> None:
    half, full = (
        og.Trainer(og.build_training(net(kind, shared), loss="mse", optimizer=og.optim.SGD(0.0), **options))
        for kind, options in (
            (np.float16, {"precision": og.MixedPrecision("float16", master_weights=masters)}),
            (np.float32, {}),
        )
    )
    for step in range(4):
        half.step(batch(step), batch(step + 100))
        full.step(batch(step, np.float32), batch(step + 100, np.float32))
    got, want = values(half), values(full)
    for name in ("mean", "var"):
        np.testing.assert_allclose(got[name].astype(np.float32), want[name], rtol=2e-2, atol=2e-2)
        assert (f"{name}_master" in got) == masters
