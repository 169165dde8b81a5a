"""Loggers of MLflow and Weights & Biases, with stand-ins that have the signatures of the real packages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad import callbacks
from tests.support.one_input import graph_of
from tests.support.training_nets import arrays, build


class MLflow(ModuleType):
    """The functions of mlflow 3.17 that are used, with a list of what was written."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.active: Any = None
        self.runs: dict[str, list[Any]] = {}
        self.calls: list[Any] = []

    def active_run(self) -> Any:
        return self.active

    def set_tracking_uri(self, uri: str | Path) -> None:
        self.calls.append(("uri", uri))

    def set_experiment(self, experiment_name: str | None = None, experiment_id: str | None = None) -> None:
        self.calls.append(("experiment", experiment_name, experiment_id))

    def start_run(
        self, run_id: str | None = None, experiment_id: str | None = None, run_name: str | None = None
    ) -> Any:
        assert self.active is None and experiment_id is None, run_name
        run_id = run_id or f"run{len(self.runs)}"
        self.runs.setdefault(run_id, [])
        self.active = SimpleNamespace(info=SimpleNamespace(run_id=run_id))
        return self.active

    def log_params(self, params: dict[str, Any], synchronous: bool | None = None) -> None:
        assert synchronous is None
        self.runs[self.active.info.run_id].append(params)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert all(type(value) is float for value in metrics.values())
        self.runs[self.active.info.run_id].append((step, metrics))

    def end_run(self, status: str = "FINISHED") -> None:
        self.calls.append(status)
        self.active = None


class WandB(ModuleType):
    """The functions of wandb 0.31 that are used."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[Any] = []

    def init(
        self,
        project: str | None = None,
        id: str | None = None,  # noqa: A002 - the name of the real one
        config: dict[str, Any] | None = None,
        resume: str | None = None,
        mode: str | None = None,
    ) -> Any:
        self.calls.append(("init", project, id, config, resume, mode))
        return SimpleNamespace(id=id or "new", log=self.log, finish=self.finish)

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert commit is None and all(type(value) is float for value in data.values())
        self.calls.append((step, data))

    def finish(self, exit_code: int | None = None) -> None:
        self.calls.append(("finish", exit_code))


def fit(logger: callbacks.Callback, trainer: og.Trainer | None = None, epochs: int = 1, **options: Any) -> og.Trainer:
    trainer = trainer or og.Trainer(build())
    trainer.fit(arrays(0), epochs=epochs, batch_size=3, callbacks=[logger], progress="none", **options)
    return trainer


def test_mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Options once, a row for each epoch, and the same run when it is resumed."""
    library = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", library)
    trainer = fit(callbacks.MLflow("digits", tracking_uri="sqlite:///a.db"))
    assert library.calls == [("uri", "sqlite:///a.db"), ("experiment", "digits", None), "FINISHED"]
    options, (step, row) = library.runs["run0"]
    assert options | {"loss": "CrossEntropy", "optimizer": "SGD", "optimizer.momentum": 0.9, "epochs": 1} == options
    assert step == 2 and row["loss"] == trainer.progress.history[0]["loss"] and "epoch" not in row
    resumed = og.Trainer(build())
    resumed.restore(trainer.save(tmp_path / "a.safetensors"))
    fit(callbacks.MLflow(), resumed, epochs=2)
    assert [entry[0] for entry in library.runs["run0"][1:]] == [2, 4] and len(library.runs) == 1


def test_mlflow_uses_a_run_that_is_active_and_tells_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    library = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", library)
    library.start_run()
    fit(callbacks.MLflow("other"))
    assert library.active is not None and library.calls == []
    library.end_run()

    def fail(*_: Any) -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(callbacks.MLflow(), metrics=[fail])
    assert library.calls[-1] == "FAILED"


