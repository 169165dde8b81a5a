"""The command `train`: options, files and output, interruption and resuming, error messages."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.utils.class_weight import compute_class_weight
from typer.testing import Result

from onnx_convgrad.cli.train_config import Config
from onnx_convgrad.cli.train_folder import read_config, written_config
from onnx_convgrad.cli.train_plot import plot
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.training.interruption import Interruption
from tests.support.command_line import invoke as invoke_command
from tests.support.training_nets import untrained


def invoke(*arguments: object, status: int = 0) -> Result:
    return invoke_command("train", *arguments, status=status)


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory, digits_cnn: Path) -> Path:
    """A folder with an untrained digits network, `train.npz` and `test.npz`."""
    folder = tmp_path_factory.mktemp("course")
    digits, generator = load_digits(), np.random.default_rng(0)
    order = generator.permutation(len(digits.target))
    images, labels = (digits.images[order][:, None] / 16).astype("f"), digits.target[order]
    for name, part in {"train": slice(0, 640), "test": slice(640, 1000)}.items():
        np.savez(folder / f"{name}.npz", image=images[part], target=labels[part])
    onnx.save(untrained(digits_cnn, generator), folder / "model.onnx")
    return folder


BASIC = ["--loss", "cross_entropy", "--threads", "1", "--batch-size", "64"]


def train(course: Path, out: Path, *more: object, status: int = 0) -> Result:
    return invoke(course / "model.onnx", "--data", course / "train.npz", *BASIC, "--out", out, *more, status=status)


def accuracy(model: Path, course: Path) -> float:
    """Of a model on `test.npz`, by ONNX Runtime alone."""
    data = np.load(course / "test.npz")
    (logits,) = onnxruntime.InferenceSession(str(model)).run(None, {"image": data["image"]})
    return float((logits.argmax(1) == data["target"]).mean())


def test_a_model_is_trained(course: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "run", tmp_path / "loss.png"
    options = ["--validation", course / "test.npz", "--epochs", 4, "--lr", 0.01, "--schedule", "onecycle"]
    result = train(course, out, *options, "--keep", 2, "--plot", picture)
    summary, _, printed = result.stdout.partition("\n\n")
    lines = printed.splitlines()
    assert summary.startswith("train       640 samples of 10 classes") and max(map(len, summary.splitlines())) < 80
    for part in ("loss        CrossEntropy of 'logits'", "10 per epoch, 40 in total", "fc       1,930       0"):
        assert part in summary
    heading = "epoch loss accuracy val. loss val. accuracy rate seconds samples/s"
    assert lines[0].split() == heading.split() and max(map(len, lines[:5])) <= 80
    assert [line.split()[0] for line in lines[1:5]] == list("1234")
    assert f" -> {out}/trained.onnx" in result.stdout and result.stderr.count("epoch ") == 4
    first, last = (accuracy(model, course) for model in (course / "model.onnx", out / "trained.onnx"))
    assert first < 0.3 and last > 0.9
    shown = float(lines[4].split()[4])
    assert shown == pytest.approx(last, abs=1e-4)
    assert accuracy(out / "best.onnx", course) > 0.9
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [
        "best.safetensors", "step-00000030.safetensors", "step-00000040.safetensors"]  # fmt: skip
    assert len((out / "history.csv").read_text().splitlines()) == 5
    with Image.open(picture) as drawn:
        assert drawn.size[0] > 1000
    again = train(course, out, status=2)
    assert "already holds a run. Continue it with `python -m onnx_convgrad train --resume" in again.stderr


def test_the_model_card_says_what_was_trained_and_its_command_does_it_again(
    course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--validation", 0.2, "--epochs", 2, "--no-shuffle", "--freeze", "conv1.*", "--freeze", "bn1.*"]
    options += ["--loss-option", "label_smoothing=0.1", "--clip-norm", 1]
    train(course, tmp_path / "run", *options)
    card = (tmp_path / "run" / "README.md").read_text()
    rows = [line.split(" | ") for line in card.splitlines() if line.startswith(("| trained.onnx", "| best.onnx"))]
    assert [row[1] for row in rows] == ["2", "2"]
    for part in (
        "# model.onnx, trained",
        "| file | epoch | loss | grad_norm | accuracy | val_loss | val_accuracy |",
        "| image | input | float32 | N x 1 x 8 x 8 |",
        "train       512 samples of 10 classes",
        "loss        CrossEntropy of 'logits'",
        f"onnxruntime {onnxruntime.__version__}",
    ):
        assert part in card
    assert str(tmp_path) not in card  # all paths are below the folder of the command, or the shorter ones
    (command,) = [line for line in card.splitlines() if line.startswith("python -m onnx_convgrad train ")]
    (tmp_path / "run").rename(tmp_path / "before")
    invoke(*shlex.split(command)[4:])
    texts = [(tmp_path / name / "README.md").read_text() for name in ("before", "run")]
    assert texts[0] == texts[1]


def test_json_and_quiet(course: Path, tmp_path: Path) -> None:
    result = train(course, tmp_path / "run", "--epochs", 1, "--json", "--metric", "accuracy,top3")
    found = json.loads(result.stdout)
    assert result.stderr == "" and found["interrupted"] is None
    assert set(found["history"][0]) >= {"epoch", "loss", "accuracy", "top3", "samples_per_second"}
    quiet = train(course, tmp_path / "other", "--epochs", 1, "-q", "--log", tmp_path / "log.jsonl")
    assert quiet.output == ""
    (row,) = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert row["loss"] == found["history"][0]["loss"] and Path(found["trained"]).is_file()


# -- interruption ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_resumed_after_ctrl_c_equals_an_undisturbed_one(course: Path, tmp_path: Path) -> None:
    out, whole = tmp_path / "a run", tmp_path / "whole"
    options = [course / "model.onnx", "--data", course / "train.npz", *BASIC, "--validation", 0.1, "--seed", 7]
    options += ["--schedule", "cosine", "--epochs", 15, "--out"]
    command = [sys.executable, "-m", "onnx_convgrad", "train", *map(str, options), str(out)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert running.stderr is not None
    assert running.stderr.readline().startswith("epoch  1/15")
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "SIGINT after step" in said and not (out / "trained.onnx").exists()
    assert said.strip().splitlines()[-1] == f"  python -m onnx_convgrad train --resume '{out}'"
    resumed = invoke("--resume", out, "--json")
    undisturbed = invoke(*options, whole, "--json")
    histories = [json.loads(result.stdout)["history"] for result in (resumed, undisturbed)]
    for row in [row for history in histories for row in history]:
        del row["seconds"], row["samples_per_second"]
    assert histories[0] == histories[1] and len(histories[0]) == 15
    for name in ("trained.onnx", "best.onnx"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_has_its_usual_effect(number: signal.Signals, status: int) -> None:
    def usual(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(number, usual)
    try:
        with Interruption() as interruption:
            assert interruption.exit_status == 0
            signal.raise_signal(number)
            assert interruption.exit_status == status
            with pytest.raises(InterruptedError):
                signal.raise_signal(number)
        assert signal.getsignal(number) is usual
    finally:
        signal.signal(number, before)


def test_a_finished_run_continues_with_more_epochs(course: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(course, out, "--epochs", 1)
    more = invoke("--resume", out, "--epochs", 2, "--json")
    assert [row["epoch"] for row in json.loads(more.stdout)["history"]] == [1, 2]
    assert tomllib.loads((out / "train.toml").read_text())["epochs"] == 2
    refused = invoke("--resume", out, "--batch-size", 32, status=2)
    assert f"--batch-size cannot change while the run goes on: in '{out}' it is 64, not 32" in refused.stderr


# -- options -----------------------------------------------------------------------------------------------------------


def test_the_command_line_overrides_a_toml_file(course: Path, tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(f"""
        model = "{os.path.relpath(course / "model.onnx", tmp_path)}"
        data = "{os.path.relpath(course / "train.npz", tmp_path)}"
        map = {{ image = "image" }}
        loss = "cross_entropy"
        optimizer = "sgd"
        momentum = 0.9
        lr = 1e-2
        epochs = 3
        freeze = ["bn*", "conv1.*"]
        out = "run"
        [loss-options]
        label_smoothing = 0.1
        [optimizer-options]
        nesterov = true
    """)
    done = invoke("--config", tmp_path / "train.toml", "--epochs", 1, "--clip-norm", 2, "--json")
    assert json.loads(done.stdout)["history"][0]["grad_norm"] > 0
    written = tomllib.loads((tmp_path / "run" / "train.toml").read_text())
    assert written["epochs"] == 1 and written["clip-norm"] == 2 and written["batch-size"] == 32
    manifest = json.loads((tmp_path / "run" / "program" / "manifest.json").read_text())
    assert manifest["losses"][0]["options"]["label_smoothing"] == 0.1
    assert [manifest["optimizer"][k] for k in ("name", "momentum", "nesterov", "clip_norm")] == ["SGD", 0.9, True, 2.0]
    trained = {p["name"] for p in manifest["parameters"]}
    assert trained and not any(name.startswith(("bn", "conv1.")) for name in trained)


def test_the_norm_of_the_gradients_is_in_the_history_on_request(course: Path, tmp_path: Path) -> None:
    options = ["--data", course / "train.npz", "--loss", "cross_entropy", "--epochs", 1]
    invoke(course / "model.onnx", *options, "--grad-norm", "-o", tmp_path / "run")
    heading, row = (tmp_path / "run" / "history.csv").read_text().splitlines()
    assert float(dict(zip(heading.split(","), row.split(","), strict=True))["grad_norm"]) > 0


@pytest.mark.parametrize("name", ["out", "plot", "log", "tensorboard", "mlflow", "wandb"])
def test_a_file_with_options_writes_in_its_folder_only(course: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "options").mkdir()
    file = tmp_path / "options" / "o.toml"
    place = "../run" if name == "out" else "../x.svg" if name == "plot" else "../x.csv"
    kept = "" if name == "out" else 'out = "run"\n'
    file.write_text(
        f"""{kept}model = "{course / "model.onnx"}"\ndata = "{course / "train.npz"}"\n{name} = "{place}"\n"""
    )
    shown = invoke("--config", file, "--epochs", 1, "--loss", "cross_entropy", status=2).stderr
    assert f"which is not in the folder of that file. If you want that, give --{name} " in shown
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["o.toml", "options"]


def test_a_run_beside_a_model_that_only_the_file_names_is_outside_its_folder(course: Path, tmp_path: Path) -> None:
    (tmp_path / "o.toml").write_text(f"""model = "{course / "model.onnx"}"\ndata = "{course / "train.npz"}"\n""")
    options = ["--config", tmp_path / "o.toml", "--epochs", 1, "--loss", "cross_entropy"]
    assert "writes out to" in invoke(*options, status=2).stderr
    invoke(*options, "--out", tmp_path / "elsewhere", "-q")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_bytes(b'model = "\xff\xfe"')
    with pytest.raises(ArgumentError, match="could not be read as TOML: 'utf-8' codec"):
        read_config(tmp_path / "train.toml")


def test_options_survive_the_file(tmp_path: Path) -> None:
    config = Config(
        model='/a/m"ü.onnx', data=("/x.npy",), loss=("a=0.5*mse",), mean=(0.5, 1e-07), validation=("0.25",),
        optimizer_options={"betas": [0.8, 0.99], "groups": {"fc*": {"lr": 0.1}}}, shuffle=False,
    )  # fmt: skip
    with written_config(config, tmp_path / "train.toml"):
        pass
    assert Config.of(read_config(tmp_path / "train.toml"), "it") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", r"Unknown key in train.toml: 'epoch'\. Did you mean 'epochs'"),
        ('epochs = "ten"', r"'epochs' in train.toml must be a whole number, not 'ten'"),
        ("shuffle = 1", "'shuffle' in train.toml must be true or false, not 1"),
        ("data = [true]", "'data' in train.toml must be text, or a list of texts, not True"),
        ("epochs = 0", "--epochs must be at least 1, not 0"),
        ("seed = -1", "--seed must be at least 0, not -1"),
        ("warmup = -3", "--warmup must be at least 0, not -3"),
        ("epochs = ", "could not be read as TOML"),
        (f"epochs = {10**400}", "'epochs' in train.toml cannot be 1000"),
        (f"epochs = {'9' * 5000}", "could not be read as TOML: Exceeds the limit"),
        ('model = "a\\u0000b"', r"'model' in train.toml cannot be 'a\\x00b'"),
        ("data = " + "[" * 5000, "could not be read as TOML: it is nested too deeply"),
        ("# " + "x" * 2**20, "could not be read as TOML: it is longer than"),
        ("data = {}", "'data' in train.toml must be text, or a list of texts"),
        ("loss-options = 3", "'loss-options' in train.toml must be a table, not 3"),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text(text)
    with pytest.raises(ArgumentError, match=message):
        Config.of(read_config(tmp_path / "train.toml"), "it")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--loss", "cross_entropi"], "Unknown loss 'cross_entropi'. Did you mean 'cross_entropy'"),
        (["--optimizer", "adm"], "Unknown optimizer 'adm'. Did you mean 'adam'"),
        (["--momentum", "0.9"], "--momentum is not an option of adamw."),
        (["--schedule", "cosin"], "Unknown schedule 'cosin'. Did you mean 'cosine'"),
        (["--freeze", "conv9*"], "Unknown initializer in freeze: 'conv9*'"),
        (["--data", "none.npz"], "none.npz'"),
        (
            ["--map", "image=target"],
            "The array 'target' has shape (64,) in a batch; the input 'image' takes (N, 1, 8, 8).",
        ),
        (["--metric", "recal"], "Unknown metric 'recal'."),
        (["--plot", "loss.bmp"], "A plot cannot be written as 'loss.bmp'"),
        (["--loss", "logits=a*mse"], "'a' is not a number. Write OUTPUT=0.5*NAME."),
        (["--providers", "cdua"], "Unknown provider 'cdua'. Did you mean 'cuda'?"),
        (["--mean", "0.5,x"], "--mean '0.5,x' is not a list of numbers."),
        (["--validation", "1.5"], "A share of 1.5 of 640 samples leaves one part empty."),
    ],
)
def test_wrong_options_leave_nothing_behind(options: list[str], message: str, course: Path, tmp_path: Path) -> None:
    given = dict(zip(options[::2], options[1::2], strict=True))
    usual = {"--data": course / "train.npz", "--loss": "cross_entropy", "--batch-size": 64, "--out": tmp_path / "run"}
    result = invoke(course / "model.onnx", *(x for pair in (usual | given).items() for x in pair), status=2)
    assert message in result.stderr and result.stdout == ""
    assert not (tmp_path / "run").exists()


def test_missing_options_are_named(course: Path, tmp_path: Path) -> None:
    model = course / "model.onnx"
    for arguments, message in (
        ([], "There is no model to train. Name an ONNX file, or --resume the folder of a run."),
        ([model, "--out", tmp_path / "run"], "There is no data. Give --data"),
        ([model, "--out", tmp_path / "run", "--data", course / "train.npz"], "There is no loss. Give --loss: mse, l1"),
        (["--resume", tmp_path], "is not the folder of a run: there is no train.toml"),
        ([model, "--out", course], "already exists and is not a run"),
    ):
        assert message in invoke(*arguments, status=2).stderr


# -- data and results --------------------------------------------------------------------------------------------------


def test_a_folder_of_images(course: Path, tmp_path: Path) -> None:
    digits = load_digits()
    for i in range(60):
        path = tmp_path / "digits" / f"class{digits.target[i]}"
        path.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[i] * 15).astype(np.uint8)).resize((24, 24)).save(path / f"{i}.png")
    options = ["--validation", 0.2, "--loss", "cross_entropy", "--epochs", 1, "--mean", 0.3, "--std", "0.4", "-q"]
    invoke(course / "model.onnx", "--data", tmp_path / "digits", *options, "--out", tmp_path / "run")
    assert json.loads((tmp_path / "run" / "classes.json").read_text()) == [f"class{i}" for i in range(10)]
    card = (tmp_path / "run" / "README.md").read_text()
    assert "Classes by number, from 0: class0, class1" in card
    assert "\nimages      8x8, (pixel * 1/255 - " in card
    (tmp_path / "digits" / "other").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "digits" / "other" / "0.png")
    invoke(course / "model.onnx", "--data", tmp_path / "digits", *options, "--out", tmp_path / "more")
    (output,) = onnx.load(tmp_path / "more" / "trained.onnx").graph.output
    assert output.type.tensor_type.shape.dim[1].dim_value == 11  # the last layer was replaced


def test_classes_count_equally_on_request(course: Path, tmp_path: Path) -> None:
    data = np.load(course / "train.npz")
    few = np.concatenate([np.flatnonzero(data["target"] != 9), np.flatnonzero(data["target"] == 9)[:5]])
    np.savez(tmp_path / "few.npz", image=data["image"][few], target=data["target"][few])
    options = ["--data", tmp_path / "few.npz", *BASIC, "--epochs", 1, "--class-weight"]
    invoke(course / "model.onnx", *options, "balanced", "--out", tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "program" / "manifest.json").read_text())
    wanted = compute_class_weight("balanced", classes=np.arange(10), y=data["target"][few])
    np.testing.assert_allclose(manifest["losses"][0]["options"]["weight"], wanted)
    assert tomllib.loads((tmp_path / "run" / "train.toml").read_text())["class-weight"] == "balanced"
    invoke("--resume", tmp_path / "run", "--epochs", 2)
    refused = invoke(course / "model.onnx", *options, "equal", "--out", tmp_path / "other", status=2)
    assert "--class-weight 'equal'" in refused.stderr


def test_arrays_of_several_files(course: Path, tmp_path: Path) -> None:
    data = np.load(course / "train.npz")
    np.save(tmp_path / "pictures.npy", data["image"])
    np.save(tmp_path / "y.npy", data["target"])
    named = ["--data", f"image={tmp_path / 'pictures.npy'}", "--data", tmp_path / "y.npy"]
    result = invoke(course / "model.onnx", *named, *BASIC, "--epochs", 1, "--out", tmp_path / "run", "--json")
    whole = train(course, tmp_path / "whole", "--epochs", 1, "--json")
    losses = [json.loads(r.stdout)["history"][0]["loss"] for r in (result, whole)]
    assert losses[0] == losses[1]
    doubled = invoke(course / "model.onnx", *named, "--data", tmp_path / "y.npy", *BASIC, status=2)
    assert "There is more than one array 'y'. Give each a name: NAME=PATH." in doubled.stderr


def test_a_loss_that_is_not_a_number_ends_the_run(course: Path, tmp_path: Path) -> None:
    result = train(course, tmp_path / "run", "--optimizer", "sgd", "--lr", 1e30, "--json", status=3)
    assert json.loads(result.stdout)["trained"] is None
    assert "Error: The loss is nan at step 2 (epoch 1, batch 2). Its samples are " in result.stderr
    assert "try a lower learning rate" in result.stderr
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def rows(count: int, **values: Any) -> list[dict[str, Any]]:
    plain = {"step": 1, "learning_rate": 0.1, "seconds": 1.0, "samples_per_second": 100.0}
    return [{"epoch": i + 1, **plain, **{k: v / (i + 1) for k, v in values.items()}} for i in range(count)]


@pytest.mark.parametrize("count", [1, 3, 60])
def test_any_history_can_be_drawn(count: int, tmp_path: Path) -> None:
    plot(rows(count, loss=2.0, val_loss=3.0, accuracy=0.5), tmp_path / "loss.svg", "net.onnx", "mse, sgd")
    text = (tmp_path / "loss.svg").read_text()
    assert "<svg" in text and len(text) > 5000


def test_long_histories_are_thinned() -> None:
    from onnx_convgrad.cli.train_results import history_table

    table = history_table(rows(95, loss=1.0))
    epochs = [int(row[0]) for row in table.rows]
    assert len(epochs) <= 20 and epochs[-1] == 95 and len(set(np.diff(epochs))) == 1
