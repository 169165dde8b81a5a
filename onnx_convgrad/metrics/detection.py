"""The mean average precision (mAP) of detectors, computed by pycocotools."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Self

import numpy as np

from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import share
from onnx_convgrad.base.optional import imported
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.metrics.metric import Arrays, Total
from onnx_convgrad.programs.manifest import Manifest

_MOST = 1000
"""Number of best pairs of a box and a class in an image that are compared."""
_QUIET = Lock()
"""Held while standard output is replaced: two threads would restore each other's."""
_NEED = "The mean average precision needs pycocotools"


@dataclass(frozen=True, kw_only=True)
class MeanAveragePrecision(Total):
    """Mean average precision (mAP) of boxes over classes, as COCO defines it; computed by the package pycocotools.

    Args:
        boxes: Output with the boxes, `[N, K, 4]` or `[N, 4, K]`.
        scores: Output with the scores of the classes, `[N, K, C]` or `[N, C, K]`: probabilities or logits. If it is the
            output of the boxes, too, that has the box first and then the scores, `[N, K, 4 + C]` or `[N, 4 + C, K]`, as
            YOLOv8's and its successors' have; K is the larger number.
        labels: Input with the objects, `[N, M, 5]`: class and box of each. Rows with a negative class are padding. By
            default it is the only one among the labels with 5 columns.
        form: Numbers of a box, in the output and in the labels: `"xyxy"` (left, top, right, bottom), `"xywh"` (left, top,
            width, height) or `"cxcywh"` (center, width, height).
        iou: Least overlap (intersection over union) of a found box with its object; by default the mean over 0.50,
            0.55 ... 0.95.
        suppress: Overlap above which the box with the lower score of one class is dropped (non-maximum suppression);
            `None` compares all boxes, as for DETR.

    Raises:
        ArgumentError: Outputs or labels are not there or have other shapes.
        ExecutionError: pycocotools is not installed.
    """

    summed = False

    boxes: str = "boxes"
    scores: str = "scores"
    labels: str = ""
    form: str = "xyxy"
    iou: float | None = None
    suppress: float | None = None

    def __post_init__(self) -> None:
        check_names([self.form], ["xyxy", "xywh", "cxcywh"], "form of boxes")
        if self.iou is not None:
            share(self.iou, "iou", zero=False)
        if self.suppress is not None:
            share(self.suppress, "suppress")

    @property
    def name(self) -> str:  # type: ignore[override]
        """`map`, or for one overlap for example `map50`."""
        return "map" if self.iou is None else f"map{round(100 * self.iou)}"

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        """The outputs that it reads."""
        return tuple(dict.fromkeys((self.boxes, self.scores)))

    def of(self, manifest: Manifest) -> Self:
        for option, name in (("boxes", self.boxes), ("scores", self.scores)):
            if name not in manifest.outputs:
                raise ArgumentError(
                    f"The metric {self.name} needs the {option}, and the program has no output {name!r}.",
                    hint=f"Name the output: og.metrics.MeanAveragePrecision({option}=...); build_training(outputs=[...]) "
                    "adds others.",
                )
        wide = [port.name for port in manifest.targets if port.shape is not None and port.shape[2:] == (5,)]
        if self.labels:
            check_names([self.labels], [port.name for port in manifest.targets], "input with labels:")
        elif len(wide) != 1:
            raise ArgumentError(
                f"The metric {self.name} needs labels with the objects, [N, M, 5]: class and box; of the program's labels "
                f"{len(wide)} have this shape.",
                hint="Name them with og.metrics.MeanAveragePrecision(labels=...). An argument of the function of a loss "
                'makes them, used or not: og.losses.Custom(function, shape={"objects": ["N", "M", 5]}).',
            )
        imported("pycocotools", _NEED)
        return replace(self, labels=self.labels or wide[0])

    def collect(self, results: Arrays, batch: Arrays) -> np.ndarray:
        """The number of images; then objects and found boxes, as rows: image, 1 if found, class, score, and `"xywh"`."""
        objects = np.asarray(batch[self.labels], np.float64)
        boxes, scores = self._found(results)
        if objects.ndim != 3 or objects.shape[2] != 5 or len(objects) != len(boxes):
            raise ArgumentError(
                f"The labels {self.labels!r} of {len(boxes)} images have the shape {objects.shape}, not [N, M, 5]."
            )
        rows = [np.array([[len(objects), *[0] * 7]], np.float64)]
        for i, (wanted, found, own) in enumerate(zip(objects, boxes, scores, strict=True)):
            label, box = np.split(wanted[wanted[:, 0] >= 0], [1], 1)
            places = self._corners(box)
            self._refuse_negative(box[(places[:, 2:] < places[:, :2]).any(1)])
            rows.append(_rows([i, 0], label, np.ones_like(label), places))
            best = np.argsort(-own, axis=None, kind="stable")[:_MOST]
            place, kind = np.unravel_index(best, own.shape)
            corners, points = self._corners(found[place]), own[place, kind]
            kept = slice(None) if self.suppress is None else _kept(corners, kind, self.suppress)
            rows.append(_rows([i, 1], kind[kept, None], points[kept, None], corners[kept]))
        return np.concatenate(rows)

    def _refuse_negative(self, boxes: np.ndarray) -> None:
        if len(boxes):
            raise ArgumentError(
                f"An object of the labels {self.labels!r} has the box {boxes[0].tolist()}, whose size is negative as "
                f"{self.form!r}.",
                hint="Name the form of the boxes: og.metrics.MeanAveragePrecision(form='xywh'), or 'cxcywh'.",
            )

    def _found(self, results: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """Boxes `[N, K, 4]` and scores `[N, K, C]`."""
        boxes, scores = (np.asarray(results[name], np.float64) for name in (self.boxes, self.scores))
        if boxes.ndim == scores.ndim == 3:
            if self.boxes == self.scores:
                whole = boxes if boxes.shape[2] < boxes.shape[1] else boxes.transpose(0, 2, 1)
                if whole.shape[2] > 4:
                    return whole[..., :4], whole[..., 4:]
            boxes = boxes if boxes.shape[2] == 4 else boxes.transpose(0, 2, 1)
            scores = scores if scores.shape[1] == boxes.shape[1] else scores.transpose(0, 2, 1)
            if boxes.shape[2] == 4 and boxes.shape[:2] == scores.shape[:2]:
                return boxes, scores
        raise ArgumentError(
            f"The boxes {self.boxes!r} have the shape {np.shape(results[self.boxes])}, and the scores {self.scores!r} have "
            f"{np.shape(results[self.scores])}.",
            hint="They are [N, K, 4] and [N, K, C], or one output [N, K, 4 + C] with more boxes K than 4 + C; or with the "
            "last two axes in the other order.",
        )

    def _corners(self, boxes: np.ndarray) -> np.ndarray:
        """Boxes as `"xyxy"`."""
        first, second = boxes[:, :2], boxes[:, 2:]
        if self.form == "xyxy":
            return boxes
        low = first if self.form == "xywh" else first - second / 2
        return np.concatenate([low, low + second], 1)

    def result(self, parts: Sequence[np.ndarray]) -> float:
        """The mean average precision, `NaN` without objects."""
        starts = np.cumsum([0, *(part[0, 0] for part in parts)])
        rows = np.concatenate([part[1:] + start * np.eye(1, 8) for part, start in zip(parts, starts, strict=False)])
        entries: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []
        for image, is_found, label, score, *box in rows.tolist():
            entry = {"image_id": int(image), "category_id": int(label), "bbox": box, "area": box[2] * box[3]}
            if is_found:
                entries[1].append({**entry, "score": score})
            else:
                entries[0].append({**entry, "id": len(entries[0]) + 1, "iscrowd": 0})
        truth, found = entries
        if not truth or not found:
            return 0.0 if truth else float("nan")
        coco = imported("pycocotools.coco", _NEED).COCO
        evaluator = imported("pycocotools.cocoeval", _NEED).COCOeval
        with _QUIET, contextlib.redirect_stdout(io.StringIO()):
            objects = coco()
            objects.dataset = {
                "info": {},
                "images": [{"id": i} for i in range(int(starts[-1]))],
                "categories": [{"id": label} for label in sorted({entry["category_id"] for entry in truth + found})],
                "annotations": truth,
            }
            objects.createIndex()
            judge = evaluator(objects, objects.loadRes(found), "bbox")
            if self.iou is not None:
                judge.params.iouThrs = np.array([self.iou])
            judge.evaluate()
            judge.accumulate()
        # of [overlaps, recalls, classes, areas, boxes an image]: all areas, and 100 boxes
        precision = judge.eval["precision"][..., 0, -1]
        return float(precision[precision > -1].mean())


def _rows(first: list[int], labels: np.ndarray, scores: np.ndarray, corners: np.ndarray) -> np.ndarray:
    """Rows of the first numbers, class, score and box as `"xywh"`; classes and scores are `[rows, 1]`."""
    front = np.tile(first, (len(labels), 1))
    return np.concatenate([front, labels, scores, corners[:, :2], corners[:, 2:] - corners[:, :2]], 1)


def _kept(corners: np.ndarray, labels: np.ndarray, most: float) -> np.ndarray:
    """Numbers of the boxes, best first, that overlap no better one of their class by more than `most`."""
    left = np.arange(len(corners))
    sizes = np.maximum(corners[:, 2:] - corners[:, :2], 0).prod(1)
    kept = []
    while left.size:
        best, others = left[0], left[1:]
        kept.append(best)
        low, high = (
            np.maximum(corners[best, :2], corners[others, :2]),
            np.minimum(corners[best, 2:], corners[others, 2:]),
        )
        shared = np.maximum(high - low, 0).prod(1)
        overlaps = shared > most * (sizes[best] + sizes[others] - shared)
        left = others[~(overlaps & (labels[others] == labels[best]))]
    return np.array(kept, int)
