"""Draw pictures of shapes with boxes, for detectors to learn from; `detect_shapes.py` uses these functions.

python examples/shapes.py
"""

from __future__ import annotations

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


if __name__ == "__main__":
    image, boxes = (column[0] for column in pictures(1, seed=0))
    for line in image[0, ::4, ::2]:  # a character is twice as high as it is wide
        print("".join(" .:#"[int(np.clip(4 * shade, 0, 3))] for shade in line))
    print(*(f"{KINDS[kind]} {box.round().astype(int).tolist()}" for kind, box in boxes), sep="\n")
