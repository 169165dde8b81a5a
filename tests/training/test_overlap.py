"""Sums of gradients that begin during the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad import losses, optim
from onnx_convgrad.data.batches import shard_of
from onnx_convgrad.programs.precision import MixedPrecision
from onnx_convgrad.training.flat_buffers import FlatBuffers
from onnx_convgrad.training.overlap import Background, OverlappedGraph, in_buckets
from onnx_convgrad.training.sessions import Accumulation
from tests.support.rank_program import net
from tests.support.thread_ranks import ThreadRank, on_ranks
from tests.support.training_nets import Feeds, build, same
from tests.training.test_parallel import zeros

CLASSES = 4


def batch(count: int, seed: int = 0) -> Feeds:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((count, 2, 6, 6)).astype(np.float32),
        "target": np.arange(count) % CLASSES,
    }


def stepped(
    program: og.TrainingProgram, groups: Sequence[Sequence[Feeds]], *, overlap: bool, size: int = 2
) -> list[tuple[list[float], Feeds]]:
    def work(own: ThreadRank) -> tuple[list[float], Feeds]:
        trainer = og.Trainer(program, distributed=own)
        found = []
        for group in groups:
            rows = [{name: array[shard_of(len(array), own.rank, size)] for name, array in b.items()} for b in group]
            found.append(float(trainer.step(*rows, outputs=[])["loss"]))
        return found, {**trainer.parameters(), **trainer.state()}

    return on_ranks(size, work, bucket=64, overlap=overlap)


IGNORED = losses.CrossEntropy(ignore_index=0)
PROGRAMS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": optim.Adam(lr=0.05)},
    "ignored": {"loss": IGNORED},
    "scaled": {"precision": MixedPrecision("float16", init_scale=2.0**24, growth_interval=3)},
}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "scaled"])
def test_results_have_the_bits_of_sums_after_the_backward_pass(name: str) -> None:
    """Batches of even and uneven size, of fewer samples than ranks, several to an update, and without any target."""
    program = build(net(), **PROGRAMS[name])
    groups = [[batch(8)], [batch(3)], [batch(1)], [batch(5, 1), batch(4, 2), batch(1, 3)], [batch(1)]]
    for (found, state), (wanted, other) in zip(
        stepped(program, groups, overlap=True), stepped(program, groups, overlap=False), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)
        same(state, other)


def test_float16_is_rounded_between_stages() -> None:
    """ONNX Runtime's CPU computes float16 in float32, and rounds where a session ends."""
    program = build(net(), **PROGRAMS["scaled"])
    groups = [[batch(count)] for count in (8, 3, 1, 8)]
    wanted = stepped(program, groups, overlap=False)[0][0]
    for found, _ in stepped(program, groups, overlap=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-3)


def test_more_ranks_agree() -> None:
    program = build(net(), optimizer=optim.Adam(lr=0.05))
    groups = [[batch(count)] for count in (8, 3)]
    results = stepped(program, groups, overlap=True, size=3)
    for _, state in results:
        same(state, results[0][1])
    same(results[0][1], stepped(program, groups, overlap=False, size=3)[0][1], rtol=2e-6)


def test_sums_begin_before_the_last_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    program = build(net())
    events: list[tuple[int, str]] = []
    run, add = OverlappedGraph._run, ThreadRank.all_reduce

    def noted_run(graph: OverlappedGraph, *arguments: Any) -> None:
        events.append((threading.get_ident(), "stage"))
        run(graph, *arguments)

    def noted_sum(own: ThreadRank, array: np.ndarray) -> None:
        if array.dtype == np.float32:
            events.append((threading.get_ident(), "sum"))
        add(own, array)

    monkeypatch.setattr(OverlappedGraph, "_run", noted_run)
    monkeypatch.setattr(ThreadRank, "all_reduce", noted_sum)
    adding = Background.add

    def at_once(background: Background, call: Any) -> None:
        adding(background, call)
        background.wait()

    monkeypatch.setattr(Background, "add", at_once)
    stepped(program, [[batch(8)]], overlap=True)
    kinds = [kind for _, kind in events]
    assert kinds.count("stage") > 2
    assert "stage" in kinds[kinds.index("sum") :]
    assert {who for who, kind in events if kind == "sum"}.isdisjoint({who for who, kind in events if kind == "stage"})


def test_an_error_in_the_background_is_raised() -> None:
    background, seen = Background(), []

    def fail() -> None:
        raise ValueError("lost")

    background.add(lambda: seen.append(1))
    background.add(fail)
    background.add(lambda: seen.append(2))
    with pytest.raises(ValueError, match="lost"):
        background.wait()
    background.wait()
    assert seen == [1, 2]


def test_buckets_follow_the_order_of_the_graph() -> None:
    program = build(net())
    sums = Accumulation(program.model("gradients"), program.manifest)
    graph = program.model("gradients").graph
    gradients = {p.gradient for p in program.manifest.parameters}
    made = [v.name for node in graph for v in node.outputs if v.name in gradients]
    buckets = in_buckets(sums.model.graph, list(sums.writes), 2)
    assert [sums.writes[name] for bucket in buckets for name in bucket] == made
    assert len(buckets) == 2


def test_pieces_of_flat_buffers() -> None:
    flat = FlatBuffers({"a": ((3,), "float32"), "b": ((2, 2), "float32"), "c": ((5,), "float64")})
    for number, name in enumerate("abc"):
        flat.values[name].numpy()[...] = number + 1
    first, second = flat.pieces(["b", "c"])
    assert set(first.tolist()) == {0.0, 2.0}
    assert first.sum() == 8
    assert second.sum() == 15
    assert np.shares_memory(first, flat.arrays[0])


def test_flat_buffers_of_tensors_share_their_memory() -> None:
    flat = FlatBuffers({"a": ((3,), "float32"), "b": ((2, 2), "float32")}, zeros)
    flat.values["b"].update_inplace(np.full((2, 2), 3, np.float32))
    assert flat.pieces(["b"])[0].sum() == 12
    flat.clear()
    assert not flat.values["b"].numpy().any()
