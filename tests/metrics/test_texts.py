"""Recognizers of texts (CTC): alphabets, greedy decoding, metrics, and the commands from a table to texts."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

import onnx_convgrad as og
from onnx_convgrad.data import TextImages
from onnx_convgrad.data.alphabet import BLANK, Alphabet, edit_distance, greedy
from onnx_convgrad.data.pictures import padded
from onnx_convgrad.frontend.metadata import LABELS, PREPROCESSING
from onnx_convgrad.metrics.texts import TextCounts
from tests.support.command_line import invoke
from tests.support.one_input import graph_of

GLYPHS = {
    "1": "0000110010000100010000100011100000",
    "2": "0111010001000010001000100111110000",
    "3": "1111000001011100000110001011100000",
    "7": "1111100001000100010000100001000000",
}


def drawn(text: str, rng: np.random.Generator, height: int = 12) -> Image.Image:
    """A dark text on a light ground."""
    page = np.full((9, 7 * len(text) + 2), 230)
    for i, c in enumerate(text):
        rows = np.array([int(b) for b in GLYPHS[c][:35].ljust(35, "0")]).reshape(7, 5)
        page[1:8, 7 * i + 2 : 7 * i + 7] -= 200 * rows
    noisy = np.clip(page + rng.integers(-10, 10, page.shape), 0, 255).astype(np.uint8)
    return Image.fromarray(noisy).resize((page.shape[1] * height // 9, height))


def recognizer(classes: int = 5, order: str = "NTC", end: str = "Softmax", width: int = 48) -> onnx.ModelProto:
    """Two convolutions, whose columns are the frames, and a layer over classes, as in PaddleOCR's and EasyOCR's files."""
    rng = np.random.default_rng(0)
    stored = {
        "k": (0.3 * rng.standard_normal((16, 1, 5, 5))).astype("f"),
        "m": (0.1 * rng.standard_normal((24, 16, 6, 3))).astype("f"),
        "w": (0.2 * rng.standard_normal((24, classes))).astype("f"),
        "b": np.zeros(classes, "f"),
    }
    frames = width // 2
    axes, perm = (f"N,{frames}", "0,2,1") if order == "NTC" else (f"{frames},N", "2,0,1")
    tail = f"y = {end} <axis = 2> (z)" if end else "y = Identity (z)"
    return graph_of(
        f"""(float[N,1,12,{width}] image) => (float[{axes},{classes}] y) {{
        a = Conv <pads = [2, 2, 2, 2], strides = [2, 2]> (image, k) r = Relu (a)
        c = Conv <pads = [0, 1, 0, 1]> (r, m) s = Relu (c) q = Squeeze (s, two) t = Transpose <perm = [{perm}]> (q)
        h = MatMul (t, w) z = Add (h, b) {tail} }}""",
        two=np.array([2]),
        **stored,
    )


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of texts with a table, a few of them named for their texts, and a recognizer without labels."""
    folder, rng = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    for part, count in (("train", 200), ("test", 30)):
        (folder / part).mkdir()
        with (folder / f"{part}.csv").open("w") as file:
            rows = csv.writer(file)
            rows.writerow(["file", "text"])
            for i in range(count):
                text = "".join(rng.choice(list(GLYPHS), rng.integers(1, 5)))
                drawn(text, rng).save(folder / part / f"{i}.png")
                rows.writerow([f"{part}/{i}.png", text])
    (folder / "named").mkdir()
    for name in ("12", "12_2", "7"):
        drawn(name.split("_")[0], rng).save(folder / "named" / f"{name}.png")
    onnx.save(recognizer(), folder / "model.onnx")
    return folder


# -- decoding and counting ---------------------------------------------------------------------------------------------


def test_the_best_path_without_repeats_and_blanks() -> None:
    alphabet = Alphabet.of_labels(["a", "b"], 3)
    assert alphabet.labels == (BLANK, "a", "b") and alphabet.encode("ab", "here") == [1, 2]
    path = [0, 1, 1, 0, 1, 2, 2, 0]
    codes, first = greedy(np.eye(3)[path], 0)
    assert alphabet.decode(codes) == "aab" and first == [1, 4, 5]
    assert greedy(np.eye(3)[[2, 2, 1]], 2) == ([1], [2])
    assert greedy(np.zeros((0, 3)), 0) == ([], [])
    assert Alphabet.of_labels(["a", "b"], 3, blank=2).labels == ("a", "b", BLANK)
    assert Alphabet.of_texts(["ba", "c"]).labels == (BLANK, "a", "b", "c")
    with pytest.raises(
        og.errors.ArgumentError, match=r"There are 2 labels, and the output has 5 classes\. .*\(4\), or .*\(5\)"
    ):
        Alphabet.of_labels(["a", "b"], 5)
    with pytest.raises(
        og.errors.ArgumentError, match=r"The character 'x' in the text 'ax' \(1.png\) is not among the 2"
    ):
        alphabet.encode("ax", "1.png")


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("ab", "ba", 2)],
)
def test_edit_distances(a: str, b: str, distance: int) -> None:
    assert edit_distance(a, b) == edit_distance(b, a) == distance


