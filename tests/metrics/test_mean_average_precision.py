"""The mean average precision of detectors: `"map"`, `"map50"` and `og.metrics.MeanAveragePrecision`."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.metrics.detection import _kept
from tests.support.thread_ranks import on_ranks

OBJECTS = np.array(
    [[[0, 0, 0, 10, 10], [-1] * 5], [[0, 0, 0, 10, 10], [1, 20, 20, 30, 40]], [[1, 5, 5, 15, 15], [-1] * 5]], np.float32
)
"""The class and the corners of each object in three images."""

FOUND = np.array(
    [
        [[0, 0, 10, 10], [50, 50, 60, 60]],
        [[0, 0, 10, 7.2], [20, 20, 30, 40]],  # overlaps of 0.72 and 1
        [[5, 5, 15, 15], [70, 70, 80, 80]],
    ],
    np.float32,
)
SCORES = np.array([[[4, -9], [-9, -9]], [[3, -9], [-9, 2]], [[-9, 3], [-9, -9]]], np.float32)
EXPECTED = (0.5 * 1 + 0.5 * 51 / 101 + 1) / 2
"""Class 0: both objects at overlaps to 0.70, then 51 of 101 recalls; class 1: both objects."""


def detector(boxes: str, scores: str, *, columns: int = 5, outputs: str = "", rows: Any = 2) -> Any:
    """A program whose model returns its inputs, with a weight that no loss moves."""
    shapes = f"float[N,{boxes}] b, float[N,{scores}] s"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> m ({shapes}) => (float[N,{boxes}] boxes, float[N,{scores}] scores'
        f"{outputs and f', float[N,{outputs}] both'}) <float w = {{1}}> {{ boxes = Mul (b, w)  scores = Mul (s, w)"
        f"{' both = Concat <axis = -1> (boxes, scores)' if outputs else ''} }}"
    )

    def loss(e: Any, boxes: Any, objects: Any) -> Any:
        return e.mul(e.reduce_sum(boxes, [1, 2]), 0)

    custom = {"boxes": og.losses.Custom(loss, shape=["N", rows, columns])}
    return og.Trainer(og.build_training(model, loss=custom, optimizer="sgd", wrt=["w"]))


def data(
    boxes: np.ndarray = FOUND, scores: np.ndarray = SCORES, objects: np.ndarray = OBJECTS
) -> dict[str, np.ndarray]:
    return {"b": boxes, "s": scores, "target": objects}


@pytest.fixture
def coco() -> None:
    pytest.importorskip("pycocotools")


@pytest.mark.peers
@pytest.mark.usefixtures("coco")
class TestWithPycocotools:
    @pytest.mark.parametrize("batch_size", [1, 2, 3])
    def test_values_by_name(self, batch_size: int) -> None:
        trainer = detector("2,4", "2,2")
        found = trainer.evaluate(data(), ["map", "map50", "map75"], batch_size=batch_size)
        assert found["map"] == pytest.approx(EXPECTED)
        assert found["map50"] == pytest.approx(1)
        assert found["map75"] == pytest.approx((51 / 101 + 1) / 2)

    def test_fit_has_it_in_its_history(self) -> None:
        row = detector("2,4", "2,2").fit(data(), batch_size=2, metrics="map", validation=data(), progress="none")[0]
        assert row["val_map"] == pytest.approx(EXPECTED) == row["map"]

    @pytest.mark.parametrize("form", ["xyxy", "xywh", "cxcywh"])
    @pytest.mark.parametrize("turned", [False, True])
    def test_forms_of_boxes_and_orders_of_axes(self, form: str, turned: bool) -> None:
        def formed(boxes: np.ndarray) -> np.ndarray:
            low, size = boxes[..., :2], boxes[..., 2:] - boxes[..., :2]
            return {"xyxy": boxes, "xywh": np.concatenate([low, size], -1)}.get(
                form, np.concatenate([low + size / 2, size], -1)
            )

        objects = np.concatenate([OBJECTS[..., :1], formed(OBJECTS[..., 1:])], -1)
        boxes, scores = formed(np.concatenate([FOUND, FOUND[:, :1]], 1)), np.concatenate([SCORES, SCORES[:, 1:]], 1)
        scores[:, 2] = -20
        metric = og.metrics.MeanAveragePrecision(form=form)
        if turned:
            trainer = detector("4,3", "2,3")
            values = data(boxes.transpose(0, 2, 1), scores.transpose(0, 2, 1), objects)
        else:
            trainer, values = detector("3,4", "3,2"), data(boxes, scores, objects)
        assert trainer.evaluate(values, metric)["map"] == pytest.approx(EXPECTED)

    def test_one_output_with_boxes_and_scores(self) -> None:
        many = [np.concatenate([a] + [a[:, 1:]] * 5, 1) for a in (FOUND, SCORES)]
        many[1][:, 2:] = -20
        metric = og.metrics.MeanAveragePrecision(boxes="both", scores="both")
        trainer = detector("7,4", "7,2", outputs="7,6")
        assert trainer.evaluate(data(*many), metric)["map"] == pytest.approx(EXPECTED)

    def test_suppression_drops_boxes_that_a_better_one_covers(self) -> None:
        boxes = np.float32([[[0, 0, 10, 10], [0, 0, 10, 9], [30, 30, 40, 40]]])
        scores, objects = np.float32([[[3], [2], [1]]]), np.float32([[[0, 0, 0, 10, 10], [0, 30, 30, 40, 40]]])
        trainer, values = detector("3,4", "3,1"), data(boxes, scores, objects)
        metrics = [og.metrics.MeanAveragePrecision(iou=0.95, suppress=s) for s in (None, 0.5)]
        plain, suppressed = (trainer.evaluate(values, metric)["map95"] for metric in metrics)
        assert suppressed == pytest.approx(1)
        assert plain == pytest.approx((51 + 50 * 2 / 3) / 101)  # the second of three finds is wrong

    def test_without_objects_or_finds(self) -> None:
        trainer = detector("2,4", "2,2")
        assert np.isnan(trainer.evaluate(data(objects=np.full_like(OBJECTS, -1)), "map")["map"])
        far = data(boxes=FOUND + 500)
        assert trainer.evaluate(far, "map")["map"] == 0

    def test_what_does_not_fit_is_refused(self) -> None:
        with pytest.raises(og.errors.ArgumentError, match=r"needs the boxes, .*no output 'box'.*boxes=\.\.\."):
            detector("2,4", "2,2").evaluate(data(), og.metrics.MeanAveragePrecision(boxes="box"))
        with pytest.raises(og.errors.ArgumentError, match=r"needs labels with the objects, \[N, M, 5\].*0 have"):
            detector("2,4", "2,2", columns=6).evaluate(data(objects=np.ones((3, 2, 6), np.float32)), "map")
        with pytest.raises(og.errors.ArgumentError, match=r"boxes 'boxes' have the shape \(3, 2, 3\)"):
            detector("2,3", "2,2").evaluate(data(boxes=FOUND[..., :3]), "map")
        few = og.metrics.MeanAveragePrecision(boxes="both", scores="both")
        with pytest.raises(og.errors.ArgumentError, match=r"shape \(3, 2, 6\).*more boxes K than 4 \+ C"):
            detector("2,4", "2,2", outputs="2,6").evaluate(data(), few)
        turned = np.concatenate([OBJECTS[..., :1], OBJECTS[..., [3, 4, 1, 2]]], -1)
        with pytest.raises(og.errors.ArgumentError, match=r"box \[10\.0, 10\.0, 0\.0, 0\.0\].*'xyxy'.*form="):
            detector("2,4", "2,2").evaluate(data(objects=turned), "map")

    def test_threads_leave_standard_output_as_it_was(self) -> None:
        program, before = detector("2,4", "2,2").program, sys.stdout

        def train(communicator: Any) -> float:
            trainer = og.Trainer(program, distributed=communicator)
            history = trainer.fit(data(), epochs=20, batch_size=2, metrics="map", validation=data(), progress="none")
            return history[-1]["val_map"]

        assert on_ranks(2, train) == pytest.approx([EXPECTED] * 2)
        assert sys.stdout is before

    def test_objects_are_lists_of_any_length(self) -> None:
        objects = [rows[rows[:, 0] >= 0] for rows in OBJECTS] + [np.zeros((0, 5), np.float32)]
        boxes, scores = (np.concatenate([a, a[:1]]) for a in (FOUND, SCORES - 20))
        scores[:3] += 20
        lists = og.data.Arrays(data(boxes, scores, objects), padding={"target": -1})  # type: ignore[arg-type]
        trainer = detector("2,4", "2,2", rows="M")
        wanted = trainer.evaluate(data(boxes, scores, og.data.pad_sequences(objects, -1)), "map")["map"]
        assert [trainer.evaluate(lists, "map", batch_size=n)["map"] for n in (1, 3)] == pytest.approx([wanted] * 2)
        assert wanted == pytest.approx(EXPECTED)


def test_suppression_is_by_class() -> None:
    corners = np.float64([[0, 0, 10, 10], [0, 0, 10, 9], [0, 0, 10, 8], [0, 0, 10, 5]])
    assert _kept(corners, np.array([0, 0, 1, 0]), 0.6).tolist() == [0, 2, 3]
    assert _kept(corners, np.array([0, 0, 0, 0]), 0.4).tolist() == [0]
    assert _kept(np.zeros((0, 4)), np.zeros(0), 0.5).tolist() == []


def test_the_package_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    with pytest.raises(
        og.errors.ExecutionError, match=r"needs pycocotools, which is not installed.*pip install pycoco"
    ):
        detector("2,4", "2,2").evaluate(data(), "map")


def test_names_and_forms_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", SimpleNamespace())
    with pytest.raises(og.errors.ArgumentError, match=r"'map5'.*map50|There is no metric"):
        detector("2,4", "2,2").evaluate(data(), "map5")
    with pytest.raises(og.errors.ArgumentError, match="xyxy"):
        og.metrics.MeanAveragePrecision(form="corners")
    for options, message in (({"iou": 50}, "iou"), ({"iou": "0.5"}, "iou"), ({"suppress": -1}, "suppress")):
        with pytest.raises(og.errors.ArgumentError, match=message):
            og.metrics.MeanAveragePrecision(**options)
