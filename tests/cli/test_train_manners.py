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
import pytest
from onnx import numpy_helper
from PIL import Image
from typer.testing import Result

import onnx_convgrad as og
from onnx_convgrad.cli.train_config import PANELS, Config
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.pipeline.option_text import table
from onnx_convgrad.runtime import run
from tests.support.command_line import invoke as invoke_command
from tests.support.one_input import graph_of


def invoke(*arguments: object, status: int = 0) -> Result:
    return invoke_command("train", *arguments, status=status)


def network(seed: int) -> onnx.ModelProto:
    """Two layers for four classes, with random weights."""
    text = """(float[N,6] x) => (float[N,4] y) {
        a = Gemm (x, "fc1.weight", "fc1.bias")
        b = Tanh (a)
        y = Gemm (b, "fc2.weight", "fc2.bias")
    }"""
    rng, shapes = np.random.default_rng(seed), {"fc1": (6, 12), "fc2": (12, 4)}
    weights = {f"{name}.weight": rng.standard_normal(shape) for name, shape in shapes.items()}
    stored = weights | {f"{name}.bias": rng.standard_normal(shape[1]) for name, shape in shapes.items()}
    return graph_of(text, opset=21, **{name: array.astype(np.float32) for name, array in stored.items()})


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The first options of a run: a model, and data whose classes another one decides."""
    folder = tmp_path_factory.mktemp("course")
    x = np.random.default_rng(2).standard_normal((160, 6)).astype(np.float32)
    onnx.save(network(0), folder / "model.onnx")
    onnx.save(network(1), folder / "teacher.onnx")
    np.savez(folder / "train.npz", x=x, target=run(network(1), {"x": x})["y"].argmax(1))
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
    options = ["--layer-decay", 0.5, "--ema", 0.5, "--unfreeze", "*@3", "--unfreeze", "fc2.*@1", "--epochs", 2]
    options += ["--optimizer", "muon", "--optimizer-option", "others.lr=1e-3", "--optimizer-option", "ns_steps=3"]
    options += ["--schedule", "plateau", "--schedule-option", "threshold=1", "--schedule-option", "patience=0"]
    out = tmp_path / "run"
    rows = json.loads(invoke(*course, *options, "--out", out, "--json").stdout)["history"]
    assert [row["learning_rate"] for row in rows] == [1e-3, 1e-3]
    before, after = stored(Path(str(course[0]))), stored(out / "trained.onnx")
    assert {n for n in before if (before[n] != after[n]).any()} == {"fc2.weight", "fc2.bias"}
    program = og.TrainingProgram.load(out / "program")
    groups = program.manifest.optimizer["groups"]
    assert groups["fc1.weight"]["start"] == 8 and groups["fc2.bias"]["start"] == 0
    assert groups["fc1.weight"]["lr_scale"] == 0.5 and program.manifest.optimizer["ns_steps"] == 3
    trainer = og.Trainer(program)
    trainer.restore(out / "checkpoints")
    averages = trainer.state()["fc2.weight_ema"]
    np.testing.assert_array_equal(after["fc2.weight"], averages)
    assert (trainer.parameters()["fc2.weight"] != averages).any() and trainer.learning_rate == pytest.approx(1e-4)
    rows = json.loads(invoke("--resume", out, "--epochs", 3, "--json").stdout)["history"]
    assert rows[2]["learning_rate"] == pytest.approx(1e-4)
    assert (stored(out / "trained.onnx")["fc1.weight"] != before["fc1.weight"]).any()
    rows = json.loads(invoke("--resume", out, "--epochs", 4, "--lr", 0.02, "--json").stdout)["history"]
    assert rows[3]["learning_rate"] == 0.02


def test_a_teacher(course: list[object], tmp_path: Path) -> None:
    """The student comes close to the teacher, although its own labels are all wrong."""
    model, data = Path(str(course[0])), dict(np.load(str(course[2])))
    np.savez(tmp_path / "wrong.npz", image=data["x"], label=(data["target"] + 1) % 4)
    options = ["--teacher", model.with_name("teacher.onnx"), "--distill-weight", 1, "--temperature", 2, "--epochs", 60]
    more, out = ["--lr", 0.03, "--validation", 0.2, "--map", "x=image"], tmp_path / "run"
    invoke(model, "--data", tmp_path / "wrong.npz", *course[3:], *options, *more, "--out", out)
    found = run(onnx.load(out / "trained.onnx"), {"x": data["x"]})["y"].argmax(1)
    assert (found == data["target"]).mean() > 0.8
    invoke("--resume", out, "--epochs", 61, "-q")


def test_options_of_a_teacher_need_one(course: list[object]) -> None:
    shown = invoke(*course, "--temperature", "nan", "--distill-weight", -1, status=2).stderr
    assert "--distill-weight and --temperature are for --teacher. Give --teacher, too." in shown


def test_loggers(course: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of a run cannot send anything to a service by itself."""
    seen: list[str | None] = []
    wandb = ModuleType("wandb")
    service = SimpleNamespace(id="a", log=lambda data, step: None, finish=lambda exit_code: None)  # noqa: ARG005
    wandb.init = lambda project, **_: seen.append(project) or service  # type: ignore[attr-defined]
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
        (["--unfreeze", "fc1.*"], "--unfreeze 'fc1.*' is not of the form GLOB@EPOCH"),
        (["--unfreeze", "fc.*@0"], "the first epoch is 1"),
        (["--unfreeze", "fd.*@2"], "Unknown parameter in groups: 'fd.*'"),
        (["--mlflow", "digits"], "The package mlflow is not installed. Install it with `python -m pip install mlflow`"),
        (["--optimizer", "muon", "--optimizer-option", "adjust_lr_fn=moonshot"], "Unknown adjust_lr_fn 'moonshot'"),
        (
            ["--optimizer", "muon", "--optimizer-option", "others.beta=1"],
            "options of others: 'beta'. Did you mean",
        ),
        (["--optimizer", "muon", "--optimizer-option", "others=lion"], "others takes an AdamW, not 'lion'"),
        (["--optimizer", "adam", "--optimizer-option", "others.lr=1"], "Unknown key in optimizer-options: 'others'"),
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


def test_headings_name_fields() -> None:
    named = [name.rstrip("*") for names in PANELS.values() for name in names.split()]
    assert len(named) == len(set(named)) and set(named) <= {field.name for field in fields(Config)}
    lines = invoke("--help-all").stdout.splitlines()
    assert {f"{heading}:" for heading in (*PANELS, "Other options")} <= set(lines) and max(map(len, lines)) <= 80
