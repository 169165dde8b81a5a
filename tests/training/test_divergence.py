"""Training that diverges stops at that step with an error, and nothing of it is saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad import callbacks, optim
from onnx_convgrad.training import checkpoint, divergence
from tests.support.one_input import graph_of
from tests.support.training_nets import build, same
from tests.training.test_trainer import linear


def finite(path: Path) -> bool:
    return all(np.isfinite(array).all() for array in checkpoint.read(path).tensors.values() if array.dtype.kind == "f")


def spoiled(sample: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40, 3)).astype(np.float32)
    x[sample, 1] = -np.inf  # NaN is refused before
    return {"x": x, "target": rng.integers(0, 4, 40)}


def test_a_nan_in_the_data_is_named_and_nothing_of_it_is_kept(tmp_path: Path) -> None:
    trainer, keeper = og.Trainer(linear()), callbacks.Checkpoints(tmp_path / "run", every_steps=1, keep=2)
    message = (
        r"The loss is nan at step 6 \(epoch 1, batch 6\)\. In its data 'x' is not finite in sample 22, counted from 0\. "
        r"The last good checkpoint is '.*step-00000005\.safetensors'\. Check the data"
    )
    with pytest.raises(og.errors.DivergenceError, match=message):
        trainer.fit(spoiled(22), batch_size=4, shuffle=False, callbacks=[keeper], progress="none")
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["step-00000004.safetensors", "step-00000005.safetensors"]
    assert all(finite(tmp_path / "run" / name) for name in names)
    (tmp_path / "trained.onnx").write_text("good")
    for write in (trainer.save, trainer.export):
        with pytest.raises(og.errors.DivergenceError, match=r"After step 6 the value '.*' is not finite"):
            write(tmp_path / "trained.onnx")
    assert (tmp_path / "trained.onnx").read_text() == "good"
    assert trainer.restore(tmp_path / "run").name == "step-00000005.safetensors"
    trainer.fit(spoiled(22) | {"x": np.ones((40, 3), "f")}, batch_size=4, shuffle=False, progress="none")
    assert trainer.progress.epoch == 1


def test_the_samples_of_a_shuffled_part_are_named_by_their_number_in_the_data() -> None:
    train, _ = og.data.Arrays(spoiled(33)).split(0.25, seed=4)
    with pytest.raises(og.errors.DivergenceError, match=r"'x' is not finite in sample 33, counted from 0"):
        og.Trainer(linear()).fit(train, batch_size=4, progress="none", accumulate=2)


def test_a_batch_whose_targets_are_all_ignored_is_named() -> None:
    data = spoiled(0) | {"x": np.ones((40, 3), "f")}
    data["target"][8:12] = -100
    message = (
        r"The loss is nan at step 3 \(epoch 1, batch 3\)\. Every entry of 'target' there is ignored or has the weight 0, "
        r"and the mean of nothing is not a number\. Its samples are 8, 9, 10, 11, counted from 0\. Leave such samples out"
    )
    trainer = og.Trainer(linear())
    with pytest.raises(og.errors.DivergenceError, match=message):
        trainer.fit(data, batch_size=4, shuffle=False, progress="none")
    fresh = og.Trainer(linear())
    fresh.fit(data, batch_size=8, shuffle=False, progress="none")
    assert all(np.isfinite(value).all() for value in fresh.state().values())


def test_a_stream_of_batches_names_the_batch() -> None:
    arrays = spoiled(5)
    batches = [{k: v[i : i + 4] for k, v in arrays.items()} for i in range(0, 40, 4)]
    with pytest.raises(
        og.errors.DivergenceError, match=r"batch 2\)\. In its data 'x' is not finite in sample 1 of the batch"
    ):
        og.Trainer(linear()).fit(batches, progress="none")


@pytest.mark.parametrize("every", [1, None])
def test_parameters_that_are_not_finite_are_noticed_where_the_loss_is(tmp_path: Path, every: int | None) -> None:
    """The derivative of a root at zero is infinite; the loss is not."""
    root = graph_of("(float[N,2] x) => (float[N,2] y) { h = Mul (x, w) y = Sqrt (h) }", w=np.ones(2, "f"))
    trainer = og.Trainer(build(root, loss="mse", optimizer=optim.SGD(lr=0.1)))
    data = {"x": np.zeros((4, 2), "f"), "target": np.ones((4, 2), "f")}
    assert np.isfinite(trainer.evaluate_batch(data)["loss"])
    keeper = callbacks.Checkpoints(tmp_path, every_steps=every)
    with pytest.raises(
        og.errors.DivergenceError, match=r"After step 1 the value 'w' is not finite\. NaN arises in node 'Mul_0/g"
    ):
        trainer.fit(data, batch_size=4, callbacks=[keeper], progress="none")
    assert not list(tmp_path.iterdir())


def test_values_that_the_program_starts_with_may_be_infinite(tmp_path: Path) -> None:
    mask = np.array([0, -np.inf, 0], np.float32)
    masked = graph_of(
        "(float[N,3] x) => (float[N,3] y) { h = Add (x, mask) y = Softmax (h) }", mask=mask, w=np.ones(3, "f")
    )
    trainer = og.Trainer(build(masked, loss="mse", optimizer=optim.SGD(lr=0.1)))
    trainer.fit({"x": np.ones((4, 3), "f"), "target": np.ones((4, 3), "f")}, progress="none")
    assert trainer.parameters()["mask"][1] == -np.inf and trainer.save(tmp_path).exists()


def test_a_checkpoint_of_a_run_that_diverged_is_refused_or_skipped(tmp_path: Path) -> None:
    trainer = og.Trainer(linear())
    good = trainer.save(tmp_path)
    content = checkpoint.read(good)
    bad = tmp_path / "step-00000001.safetensors"
    checkpoint.write(bad, content._replace(tensors={**content.tensors, "b": np.full(4, np.nan, np.float32)}))
    with pytest.raises(og.errors.CheckpointError, match=r"of a run that had diverged: .* 'b' is not finite"):
        trainer.restore(bad)
    with pytest.warns(UserWarning, match="had diverged"):
        assert trainer.restore(tmp_path) == good


# -- the cause ---------------------------------------------------------------------------------------------------------


def diverging(rate: float, size: float = 1.0, **options: Any) -> str:
    """The message of a run of y = x w + b with data of a size."""
    rng = np.random.default_rng(0)
    data = {"x": size * rng.standard_normal((8, 3)).astype("f"), "target": rng.standard_normal((8, 4)).astype("f")}
    trainer = og.Trainer(linear(loss="mse", optimizer=optim.SGD(rate), **options))
    with pytest.raises(og.errors.DivergenceError) as caught:
        trainer.fit(data, batch_size=8, epochs=500, progress="none")
    return str(caught.value)


def test_a_rate_that_is_too_high_is_told_by_the_growth_of_parameters() -> None:
    told = diverging(1e3)
    assert re.search(r"The largest number of '[wb]' has grown from [\d.]+ to [\d.]+e\+\d+\.", told)
    assert "The updates are too large: try a lower learning rate" in told


def test_data_that_are_too_large_are_told_in_the_first_step() -> None:
    told = diverging(1e-3, 1e30)
    assert "step 1 (" in told
    assert "scale the data. No update had been made yet, so that a lower learning rate does not help" in told
    assert "has grown" not in told


def test_an_overflow_of_float16_is_told() -> None:
    told = diverging(1e-3, 6e4, precision="float16")
    assert "float16 holds numbers up to 65,504: scale the data, or build the program with precision='bfloat16'" in told
    assert "learning rate" not in told


def test_data_that_are_not_finite_need_no_other_rate() -> None:
    x = np.ones((4, 3), "f")
    x[2, 1] = np.nan
    engine = og.Trainer(linear(loss="mse")).engine
    problem = divergence.diverged(np.nan, "at step 1", 1, [({"x": x}, None)], engine)
    assert "'x' is not finite in sample 2 of the batch" in problem.message
    assert problem.hint is not None
    assert problem.hint.startswith("Check the data: leave these samples out")
    assert "learning rate" not in problem.hint


# -- float16 -------------------------------------------------------------------------------------------------------------


def test_float16_steps_that_change_nothing_are_an_error() -> None:
    program = linear(precision="float16", loss="mse")
    batch: dict[str, Any] = {"x": np.full((4, 3), 3e4, "f"), "target": np.full((4, 4), -3e38, "f")}
    trainer = og.Trainer(program)
    before = trainer.parameters()
    for _ in range(24):
        trainer.step(batch)
    with pytest.raises(
        og.errors.DivergenceError, match=r"The last 24 steps have changed no parameter.*precision='float32'"
    ):
        trainer.step(batch)
    same(trainer.parameters(), before)


def test_float16_steps_that_lower_the_scale_at_first_are_none() -> None:
    precision = og.MixedPrecision("float16", init_scale=2.0**40)
    trainer = og.Trainer(linear(precision=precision))
    trainer.fit(data_of(30), epochs=2, batch_size=1, progress="none")
    assert int(trainer.state()["step"]) > 10


def data_of(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((count, 3)).astype("f"), "target": rng.integers(0, 4, count)}


# -- exceptions of the caller's code -------------------------------------------------------------------------------------


class CallersError(Exception):
    """The caller's own."""


