"""The trainer: steps, accumulation, fit with metrics and callbacks, against plain runs of the program and numpy."""

from __future__ import annotations

import csv
import json
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad import callbacks, losses, optim, schedules
from onnx_convgrad.metrics import Accuracy
from onnx_convgrad.programs.masks import initial_state
from onnx_convgrad.runtime import run
from onnx_convgrad.training import engine
from onnx_convgrad.training.sessions import fed_session
from tests.support.one_input import graph_of
from tests.support.training_nets import A, B, Feeds, ProgramRun, X, arrays, build, exported, same, two_outputs


def data(steps: int = 5) -> Feeds:
    """All samples of the batches of the first steps."""
    parts = [arrays(step) for step in range(steps)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def linear(**options: Any) -> og.TrainingProgram:
    """y = x w + b, in which samples do not affect each other."""
    rng = np.random.default_rng(1)
    w, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (4,)))
    model = graph_of("(float[N,3] x) => (float[N,4] y) { y = Gemm (x, w, b) }", w=w, b=b)
    return build(model, **{"optimizer": optim.Adam(lr=0.1), **options})


def cut(batch: Feeds, *sizes: int) -> list[Feeds]:
    ends = np.cumsum(sizes)
    return [{k: v[end - size : end] for k, v in batch.items()} for size, end in zip(sizes, ends, strict=True)]


# -- steps -------------------------------------------------------------------------------------------------------------


def test_steps_equal_those_of_the_program() -> None:
    program = build()
    onnx_run, trainer = ProgramRun(program), og.Trainer(program)
    for step in range(4):
        want, got = onnx_run(arrays(step)), trainer.step(arrays(step))
        assert got.keys() == {"loss", "y"}
        assert float(got["loss"]) == float(want["loss"])
        np.testing.assert_array_equal(got["y"], want["y"])
    same({**trainer.parameters(), **trainer.state()}, onnx_run.state)
    inputs = {i.name for i in program.evaluate.graph.input}
    want = run(program.evaluate, {**arrays(9), **{k: v for k, v in onnx_run.state.items() if k in inputs}})
    same(trainer.evaluate_batch(arrays(9)), want)
    assert repr(trainer).startswith("<Trainer: 4 steps, 0 epochs done; <TrainingProgram: ")


def test_results_are_kept_and_outputs_chosen() -> None:
    trainer = og.Trainer(build())
    first = trainer.step(arrays(0))
    held = first["y"].copy()
    small = trainer.step({k: v[:2] for k, v in arrays(1).items()})  # a smaller batch after one of six
    np.testing.assert_array_equal(first["y"], held)
    assert small["y"].shape == (2, 5)
    assert trainer.step(arrays(2), outputs=[]).keys() == {"loss"}
    assert trainer.evaluate_batch(arrays(2), outputs=["y"]).keys() == {"loss", "y"}
    with pytest.raises(og.errors.ArgumentError, match="output"):
        trainer.step(arrays(0), outputs=["z"])


def test_a_step_changes_neither_program_nor_batch() -> None:
    program, batch = build(), arrays(0)
    before = program.step.SerializeToString()
    kept = {k: v.copy() for k, v in batch.items()}
    for _ in range(3):
        og.Trainer(program).step(batch)
    same(batch, kept)
    assert og.TrainingProgram(program.manifest, program.model).step.SerializeToString() == before


def test_the_loss_is_called_loss_and_terms_keep_their_names() -> None:
    program = build(two_outputs(), loss={"a": "mse", "b": (0.5, "l1")}, outputs=["b"])
    results = og.Trainer(program).step({"x": X, "a_target": A, "b_target": B})
    assert results.keys() == {"loss", "loss_a", "loss_b", "b"}
    assert float(results["loss"]) == pytest.approx(results["loss_a"] + 0.5 * results["loss_b"], rel=1e-6)
    assert og.Trainer(build(two_outputs(), loss="distance")).step({"x": X}).keys() >= {"loss", "a", "b"}


def test_schedules() -> None:
    program = linear(optimizer=optim.SGD(lr=schedules.Warmup(schedules.Cosine(0.3, steps=4), steps=2)))
    trainer, schedule = og.Trainer(program), program.schedule
    batch = {"x": X, "target": np.array([0, 1, 2, 3])}
    rates, before = [], trainer.parameters()["b"]
    for _ in range(6):
        rates.append(trainer.learning_rate)
        trainer.step(batch)
    assert schedule is not None and rates == [schedule(i) for i in range(6)] and rates[0] == 0
    assert (trainer.parameters()["b"] != before).any()
    still = og.Trainer(program, schedule=0)
    still.step(batch)
    np.testing.assert_array_equal(still.parameters()["b"], before)


