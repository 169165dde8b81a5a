"""Train a detector like YOLO's: anchor-free, with CIoU, focal and distribution focal loss in the training step.

python examples/detect_shapes.py      (needs pycocotools, which computes the mean average precision)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pycocotools  # noqa: F401 - the metric needs it when all is trained
from networks import Network
from shapes import KINDS, SIZE, Boxes, of_boxes, pictures

import onnx_convgrad as og

STRIDE, BINS, EPOCHS = 8, 6, 8
SIGNS, STEPS = np.float32([[-1], [-1], [1], [1]]), np.arange(BINS, dtype="f")[:, None]  # left, top, right and bottom
CENTERS = np.tile(np.mgrid[: SIZE // STRIDE, : SIZE // STRIDE][::-1].reshape(2, -1) + 0.5, (2, 1)).astype(np.float32)


def network() -> ir.Model:
    """For each cell, the scores of the kinds, and a box: each side is the mean of `BINS` distances, 0 to 5 cells."""
    net = Network(1, SIZE, SIZE)
    x = net.halve(net.block(net.halve(net.block(net.image, 1, 16)), 16, 32))
    x = net.block(net.block(net.halve(net.block(x, 32, 48)), 48, 64), 64, 64)
    sides, kinds = (net.layer("Conv", net.block(x, 64, 64), 640, (n, 64, 1, 1)) for n in (4 * BINS, len(KINDS)))
    sides = net.op("Reshape", sides, np.array([0, 4, BINS, -1]), name="sides")
    rare = net.op("Sub", net.op("Reshape", kinds, np.array([0, len(KINDS), -1])), np.float32(4), name="logits")
    mean = net.op("Mul", net.op("Softmax", sides, axis=2), STEPS), np.array([2])
    far = net.op("ReduceSum", *mean, keepdims=0, name="far")
    boxes = net.op("Add", net.op("Mul", far, SIGNS), CENTERS, name="boxes")
    return net.model(net.op("Sigmoid", rare), "scores", boxes)


def loss(e: Any, logits: Any, sides: Any, far: Any, target: Any, distance: Any, objects: Any) -> Any:  # noqa: ARG001
    """`target` [N, kinds, cells]: 1 where a cell has an object of that kind; `distance` [N, 4, cells] to its sides.

    Only the metric reads `objects` [N, 3, 5]: the kind and the box of each.
    """
    focal = e.reduce_sum(og.losses.SigmoidFocal(reduction="none")(e, logits, target), [1])
    there = e.reduce_sum(target, [1])
    # a sum, and the number of cells that divides it
    return e.add(e.mul(focal, 4), e.mul(there, of_boxes(e, sides, far, distance))), there


def labels(objects: list[Boxes]) -> dict[str, np.ndarray]:
    """The assignment: the cells in the middle of an object predict it; the smaller of two objects comes last."""
    target, distance = (np.full((len(objects), n, CENTERS.shape[1]), s, "f") for n, s in ((len(KINDS), 0), (4, 1)))
    for n, (kind, box) in ((n, found) for n, boxes in enumerate(objects) for found in boxes):
        sides = (box[:, None] / STRIDE - CENTERS) * SIGNS
        mine = (sides.min(0) > 0) & (np.abs(sides[:2] - sides[2:]).max(0) < 2)
        target[n][:, mine], distance[n][:, mine] = np.eye(len(KINDS))[kind][:, None], sides[:, mine]
    lists = np.array([([[kind, *box / STRIDE] for kind, box in boxes] + 3 * [[-1] * 5])[:3] for boxes in objects], "f")
    return {"target": target, "target_distance": distance, "target_objects": lists}


def main() -> None:
    train, held = ({"image": images, **labels(objects)} for images, objects in (pictures(768, 0), pictures(128, 1)))
    cells = CENTERS.shape[1]
    shapes = {"target": ["N", len(KINDS), cells], "distance": ["N", 4, cells], "objects": ["N", 3, 5]}
    custom = og.losses.Custom(loss, reads=["logits", "sides", "far"], shape=shapes)
    optimizer = og.optim.AdamW(og.schedules.OneCycle(5e-3, steps=EPOCHS * 768 // 16))
    trainer = og.Trainer(og.build_training(network(), loss=custom, optimizer=optimizer))
    trainer.fit(train, epochs=EPOCHS, batch_size=16)
    trainer.export("detector.onnx")
    metrics = [og.metrics.MeanAveragePrecision(suppress=0.5, iou=iou) for iou in (None, 0.5)]
    found = trainer.evaluate(held, metrics, batch_size=32)
    print("mean average precision {map:.1%}, at an IoU of 0.5 {map50:.1%}".format(**found))


if __name__ == "__main__":
    main()