def test_errors_per_character_of_all_texts_together() -> None:
    counted = TextCounts()
    for predicted, wanted in (("abc", "abc"), ("axc", "abc"), ("", "abcd")):
        counted.add(predicted, wanted)
    assert counted.result() == {"exact": pytest.approx(1 / 3), "cer": pytest.approx(5 / 10)}


def test_images_are_padded_with_their_last_column() -> None:
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 6))
    result = np.asarray(padded(image, (2, 9)))
    np.testing.assert_array_equal(result[:, :6], np.asarray(image))
    np.testing.assert_array_equal(result[:, 6:], np.repeat(np.asarray(image)[:, 5:], 3, 1))
    assert padded(image, (4, 9)).size == (9, 4) and padded(image, (40, 9)).size == (9, 40)


# -- data --------------------------------------------------------------------------------------------------------------


def test_a_table_or_names_of_files(work: Path, tmp_path: Path) -> None:
    table, named = TextImages(work / "test.csv"), TextImages(work / "named")
    assert len(table) == 30 and set("".join(table.texts)) == set(GLYPHS)
    assert named.texts == ["12", "12", "7"]
    (tmp_path / "a.png").write_bytes((work / "named" / "7.png").read_bytes())
    (tmp_path / "list.tsv").write_text('a.png\t"1,\n')
    assert TextImages(tmp_path / "list.tsv").texts == ['"1,']
    wrong = {
        "a.png,1,2": "Row 1 of .* has 3 columns; there must be two, file and text",
        "file,text\nb.png,1": "Row 2 of .* names 'b.png', which is not a file",
        "file,text": "holds no images with texts",
        'a.png,"1': "could not be read as a table",
    }
    for content, message in wrong.items():
        (tmp_path / "wrong.csv").write_text(content)
        with pytest.raises(og.errors.ArgumentError, match=message):
            TextImages(tmp_path / "wrong.csv")
    with pytest.raises(og.errors.ArgumentError, match="There is no file"):
        TextImages(tmp_path / "none.csv")


@pytest.mark.parametrize("order", ["NTC", "TNC"])
def test_a_trainer_reads_texts(work: Path, order: str) -> None:
    loss = og.losses.CTC(time_first=order == "TNC")
    program = og.build_training(recognizer(order=order, end=""), loss=loss, optimizer=og.optim.Adam(0.01))
    data = TextImages(work / "named", labels=list("1237"), preprocessing="unit")
    trainer = og.Trainer(program)
    history = trainer.fit(data, epochs=60, batch_size=3, metrics=["exact", "cer"], validation=data, progress="none")
    assert history[-1]["val_exact"] == 1 and history[-1]["val_cer"] == 0 and history[0]["val_cer"] > 0
    assert trainer.labels == (BLANK, *"1237")
    with pytest.raises(og.errors.ArgumentError, match="The metric exact needs the loss ctc"):
        og.Trainer(og.build_training(recognizer(), loss="mse", optimizer="sgd")).fit(
            {"x": np.zeros((1, 1, 12, 48), "f"), "y": np.zeros((1, 24, 5), "f")}, metrics="exact"
        )