def fail(*_: object) -> Any:
    raise CallersError("here")


class Failing(callbacks.Callback):
    def on_step(self, *_: Any) -> None:
        raise CallersError("here")


class Samples(og.data.Arrays):
    def take(self, rows: Any) -> dict[str, np.ndarray]:
        return super().take(rows) if isinstance(rows, slice) else fail()


def stream(epoch: int) -> Any:
    yield {k: v[:2] for k, v in data_of(4).items()}
    raise KeyError(epoch)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"callbacks": [Failing()]}, CallersError),
        ({"metrics": fail}, CallersError),
        ({"data": Samples(data_of(40))}, CallersError),
        ({"data": stream}, KeyError),
        ({"data": map(fail, range(3))}, CallersError),
        ({"validation": stream}, KeyError),
    ],
    ids=["callback", "metric", "dataset", "stream", "iterator", "validation"],
)
def test_exceptions_of_the_callers_code_pass_unchanged(options: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        og.Trainer(linear()).fit(options.pop("data", data_of(8)), progress="none", **options)
    with pytest.raises(CallersError):
        og.Trainer(linear(), schedule=fail).step(data_of(4))
    with pytest.raises(CallersError):
        og.Trainer(linear()).evaluate(data_of(4), fail)


def test_an_error_of_this_package_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx_convgrad.metrics.tally.samples", fail)
    with pytest.raises(og.errors.InternalError, match="CallersError: here"):
        og.Trainer(linear()).fit(data_of(8), progress="none")


# -- where it arises -----------------------------------------------------------------------------------------------------

NETS = {
    "a gradient at zero": (
        "h = MatMul (x, w)  q = ReduceL2 (h, ax)  r = Reciprocal (q)  n = Mul (h, r)  y = MatMul (n, v)",
        0.0,
        r"arises in node '.*' \(Mul\), from the infinite result of node 'Reciprocal_.*A lower learning rate does not help",
    ),
    "a logarithm": (
        "h = MatMul (x, w)  a = Relu (h)  l = Log (a)  m = Mul (l, a)  y = MatMul (m, v)",
        0.0,
        r"NaN arises in node 'Mul_\d' \(Mul\), from the infinite result of node 'Log_2' \(Log\)",
    ),
    "an overflow": (
        "h = MatMul (x, w)  a = Exp (h)  y = MatMul (a, v)",
        400.0,
        r"from the infinite result of node 'Exp_1' \(Exp\)\. Numbers outgrow their type there: scale the data",
    ),
}


@pytest.mark.parametrize(("text", "weight", "message"), NETS.values(), ids=NETS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_node_is_named_in_which_the_first_such_number_arises(
    text: str, weight: float, message: str, accumulate: int
) -> None:
    net = graph_of(
        f"(float[N,3] x) => (float[N,2] y) {{ {text} }}",
        opset=21,
        w=np.full((3, 2), weight, "f"),
        v=np.array([[1, -2], [3, 4]], "f"),
        ax=np.array([1]),
    )
    trainer = og.Trainer(og.build_training(net, loss="mse", optimizer=optim.SGD(0.1)))
    data = {"x": np.ones((8, 3), "f"), "target": np.ones((8, 2), "f")}
    with pytest.raises(og.errors.DivergenceError, match=message) as caught:
        trainer.fit(data, batch_size=4, accumulate=accumulate, progress="none")
    assert "step 1" in str(caught.value)


@pytest.mark.parametrize(("number", "what"), [(np.nan, "NaN"), (np.inf, "infinite numbers")])
@pytest.mark.parametrize("name", ["w", "m"], ids=["parameter", "constant"])
def test_a_stored_value_that_is_not_finite_is_named(name: str, number: float, what: str) -> None:
    stored = {"w": np.ones((3, 2), "f"), "m": np.ones((1, 2), "f")}
    stored[name][0, 1] = number
    net = graph_of("(float[N,3] x) => (float[N,2] y) { h = MatMul (x, w)  z = Mul (h, m)  y = Sub (z, h) }", **stored)
    trainer = og.Trainer(og.build_training(net, loss="mse", optimizer=optim.SGD(0.1), wrt=["w"]))
    with pytest.raises(
        og.errors.DivergenceError, match=f"value '{name}' holds {what} before any node has run"
    ) as caught:
        trainer.fit({"x": np.zeros((8, 3), "f"), "target": np.ones((8, 2), "f")}, progress="none")
    assert "learning rate" not in str(caught.value)


def test_a_function_in_place_of_a_learning_rate_is_told_where_it_goes() -> None:
    with pytest.raises(og.errors.ArgumentError, match=r"lr takes a number or a schedule, .*Cosine.*schedule=function"):
        optim.SGD(lambda step: 0.1 / (1 + step))  # type: ignore[arg-type]


def test_a_label_out_of_range_is_named_where_only_the_output_tells_the_number_of_classes() -> None:
    net = graph_of(
        "(float[N,3] x) => (float[N,K] y) { m = ReduceMax <keepdims = 0> (x)  i = Cast <to = 7> (m)"
        "  e = Reshape (i, one)  h = MatMul (x, w)  y = Slice (h, zero, e, one) }",
        opset=21,
        w=np.ones((3, 6), "f"),
        one=np.array([1]),
        zero=np.array([0]),
    )
    data = {"x": np.full((8, 3), 4, "f"), "target": np.array([0, 1, 2, 3, 0, 5, 1, 2])}
    program = og.build_training(net, loss="cross_entropy", optimizer="sgd")
    assert not program.manifest.classes
    with pytest.raises(
        og.errors.DivergenceError, match=r"at step 2 .*label 5 in 'target' \(sample 1 of the batch.*has 4 classes"
    ):
        og.Trainer(program).fit(data, batch_size=4, shuffle=False, progress="none")
