"""Labels that are not classes and numbers that are not finite are refused before a step, with name and sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad.data import Arrays
from tests.support.one_input import graph_of
from tests.training.test_trainer import linear


def data(**change: Any) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.standard_normal((12, 3)).astype("f"), "target": rng.integers(0, 4, 12)} | change


def spoiled(sample: int, value: float) -> dict[str, np.ndarray]:
    found = data()
    found["x"][sample, 1] = value
    return found


def batches(arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    return [{name: array[i : i + 4] for name, array in arrays.items()} for i in range(0, 12, 4)]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            data(target=np.arange(12) % 4 + 1),
            r"label 4 in 'target' \(sample 3, .* 0 to 3\. .*from 1: subtract",
        ),
        (data(target=np.where(np.arange(12) == 7, -1, 0)), r"The label -1 in 'target' \(sample 7, counted from 0\)"),
        (
            data(target=np.where(np.arange(12) == 9, 6, 0)),
            r"label 6 in 'target' \(sample 9, .* a head for 7 classes \(transforms\.repl",
        ),
        (spoiled(6, np.nan), r"'x' holds nan in sample 6, counted from 0"),
        (spoiled(11, np.inf), r"'x' holds inf in sample 11, counted from 0"),
    ],
)
def test_wrong_values_are_refused_with_name_and_sample(arrays: dict[str, np.ndarray], message: str) -> None:
    trainer = og.Trainer(linear())
    with pytest.raises(og.errors.ArgumentError, match=message):
        trainer.fit(arrays, batch_size=4, shuffle=False, progress="none")
    in_batch = message.split("sample", maxsplit=1)[0]
    for run in (trainer.step, trainer.evaluate_batch):
        with pytest.raises(og.errors.ArgumentError, match=in_batch):
            run(arrays)
    with pytest.raises(og.errors.ArgumentError, match=in_batch + r"sample \d of batch [123]; samples count from 0"):
        trainer.fit(batches(arrays), progress="none")
    before = trainer.progress.steps
    with pytest.raises(og.errors.ArgumentError, match=in_batch):
        trainer.fit(data(), validation=Arrays(arrays), batch_size=4, epochs=2, progress="none")
    assert trainer.progress.steps > before or "label" in message  # labels are checked before the first step


def test_ignored_labels_and_masks_are_data() -> None:
    trainer = og.Trainer(linear())
    ignored = data(target=np.where(np.arange(12) == 7, -100, 0))
    assert np.isfinite(trainer.fit(ignored, batch_size=4, progress="none")[0]["loss"])
    trainer.evaluate_batch(spoiled(0, -np.inf))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (np.where(np.arange(12) == 5, 255, 0), r"label 255 .*give ignore_index=255 \(--loss-option ignore_index=255\)"),
        (np.where(np.arange(12) == 5, -1, 0), r"label -1 .*use -100 .*, or ignore_index=-1"),
        (
            np.eye(4, dtype="f")[np.arange(12) % 4],
            r"a number for each of 4 classes.*target\.argmax\(1\).*probabilities=True",
        ),
        (np.array(["cat", "dog"] * 6), r"holds text.*np\.unique\(labels, return_inverse=True\)"),
        (np.array(["cat", "dog"] * 6, object), r"holds text.*np\.unique"),
        (np.arange(12).astype(object), r"holds object.*array\.astype\(float\)"),
        (np.full(12, 0.5), r"float64 numbers that int64.*cannot hold, such as 0\.5"),
        (np.full(12, np.nan), r"cannot hold, such as nan"),
    ],
)
@pytest.mark.parametrize("loss", ["cross_entropy", "dice", [og.losses.Focal(), "cross_entropy"], "own"])
def test_targets_that_a_loss_of_classes_cannot_take_are_refused_with_a_remedy(
    loss: Any, target: np.ndarray, message: str
) -> None:
    def own(e: Any, y: Any, t: Any) -> Any:
        return e.add(og.losses.CrossEntropy()(e, y, t), og.losses.Focal()(e, y, t))

    trainer = og.Trainer(linear(loss=own if loss == "own" else loss))
    for run in (trainer.step, trainer.evaluate_batch, trainer.fit, trainer.evaluate):
        with pytest.raises(og.errors.ArgumentError, match=message):
            run(data(target=target))


def texts(**change: Any) -> dict[str, np.ndarray]:
    arrays = {
        "x": np.zeros((2, 4, 5), "f"),
        "target": np.array([[1, 2], [1, 2]]),
        "target_lengths": np.array([2, 2]),
        "target_input_lengths": np.array([4, 3]),
    }
    return {name: np.asarray(array) for name, array in (arrays | change).items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"target_input_lengths": [4, 1]},
            r"text of 2 labels in 'target' \(sample 1 .*takes 2 frames, and the sample has 1",
        ),
        ({"target_input_lengths": [4, 9]}, r"number 9 in 'target_input_lengths' \(sample 1 .*: the output has 4"),
        ({"target_input_lengths": [0, 4]}, r"number 0 in 'target_input_lengths' \(sample 0 "),
        (
            {"target": [[1, 1], [2, 2]], "target_input_lengths": [3, 2]},
            r"\(sample 1 .*takes 3 frames, and the sample has 2",
        ),
        ({"target_lengths": [2, 3]}, r"length 3 in 'target_lengths' \(sample 1 "),
        ({"target_lengths": [-1, 2]}, r"length -1 in 'target_lengths' \(sample 0 "),
        ({"target": [[1, 2], [1, 0]]}, r"\(sample 1 .*has the label 0, which is the blank"),
        ({"target": [[1, 2], [1, 5]]}, r"label 5 in 'target' \(sample 1 "),
    ],
)
@pytest.mark.parametrize("length", ["4", "T", "any"])
def test_texts_that_do_not_fit_are_refused_before_the_step(change: Any, message: str, length: str) -> None:
    shape = {"any": "N,M,5", "T": "N,T,5", "4": "N,4,5"}[length]
    net = graph_of(f"(float[{shape}] x) => (float[{shape}] y) {{ y = MatMul (x, w) }}", w=np.eye(5, dtype="f"))
    program = og.build_training(net, loss=og.losses.CTC(input_lengths=True), optimizer="sgd")
    trainer = og.Trainer(program)
    assert np.isfinite(float(trainer.step(texts())["loss"]))
    before = trainer.parameters()["w"]
    for run in (trainer.step, trainer.evaluate_batch, lambda batch: trainer.fit([batch], progress="none")):
        with pytest.raises(og.errors.ArgumentError, match=message):
            run(texts(**change))
    np.testing.assert_array_equal(trainer.parameters()["w"], before)


def test_zero_infinity_takes_texts_that_are_too_long() -> None:
    net = graph_of("(float[N,4,5] x) => (float[N,4,5] y) { y = MatMul (x, w) }", w=np.eye(5, dtype="f"))
    loss = og.losses.CTC(input_lengths=True, zero_infinity=True)
    trainer = og.Trainer(og.build_training(net, loss=loss, optimizer="sgd"))
    assert np.isfinite(float(trainer.step(texts(target_input_lengths=[4, 1]))["loss"]))


@pytest.mark.parametrize("hidden", [False, True])
def test_the_frames_of_a_convolution_are_counted_before_the_step_or_after_an_infinite_loss(hidden: bool) -> None:
    """The text is named after its loss if no shape tells the number of frames of the output."""
    tail = (
        "m = ReduceMax <keepdims = 0> (x)  i = Cast <to = 7> (m)  e = Reshape (i, one)  r = Slice (c, zero, e, two)"
        "  y = Transpose <perm = [0, 2, 1]> (r)"
    )
    net = graph_of(
        "(float[N,3,T] x) => (float[N,M,5] y) { c = Conv <strides = [2], kernel_shape = [2]> (x, w) "
        + (tail if hidden else "y = Transpose <perm = [0, 2, 1]> (c)")
        + "}",
        opset=21,
        w=np.random.default_rng(0).standard_normal((5, 3, 2)).astype("f"),
        **({"one": np.array([1]), "zero": np.array([0]), "two": np.array([2])} if hidden else {}),
    )
    trainer = og.Trainer(og.build_training(net, loss="ctc", optimizer="sgd"))
    arrays = {"x": np.full((2, 3, 8), 4, "f"), "target": np.array([[1, 2, 3], [1, 1, 1]])}
    arrays["target_lengths"] = np.array([3, 3])
    with pytest.raises(og.ConvGradError, match=r"\(sample 1 .* takes 5 frames, and the model has 4") as caught:
        trainer.fit([arrays], progress="none")
    assert isinstance(caught.value, og.errors.DivergenceError if hidden else og.errors.ArgumentError)
    assert np.isfinite(float(trainer.evaluate_batch({**arrays, "x": np.full((2, 3, 10), 5, "f")})["loss"]))


def test_a_number_for_each_class_of_the_only_sample_is_refused() -> None:
    graph = graph_of("(float[4] x) => (float[4] y) { y = Mul(x, w) }", w=np.ones(4, np.float32))
    trainer = og.Trainer(og.build_training(graph, loss="cross_entropy", optimizer=og.optim.SGD(0.1)))
    with pytest.raises(og.errors.ArgumentError, match=r"with a number for each of 4 classes.*target\.argmax\(0\)"):
        trainer.step({"x": np.ones(4, np.float32), "target": np.eye(4, dtype=np.float32)[1]})


def test_a_remedy_for_labels_that_are_not_finite() -> None:
    trainer = og.Trainer(linear())
    with pytest.raises(og.errors.ArgumentError, match=r"cannot hold, such as nan\. Correct the data.*np\.isfinite"):
        trainer.step(data(target=np.where(np.arange(12) == 3, np.nan, 1.0)))
    with pytest.raises(og.errors.ArgumentError, match=r"cannot hold, such as 0\.5\. .*np\.round"):
        trainer.step(data(target=np.full(12, 0.5)))
