"""Draw pictures of shapes with boxes, and measure detectors on them; `detect_shapes.py` uses these functions.

python examples/shapes.py
"""

from __future__ import annotations

import contextlib
import io

import numpy as np

SIZE, KINDS = 64, ("disc", "square", "cross")
Boxes = list[tuple[int, np.ndarray]]
"""The objects of a picture: the number of the kind, and left, top, right and bottom in pixels."""


def pictures(count: int, seed: int) -> tuple[np.ndarray, list[Boxes]]:
    """Images [count, 1, SIZE, SIZE] with one to three objects each, small ones in front, and these objects."""
    generator, (rows, columns) = np.random.default_rng(seed), np.mgrid[:SIZE, :SIZE] + 0.5
    images, objects = 0.2 * generator.standard_normal((count, 1, SIZE, SIZE)).astype(np.float32), []
    for image in images[:, 0]:
        objects.append([])
        for radius in sorted(generator.uniform(5, 14, generator.integers(1, 4)), reverse=True):
            kind, (x, y) = int(generator.integers(len(KINDS))), generator.uniform(radius, SIZE - radius, 2)
            tall = radius * generator.uniform(0.6, 1)
            dx, dy = np.abs(columns - x) / radius, np.abs(rows - y) / tall
            square = np.maximum(dx, dy) < 1
            filled = (np.hypot(dx, dy) < 1, square, square & (np.minimum(dx, dy) < 0.3))[kind]
            image[filled] = generator.uniform(0.7, 1.3)
            objects[-1].append((kind, np.array([x - radius, y - tall, x + radius, y + tall])))
    return images, objects


def suppress(scores: np.ndarray, boxes: np.ndarray) -> list[tuple[int, np.ndarray, float]]:
    """The detections of a picture, from scores [kinds, M] and boxes [M, 4]: a box that covers a better one goes."""
    kept: list[int] = []
    sizes = np.prod(boxes[:, 2:] - boxes[:, :2], -1)
    for i in (i for i in np.argsort(-scores.max(0)) if scores[:, i].max() > 0.05):
        low, high = np.maximum(boxes[i, :2], boxes[kept, :2]), np.minimum(boxes[i, 2:], boxes[kept, 2:])
        shared = np.prod(np.maximum(high - low, 0), -1)
        if (shared < 0.5 * (sizes[i] + sizes[kept] - shared)).all():
            kept.append(i)
    return [(int(scores[:, i].argmax()), boxes[i], float(scores[:, i].max())) for i in kept]


def average_precision(found: list[list[tuple[int, np.ndarray, float]]], objects: list[Boxes]) -> tuple[float, float]:
    """COCO's mean average precision: over IoUs of 0.5 to 0.95, and at 0.5 alone."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def entry(n: int, kind: int, box: np.ndarray) -> dict[str, object]:
        corner = [*box[:2].tolist(), *(box[2:] - box[:2]).tolist()]
        return {"image_id": n, "category_id": kind, "bbox": corner, "area": corner[2] * corner[3], "iscrowd": 0}

    truth = [entry(n, kind, box) for n, boxes in enumerate(objects) for kind, box in boxes]
    results = [{**entry(n, kind, box), "score": score} for n, boxes in enumerate(found) for kind, box, score in boxes]
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "images": [{"id": n} for n in range(len(objects))],
            "categories": [{"id": kind} for kind in range(len(KINDS))],
            "annotations": [{**row, "id": i} for i, row in enumerate(truth, 1)],
        }
        coco.createIndex()
        judge = COCOeval(coco, coco.loadRes(results), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return float(judge.stats[0]), float(judge.stats[1])


if __name__ == "__main__":
    image, boxes = (column[0] for column in pictures(1, seed=0))
    for line in image[0, ::4, ::2]:  # a character is twice as high as it is wide
        print("".join(" .:#"[int(np.clip(4 * shade, 0, 3))] for shade in line))
    print(*(f"{KINDS[kind]} {box.round().astype(int).tolist()}" for kind, box in boxes), sep="\n")
