"""Plot a confusion matrix: the share of each true class by predicted class, with the counts while they fit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_convgrad.cli.figures import INK, OURS, no_formula, picture
from onnx_convgrad.errors import shown

if TYPE_CHECKING:
    import numpy as np

    from onnx_convgrad.evaluation.evaluate import Evaluation

_CELL, _LEAST, _MOST = 0.52, 3.2, 9.0
"""Inches: one cell, and the least and the greatest side of a matrix."""

_NAMED, _COUNTED = 40, 25
"""Most classes with names at the axes, and with counts in the cells."""

_LONGEST, _LETTER = 24, 0.075
"""Most letters of a name, and inches of each."""

_COLUMNS = 4
"""Matrices in a row, of several labels."""


def plot(found: Evaluation, path: Path, title: str) -> None:
    """Draw the confusion matrix of an evaluation, or one for each label; the suffix of the path chooses the format."""
    from matplotlib.colors import LinearSegmentedColormap

    counts = found.confusion
    if counts is None:
        return
    single = counts.ndim == 2
    matrices = [counts] if single else list(counts)
    columns = min(len(matrices), _COLUMNS)
    rows = -(-len(matrices) // columns)
    names = [list(map(shown, found.labels))] if single else [["no", shown(label)] for label in found.labels]
    side = min(max(_CELL * matrices[0].shape[0], _LEAST if single else 1.6), _MOST)
    longest = min(max(len(n) for group in names for n in group), _LONGEST) * _LETTER
    upright = longest > side / matrices[0].shape[0]
    margin, below = 0.5 + longest, 0.6 + (longest if upright else 0.1)
    width, height = max(columns * (side + margin) + 0.3, 5.0), rows * (side + below) + 1.15
    shades = LinearSegmentedColormap.from_list("share", ["#ffffff", OURS])
    measured = [f"{name} {value:.4f}" for name, value in found.metrics.items() if not math.isnan(value)]
    details = f"{found.samples:,} samples; " + ", ".join(measured[3:])
    with picture(path, (width, height), title, ", ".join(measured[:3]), details) as figure:
        for number, (matrix, labels) in enumerate(zip(matrices, names, strict=True)):
            left = number % columns * (side + margin) + margin
            bottom = height - 1.15 - (number // columns) * (side + below) - side
            axis = figure.add_axes((left / width, bottom / height, side / width, side / height))
            _matrix(axis, matrix, labels, shades, upright=upright)


def _matrix(axis: Any, counts: np.ndarray, labels: list[str], shades: Any, *, upright: bool) -> None:
    """Draw one matrix, each row divided by its sum."""
    total = counts.sum(1, keepdims=True)
    shares = counts / total.clip(1)
    axis.imshow(shares, cmap=shades, vmin=0, vmax=1, interpolation="nearest", aspect="equal")
    size = 8.0 if len(labels) <= _COUNTED else 6.0
    if len(labels) <= _NAMED:
        places, short = (
            range(len(labels)),
            [no_formula(n if len(n) <= _LONGEST else f"{n[: _LONGEST - 1]}…") for n in labels],
        )
        axis.set_xticks(places, short, rotation=90 if upright else 0, size=size, color=INK)
        axis.set_yticks(places, short, size=size, color=INK)
    if len(labels) <= _COUNTED:
        for i, row in enumerate(counts.tolist()):
            for j, count in enumerate(row):
                if count:
                    color = "white" if shares[i, j] > 0.5 else INK
                    axis.text(j, i, str(count), ha="center", va="center", size=size, color=color)
    axis.set_xlabel("predicted", loc="center")
    axis.set_ylabel("true")
    axis.spines[:].set(visible=True, color="#c9d1d9")
