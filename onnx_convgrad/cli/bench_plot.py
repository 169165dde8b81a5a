"""Plot a `bench` report: every lowering of every convolution as a dot, PyTorch as a tick."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnx_convgrad.bench.layer import COMPUTES, OPERATORS
from onnx_convgrad.bench.measure import BenchReport, ConvTimes
from onnx_convgrad.bench.memory_curve import MemoryPoint
from onnx_convgrad.bench.timing import machine, machine_text
from onnx_convgrad.cli.figures import CONTRAST, FAINT, INK, OURS, panels, picture
from onnx_convgrad.cli.tables import ms_text, shape_text
from onnx_convgrad.lowering.cost.calibration import cores

_OTHERS, _BAND = "#aab7c4", "#f5f7fa"

_LEFT, _PANEL, _TOP, _BOTTOM, _ROW = 3.2, 5.0, 1.45, 0.85, 0.3
"""Inches: labels, one panel, headline, legend, one convolution."""


def plot(report: BenchReport, path: Path, title: str) -> None:
    """Draw a report; the suffix chooses the format."""
    rows = _rows(report.convolutions)
    operators = [op for op in COMPUTES if any(op in row for row in rows.values())]
    count = max(len(operators), 1)
    size = _LEFT + _PANEL * count + 0.2, _TOP + _BOTTOM + _ROW * max(len(rows), 4)
    with picture(path, size, title, _about(report), machine_text(report.machine)) as figure:
        shared: Any = {"sharex": True, "sharey": True, "gridspec_kw": {"wspace": 0.05}}
        axes = panels(figure, count, left=_LEFT, top=_TOP, bottom=_BOTTOM, **shared)
        for axis, operator in zip(axes, operators, strict=False):
            _panel(axis, rows, operator)
        if operators:
            _legend(figure, compared=any(t.torch for t in report.convolutions))
        else:
            axes[0].set_axis_off()
            axes[0].text(0.5, 0.5, "no convolution gradient is needed", color=FAINT, ha="center")


def plot_memory(points: Sequence[MemoryPoint], path: Path, title: str) -> None:
    """Draw time against memory; the suffix chooses the format."""
    about = "time of a run with gradients at several memory budgets"
    measured = {(p.memory / 1e6, 1e3 * p.seconds): p.budget for p in points if p.memory and p.seconds}
    with picture(path, (9.6, 4.8), title, about, machine_text(machine(cores())), dpi=120) as figure:
        axis: Any = figure.add_axes((0.07, 0.12, 0.9, 0.62))
        axis.plot([x for x, _ in measured], [y for _, y in measured], "o-", color=OURS)
        for place, budget in measured.items():
            text = str(budget or "no budget")
            axis.annotate(text, place, xytext=(4, 6), textcoords="offset points", size=8, color=INK)
        axis.set_xlabel("predicted memory of a run, MB")
        axis.set_ylabel("ms", loc="top", rotation=0)
        axis.margins(x=0.12, y=0.15)
        axis.set_ylim(bottom=0)
        axis.grid(axis="y")


def _rows(convolutions: Sequence[ConvTimes]) -> dict[str, dict[str, ConvTimes]]:
    """Geometry -> operator -> times, in the order of the model."""
    rows: dict[str, dict[str, ConvTimes]] = {}
    for times in convolutions:
        if times.measured:
            rows.setdefault(times.geometry, {})[times.operator] = times
    return rows


def _about(report: BenchReport) -> str:
    """The inputs and the time of both passes."""
    shapes = ", ".join(f"{name} {shape_text(shape)}" for name, shape in report.inputs.items())
    passes = f"forward {ms_text(report.forward)}"
    if report.backward is not None:
        passes += f", backward {ms_text(report.backward)}"
    if report.totals:
        ours, theirs = map(ms_text, report.totals)
        passes += f"; convolutions {ours}, in PyTorch {theirs}"
    return f"{shapes}:  {passes}"


def _panel(axis: Any, rows: dict[str, dict[str, ConvTimes]], operator: str) -> None:
    """Draw one operator: a row per convolution, milliseconds on a logarithmic axis."""
    title = COMPUTES[operator].capitalize() + (" gradient" if OPERATORS[operator] else "")
    axis.set_title(title)
    labels = []
    longest = shortest = 1.0
    for y, (geometry, operators) in enumerate(rows.items()):
        count = max(len(times.nodes) for times in operators.values())
        labels.append(f"{geometry}   {count}\u00d7" if count > 1 else geometry)
        if y % 2:
            axis.axhspan(y - 0.5, y + 0.5, color=_BAND, lw=0, zorder=0)
        for times in operators.values():
            everything = [*times.measured.values(), *([times.torch] if times.torch else [])]
            longest, shortest = max(longest, 1e3 * max(everything)), min(shortest, 1e3 * min(everything))
        if operator in operators:
            _dots(axis, y, operators[operator])
    axis.set_xscale("log")
    axis.set_xlim(shortest / 1.5, longest * (longest / shortest) ** 0.45)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_yticks(range(len(rows)), labels, size=8, color=INK, family="monospace")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlabel("ms")
    axis.grid(axis="x")


def _dots(axis: Any, y: int, times: ConvTimes) -> None:
    """Draw the lowerings of one convolution, the name of the chosen one, and PyTorch's time over its time."""
    others = [1e3 * t for name, t in times.measured.items() if name != times.chosen]
    chosen = 1e3 * times.measured[times.chosen]
    axis.plot(others, [y] * len(others), "o", ms=4.5, color=_OTHERS, mec="white", mew=0.5, zorder=2)
    axis.plot([chosen], [y], "o", ms=8, color=OURS, mec="white", mew=0.8, zorder=4)
    place = axis.get_yaxis_transform()
    name_at = 0.985
    if times.torch:
        axis.plot([1e3 * times.torch], [y], "|", ms=13, mew=2.4, color=CONTRAST, zorder=3)
        ratio = 1e3 * times.torch / chosen
        color = OURS if ratio >= 1 else CONTRAST
        style = {"ha": "right", "va": "center", "size": 8, "weight": "bold", "color": color}
        axis.text(0.985, y, f"{ratio:.2f}", transform=place, **style)
        name_at = 0.905
    ground = {"facecolor": _BAND if y % 2 else "white", "lw": 0, "pad": 1}  # hides the grid
    axis.text(name_at, y, times.chosen, transform=place, ha="right", va="center", size=7.5, color=FAINT, bbox=ground)


def _legend(figure: Any, *, compared: bool) -> None:
    from matplotlib.lines import Line2D

    def mark(shape: str, size: float, color: str, label: str) -> Line2D:
        return Line2D([], [], ls="", marker=shape, ms=size, color=color, mew=2.4 if shape == "|" else 0, label=label)

    marks = [mark("o", 8, OURS, "the chosen lowering"), mark("o", 4.5, _OTHERS, "other lowerings")]
    if compared:
        marks.append(mark("|", 13, CONTRAST, "PyTorch; the number is its time over ours"))
    width = figure.get_figwidth()
    place = {"loc": "lower left", "bbox_to_anchor": (_LEFT / width - 0.01, 0.0)}
    figure.legend(handles=marks, ncol=3, handletextpad=0.2, **place)