def test_texts_that_cannot_be_learned_are_refused() -> None:
    program = og.build_training(recognizer(width=8, end=""), loss="ctc", optimizer="sgd")
    image = np.zeros((2, 1, 12, 8), "f")
    wrong: list[tuple[Any, Any, str]] = [
        (
            [[1, 2], [5, 0]],
            [2, 1],
            r"The label 5 in 'target' \(sample 1 of the batch.*\) is out of range: the model has 5",
        ),
        ([[1, 2], [3, 0]], [2, 3], r"The length 3 in 'target_lengths' \(sample 1 .* does not fit 'target'"),
        ([[1, 2, 3, 3], [3] * 4], [4, 1], r"takes 5 frames, and the model has 4: its loss would be infinite"),
    ]
    for target, lengths, message in wrong:
        with pytest.raises(og.errors.ArgumentError, match=message):
            og.Trainer(program).step({"image": image, "target": np.array(target), "target_lengths": np.array(lengths)})
    padding = {"image": image, "target": np.array([[1, -1], [3, 9]]), "target_lengths": np.array([1, 1])}
    assert np.isfinite(og.Trainer(program).step(padding)["loss"])


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "end", "classes"), [("NTC", "Softmax", 5), ("TNC", "", 5), ("TNC", "LogSoftmax", 38)]
)
def test_one_command_trains_a_recognizer(work: Path, tmp_path: Path, order: str, end: str, classes: int) -> None:
    onnx.save(recognizer(classes, order, end), tmp_path / "model.onnx")
    options = [
        "--validation",
        work / "test.csv",
        "--epochs",
        30,
        "--lr",
        0.01,
        "--mean",
        0.5,
        "--std",
        0.5,
        "--threads",
        1,
    ]
    result = invoke("train", tmp_path / "model.onnx", "--data", work / "train.csv", *options)
    assert "The loss is ctc" in result.stderr and "the alphabet is that of the data, 4 characters" in result.stderr
    assert ("was replaced by one with 5 and fresh weights" in result.stderr) == (classes != 5)
    run = tmp_path / "model.train"
    found = json.loads(invoke("evaluate", run, work / "test.csv", "--json").stdout)
    assert found["task"] == "text" and found["metrics"]["exact"] >= 0.95 and found["metrics"]["cer"] < 0.02
    assert found["metrics"]["loss"] < 0.5
    about = {p.key: p.value for p in onnx.load(run / "best.onnx").metadata_props}
    assert json.loads(about[LABELS]) == [BLANK, *"1237"] and json.loads(about[PREPROCESSING])["fit"] == "pad"
    for model in (run, run / "best.onnx"):  # from the metadata of the file alone
        shown = json.loads(invoke("predict", model, work / "test" / "0.png", "--json").stdout)
        assert shown["predictions"][0]["text"] == TextImages(work / "test.csv").texts[0]
        assert shown["predictions"][0]["confidence"] > 0.5
        again = json.loads(invoke("evaluate", model, work / "test.csv", "--json").stdout)
        assert again["metrics"]["exact"] == found["metrics"]["exact"]


def test_a_file_of_others_is_read_with_options(work: Path, tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("1\n2\n3\n7\n")
    options = ["--task", "text", "--labels", tmp_path / "letters.txt", "--mean", 0.5, "--std", 0.5]
    shown = invoke("predict", work / "model.onnx", work / "test", *options, "-o", tmp_path / "texts.csv").stdout
    assert shown.splitlines()[0].split() == ["sample", "text", "confidence"]
    rows = list(csv.reader((tmp_path / "texts.csv").read_text().splitlines()))
    assert rows[0] == ["sample", "text", "confidence"] and len(rows) == 31 and 0 <= float(rows[1][2]) <= 1
    found = json.loads(invoke("evaluate", work / "model.onnx", work / "test.csv", *options, "--json").stdout)
    assert found["metrics"].keys() == {"exact", "cer"} and found["samples"] == 30
    text = invoke("evaluate", work / "model.onnx", work / "test.csv", *options).stdout
    assert "cer" in text and "confusion" not in text
    first = og.predict(
        recognizer(order="TNC"), work / "test" / "0.png", task="text", labels=list("1237"),
        preprocessing=og.data.Preprocessing(mean=(0.5,), std=(0.5,), fit="pad"),
    )  # fmt: skip
    assert first.texts == (rows[1][1],) and first.top() == [[(rows[1][1], pytest.approx(float(rows[1][2]), rel=1e-5))]]
    arrays = {
        "image": np.zeros((2, 1, 12, 48), "f"),
        "target": np.array([[1], [2]]),
        "target_lengths": np.array([1, 1]),
    }
    assert og.evaluate(recognizer(), arrays, task="text", labels=list("1237")).samples == 2


def test_errors_say_what_to_do(work: Path, tmp_path: Path) -> None:
    model, table = work / "model.onnx", work / "test.csv"
    (tmp_path / "few.txt").write_text("1\n2\n")
    wanted = {
        ("predict", model, table, "--task", "text", "--mean", 0, "--std", 1): "does not say which characters",
        (
            "evaluate",
            model,
            table,
            "--mean",
            0,
            "--std",
            1,
        ): "was not trained to read texts. If it does, say so with --task",
        ("evaluate", model, table, "--task", "text", "--mean", 0, "--std", 1, "--labels", tmp_path / "few.txt"): (
            "There are 2 labels, and the output has 5 classes"
        ),
        ("train", model, "--data", table, "--loss", "cross_entropy"): "Images with texts are for the loss ctc",
        ("train", model, "--data", table, "--classes", 9): "--classes 9 does not fit an alphabet of 4 characters",
        ("train", model, "--data", table, "--augment", "flip"): "--augment is for images of classes, not of texts",
        ("train", model, "--data", table, "--labels", tmp_path / "few.txt"): "is not among the 2 of the model",
    }
    for arguments, message in wanted.items():
        assert message in " ".join(invoke(*arguments, *(["--out", tmp_path / "run"] if arguments[0] == "train" else []),
                                          status=2).stderr.split())  # fmt: skip