def test_a_custom_schedule_must_be_passed_again(tmp_path: Path) -> None:
    class Mine(schedules.Schedule):
        def __call__(self, step: int) -> float:
            return 0.1 if step < 9 else 0.0

    program = linear(optimizer=optim.SGD(lr=Mine()))
    assert og.Trainer(program).learning_rate == 0.1
    program.save(tmp_path / "program")
    with pytest.raises(og.errors.ArgumentError, match=r"class Mine.*schedule="):
        og.Trainer(tmp_path / "program")
    assert og.Trainer(tmp_path / "program", schedule=Mine()).learning_rate == 0.1


def test_seeds() -> None:
    program = build(exported(training=True), seed=5)
    states = [int(og.Trainer(program, seed=s).state()["random_state"]) for s in (0, 1, 2)]
    assert states[0] == initial_state(5) and len(set(states)) == 3
    losses_ = [float(og.Trainer(program, seed=s).step(arrays(0))["loss"]) for s in (0, 1, 1)]
    assert losses_[0] != losses_[1] == losses_[2]
    still = og.Trainer(program, schedule=0.0)  # every step draws a new mask
    assert len({float(still.step(arrays(0))["loss"]) for _ in range(4)}) == 4


@pytest.mark.parametrize("limit", [None, 500])
def test_frozen_weights_are_read_from_the_program_folder(
    tmp_path: Path, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From `weights.bin`; above a size limit through a temporary file."""
    program = build(freeze=["conv*"])
    program.save(tmp_path / "program", shared_weights=True)
    if limit:
        monkeypatch.setattr(engine, "fed_session", partial(fed_session, limit=limit))
    trainer, want = og.Trainer(str(tmp_path / "program")), ProgramRun(program)
    for step in range(2):
        assert float(trainer.step(arrays(step))["loss"]) == float(want(arrays(step))["loss"])
    assert "conv1.weight" not in trainer.parameters()


# -- several batches, one update -----------------------------------------------------------------------------------------

UNION = {
    "plain": "cross_entropy",
    "weights": losses.CrossEntropy(weight=[1.0, 5.0, 0.5, 2.0], ignore_index=3),
    "smooth sum": losses.CrossEntropy(reduction="sum", label_smoothing=0.1),
}


@pytest.mark.parametrize("loss", UNION.values(), ids=UNION)
def test_a_step_over_several_batches_equals_one_over_their_union(loss: Any) -> None:
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((9, 3)).astype(np.float32), "target": rng.integers(0, 4, 9)}
    batch["target"][:2] = 3  # the targets of the first batch are ignored
    one, several = (og.Trainer(linear(loss=loss)) for _ in range(2))
    for sizes in ((2, 4, 3), (4, 5), (2, 7)):
        parts = cut(batch, *sizes)
        want, got = one.step(batch), several.step(*parts)
        assert float(got["loss"]) == pytest.approx(float(want["loss"]), rel=1e-5)
    np.testing.assert_allclose(got["y"], want["y"], rtol=1e-4, atol=1e-5)
    same(several.parameters(), one.parameters(), 1e-5)
    assert several.progress.steps == 3 and int(several.state()["step"]) == 3


def test_each_batch_updates_statistics_and_float16_accumulates() -> None:
    program = build(precision="float16")
    trainer, parts = og.Trainer(program), [arrays(0), arrays(1)]
    trainer.step(*parts)
    moving = {s.name: s.next for s in program.manifest.state if s.kind != "optimizer"}
    state: Feeds = {}
    for part in parts:
        found = run(program.gradients, {**part, **state})
        state = {name: found[after] for name, after in moving.items()}
    got = trainer.state()
    same({name: got[name] for name in state}, state)
    assert int(got["step"]) == int(got["good_steps"]) == 1


def test_terms_that_weight_batches_differently_are_joined_each_by_its_own_count() -> None:
    terms = {"a": "mse", "b": losses.MSE(reduction="sum")}
    one, several = (og.Trainer(build(two_outputs(), loss=terms)) for _ in range(2))
    batch = {"x": X, "a_target": A, "b_target": B}
    want, got = one.step(batch), several.step(*cut(batch, 1, 3))
    for name in ("loss", "loss_a", "loss_b"):
        assert float(got[name]) == pytest.approx(float(want[name]), rel=1e-5)
    same(several.parameters(), one.parameters(), 1e-5)


def sized(**options: Any) -> og.TrainingProgram:
    """A convolution of stride 2 over an axis of any size: 2 n + 1 entries give n."""
    model = graph_of(
        "(float[N,1,L] x) => (float[N,1,M] y) { y = Conv <strides = [2]> (x, w) }", w=np.ones((1, 1, 3), np.float32)
    )
    return build(model, **{"loss": "mse", **options})


def test_a_target_of_another_length_is_not_broadcast() -> None:
    trainer, x = og.Trainer(sized()), np.ones((2, 1, 9), np.float32)
    trainer.step({"x": x, "target": x[:, :, :4]})
    for length in (1, 5):
        with pytest.raises(
            og.errors.ArgumentError, match=rf"'target' has size {length} along axis 2 in a batch, but .* = 4"
        ):
            trainer.step({"x": x, "target": x[:, :, :length]})
    assert trainer.progress.steps == 1


def test_batches_of_different_lengths_need_a_step_without_outputs() -> None:
    trainer, by_hand = og.Trainer(sized()), og.Trainer(sized())
    x = np.random.default_rng(0).standard_normal((2, 1, 9)).astype(np.float32)
    long, short = ({"x": x[..., :n], "target": x[..., : n // 2]} for n in (9, 5))
    before = trainer.parameters()
    with pytest.raises(
        og.errors.ArgumentError, match=r"'y' has different shapes .*: \(2, 1, 4\), \(2, 1, 2\).*neither outputs"
    ):
        trainer.step(long, short)
    same(trainer.parameters(), before)
    got = trainer.step(long, short, outputs=[])
    losses_ = [float(by_hand.evaluate_batch(batch)["loss"]) for batch in (long, short)]
    assert float(got["loss"]) == pytest.approx((2 * losses_[0] + losses_[1]) / 3, rel=1e-5)
    assert (trainer.parameters()["w"] != before["w"]).all()


# -- fit ---------------------------------------------------------------------------------------------------------------


def test_fit_averages_over_samples(capsys: pytest.CaptureFixture[str]) -> None:
    whole, held = data(), arrays(9)
    trainer, by_hand = og.Trainer(build()), og.Trainer(build())
    (row,) = trainer.fit(whole, batch_size=8, shuffle=False, validation=held, metrics=["accuracy", Accuracy(top=2)])
    total, hits = 0.0, 0
    for part in cut(whole, 8, 8, 8, 6):
        results = by_hand.step(part)
        total += float(results["loss"]) * len(part["x"])
        hits += int((results["y"].argmax(1) == part["target"]).sum())
    same(trainer.parameters(), by_hand.parameters())
    checked = by_hand.evaluate_batch(held)
    order = np.argsort(-checked["y"], axis=1)[:, :2]
    assert row["loss"] == pytest.approx(total / 30, rel=1e-6)
    assert row["accuracy"] == hits / 30
    assert row["val_loss"] == pytest.approx(float(checked["loss"]), rel=1e-6)
    assert row["val_top2"] == pytest.approx((order == held["target"][:, None]).any(1).mean())
    assert (row["epoch"], row["step"], row["learning_rate"]) == (1, 4, 0.05)
    assert trainer.evaluate(held, ["accuracy"]).keys() == {"loss", "accuracy"}
    with pytest.warns(UserWarning, match=r"Nothing is trained: 1 epochs are finished already.* Give epochs=2 to go on"):
        assert trainer.fit(whole, epochs=1, progress="none") == [row]
    assert capsys.readouterr().err.startswith(f"epoch 1/1  loss {row['loss']:.4f}  accuracy")


def test_fit_takes_batches_of_any_kind_and_accumulates() -> None:
    parts = [arrays(step) for step in range(5)]
    got, want = og.Trainer(build()), og.Trainer(build())
    got.fit([(p["x"], p["target"]) for p in parts], accumulate=2, progress="none", metrics=[seen])
    want.step(*parts[:2]), want.step(*parts[2:4]), want.step(parts[4])
    same(got.parameters(), want.parameters())
    assert got.progress.history[0]["seen"] == pytest.approx((12 * 12 + 12 * 12 + 6 * 6) / 30)


def seen(results: Feeds, batch: Feeds) -> int:
    assert len(results["y"]) == len(batch["x"])
    return len(batch["x"])


def test_fit_refuses_bad_arguments() -> None:
    trainer = og.Trainer(build(outputs=[]))
    with pytest.raises(
        og.errors.ArgumentError, match=r"needs 'y', which is not an output of the program. Build it with outputs="
    ):
        trainer.fit(data(), metrics=["accuracy"])
    with pytest.raises(og.errors.ArgumentError, match=r"must be text, not False\. There are: auto, bar"):
        trainer.fit(data(), progress=False)
    with pytest.raises(og.errors.ArgumentError, match="accumulate must be at least 1"):
        trainer.fit(data(), accumulate=0)
    with pytest.raises(og.errors.ArgumentError, match="give no batches in epoch 1"):
        trainer.fit([])
    other, both = og.Trainer(build(two_outputs(), loss={"a": "mse", "b": "l1"})), {"x": X, "a_target": A, "b_target": B}
    with pytest.raises(og.errors.ArgumentError, match="needs the loss cross_entropy, nll or bce"):
        other.fit(both, metrics="accuracy")


def test_a_metric_of_an_output_called_loss_is_refused_and_its_remedy_works() -> None:
    """Results of a step have the loss under this name."""
    weight = {"w": np.eye(3, dtype=np.float32)}
    model = ir.from_proto(graph_of("(float[N,3] x) => (float[N,3] loss) { loss = MatMul (x, w) }", **weight))
    feeds = {"x": np.eye(3, dtype=np.float32), "target": np.arange(3)}
    with pytest.raises(og.errors.ArgumentError, match=r"needs the output 'loss'.*graph\.outputs\[0\]\.name = 'scores'"):
        og.Trainer(build(model, loss="cross_entropy")).evaluate(feeds, metrics="accuracy")
    model.graph.outputs[0].name = "scores"
    assert og.Trainer(build(model, loss="cross_entropy")).evaluate(feeds, metrics="accuracy")["accuracy"] == 1


def test_each_term_is_averaged_with_its_own_weights() -> None:
    """The average over batches equals the loss over all samples, in either order of the terms."""
    rng = np.random.default_rng(0)
    held = {"x": rng.standard_normal((10, 3)).astype(np.float32), "b_target": rng.standard_normal((10, 2))}
    held |= {"a_target": np.where(np.arange(10) < 6, -100, rng.integers(0, 2, 10))}
    for names in ("ab", "ba"):
        terms = {name: {"a": "cross_entropy", "b": (0.5, "mse")}[name] for name in names}
        trainer = og.Trainer(build(two_outputs(), loss=terms))
        want = float(trainer.evaluate_batch(held)["loss"])
        assert trainer.evaluate(held, batch_size=4) == {"loss": pytest.approx(want, rel=1e-5)}
        still = og.Trainer(trainer.program, schedule=0.0)
        (row,) = still.fit(held, batch_size=4, progress="none", metrics=[Accuracy(output="a")])
        assert row["loss"] == pytest.approx(want, rel=1e-5)
        assert 0 <= row["accuracy_a"] <= 1


def test_accuracy_of_signs_and_ignored_targets() -> None:
    binary = Accuracy().of(build(two_outputs(), loss={"b": "mse", "a": "bce_with_logits"}).manifest)
    y, t = np.array([[2.0, -1.0], [-3.0, 0.5]]), np.array([[1.0, 1.0], [0.0, 0.0]])
    assert binary({"a": y}, {"a_target": t}) == (0.5, 4)
    classes = Accuracy().of(linear().manifest)
    assert classes({"y": np.eye(4)}, {"target": np.array([0, 2, -100, 3])}) == (2 / 3, 3)
    assert classes({"y": np.eye(4)}, {"target": np.full(4, -100)}) == (0.0, 0)


def test_top_k_breaks_ties_by_index() -> None:
    top = Accuracy(top=2).of(linear().manifest)
    assert top({"y": np.zeros((4, 4))}, {"target": np.arange(4)}) == (0.5, 4)
    assert top({"y": np.full((4, 4), np.nan)}, {"target": np.arange(4)}) == (0.0, 4)
    y = np.array([[1.0, 3.0, 2.0, 2.0]] * 4)
    assert top({"y": y}, {"target": np.arange(4)}) == (0.5, 4)


def test_batches_of_different_sizes_are_accumulated() -> None:
    """Inputs are concatenated only if a metric needs them."""
    model = graph_of(
        "(float[N,1,L] x) => (float[N,1,L] y) { y = Conv <pads = [1, 1]> (x, w) }",
        opset=21,
        w=np.float32([[[1, 2, 1]]]),
    )
    program = og.build_training(model, loss="mse", optimizer=optim.SGD(lr=0.1))
    batches = [{"x": np.ones((2, 1, size), "f"), "target": np.zeros((2, 1, size), "f")} for size in (8, 5)]
    trainer = og.Trainer(program)
    (row,) = trainer.fit(batches, accumulate=2, progress="none")
    assert trainer.progress.steps == 1 and np.isfinite(row["loss"])


def test_callbacks_logs_and_stopping(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps: list[float] = []

    class Watch(callbacks.Callback):
        def on_step(self, run: Any, results: Any) -> None:
            assert run.trainer.progress.steps == len(steps) + 1
            steps.append(float(results["loss"]))

    program = build(optimizer=optim.SGD(lr=0.0))  # the validation loss never improves
    logs = [callbacks.Log(tmp_path / name) for name in ("log.csv", "log.jsonl")]
    stop = callbacks.EarlyStopping("val_loss", patience=2)
    history = og.Trainer(program).fit(
        data(2), epochs=9, batch_size=4, validation=arrays(9), callbacks=[Watch(), stop, *logs]
    )
    assert len(history) == 3 and len(steps) == 9
    assert capsys.readouterr().err.endswith(
        "Stopped after epoch 3: val_loss has not improved for 2 epochs; the parameters are those of epoch 1.\n"
    )
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == history
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [{k: float(v) for k, v in row.items()} for row in rows] == history
    with pytest.raises(og.errors.ArgumentError, match=r"kind of log '.txt'|'.txt'"):
        callbacks.Log("log.txt")
    with pytest.raises(og.errors.ArgumentError, match="val_loss"):
        og.Trainer(program).fit(data(1), callbacks=[callbacks.EarlyStopping()], progress="none")


def test_stop_from_outside() -> None:
    trainer = og.Trainer(build())

    class Interrupt(callbacks.Callback):
        def on_step(self, run: Any, results: Any) -> None:
            assert run.trainer is trainer and "loss" in results
            trainer.stop()

    assert trainer.fit(data(), batch_size=6, callbacks=[Interrupt()], progress="none") == []
    assert (trainer.progress.steps, trainer.progress.position) == (1, 1)
    (row,) = trainer.fit(data(), batch_size=6, progress="none")  # continues at the next batch
    assert row["step"] == 5


def test_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int) -> None: ...

        def add_scalar(self, name: str, value: float, step: int) -> None:
            seen_.append((name, value, step))

        def add_images(self, name: str, pixels: np.ndarray, step: int, dataformats: str) -> None:
            assert dataformats == "NHWC" and pixels.dtype == np.uint8 and pixels.shape[3] == 3
            pictures.append((name, step))

        def close(self) -> None: ...

    pictures: list[tuple[str, int]] = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(og.errors.ArgumentError, match="pip install tensorboardX"):
        callbacks.TensorBoard("runs")
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    (row,) = og.Trainer(build()).fit(data(2), batch_size=6, callbacks=[callbacks.TensorBoard("runs")], progress="none")
    assert [(name, step) for name, _, step in seen_[:4]] == [
        ("loss", 1), ("learning_rate", 1), ("loss", 2), ("learning_rate", 2),
    ]  # fmt: skip
    assert ("epoch/loss", row["loss"], 2) in seen_
    assert pictures == [("first_batch/x", 1)]


def test_the_progress_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("FORCE_COLOR", "1")
    og.Trainer(build()).fit(data(), epochs=2, batch_size=6, progress="bar")
    shown = capsys.readouterr().err
    assert "epoch 1/2  loss" in shown and "epoch 2/2  loss" in shown and "samples/s" in shown
    with pytest.raises(og.errors.ArgumentError, match="progress"):
        og.Trainer(build()).fit(data(), progress="loud")
