"""Plot a training run, loss and metrics by epoch, and a search for a learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx_convgrad.cli.figures import CONTRAST, FAINT, OURS, no_formula, panels, picture
from onnx_convgrad.training.display import measures, number
from onnx_convgrad.training.learning_rates import LearningRates

_PANEL, _HEIGHT, _BETWEEN = 4.6, 4.3, 0.75
"""Inches: panel width, figure height, gap between panels."""

_MARGINS: Any = {"left": 0.65, "top": 1.3, "bottom": 0.6}
"""Inches: numbers of the axis, headline, label of the axis."""

_LEGEND: Any = {"loc": "upper right", "bbox_to_anchor": (1.0, 1.13), "handlelength": 1.2, "columnspacing": 1.2}


def plot(rows: Sequence[Mapping[str, Any]], path: Path, title: str, about: str) -> None:
    """Draw the history of a run, one row per epoch; the suffix chooses the format. `about` stands below the headline."""
    keys = [key for key in measures(rows[-1]) if not key.startswith("val_")]
    width = _MARGINS["left"] + _PANEL * len(keys) + _BETWEEN * (len(keys) - 1) + 0.2
    last, epochs = rows[-1], f"{len(rows)} epoch{'s' * (len(rows) > 1)}"
    counts = f"{epochs}, {last['step']} steps, {last['samples_per_second']:,.0f} samples/s"
    with picture(path, (width, _HEIGHT), title, about, counts) as figure:
        axes = panels(figure, len(keys), **_MARGINS, gridspec_kw={"wspace": _BETWEEN / _PANEL})
        for axis, key in zip(axes, keys, strict=True):
            _panel(axis, rows, key)


def plot_rates(found: LearningRates, path: Path, title: str, about: str) -> None:
    """Draw the loss over the learning rate, with the suggestion; arguments as for `plot`."""
    details = f"{len(found.rates)} steps with growing learning rates"
    with picture(path, (1.5 * _PANEL, _HEIGHT), title, about, details) as figure:
        _rates(panels(figure, **_MARGINS)[0], found)


def _rates(axis: Any, found: LearningRates) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.plot(found.rates, found.losses, color=FAINT, lw=0.8, label="loss of each step")
    axis.plot(found.rates, found.smoothed, color=OURS, lw=2, label="smoothed")
    if found.suggestion is not None:
        height = found.smoothed[found.rates.index(found.suggestion)]
        named = f"suggestion {found.suggestion:.2g}"
        axis.plot([found.suggestion], [height], "o", color=CONTRAST, ms=7, mec="white", mew=0.8, label=named)
    low, high = min(found.smoothed), max(found.smoothed[0], min(found.smoothed) * 1.5, sorted(found.smoothed)[-6:][0])
    axis.set_ylim(low - 0.15 * (high - low), high + 0.25 * (high - low))
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(numticks=12))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlabel("learning rate")
    axis.set_title("Loss")
    axis.legend(ncol=3, **_LEGEND)
    axis.grid(axis="y")


def _panel(axis: Any, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    """Draw one quantity over the epochs; the legend shows the last values."""
    axis.set_title(no_formula(key.replace("_", " ").capitalize()))
    lines = [("training", key, OURS), ("validation", f"val_{key}", CONTRAST)]
    drawn = [(label, name, color) for label, name, color in lines if name in rows[-1]]
    for label, name, color in drawn:
        points = [(row["epoch"], row[name]) for row in rows if name in row]
        epochs, values = zip(*points, strict=True)
        mark = "o" if len(rows) < 30 else ""
        axis.plot(epochs, values, color=color, lw=2, marker=mark, ms=4, mec="white", mew=0.6, label=label)
        axis.plot(epochs[-1:], values[-1:], "o", color=color, ms=6, mec="white", mew=0.8, clip_on=False)
    handles, _ = axis.get_legend_handles_labels()
    named = [f"{label} {number(rows[-1][name])}" for label, name, _ in drawn]
    axis.legend(handles, named, ncol=2, **_LEGEND)
    _scale(axis, [row[name] for row in rows for _, name, _ in drawn if name in row], rows[-1]["epoch"])


def _scale(axis: Any, values: Sequence[float], epochs: int) -> None:
    """Use a logarithmic axis if the values span more than a decade, except for accuracies, which stay linear."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    if min(values) > 0 and max(values) > 10 * min(values) and max(values) > 1.05:
        axis.set_yscale("log")
        narrow = max(values) < 100 * min(values)
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,)))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
    else:
        axis.margins(y=0.12)
    axis.set_xlim(0.8, max(epochs, 2) + 0.2)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))
    axis.set_xlabel("epoch")
    axis.grid(axis="y")
