"""Training on several ranks, which are threads here, equals training in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad import callbacks, losses, optim, schedules
from onnx_convgrad.data.batches import shard_of
from onnx_convgrad.distributed import Communicator
from onnx_convgrad.programs.precision import MixedPrecision
from onnx_convgrad.training.flat_buffers import FlatBuffers
from onnx_convgrad.training.parallel import ParallelEngine
from tests.support.one_input import graph_of
from tests.support.thread_ranks import ThreadRank, on_ranks
from tests.support.training_nets import Feeds, arrays, build, exported, same

CLASSES = 4


def net(dtype: str = "float") -> Any:
    """Two layers, without anything that mixes samples."""
    rng = np.random.default_rng(1)
    kind = np.float64 if dtype == "double" else np.float32
    shapes = {"w": (3, 6), "b": (6,), "v": (6, CLASSES), "c": (CLASSES,)}
    stored = {name: rng.standard_normal(shape).astype(kind) for name, shape in shapes.items()}
    return graph_of(
        f"({dtype}[N,3] x) => ({dtype}[N,{CLASSES}] y) {{ h = Gemm (x, w, b)  a = Tanh (h)  y = Gemm (a, v, c) }}",
        **stored,
    )


def samples(count: int, seed: int = 0, dtype: type = np.float32) -> Feeds:
    """A batch whose first target is a class that every loss counts."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, CLASSES, count)
    targets[0] = 0
    return {"x": rng.standard_normal((count, 3)).astype(dtype), "target": targets}


def shard(batch: Feeds, rank: int, size: int) -> Feeds:
    rows = shard_of(len(batch["target"]), rank, size)
    return {name: array[rows] for name, array in batch.items()}


def values(trainer: og.Trainer) -> Feeds:
    return {**trainer.parameters(), **trainer.state()}


WEIGHTED = losses.CrossEntropy(weight=[0.5, 1.0, 2.0, 0.0], ignore_index=1)
PROGRAMS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adam": {"optimizer": optim.Adam(lr=0.05)},
    "clipped": {"optimizer": optim.SGD(lr=0.5, momentum=0.9, clip_norm=0.1)},
    "ignored and weighted": {"loss": WEIGHTED},
    "summed": {"loss": losses.CrossEntropy(reduction="sum"), "optimizer": optim.SGD(lr=0.01)},
    "average": {"ema": 0.9},
    "scheduled": {"optimizer": optim.SGD(lr=schedules.Cosine(0.1, 10))},
}


def stepped(
    program: og.TrainingProgram, size: int, batches: Sequence[Sequence[Feeds]]
) -> list[tuple[list[float], Feeds]]:
    """Losses and values of every rank after the steps, each from several batches."""

    def work(own: ThreadRank) -> tuple[list[float], Feeds]:
        trainer = og.Trainer(program, distributed=own)
        results = [trainer.step(*(shard(b, own.rank, size) for b in group), outputs=[]) for group in batches]
        return [float(r["loss"]) for r in results], values(trainer)

    return on_ranks(size, work, bucket=64)


QUICK = (("adam", 4), ("clipped", 2), ("ignored and weighted", 2))
CASES = [
    pytest.param(name, size, marks=() if (name, size) in QUICK else pytest.mark.slow)
    for name in PROGRAMS
    for size in (2, 4)
]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_ranks_equal_one_process(name: str, size: int) -> None:
    """Batches of even and uneven size, and of fewer samples than ranks."""
    program = build(net(), **PROGRAMS[name])
    batches = [[samples(count, seed)] for seed, count in enumerate((8, 7, 3, 1) * 5)]
    alone = og.Trainer(program)
    wanted = [float(alone.step(*group, outputs=[])["loss"]) for group in batches]
    results = stepped(program, size, batches)
    assert np.isfinite(wanted).all()
    for found, state in results:
        np.testing.assert_allclose(found, wanted, rtol=2e-6)
        same(state, values(alone), rtol=2e-6)
        same(state, results[0][1])
    again = stepped(program, size, batches)
    same(again[-1][1], results[0][1])


