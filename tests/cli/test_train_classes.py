"""`train` on a file that ends in Softmax: the last layer fits the data, the loss reads logits, and both are said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from PIL import Image
from typer.testing import Result

from tests.support.command_line import invoke as invoke_command

RNG = np.random.default_rng(0)


def invoke(*arguments: object, status: int = 0) -> Result:
    return invoke_command("train", *arguments, status=status)


def saved(path: Path, text: str, **stored: np.ndarray) -> None:
    m = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    m.graph.initializer.extend(numpy_helper.from_array(a.astype(np.float32), name) for name, a in stored.items())
    m.metadata_props.add(key="onnx_convgrad.labels", value=json.dumps([f"old{i}" for i in range(10)]))
    onnx.save(m, path)


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of ten classes, 60 images in folders of three, sequences of four classes."""
    folder = tmp_path_factory.mktemp("course")
    saved(folder / "model.onnx", "(float[N,3,8,8] image) => (float[N,10] p) { h = Conv(image, c) r = Relu(h) "
          "g = GlobalAveragePool(r) f = Flatten(g) z = Gemm(f, w, b) p = Softmax<axis=1>(z) }",
          c=0.3 * RNG.standard_normal((8, 3, 3, 3)), w=RNG.standard_normal((8, 10)), b=np.zeros(10))  # fmt: skip
    for channel, name in enumerate(("blue", "green", "red")):
        (folder / "images" / name).mkdir(parents=True)
        for i in range(20):
            pixels = RNG.integers(0, 80, (8, 8, 3))
            pixels[..., 2 - channel] += 150
            Image.fromarray(pixels.astype(np.uint8)).save(folder / "images" / name / f"{i}.png")
    saved(folder / "sequences.onnx", "(float[N,T,6] x) => (float[N,T,4] y) { z = MatMul(x, w) y = Softmax<axis=2>(z) }",
          w=RNG.standard_normal((6, 4)))  # fmt: skip
    np.savez(folder / "sequences.npz", x=RNG.random((16, 7, 6)).astype("f"), target=np.arange(112).reshape(16, 7) % 4)
    np.savez(folder / "more.npz", x=RNG.random((16, 7, 6)).astype("f"), target=np.arange(112).reshape(16, 7) % 6)
    lengths = np.full(16, 2)
    np.savez(
        folder / "ctc.npz", x=RNG.random((16, 7, 6)).astype("f"), target=np.full((16, 3), 3), target_lengths=lengths
    )
    return folder


def labels(path: Path) -> list[str]:
    return json.loads({p.key: p.value for p in onnx.load(path).metadata_props}["onnx_convgrad.labels"])


def test_a_folder_of_other_classes(course: Path, tmp_path: Path) -> None:
    result = invoke(
        course / "model.onnx", "--data", course / "images", "--out", tmp_path / "run", "--epochs", 6, "--lr", 0.1
    )
    assert "The loss is cross_entropy, as no --loss was given and the data is a folder of classes." in result.stderr
    assert "'w' had 10 classes: it was replaced by one with 3" in " ".join(result.stderr.replace(",", "").split())
    assert "'p' ends in Softmax, and the loss cross_entropy takes logits: it reads 'z'" in " ".join(
        result.stderr.split()
    )
    trained = tmp_path / "run" / "trained.onnx"
    assert labels(trained) == ["blue", "green", "red"]
    pixels = np.zeros((3, 3, 8, 8), np.float32)
    pixels[range(3), [2, 1, 0]] = 0.8
    (p,) = onnxruntime.InferenceSession(str(trained)).run(None, {"image": pixels})
    assert p.argmax(1).tolist() == [0, 1, 2]
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-5)
    again = invoke("--resume", tmp_path / "run", "--epochs", 7)
    assert "replaced" not in again.stderr and "epoch 7/7" in again.stderr
    assert "classes = 3" in (tmp_path / "run" / "train.toml").read_text()


def test_classes_that_are_kept_or_given(course: Path, tmp_path: Path) -> None:
    common = [course / "model.onnx", "--data", course / "images", "--loss", "cross_entropy", "--epochs", 1]
    kept = invoke(*common, "--out", tmp_path / "kept", "--classes", 10)
    assert "replaced" not in kept.stderr and labels(tmp_path / "kept" / "trained.onnx")[0] == "blue"
    invoke(*common, "--out", tmp_path / "five", "--classes", 5, "--head", "w")
    output = onnx.load(tmp_path / "five" / "trained.onnx").graph.output[0]
    assert output.type.tensor_type.shape.dim[1].dim_value == 5


def test_classes_of_arrays(course: Path, tmp_path: Path) -> None:
    common = [course / "sequences.onnx", "--epochs", 1, "--loss", "cross_entropy", "--loss-option", "axis=-1"]
    fits = invoke(*common, "--data", course / "sequences.npz", "--out", tmp_path / "fits")
    assert "replaced" not in fits.stderr
    more = invoke(*common, "--data", course / "more.npz", "--out", tmp_path / "more")
    assert "had 4 classes: it was replaced by one with 6" in more.stderr
    invoke(
        course / "sequences.onnx", "--data", course / "ctc.npz", "--loss", "ctc", "--out", tmp_path / "c", "--epochs", 1
    )


