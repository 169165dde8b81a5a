"""Predictions and evaluations of any model: against scikit-learn, with every kind of output and batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from PIL import Image
from sklearn import metrics as reference

import onnx_convgrad as og
from onnx_convgrad.data import Preprocessing
from onnx_convgrad.evaluation.predictor import open_model
from onnx_convgrad.frontend import metadata
from tests.support.one_input import graph_of

RNG = np.random.default_rng(0)
W = RNG.standard_normal((6, 3)).astype("f")
X = RNG.standard_normal((37, 6)).astype("f")
MACRO: dict[str, Any] = {"average": "macro", "zero_division": 0.0}


def linear(tail: str = "", *, batch: int | str = "N", classes: int = 3) -> onnx.ModelProto:
    """A matrix product, then `tail`, which computes y from z."""
    body = f"z = MatMul (x, w) {tail}" if tail else "y = MatMul (x, w)"
    text = f"(float[{batch},6] x) => (float[{batch},{classes}] y) {{ {body} }}"
    return graph_of(text, w=W[:, :classes], **({"a": np.array([1])} if "(e, a)" in tail else {}))


def softmax(z: np.ndarray) -> np.ndarray:
    return torch.softmax(torch.tensor(z, dtype=torch.float64), 1).numpy()


@pytest.mark.parametrize("batch", ["N", 1, 5])
@pytest.mark.parametrize(
    "tail",
    [
        "",
        "y = Softmax (z)",
        "y = LogSoftmax (z)",
        "p = Softmax (z) f = Flatten (p) y = Identity (f)",
        "e = Exp (z) s = ReduceSum <keepdims = 1> (e, a) y = Div (e, s)",
    ],
)
def test_classes(tail: str, batch: int | str) -> None:
    target, want = RNG.integers(0, 3, len(X)), softmax(X @ W)
    model = linear(tail, batch=batch)
    found = og.predict(model, X)
    assert (found.task, found.labels, found.names[-1]) == ("classes", ("0", "1", "2"), "36")
    np.testing.assert_allclose(found.values, want, atol=1e-6)
    assert [row[0][0] for row in found.top(2)] == list(map(str, want.argmax(1)))
    assert [len(row) for row in found.top(9)] == [3] * len(X)
    got = og.evaluate(model, {"x": X, "y": target}, top=2, labels=["a", "b", "c"])
    predicted = want.argmax(1)
    expected = {
        "accuracy": reference.accuracy_score(target, predicted),
        "top2": reference.top_k_accuracy_score(target, want, k=2),
        "precision": reference.precision_score(target, predicted, **MACRO),
        "recall": reference.recall_score(target, predicted, **MACRO),
        "f1": reference.f1_score(target, predicted, **MACRO),
        "auroc": reference.roc_auc_score(target, want, multi_class="ovr"),
    }
    assert dict(got.metrics) == pytest.approx(expected, abs=1e-6) and got.samples == len(X)
    np.testing.assert_array_equal(got.confusion, reference.confusion_matrix(target, predicted))
    each = reference.precision_recall_fscore_support(target, predicted, zero_division=0.0)
    for row, values in zip(got.classes, zip(*each, strict=True), strict=True):
        assert (row.precision, row.recall, row.f1, row.support) == pytest.approx(values)
    assert [row.label for row in got.classes] == ["a", "b", "c"]


def test_labels() -> None:
    target = RNG.integers(0, 2, (len(X), 3))
    got = og.evaluate(linear("y = Sigmoid (z)"), {"x": X, "target": target})
    p = torch.sigmoid(torch.tensor(X @ W)).numpy()
    assert got.task == "labels"
    assert got.metrics["f1"] == pytest.approx(reference.f1_score(target, p > 0.5, **MACRO))
    assert got.metrics["auroc"] == pytest.approx(reference.roc_auc_score(target, p))
    np.testing.assert_array_equal(got.confusion, reference.multilabel_confusion_matrix(target, p > 0.5))
    same = og.evaluate(linear(), {"x": X, "target": target}, task="labels")
    assert same.metrics == pytest.approx(dict(got.metrics))
    with pytest.raises(og.errors.ArgumentError, match="each number of the output needs a 0 or a 1"):
        og.evaluate(linear(), {"x": X, "target": target[:, 0]}, task="labels")


def test_one_probability_is_that_of_the_second_of_two_classes() -> None:
    model, target = linear("y = Sigmoid (z)", classes=1), RNG.integers(0, 2, len(X))
    p = torch.sigmoid(torch.tensor(X @ W[:, :1])).numpy()
    found = og.predict(model, X, labels=["cat", "dog"])
    np.testing.assert_allclose(found.values, np.column_stack([1 - p, p]), atol=1e-6)
    assert found.top()[0][0][0] == ("dog" if p[0, 0] > 0.5 else "cat")
    got = og.evaluate(model, {"x": X, "target": target}, labels=["cat", "dog"])
    assert got.metrics["precision"] == pytest.approx(reference.precision_score(target, p > 0.5, zero_division=0.0))
    assert got.classes[0].label == "dog"


def test_numbers() -> None:
    target = (X @ W + RNG.standard_normal((len(X), 3)) + 1000).astype("f")
    model = linear("b = Constant <value = float {1000.0}> () y = Add (z, b)")
    got = og.evaluate(model, {"x": X, "target": target}, batch_size=8)
    y = (X @ W + 1000).astype("f")
    expected = {
        "mse": reference.mean_squared_error(target, y),
        "mae": reference.mean_absolute_error(target, y),
        "r2": reference.r2_score(target, y),
    }
    assert got.task == "numbers" and dict(got.metrics) == pytest.approx(expected, rel=1e-4)
    assert og.predict(model, X, task="numbers").labels == ()
    with pytest.raises(og.errors.ArgumentError, match="Give a label for each number"):
        og.evaluate(model, {"x": X, "target": target[:, 0]})


def test_segmentations_are_counted_by_pixel() -> None:
    y, target = RNG.standard_normal((4, 3, 5, 5)).astype("f"), RNG.integers(0, 3, (4, 5, 5))
    model = graph_of("(float[N,3,H,W] x) => (float[N,3,H,W] y) { y = Identity (x) }")
    got = og.evaluate(model, {"x": y, "mask": target})
    flat = y.argmax(1).reshape(-1)
    np.testing.assert_array_equal(got.confusion, reference.confusion_matrix(target.reshape(-1), flat))
    assert "auroc" not in got.metrics and got.metrics["accuracy"] == pytest.approx((flat == target.reshape(-1)).mean())


def test_outputs_with_classes_last_and_with_axes_of_one() -> None:
    y, target = RNG.standard_normal((4, 7, 3)).astype("f"), RNG.integers(0, 3, (4, 7))
    model = graph_of("(float[N,7,3] x) => (float[N,7,3] y) { y = Softmax (x) }")
    got = og.evaluate(model, {"x": y, "target": target})
    want = reference.confusion_matrix(target.reshape(-1), y.argmax(2).reshape(-1))
    np.testing.assert_array_equal(got.confusion, want)
    found = og.predict(model, y)
    assert found.task == "numbers" and found.values.shape == (4, 7, 3)
    for sizes in ("N,3,1,1", "N,1,1,3"):
        pooled = graph_of(f"(float[{sizes}] x) => (float[{sizes}] y) {{ y = Identity (x) }}")
        x = y[:, 0].reshape([4 if d == "N" else int(d) for d in sizes.split(",")])
        np.testing.assert_allclose(og.predict(pooled, x).values, softmax(y[:, 0]), atol=1e-6)
        right = og.evaluate(pooled, {"x": x, "target": target[:, :1]}).metrics["accuracy"]
        assert right == (y[:, 0].argmax(1) == target[:, 0]).mean()


def test_targets_that_are_no_classes() -> None:
    model = linear("y = Softmax (z)")
    for target, message in (
        (np.full(len(X), 0.5), "not a whole number"),
        (np.zeros((len(X), 2), int), r"labels have the shape \(\d+, 2\)"),
        (np.full(len(X), np.nan), "holds nan in sample 0"),
    ):
        with pytest.raises(og.errors.ArgumentError, match=message):
            og.evaluate(model, {"x": X, "target": target})


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two folders of gray and colored images."""
    for number, name in enumerate(("cat", "cat", "dog", "dog", "dog")):
        (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
        pixels = RNG.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    return tmp_path / "images"


def classifier(labels: list[str] | None, size: str = "4,4") -> ir.Model:
    """A classifier of channel-last images with a batch of 1, as exported from TensorFlow."""
    v = RNG.standard_normal((3, 2)).astype("f")
    text = f"""(float[1,{size},3] x) => (float[1,2] y) {{
        m = ReduceMean <axes = [1, 2], keepdims = 0> (x) z = MatMul (m, v) y = Softmax (z) }}"""
    model = ir.from_proto(graph_of(text, v=v))
    metadata.describe(model, labels, Preprocessing(size=(4, 4), layout="NHWC", mean=(0.5,), std=(0.25,)))
    return model


def test_images_are_prepared_as_the_file_says(pictures: Path) -> None:
    model = classifier(["dog", "cat"])
    files = sorted(pictures.rglob("*.png"))
    found = og.predict(model, files)
    weights = model.graph.initializers["v"].const_value
    assert weights is not None
    for file, values in zip(files, found.values, strict=True):
        with Image.open(file) as image:
            pixels = np.asarray(image.resize((5, 4), Image.Resampling.BILINEAR), np.float32)[:, 0:4]
        want = softmax((((pixels / 255) - 0.5) / 0.25).mean((0, 1))[None] @ weights.numpy())
        np.testing.assert_allclose(values, want[0], atol=1e-5)
    assert found.names == tuple(map(str, files)) and found.labels == ("dog", "cat")
    by_class = og.predict(model, pictures)
    np.testing.assert_array_equal(by_class.values, found.values)
    assert by_class.names[0] == str(Path("cat") / "0.png")
    flat = og.predict(model, str(pictures / "dog"))
    np.testing.assert_array_equal(flat.values, found.values[2:])
    got = og.evaluate(model, pictures)
    right = found.values.argmax(1) == [1, 1, 0, 0, 0]
    assert got.metrics["accuracy"] == right.mean() and [c.support for c in got.classes] == [3, 2]
    assert [c.label for c in got.classes] == ["dog", "cat"]


def test_images_need_a_known_preprocessing_and_classes(pictures: Path) -> None:
    model = classifier(["dog", "bird"])
    with pytest.raises(
        og.errors.ArgumentError, match=r"class 'cat', which is not among the 2 labels of the model \(dog, bird\)"
    ):
        og.evaluate(model, pictures)
    with pytest.raises(og.errors.ArgumentError, match="These images have no classes"):
        og.evaluate(model, pictures / "cat")
    with pytest.raises(og.errors.ArgumentError, match="There are 3 labels, and the output has 2 classes"):
        og.predict(model, pictures, labels=["a", "b", "c"])
    del model.metadata_props[metadata.PREPROCESSING]
    with pytest.raises(og.errors.ArgumentError, match=r"does not say how images become its input.*--mean and --std"):
        og.predict(model, pictures)
    assert len(og.predict(model, pictures, preprocessing=Preprocessing())) == 5
    with pytest.raises(
        og.errors.ArgumentError, match=r"takes an onnx_convgrad.data.Preprocessing or a name .*, not {}"
    ):
        og.predict(model, pictures, preprocessing={})  # type: ignore[arg-type]


# -- which output, which target ----------------------------------------------------------------------------------------


def test_outputs_and_targets_that_are_not_clear() -> None:
    two = graph_of(
        "(float[N,3] x) => (float[N,3] a, float[N,3] b, int64[N,3] c) { a = Relu (x) b = Neg (x) c = Cast <to = 7> (x) }"
    )
    data = {"x": X[:, :3], "u": np.zeros(len(X), int), "v": np.zeros(len(X), int)}
    with pytest.raises(og.errors.ArgumentError, match=r"has 2 floating outputs \(a, b\). Name one with --of"):
        og.predict(two, X[:, :3])
    assert og.predict(two, X[:, :3], output="b").outputs.keys() == {"a", "b"}
    with pytest.raises(og.errors.ArgumentError, match="Unknown output 'c'"):
        og.predict(two, X[:, :3], output="c")
    with pytest.raises(og.errors.ArgumentError, match="none is clearly 'target'"):
        og.evaluate(two, data, output="a")
    assert og.evaluate(two, data, output="a", names={"target": "v"}).task == "classes"
    with pytest.raises(og.errors.ArgumentError, match="There is no array for 'target'"):
        og.evaluate(two, {"x": X[:, :3]}, output="a")
    with pytest.raises(og.errors.ArgumentError, match="A label is the class 3, and the output has 3 classes"):
        og.evaluate(two, {"x": X[:, :3], "y": np.full(len(X), 3)}, output="a")
    with pytest.raises(og.errors.ArgumentError, match="All labels are -100"):
        og.evaluate(linear(), {"x": X, "y": np.full(len(X), -100)})
    with pytest.raises(og.errors.ArgumentError, match="int is not data to evaluate on"):
        og.evaluate(two, 3, output="a")  # type: ignore[arg-type]


def test_the_loss_in_the_metadata_settles_what_an_output_means(tmp_path: Path) -> None:
    program = og.build_training(linear(), loss="bce_with_logits", optimizer=og.optim.SGD(0.1))
    og.Trainer(program).export(tmp_path / "trained.onnx")
    opened = open_model(tmp_path / "trained.onnx")
    assert [term["loss"] for term in opened.manifest.losses] == ["BCEWithLogits"]
    found = og.predict(tmp_path / "trained.onnx", X)
    assert found.task == "labels"
    np.testing.assert_allclose(found.values, 1 / (1 + np.exp(-(X @ W).astype(float))), atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"ema": 0.9}, {"precision": "float16", "ema": 0.9}, {"quantization": "qat"}], ids=str
)
def test_the_folder_of_a_run_is_evaluated_as_its_file(options: dict[str, Any], tmp_path: Path) -> None:
    model: Any = linear()
    if "quantization" in options:
        model = og.transforms.insert_quantizers(model, {"x": X})
    program = og.build_training(model, loss="cross_entropy", optimizer=og.optim.SGD(1.0), **options)
    program.save(tmp_path / "program")
    data, trainer = {"x": X, "target": RNG.integers(0, 3, len(X))}, og.Trainer(program)
    trainer.fit(data, epochs=5, progress="none")
    trainer.export(tmp_path / "trained.onnx")
    run, file = (og.evaluate(path, data).metrics for path in (tmp_path, tmp_path / "trained.onnx"))
    assert file.items() <= run.items()
    if "quantization" not in options:  # such a file has no weights for the program
        assert run["loss"] == pytest.approx(trainer.evaluate(data)["loss"], rel=1e-3)


