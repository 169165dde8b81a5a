"""Draw pictures of shapes with boxes, and compare boxes in a loss; `detect_shapes.py` and `fine_tune_yolo.py` use this.

python examples/shapes.py
"""

from __future__ import annotations

from typing import Any

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


def of_boxes(e: Any, sides: Any, far: Any, distance: Any) -> Any:
    """Twice 1 - CIoU, and distribution focal loss: [N, 1, cells], of the distances to the sides [N, 4, cells]."""
    steps = e.const(np.arange(sides.shape[2], dtype="f")[:, None])
    near = e.op("Relu", e.sub(1, e.op("Abs", e.sub(e.unsqueeze(distance, [2]), steps))))  # the two next bins
    dfl = e.reduce_sum(e.reduce_sum(e.mul(near, e.op("LogSoftmax", sides, axis=2)), [2], keepdims=False), [1])
    pairs = [e.ops("Split", x, outputs=2, axis=1, num_outputs=2) for x in (far, distance)]
    (a, b), (u, v) = pairs  # left and top, right and bottom
    sizes = [e.ops("Split", e.add(*x), outputs=2, axis=1, num_outputs=2) for x in pairs]
    least, most = (e.add(e.op(kind, a, u), e.op(kind, b, v)) for kind in ("Min", "Max"))
    both = e.op("ReduceProd", least, e.ints([1]))  # the area that both boxes cover
    iou = e.div(both, e.sub(e.add(*(e.mul(*x) for x in sizes)), both))
    apart, diagonal = (e.reduce_sum(e.square(x), [1]) for x in (e.sub(e.sub(b, a), e.sub(v, u)), e.mul(most, 2)))
    aspect = e.mul(e.square(e.sub(*(e.op("Atan", e.div(x, e.add(y, 1e-3))) for x, y in sizes))), 4 / np.pi**2)
    ciou = e.sub(iou, e.add(e.div(apart, diagonal), e.div(e.square(aspect), e.add(e.sub(1.001, iou), aspect))))
    return e.sub(e.mul(e.sub(1, ciou), 2), e.mul(dfl, 0.5))


if __name__ == "__main__":
    image, boxes = (column[0] for column in pictures(1, seed=0))
    for line in image[0, ::4, ::2]:  # a character is twice as high as it is wide
        print("".join(" .:#"[int(np.clip(4 * shade, 0, 3))] for shade in line))
    print(*(f"{KINDS[kind]} {box.round().astype(int).tolist()}" for kind, box in boxes), sep="\n")