def test_float64_is_exact_to_the_last_digits() -> None:
    program = build(net("double"), optimizer=optim.Adam(lr=0.05))
    batches = [[samples(9, seed, np.float64)] for seed in range(10)]
    alone = og.Trainer(program)
    for group in batches:
        alone.step(*group)
    for _, state in stepped(program, 2, batches):
        same(state, values(alone), rtol=1e-12)


def test_accumulated_batches_make_one_update() -> None:
    program = build(net(), loss=WEIGHTED)
    batches = [[samples(5, 3 * i), samples(1, 3 * i + 1), samples(8, 3 * i + 2)] for i in range(5)]
    alone = og.Trainer(program)
    wanted = [float(alone.step(*group)["loss"]) for group in batches]
    assert np.isfinite(wanted).all()
    for found, state in stepped(program, 3, batches):
        np.testing.assert_allclose(found, wanted, rtol=2e-6)
        same(state, values(alone), rtol=2e-6)


def test_a_rank_whose_targets_are_all_ignored() -> None:
    program = build(net(), loss=losses.CrossEntropy(ignore_index=1))
    batch = samples(6)
    batch["target"][:] = [0, 2, 3, 1, 1, 1]
    alone = og.Trainer(program)
    wanted = [float(alone.step(batch)["loss"]) for _ in range(3)]
    for found, state in stepped(program, 2, [[batch]] * 3):
        np.testing.assert_allclose(found, wanted, rtol=2e-6)
        same(state, values(alone), rtol=2e-6)


def test_loss_scaling_skips_the_same_steps() -> None:
    program = build(net(), precision=MixedPrecision("float16", init_scale=2.0**24, growth_interval=3))
    batches = [[samples(8, seed)] for seed in range(12)]
    alone = og.Trainer(program)
    for group in batches:
        alone.step(*group)
    scale = next(s.name for s in program.manifest.state if s.slot == "loss_scale")
    results = stepped(program, 2, batches)
    for _, state in results:
        assert state[scale] == alone.state()[scale]
        same(state, values(alone), rtol=5e-3, atol=5e-3)
        same(state, results[0][1])


def test_batch_normalization_normalizes_each_shard() -> None:
    """N ranks equal `trainer.step` of N batches, except running statistics, which are averaged."""
    program = build(exported(training=True))
    alone = og.Trainer(program)
    drop = [s.name for s in program.manifest.state if s.kind == "random"]
    statistics = [s for s in program.manifest.state if s.kind == "statistic"]
    before = alone.state()

    def work(own: ThreadRank) -> tuple[Feeds, Feeds]:
        trainer = og.Trainer(program, distributed=own)
        trainer.step(shard(arrays(0), own.rank, 2), outputs=[])
        return trainer.state(), trainer.parameters()

    results = on_ranks(2, work)
    assert results[0][0][drop[0]] != results[1][0][drop[0]]
    each = []
    for rank in range(2):
        other = og.Trainer(program)
        other.load({drop[0]: results[rank][0][drop[0]] - 1})
        other.step(shard(arrays(0), rank, 2))
        each.append(other.state())
    for s in statistics:
        wanted = (each[0][s.name] + each[1][s.name]) / 2
        assert not np.array_equal(wanted, before[s.name])
        for state, _ in results:
            np.testing.assert_allclose(state[s.name], wanted, rtol=1e-6)
    same(results[0][1], results[1][1])


