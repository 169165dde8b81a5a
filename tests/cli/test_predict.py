"""The commands `predict` and `evaluate`: a run's folder and files of others, every kind of output, error messages."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from PIL import Image

from tests.support.command_line import invoke
from tests.support.one_input import graph_of

RNG = np.random.default_rng(0)
NAMES = ("blue", "green", "red")


def model(size: str = "1,3,16,16") -> onnx.ModelProto:
    """A small classifier of images that ends in Softmax."""
    w = {"w": RNG.standard_normal((4, 3, 3, 3)).astype("f"), "v": RNG.standard_normal((4, 3)).astype("f")}
    return graph_of(
        f"""(float[{size}] image) => (float[{size[0]},3] y) {{ h = Conv <pads = [1, 1, 1, 1]> (image, w) r = Relu (h)
        p = GlobalAveragePool (r) f = Flatten (p) y = MatMul (f, v) }}""",
        **w,
    )


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images of three colors, a model of another size, and a run that was trained on them."""
    folder = tmp_path_factory.mktemp("work")
    for part, count in (("train", 12), ("test", 4)):
        for channel, name in enumerate(reversed(NAMES)):
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = RNG.integers(0, 100, (10, 10, 3), dtype=np.uint8)
                pixels[..., channel] += 150
                Image.fromarray(pixels).save(folder / part / name / f"{i}.png")
    onnx.save(model("N,3,16,16"), folder / "model.onnx")
    options = ["--loss", "cross_entropy", "--lr", 0.05, "--epochs", 3, "--batch-size", 6, "--threads", 1, "-q"]
    sizes = [
        "--image-size",
        8,
        "--mean",
        0.5,
        "--std",
        0.5,
        "--validation",
        folder / "test",
        "--metric",
        "f1,confusion",
    ]
    invoke("train", folder / "model.onnx", "--data", folder / "train", *options, *sizes, "--out", folder / "run")
    return folder


def test_a_run_is_all_that_predict_needs(work: Path) -> None:
    shown = invoke("predict", work / "run", work / "test" / "red" / "0.png").stdout.splitlines()
    assert shown[0].split() == ["sample", "label", "probability", "next"]
    assert shown[1].split()[:2] == [str(work / "test" / "red" / "0.png"), "red"]
    found = json.loads(invoke("evaluate", work / "run", work / "test", "--json").stdout)
    assert found["metrics"]["accuracy"] == 1 and [row["label"] for row in found["classes"]] == list(NAMES)
    history = list(csv.DictReader((work / "run" / "history.csv").read_text().splitlines()))
    best = min(float(row["val_loss"]) for row in history)
    assert found["metrics"]["loss"] == pytest.approx(best, rel=1e-5)


def test_the_exported_file_says_all_that_plain_onnxruntime_needs(work: Path) -> None:
    session = onnxruntime.InferenceSession(str(work / "run" / "best.onnx"))
    about = session.get_modelmeta().custom_metadata_map
    labels, how = (json.loads(about[f"onnx_convgrad.{key}"]) for key in ("labels", "preprocessing"))
    assert labels == list(NAMES) and how["size"] == [8, 8] and session.get_inputs()[0].shape == ["N", 3, 8, 8]
    with Image.open(work / "test" / "red" / "0.png") as image:
        pixels = np.asarray(image.resize((8, 8), Image.Resampling.BILINEAR), np.float32)
    x = (pixels * how["scale"] - np.float32(how["mean"])) / np.float32(how["std"])
    (logits,) = session.run(None, {"image": x.transpose(2, 0, 1)[None].astype("f")})
    assert labels[int(logits.argmax())] == "red"
    shown = json.loads(invoke("predict", work / "run" / "best.onnx", work / "test" / "red" / "0.png", "--json").stdout)
    e = np.exp(logits[0].astype(float) - logits.max())
    first = shown["predictions"][0]["labels"][0]
    assert first["label"] == "red" and first["probability"] == pytest.approx(float(e.max() / e.sum()), abs=1e-5)


