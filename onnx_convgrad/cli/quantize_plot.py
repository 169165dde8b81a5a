"""Plot a quantization: the signal-to-noise ratio of each layer, with rounding to the nearest and with the method."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_convgrad.cli.figures import CONTRAST, FAINT, INK, OURS, headline, new_figure, no_formula, save
from onnx_convgrad.cli.tables import shape_text, shortened
from onnx_convgrad.errors import shown

if TYPE_CHECKING:
    from onnx_convgrad.quantization.measure import Error, QuantizationReport

_WIDTH, _LEFT, _TOP, _BOTTOM, _ROW = 8.0, 3.4, 1.3, 0.9, 0.27
"""Inches: the figure, labels, headline, axis and legend, one layer."""

_LONGEST = 26
"""Most letters of a weight's name."""


def plot(report: QuantizationReport, path: Path, title: str) -> None:
    """Draw a report; the suffix chooses the format."""
    rows: list[tuple[str, str, Error, Error]] = [
        *((row.node, shape_text(row.shape), row.nearest, row.after) for row in report.layers),
        *((name, "output", before, after) for name, (before, after) in report.outputs.items()),
    ]
    height = _TOP + _BOTTOM + _ROW * max(len(rows), 4)
    figure = new_figure(figsize=(_WIDTH, height))
    axis: Any = figure.subplots()
    figure.subplots_adjust(left=_LEFT / _WIDTH, right=0.97, top=1 - _TOP / height, bottom=_BOTTOM / height)
    about = f"{report.method}: weights {report.weights}, activations {report.activations}"
    headline(figure, title, about, f"signal to noise against the float model on {report.samples} samples")
    for y, (_, _, nearest, after) in enumerate(rows):
        ends = [error.signal_to_noise for error in (nearest, after)]
        if all(map(math.isfinite, ends)):
            axis.plot(ends, [y, y], color=FAINT, lw=1, zorder=1)
    for points, color, label in (
        ([row[2] for row in rows], CONTRAST, "nearest"),
        ([row[3] for row in rows], OURS, report.method),
    ):
        found = [(e.signal_to_noise, y) for y, e in enumerate(points) if math.isfinite(e.signal_to_noise)]
        axis.plot(
            [x for x, _ in found], [y for _, y in found], "o", ms=6, color=color, mec="white", mew=0.7, label=label
        )
    labels = [no_formula(f"{shortened(shown(name), _LONGEST)}   {shape}") for name, shape, *_ in rows]
    axis.set_yticks(range(len(rows)), labels, size=8, color=INK, family="monospace")
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlabel("decibels; more is better")
    axis.grid(axis="x")
    figure.legend(loc="lower right", bbox_to_anchor=(0.98, 0.0), ncol=2, handletextpad=0.2)
    save(figure, path)