@pytest.mark.parametrize(
    "optimizer", [optim.Adam(lr=0.05, clip_norm=0.5), pytest.param(optim.SGD(lr=0.05), marks=pytest.mark.slow)]
)
def test_a_divided_optimizer_gives_the_same_bits(optimizer: Any, tmp_path: Path) -> None:
    """Every rank holds a part of the state; checkpoints have all of it, and go on undivided and with other ranks."""
    program = build(net(), optimizer=optimizer, ema=0.9)
    batches = [samples(7, seed) for seed in range(6)]
    slots = [s.name for s in program.manifest.state if s.of is not None and s.slot != "ema"]

    def work(own: ThreadRank, *, divided: bool, name: str, start: str = "") -> tuple[Feeds, set[str], Feeds]:
        trainer = og.Trainer(program, distributed=own, shard_optimizer=divided)
        if start:
            trainer.restore(tmp_path / start)
        for batch in batches:
            trainer.step(shard(batch, own.rank, own.size), outputs=[])
        trainer.save(tmp_path / name)
        return values(trainer), set(trainer.engine.held()), trainer.evaluate_batch(batches[0])

    whole = on_ranks(3, lambda own: work(own, divided=False, name="whole.safetensors"))
    parts = on_ranks(3, lambda own: work(own, divided=True, name="parts.safetensors"))
    for (found, _, evaluated), (wanted, _, expected) in zip(parts, whole, strict=True):
        same(found, wanted)
        same(evaluated, expected)
    if slots:
        assert sum(name in held for name in slots for _, held, _ in parts) == len(slots)
        assert sum(any(name in held for name in slots) for _, held, _ in parts) > 1
    for size in (1, 2):
        on = [
            on_ranks(size, lambda own, d=divided, s=start: work(own, divided=d, name="end.safetensors", start=s))[0][0]
            for start, divided in (("whole.safetensors", False), ("parts.safetensors", True))
        ]
        same(on[1], on[0])


def test_a_divided_optimizer_of_fewer_parameters_than_ranks() -> None:
    program = build(net(), wrt=build(net()).manifest.parameters[0].name, optimizer=optim.Adam(lr=0.05))

    def work(own: ThreadRank, *, divided: bool) -> Feeds:
        trainer = og.Trainer(program, distributed=own, shard_optimizer=divided)
        for seed in range(2):
            trainer.step(shard(samples(7, seed), own.rank, own.size), outputs=[])
        return values(trainer)

    whole, parts = (on_ranks(2, lambda own, d=divided: work(own, divided=d)) for divided in (False, True))
    for found, wanted in zip(parts, whole, strict=True):
        same(found, wanted)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("divided", [False, True])