def test_sizes_of_minus_one_are_unknown(work: Path, tmp_path: Path) -> None:
    """PaddlePaddle's exporter declares a free batch like this."""
    free = model("N,3,16,16")
    for value in (*free.graph.input, *free.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    onnx.save(free, tmp_path / "m.onnx")
    shown = invoke("predict", tmp_path / "m.onnx", work / "test", "--mean", 0, "--std", 1, "--json").stdout
    assert len(json.loads(shown)["predictions"]) == 12


def test_files_of_predictions(work: Path, tmp_path: Path) -> None:
    for suffix in ("csv", "json", "npz"):
        done = invoke("predict", work / "run", work / "test", "--top", 2, "-o", tmp_path / f"p.{suffix}")
        assert f"12 predictions are in {tmp_path / f'p.{suffix}'}" in done.stdout
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    assert len(rows) == 12 and list(rows[0]) == ["sample", "label", "probability", "label2", "probability2"]
    assert [row["label"] for row in rows] == [Path(row["sample"]).parts[0] for row in rows]
    written = json.loads((tmp_path / "p.json").read_text())
    assert [p["labels"][0]["label"] for p in written["predictions"]] == [row["label"] for row in rows]
    assert np.load(tmp_path / "p.npz")["y"].shape == (12, 3)


def test_evaluations(work: Path, tmp_path: Path) -> None:
    shown = invoke(
        "evaluate", work / "run", work / "test", "--plot", tmp_path / "c.png", "-o", tmp_path / "e.csv"
    ).stdout
    assert all(len(line) <= 80 for line in shown.splitlines() if str(tmp_path) not in line)
    assert "true \\ predicted  blue  green  red" in shown and "macro" not in shown
    with Image.open(tmp_path / "c.png") as drawn:
        assert drawn.size[0] > 500
    rows = list(csv.DictReader((tmp_path / "e.csv").read_text().splitlines()))
    assert [row["label"] for row in rows] == list(NAMES) and rows[0]["predicted blue"] == "4"


def test_unfinished_runs_use_their_newest_checkpoint(work: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "run"
    unfinished.mkdir()
    for name in ("program", "checkpoints", "classes.json"):
        (unfinished / name).symlink_to(work / "run" / name)
    shown = [
        json.loads(invoke("predict", path, work / "test", "--json").stdout)["predictions"]
        for path in (unfinished, work / "run" / "trained.onnx")
    ]
    for a, b in zip(*shown, strict=True):
        assert a["labels"][0]["label"] == b["labels"][0]["label"]
        assert a["labels"][0]["probability"] == pytest.approx(b["labels"][0]["probability"], abs=1e-5)


def test_numbers_and_many_classes(tmp_path: Path) -> None:
    onnx.save(graph_of("(float[2,30] x) => (float[2,30] y) { y = Neg (x) }"), tmp_path / "m.onnx")
    x, y = RNG.standard_normal((5, 30)).astype("f"), RNG.integers(0, 30, 5)
    np.savez(tmp_path / "d.npz", x=x, target=y)
    np.savez(tmp_path / "r.npz", x=x, target=-2 * x)
    numbers = invoke("predict", tmp_path / "m.onnx", tmp_path / "d.npz", "--task", "numbers").stdout.splitlines()
    assert len(numbers) == 6 and numbers[1].endswith("... (30)")
    invoke("predict", tmp_path / "m.onnx", tmp_path / "d.npz", "--task", "numbers", "-o", tmp_path / "n.csv", "-q")
    assert len((tmp_path / "n.csv").read_text().splitlines()[0].split(",")) == 31
    confused = invoke("evaluate", tmp_path / "m.onnx", tmp_path / "d.npz", "--plot", tmp_path / "c.png").stdout
    assert "true  predicted  count" in confused and "... and 10 more" in confused
    errors = invoke("evaluate", tmp_path / "m.onnx", tmp_path / "r.npz", "-o", tmp_path / "e.csv").stdout
    assert "mae" in errors and (tmp_path / "e.csv").read_text().startswith("metric,value\nsamples,5\nmse,")


def test_a_size_that_the_model_cannot_take_is_refused(work: Path, tmp_path: Path) -> None:
    fixed = model("1,3,16,16")
    fixed.graph.node[2].op_type, fixed.graph.node[2].input[:] = "Reshape", ["r", "s"]
    fixed.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 4, 256, 1]), "s"))
    del fixed.graph.initializer[1]
    fixed.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((1024, 3), "f"), "v"))
    onnx.save(fixed, tmp_path / "fixed.onnx")
    options = ["--data", work / "train", "--loss", "cross_entropy", "--image-size", 8, "--out", tmp_path / "run"]
    refused = invoke("train", tmp_path / "fixed.onnx", *options, status=2).stderr
    assert "does not take inputs of the given shapes" in refused and "Reshape" in refused
    assert not (tmp_path / "run").exists()