def test_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The loss of every step, and the row of each epoch at its last step."""
    library = WandB()
    monkeypatch.setitem(sys.modules, "wandb", library)
    trainer = fit(callbacks.WandB("digits", mode="offline"))
    (row,) = trainer.progress.history
    (_, project, run_id, config, resume, mode), *steps, epoch, end = library.calls
    assert (project, run_id, resume, mode) == ("digits", None, None, "offline") and config["epochs"] == 1
    assert [step for step, _ in steps] == [1, 2] and all(
        values.keys() == {"loss", "learning_rate"} for _, values in steps
    )
    assert epoch[0] == 2 and epoch[1]["epoch/loss"] == row["loss"] and end == ("finish", 0)
    resumed = og.Trainer(build())
    resumed.restore(trainer.save(tmp_path / "a.safetensors"))
    library.calls.clear()
    fit(callbacks.WandB(), resumed, epochs=2)
    assert library.calls[0][:3] == ("init", None, "new") and library.calls[0][4] == "allow"


@pytest.mark.parametrize(("name", "make"), [("mlflow", callbacks.MLflow), ("wandb", callbacks.WandB)])
def test_a_missing_package_is_named(
    name: str, make: Callable[[], callbacks.Callback], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (None, ModuleType(name)):  # a folder `wandb` in the current folder can be imported
        monkeypatch.setitem(sys.modules, name, module)
        with pytest.raises(og.errors.ArgumentError, match=f"The package {name} is not installed") as caught:
            make()
        assert f"python -m pip install {name}`" in str(caught.value.hint)


# -- images for TensorBoard --------------------------------------------------------------------------------------------


class Images:
    """The methods of a writer for TensorBoard, with a list of the images."""

    def __init__(self, folder: str, purge_step: int) -> None:
        assert folder and purge_step == 1
        self.images: dict[str, list[Any]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None: ...

    def add_images(self, name: str, pixels: np.ndarray, step: int, dataformats: str) -> None:
        self.images.setdefault(name, []).append((step, dataformats, pixels))

    def add_image(self, name: str, pixels: np.ndarray, step: int, dataformats: str) -> None:
        self.images.setdefault(name, []).append((step, dataformats, pixels))

    def close(self) -> None: ...


def written(
    monkeypatch: pytest.MonkeyPatch, program: og.TrainingProgram, data: Any, **options: Any
) -> dict[str, list[Any]]:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Images))
    logger, trainer = callbacks.TensorBoard("runs"), og.Trainer(program)
    trainer.preprocessing = options.pop("preprocessing", None)
    trainer.fit(data, callbacks=[logger], progress="none", **options)
    return logger.writer.images


def test_the_first_batch_is_shown_as_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    net = graph_of(
        "(float[N,3,2,2] x) => (float[N,4] y) { f = Flatten (x)  y = MatMul (f, w) }", w=np.zeros((12, 4), "f")
    )
    program = og.build_training(net, loss="cross_entropy", optimizer="sgd")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 2, 2), np.uint8)
    how = og.data.Preprocessing(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    data = {"x": pixels, "target": np.arange(6) % 4}
    found = written(monkeypatch, program, data, preprocessing=how, batch_size=3, epochs=2, shuffle=False)
    ((step, layout, shown),) = found.pop("first_batch/x")
    assert (step, layout, found) == (1, "NHWC", {})
    np.testing.assert_array_equal(shown, np.moveaxis(pixels[: len(shown)], 1, -1))
    numbers = {"x": np.linspace(-3, 5, 72, dtype="f").reshape(6, 3, 2, 2), "target": data["target"]}
    ((_, _, shown),) = written(monkeypatch, program, numbers, batch_size=6, shuffle=False)["first_batch/x"]
    assert shown[0, 0, 0, 0] == 0 and shown.max() <= 255 and (np.diff(np.moveaxis(shown, -1, 1).reshape(-1)) >= 0).all()


def test_confusion_matrices_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    net = graph_of("(float[N,3] x) => (float[N,3] y) { y = MatMul (x, w) }", w=np.eye(3, dtype="f"))
    x = np.eye(3, dtype="f")[[0, 0, 1, 1, 2, 2]]
    data = {"x": x, "target": np.array([0, 1, 1, 1, 2, 2])}
    classes = og.build_training(net, loss="cross_entropy", optimizer=og.optim.SGD(0.0))
    found = written(monkeypatch, classes, data, metrics="confusion", validation=data, epochs=2)
    assert set(found) == {"epoch/confusion", "epoch/val_confusion"}
    for (step, layout, picture), wanted in zip(found["epoch/val_confusion"], (1, 2), strict=True):
        assert (step, layout, picture.shape) == (wanted, "HW", (255, 255))
        cells = picture[::85, ::85]
        np.testing.assert_array_equal(cells, 255 - np.rint(255 * np.array([[1, 0, 0], [1 / 3, 2 / 3, 0], [0, 0, 1]])))
    labels = og.build_training(net, loss="bce_with_logits", optimizer=og.optim.SGD(0.0))
    found = written(monkeypatch, labels, {"x": x, "target": x}, metrics="confusion")
    assert found["epoch/confusion"][0][2].shape == (256, 3 * 256)


@pytest.mark.peers
def test_the_writer_of_tensorboardx_takes_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    net = graph_of(
        "(float[N,1,2,2] x) => (float[N,4] y) { f = Flatten (x)  y = MatMul (f, w) }", w=np.zeros((4, 4), "f")
    )
    program = og.build_training(net, loss="cross_entropy", optimizer="sgd")
    data = {"x": np.random.default_rng(0).random((6, 1, 2, 2), np.float32), "target": np.arange(6) % 4}
    log = callbacks.TensorBoard(tmp_path)
    og.Trainer(program).fit(data, callbacks=[log], metrics="confusion", progress="none")
    content = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"first_batch/x" in content and b"epoch/confusion" in content and content.count(b"\x89PNG") >= 2