def test_damaged_metadata_is_reported(tmp_path: Path) -> None:
    model = linear()
    for key in (metadata.LABELS, "onnx_convgrad.training"):
        entry = model.metadata_props.add()
        entry.key, entry.value = key, json.dumps({"a": 1})
        with pytest.raises(og.errors.ModelError):
            og.predict(model, X)
        model.metadata_props.remove(entry)
    (tmp_path / "empty").mkdir()
    with pytest.raises(og.errors.ArgumentError, match="is not the folder of a run"):
        og.predict(tmp_path / "empty", X)


def test_a_confusion_matrix_of_too_many_classes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of a few bytes can have any number of outputs, and the matrix has its square."""
    from onnx_convgrad.metrics import scores

    rows = scores.Rows(np.zeros((1, 10), np.float32), np.zeros(1, np.int64))
    assert scores.class_counts(rows).sum() == 1
    monkeypatch.setattr(scores, "machine_bytes", lambda: 3000.0)
    with pytest.raises(og.errors.LimitError, match=r"The confusion matrix of 10 classes takes"):
        scores.class_counts(rows)


LENGTHS = (5, 7, 3)
SEQUENCES = [RNG.standard_normal((n, 6)).astype("f") for n in LENGTHS]


@pytest.mark.parametrize(("axis", "cut"), [(1, None), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", ["numbers", "labels", "classes"])
def test_the_padding_of_sequences_does_not_count(kind: str, axis: int, cut: int | None) -> None:
    tail = " y = Sigmoid (z)" if kind == "labels" else " y = Identity (z)"
    product, sizes = ("MatMul (x, w)", ("T,6", "T,3")) if axis == 1 else ("MatMul (w, x)", ("6,T", "3,T"))
    model = graph_of(
        f"(float[N,{sizes[0]}] x) => (float[N,{sizes[1]}] y) {{ z = {product}{tail} }}",
        w=W if axis == 1 else W.T.copy(),
    )
    found = np.concatenate(SEQUENCES) @ W
    shape = {"numbers": (3,), "labels": (3,), "classes": ()}[kind]
    target: Any = [RNG.integers(2, size=(n, *shape)) for n in LENGTHS]
    if kind == "numbers":
        target = [RNG.standard_normal((n, *shape)).astype("f") for n in LENGTHS]
    data: Any = {"x": SEQUENCES, "target": target}
    data = data if cut is None else og.data.Sequences(data, cut, axis=axis)
    options = {"task": "classes"} if axis == 2 and kind == "classes" else {}
    got = og.evaluate(model, data, batch_size=2, **options).metrics
    wanted = np.concatenate(target)
    if kind == "numbers":
        assert got["mse"] == pytest.approx(((found - wanted) ** 2).mean(), rel=1e-5)
    else:
        right = (found > 0) == wanted if kind == "labels" else found.argmax(1) == wanted
        assert got["accuracy"] == pytest.approx(right.mean())