BAD = [
    ("predict no.onnx test", "There is no file 'no.onnx'"),
    ("predict test test", "is not the folder of a run"),
    ("predict run no.png", "There is no file 'no.png'"),
    ("predict run bad.png", "could not be read"),
    ("predict run model.onnx", "is not a data file of a known type"),
    ("predict run test -o p.txt", "Use .csv, .json, .npz"),
    ("predict run test -o no/p.csv", "There is no folder 'no'"),
    ("predict run test --top 0", "--top must be at least 1"),
    ("predict run test --of z", "Unknown output 'z'"),
    ("predict run test --task z", "Unknown task 'z'"),
    ("predict run test --image-size 9", "takes images of height 8, not 9"),
    ("predict run test --image-size x", "--image-size 'x' is not H or HxW"),
    ("predict run test --std 0", "std must be above 0"),
    ("predict run test --labels no.txt", "could not be read: No such file"),
    ("predict run test --labels bad.png", "There are 1 labels, and the output has 3 classes"),
    ("predict run test --labels empty.txt", "holds no names of classes"),
    ("predict model.onnx test", "does not say how images become its input"),
    ("predict run test/red bad.npz", "could not be read as arrays"),
    ("evaluate run test/red", "These images have no classes"),
    ("evaluate run test --plot c.txt", "A plot cannot be written as 'c.txt'"),
    ("evaluate run test -o c.npz", "Use .csv, .json"),
    ("evaluate run test --map target=z", "There is no array 'z'"),
    ("train model.onnx --data train --loss cross_entropy --metric f2", "Unknown metric 'f2'"),
]


@pytest.mark.parametrize(("command", "message"), BAD, ids=[command for command, _ in BAD])
def test_mistakes_are_answered_in_one_paragraph(
    command: str, message: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    (work / "bad.png").write_text("no image")
    (work / "bad.npz").write_text("no arrays")
    (work / "empty.txt").write_text("\n\n")
    said = invoke(*command.split(), status=2).stderr
    assert message in said and said.startswith("Error: ") and len(said.strip().splitlines()) == 1


def test_help_and_pipe(work: Path) -> None:
    command = [sys.executable, "-m", "onnx_convgrad", "predict", str(work / "run"), str(work / "test"), "-v"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "80"})
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 13 and done.stderr == ""


@pytest.mark.parametrize(
    ("declared", "options", "trained"),
    [
        ("1,3,16,16", [], ["N", 3, 16, 16]),
        ("1,3,16,16", ["--image-size", 8], ["N", 3, 8, 8]),
        ("1,3,16,16", ["--batch-size", 1], [1, 3, 16, 16]),
        ("4,3,16,16", [], [4, 3, 16, 16]),
        ("4,3,16,16", ["--batch-size", 6], ["N", 3, 16, 16]),
        ("4,3,16,16", ["--image-size", 8, "--input-shape", "image:2,3,8,8"], [2, 3, 8, 8]),
    ],
)
def test_files_declare_the_size_that_they_were_trained_at(
    work: Path, tmp_path: Path, declared: str, options: list[object], trained: list[object]
) -> None:
    onnx.save(model(declared), tmp_path / "model.onnx")
    invoke("train", tmp_path / "model.onnx", "--data", work / "test", "--loss", "cross_entropy", "--epochs", 1,
           "--threads", 1, "-q", "--mean", 0.5, *options)  # fmt: skip
    session = onnxruntime.InferenceSession(str(tmp_path / "model.train" / "trained.onnx"))
    assert session.get_inputs()[0].shape == trained and session.get_outputs()[0].shape == [trained[0], 3]
    invoke("predict", tmp_path / "model.train", work / "test" / "red", "-q")
