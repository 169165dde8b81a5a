"""Watch the mean average precision (mAP) of COCO, computed by pycocotools, of a detector in training.

The detector looks at a row of 4 cells, in each of which there may be a square of one of two classes.
"""

from typing import Any

import numpy as np
import onnx

import onnx_convgrad as og


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
metrics = [og.metrics.MeanAveragePrecision(form="xywh"), og.metrics.MeanAveragePrecision(form="xywh", iou=0.5)]
for row in trainer.fit(train, epochs=30, validation=held, metrics=metrics, progress="none")[9::10]:
    print(f"epoch {row['epoch']:2}  mAP {row['val_map']:.3f}, at an overlap of one half {row['val_map50']:.3f}")
