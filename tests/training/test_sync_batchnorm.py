"""Training with `sync_batchnorm` on several ranks, which are threads here, equals training in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad import losses, optim
from onnx_convgrad.data.batches import shard_of
from onnx_convgrad.programs.precision import MixedPrecision
from tests.support.one_input import graph_of
from tests.support.thread_ranks import ThreadRank, on_ranks
from tests.support.training_nets import Feeds, build, same

CLASSES = 4
BRANCHES = f"""(float[N,2,5,5] x) => (float[N,{CLASSES}] y) {{
    a = Conv (x, k)  n = BatchNormalization (a, s, b, m, v)  r = Relu (n)
    c = Conv <pads = [1, 1, 1, 1]> (r, k2)  n2 = BatchNormalization <momentum = 0.7> (c, s2, b2, m2, v2)
    d = Conv (r, k3)  n3 = BatchNormalization (d, s3, b3, m3, v3)
    t = Add (n2, n3)  u = Relu (t)  p = GlobalAveragePool (u)  f = Flatten (p)  y = Gemm (f, w, z) }}"""
"""Two BatchNormalization nodes one after the other, and a third one beside the second."""


def net() -> Any:
    rng = np.random.default_rng(1)
    shapes = {"k": (6, 2, 3, 3), "k2": (6, 6, 3, 3), "k3": (6, 6, 1, 1), "w": (6, CLASSES), "z": (CLASSES,)}
    stored = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    for i in ("", "2", "3"):
        stored |= {f"s{i}": rng.uniform(0.5, 1.5, 6), f"b{i}": rng.standard_normal(6)}
        stored |= {f"m{i}": rng.standard_normal(6), f"v{i}": rng.uniform(0.5, 1.5, 6)}
    return graph_of(BRANCHES, **{name: array.astype(np.float32) for name, array in stored.items()})


def samples(count: int, seed: int) -> Feeds:
    """A batch whose first target is a class that every loss counts, with a mean that is far from zero."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, CLASSES, count)
    targets[0] = 0
    return {"x": (rng.standard_normal((count, 2, 5, 5)) + 3).astype(np.float32), "target": targets}


def shard(batch: Feeds, rank: int, size: int) -> Feeds:
    rows = shard_of(len(batch["target"]), rank, size)
    return {name: array[rows] for name, array in batch.items()}


def values(trainer: og.Trainer) -> Feeds:
    return {**trainer.parameters(), **trainer.state()}


def synchronized(
    program: og.TrainingProgram, size: int, batches: Sequence[Sequence[Feeds]], **options: Any
) -> list[tuple[list[float], Feeds]]:
    """Losses and values of every rank after the steps, each from several batches."""

    def work(own: ThreadRank) -> tuple[list[float], Feeds]:
        trainer = og.Trainer(program, distributed=own, options={"threads": 1}, **options)
        results = [trainer.step(*(shard(b, own.rank, size) for b in group), outputs=[]) for group in batches]
        return [float(r["loss"]) for r in results], values(trainer)

    return on_ranks(size, work)


WEIGHTED = losses.CrossEntropy(weight=[0.5, 1.0, 2.0, 0.0], ignore_index=1)
PROGRAMS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": optim.SGD(lr=0.01, momentum=0.9)},
    "adam": {"optimizer": optim.Adam(lr=0.01)},
    "clipped": {"optimizer": optim.SGD(lr=0.1, clip_norm=0.1)},
    "ignored and weighted": {"optimizer": optim.SGD(lr=0.01), "loss": WEIGHTED},
    "two terms": {"optimizer": optim.SGD(lr=0.01), "loss": [WEIGHTED, (0.1, losses.Focal(reduction="sum"))]},
}
QUICK = (("sgd", 2), ("ignored and weighted", 4), ("two terms", 2))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=() if (name, size) in QUICK else pytest.mark.slow)
        for name in PROGRAMS
        for size in (2, 4)
    ],
)
def test_ranks_equal_one_process(name: str, size: int) -> None:
    """20 steps of even and uneven batches, and of fewer samples than ranks; some shards have no label that counts."""
    program = build(net(), sync_batchnorm=True, **PROGRAMS[name])
    batches = [[samples(count, seed)] for seed, count in enumerate((8, 7, 3, 2) * 5)]
    alone = og.Trainer(program)
    wanted = [float(alone.step(*group, outputs=[])["loss"]) for group in batches]
    results = synchronized(program, size, batches)
    for found, state in results:
        np.testing.assert_allclose(found, wanted, rtol=2e-6)
        same(state, values(alone), rtol=2e-6, atol=2e-6)
        same(state, results[0][1])
    again = synchronized(program, size, batches)
    same(again[-1][1], results[0][1])


