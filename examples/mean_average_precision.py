"""A metric of your own: the mean average precision (mAP) of COCO, computed by pycocotools, of a detector in training.

The detector looks at a row of 4 cells, in each of which there may be a square of one of two classes.
"""

import contextlib
import io
from typing import Any

import numpy as np
import onnx
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

import onnx_convgrad as og


class MeanAveragePrecision(og.metrics.Total):
    """mAP of `boxes` [N, K, 4] (left, top, width, height) and `scores` [N, K, C]; labels [N, K, 5] are class and box."""

    name, outputs, summed = "map", ("boxes", "scores"), False

    def collect(self, results: Any, batch: Any) -> np.ndarray:
        rows = [[len(batch["target"]), *[-1] * 7]]  # image, 1 if it is predicted, class, score, box
        for i, (boxes, scores, wanted) in enumerate(
            zip(results["boxes"], results["scores"], batch["target"], strict=True)
        ):
            rows += [[i, 0, label, 1, *box] for label, *box in wanted if label >= 0]
            rows += [[i, 1, c, s, *box] for box, own in zip(boxes, scores, strict=True) for c, s in enumerate(own)]
        return np.array(rows)

    def result(self, parts: Any) -> float:
        first = np.cumsum([0, *(part[0, 0] for part in parts)])  # the number of the first image of each batch
        rows = np.concatenate([part[1:] + i * np.eye(1, 8) for part, i in zip(parts, first, strict=False)])
        found, truth = [], COCO()
        truth.dataset = {"info": {}, "annotations": [], "images": [{"id": i} for i in range(int(first[-1]))]}
        truth.dataset["categories"] = [{"id": int(c)} for c in np.unique(rows[:, 2])]
        for number, (image, predicted, label, score, *box) in enumerate(rows, 1):
            entry = {"id": number, "image_id": int(image), "category_id": int(label), "bbox": box, "score": score}
            (found if predicted else truth.dataset["annotations"]).append(
                {**entry, "area": box[2] * box[3], "iscrowd": 0}
            )
        with contextlib.redirect_stdout(io.StringIO()):
            truth.createIndex()
            judge = COCOeval(truth, truth.loadRes(found), "bbox")
            judge.evaluate(), judge.accumulate(), judge.summarize()
        return float(judge.stats[0])


def detection(e: Any, boxes: Any, scores: Any, target: Any) -> Any:
    """Squared errors of the boxes that there are, and of all scores, which are 1 for the class that is there."""
    label, wanted = e.slice(target, [0], [1], [2]), e.slice(target, [1], [5], [2])
    hot = e.mask(e.compare("Equal", label, e.const(np.float32([0, 1]))), scores)
    errors = e.where(e.compare("GreaterOrEqual", label, 0), e.square(e.sub(boxes, wanted)), 0)
    return e.add(e.reduce_sum(errors, [2]), e.reduce_sum(e.mul(e.square(e.sub(scores, hot)), 50), [2]))


def drawn(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """The content of cells, and the classes and boxes of their squares in a picture of 4 cells of 20 pixels."""
    label, size = rng.integers(-1, 2, (count, 4)), rng.uniform(6, 12, (count, 4))
    left, top = rng.uniform(0, 8, (2, count, 4))
    cells = np.stack([label == 0, label == 1, *((label >= 0) * [left, top, size])], -1)
    boxes = [label, left + 20 * np.arange(4), top, size, size]
    return {"cells": cells.astype(np.float32), "target": np.stack(boxes, -1).astype(np.float32)}


wb, bb, ws = (", ".join(["0.1"] * size) for size in (20, 16, 10))
model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
detector (float[N,4,5] cells) => (float[N,4,4] boxes, float[N,4,2] scores)
<float[5,4] wb = {{{wb}}}, float[4,4] bb = {{{bb}}}, float[5,2] ws = {{{ws}}}>
{{ offsets = MatMul (cells, wb)  boxes = Add (offsets, bb)  scores = MatMul (cells, ws) }}""")
loss = og.losses.Custom(detection, reads=["boxes", "scores"], shape=["N", 4, 5], dtype=np.float32)
trainer = og.Trainer(og.build_training(model, loss=loss, optimizer=og.optim.Adam(0.3)))
train, held = (drawn(np.random.default_rng(seed), count) for seed, count in ((0, 512), (1, 64)))
for row in trainer.fit(train, epochs=30, validation=held, metrics=[MeanAveragePrecision()], progress="none")[9::10]:
    print(f"epoch {row['epoch']:2}  mAP {row['val_map']:.3f}")
