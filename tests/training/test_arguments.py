"""Bad arguments of training are refused by name; integers and tensors of any type are accepted."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad import losses, optim, schedules
from onnx_convgrad.callbacks import Checkpoints, EarlyStopping
from tests.support.one_input import graph_of

BATCH = {"x": np.ones((2, 4), np.float32), "target": np.asarray([0, 1])}


def model() -> onnx.ModelProto:
    return graph_of("(float[N,4] x) => (float[N,3] y) { y = Gemm (x, w) }", w=np.ones((4, 3), np.float32))


def program(loss: Any = "cross_entropy", **options: Any) -> og.TrainingProgram:
    return og.build_training(model(), loss=loss, **{"optimizer": optim.SGD(lr=0.1), **options})


def fit(trainer: og.Trainer | None = None, **options: Any) -> list[dict[str, Any]]:
    trainer = trainer or og.Trainer(program())
    return trainer.fit({"x": BATCH["x"], "target": BATCH["target"]}, **{"progress": "none", **options})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: program(seed="a"), "seed must be a whole number, not 'a'"),
        (lambda: og.Trainer(program(), seed=1.5), r"seed must be a whole number, not 1\.5"),
        (lambda: og.Trainer(program(), seed=-1), "seed must be at least 0, not -1"),
        (lambda: og.Trainer(model()), "a training program or the folder of one, not ModelProto.*build_training"),
        (lambda: program(wrt=None), "wrt takes a name or several, not None"),
        (lambda: fit(batch_size=0), "batch_size must be at least 1, not 0"),
        (lambda: fit(batch_size=2.0), "batch_size must be a whole number"),
        (lambda: fit(accumulate=1.5), "accumulate must be a whole number"),
        (lambda: fit(epochs="2"), "epochs must be a whole number"),
        (lambda: fit(callbacks=EarlyStopping("loss")), "callbacks takes a list of members"),
        (lambda: fit(callbacks=[EarlyStopping]), "callbacks takes a list of members"),
        (lambda: fit(callbacks=[Checkpoints(__file__)]), "is a file; checkpoints need a folder"),
        (lambda: optim.SGD(groups={"w": 1}), r'groups takes options by glob, as in \{"\*\.bias"'),
        (lambda: optim.SGD(clip_norm="1"), "clip_norm must be a number"),
        (lambda: schedules.OneCycle(0.1, 10, div=0), "div must be above 0, not 0"),
        (lambda: schedules.Cosine(0.1, 10, minimum=-1), "minimum must be at least 0, not -1"),
        (lambda: schedules.Step(0.1, 2, gamma=-1), "gamma must be at least 0, not -1"),
        (lambda: optim.SGD(dampening="a"), "dampening must be a number"),
        (lambda: optim.Adam(betas=("a", 0.9)), r"betas\[0\] must be a number, not 'a'"),
        (lambda: optim.Adam(betas=(1.0, 0.9)), r"betas\[0\] must be at least 0 and below 1"),
        (lambda: schedules.Warmup(0.1, 5, start="a"), "start must be a number"),
        (lambda: schedules.Step(0.1, milestones=3), "milestones must be a list of steps, not 3"),
        (lambda: losses.CrossEntropy(weight=["a"] * 3), "weight must be finite numbers"),
        (lambda: losses.CrossEntropy(weight=[1, math.nan]), "weight must be finite numbers"),
        (lambda: losses.CrossEntropy(label_smoothing="a"), "label_smoothing must be a number"),
        (lambda: losses.BCEWithLogits(pos_weight="abc"), "pos_weight must be finite numbers"),
        (lambda: og.load(model(), input_shapes={"x": ["N", 5]}), "does not take inputs of the given shapes: .*Gemm"),
        (lambda: fit(metrics=None), "metrics takes a list of names"),
        (lambda: fit(metrics=[lambda *_: None]), "returned None, not a number"),
        (lambda: fit(callbacks=[EarlyStopping("loss", min_delta="a")]), "min_delta must be a number"),
        (lambda: EarlyStopping(["loss"]), r"monitor must be the name of a column of the history, not \['loss'\]"),
        (lambda: Checkpoints("folder", every_epochs=-1), "every_epochs must be at least 0"),
        (lambda: og.Trainer(program(), schedule="cosine"), "a learning rate or a function of the step, not 'cosine'"),
        (lambda: fit(og.Trainer(program(), schedule=lambda _: None)), "rate of step 0 must be a number, not None"),
        (lambda: fit(og.Trainer(program(), schedule=lambda _: math.nan)), "rate of step 0 must be at least 0"),
        (lambda: og.Trainer(program()).load(None), "load takes a mapping from names to arrays, or a Trainer, not NoneType"),
        (lambda: og.Trainer(program()).load({"w": "abc"}), "'w' takes float32 numbers, not <U3"),
        (lambda: og.Trainer(program()).step({"x": [[1, 2], [3]], "target": [0, 1]}), "Cannot convert .* array: .*inhomog"),
        (lambda: losses.CrossEntropy(ignore_index=1.5), r"ignore_index must be a whole number or None, not 1\.5"),
        (lambda: program({"y": (math.nan, "cross_entropy")}), "The weight of a loss must be finite, not nan"),
        (lambda: losses.Huber(delta="1"), "delta must be a number"),
        (lambda: program(losses.BCEWithLogits(pos_weight=[1, 2])).step, r"pos_weight has shape \[2\].*output's \['\?', 3\]"),
        (lambda: optim.SGD(lr=-1), "lr must be at least 0, not -1"),
        (lambda: optim.SGD(lr=float("nan")), "lr must be at least 0, not nan"),
        (lambda: optim.SGD(nesterov=True), "nesterov needs a momentum above 0 and no dampening"),
        (lambda: optim.SGD(momentum=0.9, dampening=0.1, nesterov=True), "nesterov needs a momentum"),
        (lambda: optim.SGD(lr="fast"), "lr must be a number, not 'fast'"),
        (lambda: optim.Adam(betas=0.9), "betas must be two numbers, not 0.9"),
        (lambda: optim.Adam(betas=(0.9, 1.0)), r"betas\[1\] must be at least 0 and below 1, not 1.0"),
        (lambda: optim.Adam(clip_norm=0), "clip_norm must be above 0, not 0"),
        (lambda: optim.Adam(groups={"*": {"momentum": 1}}), r"Unknown option of group '\*': 'momentum'"),
        (lambda: optim.Adam(groups={"*": {"eps": -1}}), "eps must be at least 0, not -1"),
        (lambda: optim.Adam(groups={"*": {"lr": schedules.Constant(1)}}), "The lr of group '.*' is a schedule"),
        (lambda: schedules.Step(0.1), "takes either step_size"),
        (lambda: schedules.Cosine(0.1, 0), "steps must be at least 1, not 0"),
        (lambda: schedules.OneCycle(0.1, 10, rise=1.0), "rise must be at least 0 and below 1"),
        (lambda: schedules.OneCycle(0.1, 10, anneal="sine"), "Unknown anneal 'sine'"),
        (lambda: schedules.Warmup(0.1, 10, start=2), "start must be between 0 and 1"),
        (lambda: program(optimizer=optim.SGD(groups={"v*": {"lr": 1}})), r"Unknown parameter in groups: 'v\*'"),
        (lambda: program(optimizer=optim.SGD(lr=0, groups={"*": {"lr": 1}})),
         "A group sets the learning rate of 'w', but that of the optimizer is 0"),
        (lambda: og.MixedPrecision(init_scale=0), "init_scale must be above 0, not 0"),
        (lambda: og.MixedPrecision(growth_factor=0.5), "growth_factor must be at least 1, not 0.5"),
        (lambda: og.MixedPrecision(backoff_factor=2.0), "backoff_factor must be between 0 and 1, not 2.0"),
        (lambda: og.MixedPrecision(growth_interval=0), "growth_interval must be at least 1, not 0"),
        (lambda: losses.MSE(reduction="average"), "Unknown reduction 'average'"),
        (lambda: losses.Huber(delta=0), "delta must be above 0, not 0"),
        (lambda: losses.CrossEntropy(label_smoothing=1.5), "label_smoothing must be between 0 and 1, not 1.5"),
        (lambda: losses.CrossEntropy(weight=[[1.0]]), "weight must be one number per class"),
        (lambda: program(losses.CrossEntropy(weight=[1.0, 2.0])).step, "There are 2 class weights for 3 classes"),
    ],
)  # fmt: skip
def test_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        call()


def test_integers_and_tensors_of_any_kind(tmp_path: Path) -> None:
    trainer = og.Trainer(program(seed=np.int64(3)), seed=np.int64(3))
    fit(trainer, batch_size=np.int32(1), epochs=np.int64(2), callbacks=[Checkpoints(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir())
    assert schedules.Step(0.1, milestones=np.asarray([4, 2])).milestones == (2, 4)
    trainer.load({"w": torch.zeros(4, 3, requires_grad=True)})
    assert not trainer.parameters()["w"].any()
    assert program({"y": (np.float32(0.25), "cross_entropy")}).manifest.losses[0]["weight"] == 0.25


def test_callbacks_restart_with_a_new_run(tmp_path: Path) -> None:
    """As in a loop over folds: the best value of the first run does not count in the next."""
    stopping, shared = EarlyStopping("loss", patience=2), Checkpoints(tmp_path, best="loss", every_epochs=0)
    fit(epochs=5, callbacks=[stopping, shared])
    (tmp_path / "best.safetensors").unlink()
    assert len(fit(epochs=3, callbacks=[stopping, shared])) == 3
    assert (tmp_path / "best.safetensors").exists()


@pytest.mark.parametrize("label", [7, -1])
def test_a_label_out_of_range_makes_the_loss_nan(label: int) -> None:
    """In the graphs, which others may run; also with class weights, which decide the weight of each batch."""
    trainer = og.Trainer(program(losses.CrossEntropy(weight=[1, 2, 3])))
    wrong = {**BATCH, "target": np.asarray([0, label])}
    batches, names = [trainer.inputs(batch) for batch in (wrong, BATCH)], [trainer.manifest.loss]
    assert math.isnan(float(trainer.engine.evaluate(batches[0], names)[names[0]]))
    assert math.isnan(float(trainer.engine.step(batches, 0.1, names)[names[0]]))


# -- anything whatsoever -----------------------------------------------------------------------------------------------

ODD: list[Any] = [
    None, 0, -1, 2.5, math.nan, math.inf, True, 1j, 10**30, 10**400, "x", "", "a\0b", "a\ud800", "/no/such/folder/file",
    b"x", [], [1], ["x"], (1, 2), {}, {"a": 1}, {1: 2}, [[1, [2]]], range(3), ..., object(), np.zeros(3), np.zeros((0, 3)),
    np.array([object()]), np.datetime64("2020"), int,
]  # fmt: skip
USUAL = {"lr": 0.1, "steps": 10, "schedule": 0.1, "folder": "f", "path": "log.csv", "step_size": 3, "loss": None}
CLASSES = [
    kind
    for module in (optim, losses, og.metrics, og.callbacks, og.data)
    for kind in (getattr(module, name) for name in module.__all__)
    if isinstance(kind, type) and not inspect.isabstract(kind) and kind not in (og.data.Batches, og.callbacks.Callback)
]


def misfit(problem: BaseException | None) -> bool:
    """Whether this is an error that Python, or NumPy for an array, raises for an object of a wrong type."""
    return isinstance(problem, (TypeError, AttributeError)) or "truth value of an" in f"{problem}"


def typed(call: Callable[[], object]) -> None:
    """Call; no error but one of this package may come out, and no internal one, unless Python misses a method."""
    found: BaseException | None = None
    try:
        call()
    except og.errors.InternalError as problem:
        found = problem.__cause__
    except og.ConvGradError:
        return
    except Exception as problem:  # noqa: BLE001 - judged below
        found = problem
    else:
        return
    assert misfit(found), found


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_constructors_take_anything_or_refuse_it(kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parameters = inspect.signature(kind).parameters
    needed = {p.name: USUAL.get(p.name) for p in parameters.values() if p.default is p.empty}
    for name in parameters:
        for value in ODD:
            typed(lambda options={**needed, name: value}: kind(**options))
    typed(lambda: kind(no_such_option=1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", ODD, ids=[f"{i}" for i in range(len(ODD))])
def test_methods_take_anything_or_refuse_it(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = program()
    trainer = og.Trainer(made)
    for name in ("step", "evaluate_batch", "load", "load_flat", "save", "restore", "export", "evaluate", "predict"):
        if value is not int or name not in (
            "evaluate",
            "predict",
        ):  # a function that makes no batches: the caller's error
            typed(lambda method=name: getattr(trainer, method)(value))
    for name in ("batch_size", "shuffle", "accumulate", "validation", "callbacks", "progress", "metrics"):
        if value is not int:
            typed(lambda option=name: fit(og.Trainer(made), **{option: value}))
    for name in ("batch_size", "shuffle", "seed", "drop_last", "prefetch", "names"):
        typed(lambda option=name: trainer.evaluate(BATCH, **{option: value}))
    for name in ("seed", "schedule", "options", "providers"):
        if value is not int:
            typed(lambda option=name: og.Trainer(made, **{option: value}).step(BATCH))
    for function in (
        og.Trainer,
        og.TrainingProgram.load,
        made.save,
        made.model,
        og.data.read_arrays,
        og.data.as_dataset,
    ):
        typed(lambda call=function: call(value))  # type: ignore[misc]
    typed(lambda: og.data.Arrays(BATCH).split(value))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", ODD, ids=[f"{i}" for i in range(len(ODD))])
def test_predictions_take_anything_or_refuse_it(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = program()
    trainer, model = og.Trainer(made), made.inference
    typed(lambda: trainer.export("t.onnx", check=value))
    for name in ("batch_size", "outputs"):
        typed(lambda option=name: trainer.predict(BATCH, **{option: value}))
    for function in (og.predict, og.evaluate):
        typed(lambda call=function: call(value, BATCH))  # type: ignore[misc]
        if value is not int:  # a function that makes no batches: the caller's error
            typed(lambda call=function: call(model, value))  # type: ignore[misc]
    for name in ("output", "task", "labels", "preprocessing", "batch_size", "names", "top"):
        typed(lambda option=name: og.evaluate(model, BATCH, **{option: value}))


def test_arguments_that_do_not_fit_a_signature_are_refused() -> None:
    calls: list[tuple[Any, str, str]] = [
        (lambda: optim.SGD(rate=1), "SGD", "rate"),  # type: ignore[call-arg]
        (lambda: og.Trainer(program()).step(BATCH, rate=1), "Trainer.step", "rate"),  # type: ignore[call-arg]
        (lambda: og.Trainer(program()).fit(BATCH, epoch=3), "Trainer.fit", "epoch"),  # type: ignore[call-arg]
        (lambda: og.Trainer(program(), provider="cpu"), "Trainer", "provider"),  # type: ignore[call-arg]
        (lambda: og.build_training("x.onnx", loss="mse", optimizer="sgd", los="mse"), "build_training", "los"),  # type: ignore[call-arg]
        (lambda: optim.AdamW(weight_decya=1), "AdamW", "weight_decya"),  # type: ignore[call-arg]
    ]
    for call, what, keyword in calls:
        with pytest.raises(TypeError, match=rf"{what}.* got an unexpected keyword argument '{keyword}'"):
            call()


def test_a_loss_over_classes_needs_an_axis_of_them() -> None:
    scalar = graph_of("(float[N,4] x) => (float y) { h = MatMul (x, w) y = ReduceSum <keepdims = 0> (h) }",
                      w=np.ones((4, 3), np.float32))  # fmt: skip
    for loss in ("cross_entropy", "nll"):
        with pytest.raises(og.errors.ArgumentError, match=r"'y' is a single number, .* has the shape \[N, classes\]"):
            og.build_training(scalar, loss=loss, optimizer=optim.SGD(lr=0.1))
