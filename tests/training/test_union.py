"""Batches of any sizes, on any number of ranks, give the loss and the gradients of their union."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnx_convgrad as og
from onnx_convgrad import losses
from tests.support.one_input import graph_of
from tests.support.thread_ranks import ThreadRank, on_ranks
from tests.support.training_nets import Feeds

CLASSES, POSITIONS = 3, 4


class Masked(losses.Loss):
    """The mean square of the entries that a mask chooses."""

    def more_targets(self, y: ir.Value) -> dict[str, Any]:
        return {"mask": (ir.DataType.FLOAT, y.shape)}

    def __call__(self, e: Any, y: ir.Value, target: ir.Value, mask: ir.Value) -> ir.Value:
        total = e.op("ReduceSum", e.mul(mask, e.square(e.sub(y, target))), keepdims=0)
        return e.div(total, e.op("ReduceSum", mask, keepdims=0))


class MaskedPair(Masked):
    """The numbers of the loss as a pair."""

    def __call__(self, e: Any, y: ir.Value, target: ir.Value, mask: ir.Value) -> Any:
        return e.mul(mask, e.square(e.sub(y, target))), mask


def squares(e: Any, y: ir.Value, target: ir.Value) -> ir.Value:
    return e.square(e.sub(y, target))


def total(e: Any, y: ir.Value, target: ir.Value) -> ir.Value:
    return e.mul(e.op("ReduceSum", squares(e, y, target), keepdims=0), 0.5)


def total_with_axes(e: Any, y: ir.Value, target: ir.Value) -> ir.Value:
    """Its shape is [1, 1, 1], as reductions leave it that keep their axes."""
    return e.op("Transpose", e.op("ReduceSum", squares(e, y, target)), perm=[2, 0, 1])


def sum_and_mean_with_axes(e: Any, y: ir.Value, target: ir.Value) -> ir.Value:
    return e.add(e.mul(total_with_axes(e, y, target), 0.1), e.op("ReduceMean", squares(e, y, target)))


def mean_of_sums(e: Any, y: ir.Value, target: ir.Value) -> ir.Value:
    return e.op("ReduceMean", e.reduce_sum(squares(e, y, target), [1, 2], keepdims=False), keepdims=0)


def by_size(e: Any, y: ir.Value, target: ir.Value) -> ir.Value:
    error = squares(e, y, target)
    return e.div(e.op("ReduceSum", error, keepdims=0), e.cast(e.op("Size", error), ir.DataType.FLOAT))


def chosen(e: Any, y: ir.Value, target: ir.Value, mask: ir.Value) -> ir.Value:
    flat = [e.op("Reshape", v, e.ints([-1])) for v in (squares(e, y, target), mask)]
    return e.op("ReduceMean", e.op("Compress", flat[0], e.cast(flat[1], ir.DataType.BOOL)), keepdims=0)


class MaskedWithAxes(Masked):
    """The loss with shape [1, 1, 1]."""

    def __call__(self, e: Any, y: ir.Value, target: ir.Value, mask: ir.Value) -> ir.Value:
        return e.div(e.op("ReduceSum", e.mul(mask, e.square(e.sub(y, target)))), e.op("ReduceSum", mask))


class Chosen(Masked):
    """The loss from its entries alone."""

    def __call__(self, e: Any, y: ir.Value, target: ir.Value, mask: ir.Value) -> ir.Value:
        return chosen(e, y, target, mask)


class Guarded(Masked):
    """The mean is 0 where nothing counts."""

    def __call__(self, e: Any, y: ir.Value, target: ir.Value, mask: ir.Value) -> ir.Value:
        total = e.op("ReduceSum", e.mul(mask, squares(e, y, target)), keepdims=0)
        return e.div(total, e.op("Max", e.op("ReduceSum", mask, keepdims=0), e.scalar(1, y)))


class GuardedPair(Masked):
    def __call__(self, e: Any, y: ir.Value, target: ir.Value, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
        count = e.op("Clip", e.op("ReduceSum", mask, keepdims=0), e.scalar(1e-6, y))
        return e.mul(mask, squares(e, y, target)), count


class ChosenAlongAxis(Masked):
    """A mask is compressed along an axis of its own."""

    def __call__(self, e: Any, y: ir.Value, target: ir.Value, mask: ir.Value) -> ir.Value:
        flat = [e.op("Reshape", v, e.ints([-1])) for v in (squares(e, y, target), mask)]
        return e.op("ReduceMean", e.op("Compress", flat[0], e.cast(flat[1], ir.DataType.BOOL), axis=0), keepdims=0)


class Picked(Masked):
    """Entries by their numbers."""

    def __call__(self, e: Any, y: ir.Value, target: ir.Value, mask: ir.Value) -> ir.Value:
        flat = [e.op("Reshape", v, e.ints([-1])) for v in (squares(e, y, target), mask)]
        places = e.op("Squeeze", e.op("NonZero", flat[1]), e.ints([0]))
        return e.op("ReduceMean", e.op("Gather", flat[0], places), keepdims=0)


def both(e: Any, y: ir.Value, target: ir.Value) -> ir.Value:
    return e.sub(losses.CrossEntropy()(e, y, target), e.mul(losses.Dice()(e, y, target), -0.5))


def with_penalty(e: Any, y: ir.Value, target: ir.Value) -> ir.Value:
    w = next(v for v in e.graph.inputs if v.name == "w")
    return e.add(losses.L1(reduction="sum")(e, y, target), e.op("ReduceSumSquare", w, keepdims=0))


INDEX, REAL, MASK = "index", "real", "mask"
LOSSES: dict[str, tuple[Any, str]] = {
    "mse": ("mse", REAL),
    "l1 sum": (losses.L1(reduction="sum"), REAL),
    "binary": (losses.BCEWithLogits(pos_weight=2.0), REAL),
    "cross entropy": ("cross_entropy", INDEX),
    "weighted": (losses.CrossEntropy(weight=[0.5, 0.0, 2.0]), INDEX),
    "smoothed": (losses.CrossEntropy(weight=[0.5, 1.0, 2.0], label_smoothing=0.1), INDEX),
    "focal sum": (losses.Focal(reduction="sum"), INDEX),
    "dice": ("dice", INDEX),
    "probabilities": (losses.CrossEntropy(probabilities=True), REAL),
    "batchmean": (losses.KLDiv(reduction="batchmean", temperature=2.0), REAL),
    "two terms": ([losses.CrossEntropy(weight=[1.0, 3.0, 0.2]), (0.5, "dice"), (2.0, "focal")], INDEX),
    "a sum and a mean": ([losses.Focal(reduction="sum"), "dice"], INDEX),
    "masked": (Masked(), MASK),
    "chosen": (Chosen(), MASK),
    "masked and guarded": (Guarded(), MASK),
    "guarded pair": (GuardedPair(), MASK),
    "chosen along an axis": (ChosenAlongAxis(), MASK),
    "picked": (Picked(), MASK),
    "guarded and picked": ([Guarded(), (0.3, Picked()), (0.2, "mse")], MASK),
    "masked pair": (MaskedPair(), MASK),
    "masked pair, summed": (MaskedPair(reduction="sum"), MASK),
    "two masked": ([MaskedPair(), (0.3, "mse"), (0.1, MaskedPair(reduction="sum"))], MASK),
    "own entries": (squares, REAL),
    "own entries, summed": (losses.Custom(squares, reduction="sum"), REAL),
    "own sum": (total, REAL),
    "own sum with axes": (total_with_axes, REAL),
    "own sum and mean with axes": (sum_and_mean_with_axes, REAL),
    "masked with axes": (MaskedWithAxes(), MASK),
    "two masked with axes": ([MaskedWithAxes(), (0.3, total_with_axes)], MASK),
    "own mean of sums": (mean_of_sums, REAL),
    "own mean by size": (by_size, REAL),
    "own sum of class losses": (both, INDEX),
    "own penalty": (with_penalty, REAL),
}

MODEL = graph_of(
    f"(float[N,2,L] x) => (float[N,{CLASSES},L] y) {{ y = Conv (x, w) }}",
    w=np.random.default_rng(0).standard_normal((CLASSES, 2, 1)).astype(np.float32),
)
PROGRAMS: dict[str, og.TrainingProgram] = {}


def program(name: str) -> og.TrainingProgram:
    if name not in PROGRAMS:
        PROGRAMS[name] = og.build_training(MODEL, loss=LOSSES[name][0], optimizer=og.optim.SGD(0.01))
    return PROGRAMS[name]


def batch(kind: str, count: int, positions: int, seed: int) -> Feeds:
    rng = np.random.default_rng(seed)
    shape = (count, CLASSES, positions)
    found: Feeds = {"x": rng.standard_normal((count, 2, positions)).astype(np.float32)}
    if kind == INDEX:
        found["target"] = rng.integers(0, CLASSES, (count, positions))
        found["target"][rng.random((count, positions)) < rng.random((count, 1))] = -100
        found["target"][0, 0] = 0
        return found
    found["target"] = rng.random(shape).astype(np.float32)
    if kind == MASK:
        found["target_mask"] = (rng.random(shape) < rng.random((count, 1, 1))).astype(np.float32)
        found["target_mask"][0, 0, 0] = 1
    return found


@pytest.mark.parametrize("name", [name for name, (_, kind) in LOSSES.items() if kind == MASK])
def test_a_batch_in_which_nothing_counts(name: str) -> None:
    parts = [batch(MASK, 3, POSITIONS, 0), batch(MASK, 2, POSITIONS, 1)]
    parts[1]["target_mask"][:] = 0
    union = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    trainer = og.Trainer(program(name))
    want = trainer.gradients(union)["w"]
    for several in (parts, parts[::-1]):
        np.testing.assert_allclose(trainer.gradients(*several)["w"], want, rtol=1e-4, atol=1e-6)
    loss = float(trainer.evaluate_batch(union)["loss"])
    assert trainer.evaluate(parts)["loss"] == pytest.approx(loss, rel=1e-4)
    assert float(trainer.step(*parts)["loss"]) == pytest.approx(loss, rel=1e-4)


def cut(arrays: Feeds, sizes: list[int]) -> list[Feeds]:
    return [{k: a[i:j] for k, a in arrays.items()} for i, j in pairwise(np.cumsum([0, *sizes]))]


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=6)
@given(sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_batches_give_the_loss_and_the_gradients_of_their_union(name: str, sizes: list[int], seed: int) -> None:
    union = batch(LOSSES[name][1], sum(sizes), POSITIONS, seed)
    parts = cut(union, sizes)
    one, several, apart = (og.Trainer(program(name)) for _ in range(3))
    validated = apart.evaluate(parts)["loss"]
    assert validated == pytest.approx(float(apart.evaluate_batch(union)["loss"]), rel=1e-4)
    want, got = one.step(union), several.step(*parts)
    assert set(got) == set(want)
    for key in set(want) - {"y"}:
        assert float(got[key]) == pytest.approx(float(want[key]), rel=1e-4, abs=1e-6), key
    np.testing.assert_allclose(several.parameters()["w"], one.parameters()["w"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["two terms", "two masked", "own sum of class losses", "own sum", "weighted"])
def test_ranks_give_the_loss_and_the_gradients_of_their_union(name: str) -> None:
    union = batch(LOSSES[name][1], 7, POSITIONS, 5)
    parts = cut(union, [1, 3, 2, 1])
    one = og.Trainer(program(name))
    validated, want = one.evaluate([union])["loss"], one.step(union)

    def work(own: ThreadRank) -> tuple[float, float, np.ndarray]:
        trainer = og.Trainer(program(name), distributed=own)
        means = trainer.evaluate([union])["loss"]
        loss = trainer.step(*parts[2 * own.rank : 2 * own.rank + 2])["loss"]
        return means, float(loss), trainer.parameters()["w"]

    for means, loss, w in on_ranks(2, work):
        assert means == pytest.approx(validated, rel=1e-4)
        assert loss == pytest.approx(float(want["loss"]), rel=1e-4)
        np.testing.assert_allclose(w, one.parameters()["w"], rtol=1e-4, atol=1e-6)


def test_entries_of_batches_of_different_lengths_count_alike() -> None:
    for name in ("mse", "own entries", "own mean by size"):
        long, short = batch(REAL, 3, 6, 1), batch(REAL, 2, 2, 2)
        trainer = og.Trainer(program(name))
        errors = [np.square(trainer.evaluate_batch(p)["y"] - p["target"]).reshape(-1) for p in (long, short)]
        want = np.concatenate(errors).mean()
        assert trainer.evaluate([long, short])["loss"] == pytest.approx(want, rel=1e-5)
        assert float(trainer.step(long, short, outputs=[])["loss"]) == pytest.approx(want, rel=1e-5)


def test_a_batch_without_anything_that_counts_adds_nothing() -> None:
    for name, target, nothing in (("two terms", "target", -100), ("two masked", "target_mask", 0)):
        first, second = (batch(LOSSES[name][1], 2, POSITIONS, seed) for seed in (1, 2))
        second[target][:] = nothing
        union = {k: np.concatenate([first[k], second[k]]) for k in first}
        one, several = og.Trainer(program(name)), og.Trainer(program(name))
        want, got = one.step(union), several.step(second, first)
        assert float(got["loss"]) == pytest.approx(float(want["loss"]), rel=1e-5)
        np.testing.assert_allclose(several.parameters()["w"], one.parameters()["w"], rtol=1e-5)


def test_a_run_reports_the_loss_of_all_data(tmp_path: Any) -> None:
    data = batch(INDEX, 10, POSITIONS, 3)
    own = program("own sum of class losses")
    own.save(tmp_path / "program")
    trainer = og.Trainer(tmp_path / "program", schedule=0.0)
    (row,) = trainer.fit(data, batch_size=4, accumulate=2, validation=data, progress="none", shuffle=False)
    assert row["val_loss"] == pytest.approx(float(trainer.evaluate_batch(data)["loss"]), rel=1e-5)
    assert row["loss"] == pytest.approx(row["val_loss"], rel=1e-5)


def test_a_count_that_depends_on_parameters_is_refused() -> None:
    def relative(e: Any, y: ir.Value, target: ir.Value) -> Any:
        return squares(e, y, target), e.square(y)

    with pytest.raises(og.errors.ArgumentError, match="count that the loss function returns depends on the parameters"):
        og.build_training(MODEL, loss=relative, optimizer="sgd")


def test_a_loss_of_the_model_is_joined_by_its_own_count() -> None:
    model = graph_of(
        "(float[N,3] x, float[N,3] mask) => (float loss) { h = MatMul (x, w)  s = Mul (h, h)  m = Mul (s, mask)"
        "  a = ReduceSum <keepdims = 0> (m)  b = ReduceSum <keepdims = 0> (mask)  q = Div (a, b)"
        "  z = ReduceSum <keepdims = 0> (s)  loss = Add (q, z) }",
        w=np.eye(3, dtype=np.float32),
    )
    own = og.build_training(model, loss="loss", optimizer=og.optim.SGD(0.01))
    rng = np.random.default_rng(1)
    union = {"x": rng.random((6, 3), np.float32), "mask": (rng.random((6, 3)) < 0.5).astype(np.float32)}
    one, several = og.Trainer(own), og.Trainer(own)
    assert one.evaluate(cut(union, [1, 5]))["loss"] == pytest.approx(float(one.evaluate_batch(union)["loss"]), rel=1e-5)
    assert float(several.step(*cut(union, [2, 4]))["loss"]) == pytest.approx(float(one.step(union)["loss"]), rel=1e-5)
    np.testing.assert_allclose(several.parameters()["w"], one.parameters()["w"], rtol=1e-5)
