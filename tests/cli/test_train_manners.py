"""The command `train`: searches for a learning rate, options of optimizer and schedule, averages, loggers."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from PIL import Image
from sklearn.datasets import load_digits
from typer.testing import Result

import onnx_convgrad as og
from onnx_convgrad.cli.train_config import PANELS, Config
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.pipeline.option_text import table
from tests.support.command_line import invoke as invoke_command
from tests.support.training_nets import untrained


def invoke(*arguments: object, status: int = 0) -> Result:
    return invoke_command("train", *arguments, status=status)


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory, digits_cnn: Path) -> list[object]:
    """The first options of a run: an untrained model and few digits."""
    folder, digits = tmp_path_factory.mktemp("course"), load_digits()
    images = (digits.images[:160, None] / 16).astype("f")
    np.savez(folder / "train.npz", image=images, target=digits.target[:160])
    onnx.save(untrained(digits_cnn, np.random.default_rng(0)), folder / "model.onnx")
    return [
        folder / "model.onnx",
        "--data",
        folder / "train.npz",
        "--loss",
        "cross_entropy",
        "--threads",
        1,
        "--batch-size",
        40,
    ]


def stored(model: Path) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in onnx.load(model).graph.initializer}


def test_a_search_for_a_learning_rate(course: list[object], tmp_path: Path) -> None:
    """It says the rate, draws the search, and leaves no run behind."""
    (tmp_path / "model.onnx").write_bytes(Path(str(course[0])).read_bytes())
    result = invoke(tmp_path / "model.onnx", *course[1:], "--find-lr", "--plot", tmp_path / "rates.png", "--lr", 3)
    found = re.search(r"Suggested learning rate: (\S+)\. Train with --lr \1\.", result.stdout)
    assert found is not None and 1e-7 < float(found[1]) < 1
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "rates.png"}
    with Image.open(tmp_path / "rates.png") as drawn:
        assert drawn.size[0] > 1000
    values = json.loads(invoke(*course, "--find-lr", "--json").stdout)
    assert f"{values['suggestion']:.2g}" == found[1]
    assert len(values["rates"]) == len(values["losses"]) == len(values["smoothed"]) <= 100


def test_options_of_a_run(course: list[object], tmp_path: Path) -> None:
    """Layers train at their rates and from their epochs on, and the exported model holds the averages."""
    options = ["--layer-decay", 0.5, "--ema", 0.5, "--unfreeze", "*@3", "--unfreeze", "fc.*@1", "--epochs", 2]
    options += ["--optimizer", "muon", "--optimizer-option", "adamw_lr=1e-3", "--optimizer-option", "ns_steps=3"]
    options += ["--schedule", "plateau", "--schedule-option", "threshold=1", "--schedule-option", "patience=0"]
    out = tmp_path / "run"
    rows = json.loads(invoke(*course, *options, "--out", out, "--json").stdout)["history"]
    assert [row["learning_rate"] for row in rows] == [1e-3, 1e-3]
    before, after = stored(Path(str(course[0]))), stored(out / "trained.onnx")
    assert {n for n in before if (before[n] != after[n]).any() and "running" not in n} == {"fc.weight", "fc.bias"}
    program = og.TrainingProgram.load(out / "program")
    groups = program.manifest.optimizer["groups"]
    assert groups["conv1.weight"]["start"] == 8 and groups["fc.bias"]["start"] == 0
    assert groups["conv3.weight"]["lr_scale"] == 0.5 and program.manifest.optimizer["ns_steps"] == 3
    trainer = og.Trainer(program)
    trainer.restore(out / "checkpoints")
    averages = trainer.state()["fc.weight_ema"]
    np.testing.assert_array_equal(after["fc.weight"], averages)
    assert (trainer.parameters()["fc.weight"] != averages).any() and trainer.learning_rate == pytest.approx(1e-4)
    rows = json.loads(invoke("--resume", out, "--epochs", 3, "--json").stdout)["history"]
    assert rows[2]["learning_rate"] == pytest.approx(1e-4)
    assert (stored(out / "trained.onnx")["conv1.weight"] != before["conv1.weight"]).any()
    rows = json.loads(invoke("--resume", out, "--epochs", 4, "--lr", 0.02, "--json").stdout)["history"]
    assert rows[3]["learning_rate"] == 0.02


def test_a_teacher(course: list[object], tmp_path: Path, digits_cnn: Path) -> None:
    """The student comes close to the teacher, also where its own targets are wrong."""
    data = dict(np.load(str(course[2])))
    np.savez(tmp_path / "wrong.npz", image=data["image"], label=np.zeros(160, np.int64))
    options = ["--teacher", digits_cnn, "--distill-weight", 1, "--temperature", 2, "--epochs", 6, "--lr", 0.01]
    out = tmp_path / "run"
    invoke(course[0], "--data", tmp_path / "wrong.npz", *course[3:], *options, "--validation", 0.2, "--out", out)
    (logits,) = onnxruntime.InferenceSession(str(out / "trained.onnx")).run(None, {"image": data["image"]})
    assert (logits.argmax(1) == data["target"]).mean() > 0.8
    invoke("--resume", out, "--epochs", 7, "-q")


def test_loggers(course: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of a run cannot send anything to a service by itself."""
    seen: list[str | None] = []
    wandb = ModuleType("wandb")
    run = SimpleNamespace(id="a", log=lambda data, step: None, finish=lambda exit_code: None)  # noqa: ARG005
    wandb.init = lambda project, **_: seen.append(project) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    out = tmp_path / "run"
    invoke(*course, "--wandb", "digits", "--epochs", 1, "--out", out)
    refused = invoke("--resume", out, "--epochs", 2, status=2).stderr
    assert "sends its history to wandb, 'digits'," in refused and "give --wandb digits again" in refused
    invoke("--resume", out, "--epochs", 2, "--wandb", "digits")
    assert seen == ["digits", "digits"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--find-lr", "--resume", "run"], "--find-lr is for a new run"),
        (["--find-lr", "--plot", "rates.gif"], "A plot cannot be written as 'rates.gif'"),
        (["--find-lr", "--accumulate", 0], "--accumulate must be at least 1"),
        (["--optimizer", "lamp"], "Unknown optimizer 'lamp'. Did you mean 'lamb'"),
        (["--optimizer-option", "betas"], "--optimizer-option 'betas' is not of the form KEY=VALUE"),
        (["--optimizer-option", "beta=0.9"], "Unknown key in optimizer-options: 'beta'. Did you mean 'betas'"),
        (["--optimizer-option", "betas=0.9"], "betas must be two numbers, not 0.9"),
        (["--optimizer-option", "eps=1", "--optimizer-option", "eps=2"], "gives 'eps' twice"),
        (["--optimizer-option", "eps=small"], "eps must be a number, not 'small'"),
        (["--loss-option", "label_smoothing=2"], "label_smoothing must be between 0 and 1"),
        (["--loss-option", "smoothing=0.1"], "Unknown key in loss-options: 'smoothing'"),
        (["--schedule", "step", "--schedule-option", "gama=0.1"], "Did you mean 'gamma'"),
        (["--schedule", "plateau", "--schedule-option", "factor=2"], "factor must be at least 0 and below 1"),
        (["--schedule", "plateau", "--schedule-option", "waited=2"], "Unknown key in schedule-options: 'waited'"),
        (["--layer-decay", 2], "layer_decay must be between 0 and 1"),
        (["--layer-decay", 0], "layer_decay must be above 0"),
        (["--teacher", "none.onnx"], "none.onnx"),
        (["--teacher", "MODEL", "--temperature", 0], "temperature must be above 0"),
        (["--teacher", "MODEL", "--distill-weight", 1.5], "weight must be between 0 and 1"),
        (["--ema", 1], "ema must be at least 0 and below 1"),
        (["--unfreeze", "fc.*"], "--unfreeze 'fc.*' is not of the form GLOB@EPOCH"),
        (["--unfreeze", "fc.*@0"], "the first epoch is 1"),
        (["--unfreeze", "fd.*@2"], "Unknown parameter in groups: 'fd.*'"),
        (["--mlflow", "digits"], "The package mlflow is not installed. Install it with `pip install"),
        (["--optimizer", "muon", "--optimizer-option", "adjust_lr_fn=moonshot"], "Unknown adjust_lr_fn 'moonshot'"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_bad_options(
    options: list[object], message: str, course: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    options = [course[0] if option == "MODEL" else option for option in options]
    result = invoke(*course, *options, "--out", tmp_path / "run", status=2)
    assert message in result.stderr and result.stderr.count("\n") == 1 and not (tmp_path / "run").exists()


def test_tables_on_the_command_line() -> None:
    given = ["a=1", "b=0.9,0.95", "c=true", "d=text", "e=[1, 2]", 'f="1"', "g=x,2", "h={k = 1}", "i=1=2"]
    assert table("--it", given) == {
        "a": 1, "b": [0.9, 0.95], "c": True, "d": "text", "e": [1, 2], "f": "1", "g": ["x", 2], "h": {"k": 1}, "i": "1=2",
    }  # fmt: skip
    for wrong in ("=1", "a=", "a"):
        with pytest.raises(ArgumentError, match="KEY=VALUE"):
            table("--it", [wrong])


def test_every_option_is_in_the_help_and_in_the_documentation() -> None:
    help_text = invoke("--help").stdout
    documented = (Path(__file__).parents[2] / "docs" / "options.md").read_text(encoding="utf-8")
    for field in fields(Config):
        if field.name == "model":
            continue
        (option,) = field.metadata["options"]
        for name in [name for written in option.names for name in written.split("/")]:
            assert re.search(rf"(?<!\S){name}(?![\w-])", help_text), f"{name} is not in the help"
            assert re.search(rf"`[^`]*{name}(?![\w-])[^`]*`", documented), f"{name} is not in docs/options.md"


def test_headings_name_fields() -> None:
    named = [name for names in PANELS.values() for name in names.split()]
    assert len(named) == len(set(named)) and set(named) <= {field.name for field in fields(Config)}
    assert max(map(len, invoke("--help").stdout.splitlines())) <= 80
