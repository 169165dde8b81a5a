"""Plot a quantization: the signal-to-noise ratio of each layer, with rounding to the nearest and with the method."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from onnx_convgrad.cli.figures import CONTRAST, FAINT, INK, OURS, no_formula, panels, picture
from onnx_convgrad.cli.tables import shape_text, shortened
from onnx_convgrad.errors import shown

if TYPE_CHECKING:
    from onnx_convgrad.quantization.report import QuantizationReport

_WIDTH, _LEFT, _TOP, _BOTTOM, _ROW = 8.0, 3.4, 1.3, 0.9, 0.27
"""Inches: the figure, labels, headline, axis and legend, one layer."""

_LONGEST = 26
"""Most letters of a weight's name."""


def plot(report: QuantizationReport, path: Path, title: str) -> None:
    """Draw a report; the suffix chooses the format."""
    rows = [
        *((row.node, shape_text(row.shape), row.nearest, row.after) for row in report.layers),
        *((name, "output", before, after) for name, (before, after) in report.outputs.items()),
    ]
    size = _WIDTH, _TOP + _BOTTOM + _ROW * max(len(rows), 4)
    about = f"{report.method}: weights {report.weights}, activations {report.activations}"
    details = f"signal to noise against the float model on {report.samples} samples"
    with picture(path, size, title, about, details) as figure:
        (axis,) = panels(figure, left=_LEFT, right=0.24, top=_TOP, bottom=_BOTTOM)
        places = range(len(rows))
        nearest, after = (
            [error.signal_to_noise for error in side] for side in zip(*(row[2:] for row in rows), strict=True)
        )
        for y, ends in enumerate(zip(nearest, after, strict=True)):
            axis.plot(ends, [y, y], color=FAINT, lw=1, zorder=1)
        for points, color, label in ((nearest, CONTRAST, "nearest"), (after, OURS, report.method)):
            axis.plot(points, places, "o", ms=6, color=color, mec="white", mew=0.7, label=label)
        labels = [no_formula(f"{shortened(shown(name), _LONGEST)}   {shape}") for name, shape, *_ in rows]
        axis.set_yticks(places, labels, size=8, color=INK, family="monospace")
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlabel("decibels; more is better")
        axis.grid(axis="x")
        figure.legend(loc="lower right", bbox_to_anchor=(0.98, 0.0), ncol=2, handletextpad=0.2)