def test_values_on_another_device(divided: bool, tensors: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass through the main memory, but for gradients in tensors that the communicator adds up where they are."""
    monkeypatch.setattr(ParallelEngine, "_in_main_memory", lambda _: False)
    if tensors:
        monkeypatch.setattr(ThreadRank, "on_device", lambda *_: zeros, raising=False)
    program = build(net(), optimizer=optim.Adam(lr=0.05))
    batches = [samples(count, count) for count in (8, 1, 5)]
    alone = og.Trainer(program)
    for batch in batches:
        alone.step(batch)

    def work(own: ThreadRank) -> Feeds:
        trainer = og.Trainer(program, distributed=own, shard_optimizer=divided)
        for batch in batches:
            trainer.step(shard(batch, own.rank, 2), outputs=[])
        return values(trainer)

    for state in on_ranks(2, work, overlap=overlap):
        same(state, values(alone), rtol=2e-6)


def zeros(size: int, dtype: np.dtype[Any]) -> Any:
    import torch

    return torch.zeros(size, dtype=getattr(torch, dtype.name))


# -- fit ---------------------------------------------------------------------------------------------------------------


def fitted(
    program: og.TrainingProgram, own: Communicator | None, data: Any, epochs: int = 2, **options: Any
) -> og.Trainer:
    trainer = og.Trainer(program, seed=3, distributed=own)
    folder = options.pop("restore", None)
    if folder is not None:
        trainer.restore(folder)
    trainer.fit(data, epochs=epochs, batch_size=10, progress="none", **options)
    return trainer


METRICS = ["accuracy", "confusion", "auroc"]


@pytest.mark.parametrize("kind", [dict, list])
def test_fit_equals_one_process(kind: type) -> None:
    program, data = build(net(), loss=WEIGHTED), samples(43)
    given: Any = data
    if kind is list:
        given = [{k: v[i : i + 10] for k, v in data.items()} for i in range(0, 43, 10)]
    options: dict[str, Any] = {"validation": samples(13, 9), "metrics": METRICS, "accumulate": 2}
    alone = fitted(program, None, given, **options)

    def work(own: ThreadRank) -> og.Trainer:
        return fitted(program, own, given, **options)

    for trainer in on_ranks(3, work):
        same(values(trainer), values(alone), rtol=2e-6)
        for found, wanted in zip(trainer.progress.history, alone.progress.history, strict=True):
            assert found.keys() == wanted.keys()
            for name in wanted.keys() - {"seconds", "samples_per_second"}:
                np.testing.assert_allclose(found[name], wanted[name], rtol=2e-6, err_msg=name)
        with pytest.raises(og.errors.ArgumentError, match="search for a learning rate"):
            trainer.find_learning_rate(given)


def test_only_one_rank_writes_and_another_number_goes_on(tmp_path: Path) -> None:
    """A run of 2 ranks is stopped in the middle of an epoch; 3 go on and end like one that was never stopped."""
    program, data = build(net()), samples(60)
    whole = fitted(program, None, data, metrics=METRICS)
    folder = tmp_path / "checkpoints"

    class Stop(callbacks.Callback):
        def on_step(self, run: Any, results: Any) -> None:  # noqa: ARG002
            if run.trainer.progress.steps == 4 and run.trainer.ranks.rank == 1:
                run.stop("enough")

    def first(own: ThreadRank) -> int:
        saved = callbacks.Checkpoints(folder, every_steps=2)
        log = callbacks.Log(tmp_path / f"log{own.rank}.csv")
        trainer = fitted(program, own, data, metrics=METRICS, callbacks=[log, saved, Stop()])
        return trainer.progress.steps

    assert on_ranks(2, first) == [4, 4]
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000002.safetensors", "step-00000004.safetensors"]

    def second(own: ThreadRank) -> og.Trainer:
        log = callbacks.Log(tmp_path / f"log{own.rank}.csv")
        saved = callbacks.Checkpoints(folder, every_steps=2)
        trainer = fitted(program, own, data, metrics=METRICS, callbacks=[log, saved], restore=folder)
        trainer.export(tmp_path / f"trained{own.rank}.onnx")
        return trainer

    for trainer in on_ranks(3, second):
        same(values(trainer), values(whole), rtol=2e-6)
        for found, wanted in zip(trainer.progress.history, whole.progress.history, strict=True):
            for name in ("loss", *METRICS):
                np.testing.assert_allclose(found[name], wanted[name], rtol=2e-6, err_msg=name)
    assert {p.name for p in tmp_path.iterdir() if p.is_file()} == {"log0.csv", "trained0.onnx"}


def test_a_run_with_dropout_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    program = build(exported(training=True))
    data = {name: np.concatenate([arrays(i)[name] for i in range(4)]) for name in arrays(0)}

    def run(own: ThreadRank, *, stop: bool) -> Feeds:
        folder = tmp_path / str(stop)
        saved = callbacks.Checkpoints(folder, every_steps=2)
        if not stop:
            return values(fitted(program, own, data, callbacks=[saved]))
        fitted(program, own, data, epochs=1, callbacks=[saved])
        return values(fitted(program, own, data, callbacks=[callbacks.Checkpoints(folder)], restore=folder))

    whole = on_ranks(2, lambda own: run(own, stop=False))
    assert len({int(v[n]) for v in whole for n in v if np.asarray(v[n]).dtype == np.int32}) == 2
    for found, wanted in zip(on_ranks(2, lambda own: run(own, stop=True)), whole, strict=True):
        same(found, wanted)


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(work: Callable[[ThreadRank], object], match: str) -> None:
    def checked(own: ThreadRank) -> None:
        with pytest.raises(og.ConvGradError, match=match):
            work(own)

    on_ranks(2, checked)


def test_different_ranks_are_refused_at_the_start() -> None:
    program, other = build(net()), build(net(), optimizer=optim.SGD(lr=0.06, momentum=0.9))
    refused(
        lambda own: og.Trainer(other if own.rank else program, distributed=own), "Rank 1 of 2 has another optimizer"
    )
    refused(lambda own: og.Trainer(program, seed=own.rank, distributed=own), r"another seed than rank 0: \[1, 0\], not")
    moved = build(net())

    def fit(own: ThreadRank, counts: Sequence[int], **options: Any) -> None:
        fitted(moved, own, samples(counts[own.rank], options.pop("seed", 0)), **options)

    refused(lambda own: fit(own, (40, 41)), "another description of the data")
    refused(lambda own: fit(own, (40, 40), seed=own.rank), "another content of the first samples")
    refused(lambda own: fit(own, (40, 40), epochs=1 + own.rank), "another number of epochs than rank 0: 2, not 1")
    refused(lambda own: fit(own, (40, 40), accumulate=1 + own.rank), "another number of batches per update")


def test_what_ranks_cannot_train() -> None:
    fixed = build(og.load(net(), input_shapes={"x": [10, 3]}))
    refused(lambda own: fitted(fixed, own, samples(40)), "batches of 10, which 2 ranks cannot divide")
    whole = build(net(), loss=losses.CrossEntropy(reduction="none"))
    refused(lambda own: og.Trainer(whole, distributed=own), "not one number")


def test_ranks_with_other_bits_are_noticed() -> None:
    program = build(net())

    def work(own: ThreadRank) -> None:
        trainer = og.Trainer(program, distributed=own)
        if own.rank:
            trainer.load({"c": trainer.parameters()["c"] + 1})
        with pytest.raises(og.errors.ExecutionError, match="Rank 1 of 2 has other parameters than rank 0"):
            trainer.fit(samples(20), progress="none")

    on_ranks(2, work)


def test_flat_buffers_are_aligned() -> None:
    flat = FlatBuffers({"a": ((3,), "float32"), "b": ((2, 5), "float32"), "c": ((), "float64"), "d": ((0,), "float64")})
    assert [a.dtype for a in flat.arrays] == [np.float32, np.float64]
    views = {name: value.numpy() for name, value in flat.values.items()}
    assert {name: v.shape for name, v in views.items()} == {"a": (3,), "b": (2, 5), "c": (), "d": (0,)}
    for name in "abc":
        assert views[name].ctypes.data % 64 == 0
        views[name][...] = 7
    assert flat.arrays[0].sum() == 7 * 13
    flat.clear()
    assert views["b"].sum() == 0


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_get_frozen_weights_from_a_checkpoint(tmp_path: Path, *, sharded: bool, overlap: bool) -> None:
    """Weights that were replaced in one process are those of all ranks that continue from its checkpoint."""
    model = net()
    program = og.build_training(model, loss="cross_entropy", optimizer=optim.Adam(lr=0.05), freeze=["v", "c"])
    alone, batch = og.Trainer(program), samples(8)
    alone.load({"v": np.ones((6, CLASSES), np.float32), "c": np.arange(CLASSES)})
    alone.save(tmp_path / "start.safetensors")

    def work(own: ThreadRank) -> Feeds:
        own.overlap = overlap
        trainer = og.Trainer(program, distributed=own, shard_optimizer=sharded)
        trainer.step(shard(batch, own.rank, 2))
        trainer.restore(tmp_path / "start.safetensors")
        for _ in range(2):
            trainer.step(shard(batch, own.rank, 2))
        trainer.save(tmp_path / f"{sharded}{overlap}.safetensors")
        return values(trainer)

    found = on_ranks(2, work)
    for _ in range(2):
        alone.step(batch)
    for one in found:
        same(one, values(alone), rtol=1e-4, atol=1e-6)
    again = og.Trainer(program)
    again.restore(tmp_path / f"{sharded}{overlap}.safetensors")
    assert again.evaluate_batch(batch)["loss"] == pytest.approx(alone.evaluate_batch(batch)["loss"], rel=1e-4)
