"""Labeled pictures of real things that need no download: handwritten digits on photographs, both from scikit-learn."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits, load_sample_images

SIZE = 20
"""Rows and columns of a picture."""

TRAINED = 1200
"""The digits from which pictures for training are made; the other 597, by other writers, are for the test."""


@cache
def digits_on_photographs() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pictures (N, 1, 20, 20) in 0 .. 1 and labels: 4800 for training and 1194 for the test.

    Each digit is turned by up to 20 degrees, scaled, shifted, and laid over a random part of one of two photographs, as in
    the `mnist-back-image` data of Larochelle et al. 2007: four times for training, twice for the test.
    """
    found, generator = load_digits(), np.random.default_rng(0)
    images, labels = found.images / 16, found.target.astype(np.int64)
    train = np.concatenate([_scenes(images[:TRAINED], generator) for _ in range(4)])
    test = np.concatenate([_scenes(images[TRAINED:], generator) for _ in range(2)])
    return train, np.tile(labels[:TRAINED], 4), test, np.tile(labels[TRAINED:], 2)


def _scenes(images: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    photographs = [photograph.mean(-1) / 255 for photograph in load_sample_images().images]
    count = len(images)
    angle, zoom = generator.uniform(-0.35, 0.35, count), generator.uniform(1, 1.6, count)
    shift = generator.uniform(-0.35, 0.35, (count, 2))
    rows = np.stack([zoom * np.cos(angle), -zoom * np.sin(angle), shift[:, 0]], 1)
    columns = np.stack([zoom * np.sin(angle), zoom * np.cos(angle), shift[:, 1]], 1)
    grid = torch.nn.functional.affine_grid(
        torch.tensor(np.stack([rows, columns], 1), dtype=torch.float32), [count, 1, SIZE, SIZE], align_corners=False
    )
    digits = torch.tensor(images[:, None], dtype=torch.float32)
    moved = torch.nn.functional.grid_sample(digits, grid, align_corners=False).numpy()
    for scene in moved[:, 0]:
        behind = photographs[generator.integers(len(photographs))]
        top, left = (generator.integers(size - SIZE) for size in behind.shape)
        np.maximum(scene, 0.6 * behind[top : top + SIZE, left : left + SIZE], out=scene)
    return moved