@pytest.mark.parametrize(("options", "message"), [
    (["--classes", 2], "--classes 2 is fewer than the 3 classes of the data"),
    (["--classes", 0], "--classes must be at least 1, not 0"),
    (["--classes", "many"], "Invalid value for '--classes'"),
    (["--head", "v"], "Unknown layer in head: 'v'"),
    (["--loss", "bce_with_logits"], "Use the loss cross_entropy"),
    (["--loss-option", "axis"], "--loss-option 'axis' is not of the form KEY=VALUE"),
    (["--loss-option", "smoothing=0.1"], "Unknown key in loss-options: 'smoothing'. Did you mean 'label_smoothing'"),
    (["--loss-option", "label_smoothing=2"], "label_smoothing must be between 0 and 1, not 2"),
    (["--loss-option", "weight=[1, 2]"], "There are 2 class weights for 3 classes"),
    (["--loss-option", "axis=3"], "classes along axis 3"),
    (["--optimizer-option", "epsilon=1"], "Unknown key in optimizer-options: 'epsilon'"),
    (["--loss", "focal", "--loss-option", "gamma=-1"], "gamma must be at least 0"),
    (["--loss", "ctc"], "the loss ctc takes [N, T, classes]"),
    (["--loss", "fokal"], "Did you mean 'focal'"),
], ids=lambda v: v if isinstance(v, str) else "")  # fmt: skip
def test_typical_mistakes(options: list[object], message: str, course: Path, tmp_path: Path) -> None:
    result = invoke(course / "model.onnx", "--data", course / "images", "--out", tmp_path / "run", *options, status=2)
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.stderr and not (tmp_path / "run").exists()


def test_a_missing_axis_is_named(course: Path, tmp_path: Path) -> None:
    data = ["--data", course / "sequences.npz", "--loss", "cross_entropy", "--out", tmp_path / "run"]
    assert "--loss-option axis=-1" in invoke(course / "sequences.onnx", *data, status=2).stderr


def test_a_missing_axis_of_logits_is_named(tmp_path: Path) -> None:
    """Tokens: the last layer is not replaced by one for the classes of the data before the loss finds them elsewhere."""
    saved(tmp_path / "m.onnx", "(float[N,7,6] x) => (float[N,7,30] y) { y = MatMul(x, w) }", w=RNG.random((6, 30)))
    np.savez(tmp_path / "d.npz", x=RNG.random((8, 7, 6)).astype("f"), target=np.arange(56).reshape(8, 7) % 29)
    common = [tmp_path / "m.onnx", "--data", tmp_path / "d.npz", "--loss", "cross_entropy", "--epochs", 1]
    refused = invoke(*common, "--out", tmp_path / "refused", status=2).stderr
    assert "30 classes along the last of 3 axes" in refused and "replaced" not in refused
    assert "--loss-option axis=-1" in refused
    invoke(*common, "--loss-option", "axis=-1", "--classes", 30, "--out", tmp_path / "run")


def test_one_hot_integers_are_no_numbers_of_classes(course: Path, tmp_path: Path) -> None:
    pictures = RNG.random((20, 3, 8, 8)).astype("f")
    np.savez(tmp_path / "d.npz", image=pictures, target=np.eye(10, dtype=np.int64)[np.arange(20) % 10])
    common = [course / "model.onnx", "--data", tmp_path / "d.npz", "--loss", "cross_entropy", "--epochs", 1]
    refused = invoke(*common, "--out", tmp_path / "refused", status=2).stderr
    assert "replaced" not in refused and "--loss-option probabilities=true" in refused
    trained = invoke(*common, "--loss-option", "probabilities=true", "--out", tmp_path / "run")
    assert "replaced" not in trained.stderr


def test_more_classes_than_a_layer_that_is_not_found(course: Path, tmp_path: Path) -> None:
    text = ("(float[N,3,8,8] image) => (float[N,2] y) { h = Conv(image, c) g = GlobalAveragePool(h) f = Flatten(g) "
            "y = BatchNormalization(f, s, s, s, s) }")  # fmt: skip
    saved(tmp_path / "m.onnx", text, c=RNG.standard_normal((2, 3, 3, 3)), s=np.ones(2))
    result = invoke(tmp_path / "m.onnx", "--data", course / "images", "--out", tmp_path / "run", status=2)
    assert "--classes 3" in result.stderr and "og.transforms.replace_head(model, 3)" in result.stderr


def test_sizes_of_minus_one_are_unknown(course: Path, tmp_path: Path) -> None:
    model = onnx.load(course / "model.onnx")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1  # as some exporters write
    onnx.save(model, tmp_path / "model.onnx")
    result = invoke(tmp_path / "model.onnx", "--data", course / "images", "--epochs", 1, "--batch-size", 60)
    assert "it was replaced by one with 3" in result.stderr
    assert "CrossEntropy of 'p', reading 'z'" in result.stdout
    assert labels(tmp_path / "model.train" / "trained.onnx") == ["blue", "green", "red"]
    result = invoke(tmp_path / "model.onnx", "--data", course / "images", "--epochs", 1, "-o", tmp_path / "default")
    assert "steps       2 per epoch" in result.stdout  # 60 samples in batches of 32