def test_accumulated_batches_make_one_update() -> None:
    program = build(net(), sync_batchnorm=True, loss=WEIGHTED, optimizer=optim.SGD(lr=0.01))
    batches = [[samples(1, 3 * i), samples(5, 3 * i + 1), samples(2, 3 * i + 2)] for i in range(4)]
    alone = og.Trainer(program)
    wanted = [float(alone.step(*group)["loss"]) for group in batches]
    for found, state in synchronized(program, 3, batches, shard_optimizer=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-6)
        same({k: v for k, v in values(alone).items() if k in state}, state, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("initial", [2.0**12, 2.0**30])
def test_float16_is_scaled(initial: float) -> None:
    """With the second scale some steps overflow; not the same as in one process, since sums over a shard may be larger."""
    program = build(
        net(), sync_batchnorm=True, precision=MixedPrecision("float16", init_scale=initial, growth_interval=100)
    )
    batches = [[samples(8, seed)] for seed in range(12)]
    alone = og.Trainer(program)
    for group in batches:
        alone.step(*group)
    scale = next(s.name for s in program.manifest.state if s.slot == "loss_scale")
    (_, state), (_, other) = synchronized(program, 2, batches)
    same(state, other)
    assert all(np.isfinite(array).all() for array in state.values())
    if initial == 2.0**12:
        assert state[scale] == alone.state()[scale] == initial
        same(state, values(alone), rtol=2e-2, atol=2e-2)
    else:
        assert 2.0**16 < state[scale] < initial


def test_without_it_each_rank_has_its_own_statistics() -> None:
    batches = [[samples(8, 0)]]
    alone = og.Trainer(build(net()))
    alone.step(*batches[0])
    (_, state), _ = synchronized(build(net()), 2, batches)
    assert np.abs(state["k"] - values(alone)["k"]).max() > 1e-4


def test_outputs_are_those_of_the_whole_batch() -> None:
    program, batch = build(net(), sync_batchnorm=True), samples(7, 0)
    wanted = og.Trainer(program).step(batch)["y"]

    def work(own: ThreadRank) -> np.ndarray:
        trainer = og.Trainer(program, distributed=own)
        return np.asarray(trainer.step(shard(batch, own.rank, 2))["y"])

    np.testing.assert_allclose(np.concatenate(on_ranks(2, work)), wanted, rtol=2e-6, atol=2e-6)


def test_layers_side_by_side_share_an_exchange(tmp_path: Path) -> None:
    """Of a saved program; the sums over ranks of a step are counted."""
    build(net(), sync_batchnorm=True).save(tmp_path / "program")
    program = og.TrainingProgram.load(tmp_path / "program")
    assert "convgrad" not in {node.domain for node in program.model("synchronized").graph}

    def work(own: ThreadRank) -> int:
        trainer = og.Trainer(program, distributed=own)
        trainer.step(samples(3, own.rank))
        before = own.calls
        trainer.step({} if own.rank else samples(3, 5))
        stages = trainer.engine._staged.stages  # type: ignore[attr-defined]
        assert [sum(x.kind == "moments" for x in stage.exchanges) for stage in stages] == [1, 2, 0, 0, 0]
        assert [sum(x.kind == "sum" for x in stage.exchanges) for stage in stages] == [0, 0, 2, 1, 0]
        return own.calls - before

    assert len(set(on_ranks(2, work))) == 1


@pytest.mark.parametrize("data", ["float[N,3]", "float[N,3,7]", "double[N,3]", "float[N,3,2,2,2]"])
def test_inputs_of_other_ranks(data: str) -> None:
    """A BatchNormalization of the input itself, with a shared set of statistics for two nodes."""
    kind = data.partition("[")[0]
    stored = {
        name: np.full(3, number, kind.replace("float", "float32"))
        for name, number in zip("sbmv", (2, 1, 0, 1), strict=True)
    }
    text = f"({data} x) => ({kind}[N,3] y) {{ n = BatchNormalization (x, s, b, m, v)  t = Tanh (n)  "
    text += "z = BatchNormalization (t, s, b, m, v)  u = Mul (z, s4)  r = Flatten (u)  y = MatMul (r, w) }"
    width = int(np.prod([int(d) for d in data.rstrip("]").split(",")[1:]]))
    dtype, rng = stored["s"].dtype, np.random.default_rng(0)
    stored |= {"w": rng.standard_normal((width, 3)).astype(dtype), "s4": np.ones((), dtype)}
    program = build(graph_of(text, **stored), sync_batchnorm=True, optimizer=optim.SGD(lr=0.01))
    shape = [5, *(int(d) for d in data.rstrip("]").split(",")[1:])]
    batches = [[{"x": rng.standard_normal(shape).astype(dtype), "target": rng.integers(0, 3, 5)}] for _ in range(4)]
    alone = og.Trainer(program)
    for group in batches:
        alone.step(*group)
    for _, state in synchronized(program, 2, batches):
        same(state, values(alone), rtol=2e-6, atol=2e-6 if kind == "float" else 1e-13)


def test_a_model_without_batch_normalization_needs_no_exchange() -> None:
    model = graph_of("(float[N,3] x) => (float[N,4] y) { y = MatMul (x, w) }", w=np.ones((3, 4), np.float32))
    assert "sync_batchnorm" not in build(model, sync_batchnorm=True).manifest.options
    with pytest.raises(og.errors.ArgumentError, match="sync_batchnorm"):
        build(net(), sync_batchnorm="yes")
