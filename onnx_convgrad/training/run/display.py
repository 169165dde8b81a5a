"""How a training run shows itself: a bar on a terminal, a line for each epoch elsewhere, or nothing."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onnx_convgrad.base.names import check_names

if TYPE_CHECKING:
    from onnx_convgrad.training.run.fit import Run

__all__ = ["Display", "display", "epoch_line"]

_INTERVAL = 0.2
"""Seconds between two changes of the bar."""


class Display:
    """Shows nothing."""

    def begin(self, run: Run) -> None:
        """Before the first step."""

    def step(self, run: Run) -> None:
        """After an update."""

    def epoch(self, run: Run, row: Mapping[str, Any]) -> None:
        """After an epoch."""

    def end(self, run: Run) -> None:
        """After the last step."""


class Lines(Display):
    """A line of text for each epoch."""

    def epoch(self, run: Run, row: Mapping[str, Any]) -> None:
        self.say(epoch_line(row, run.epochs))

    def end(self, run: Run) -> None:
        if run.reason:
            self.say(f"Stopped after epoch {run.trainer.progress.epoch}: {run.reason}.")

    def say(self, text: str) -> None:
        """Print a line."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


class Bar(Lines):
    """A bar for the epoch under way, above it the lines of those done."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=1 / _INTERVAL,
            transient=True,
        )
        self.task = self.bar.add_task("", values="", visible=False)
        self.last = 0.0

    def begin(self, run: Run) -> None:
        self._show(run)
        self.bar.start()

    def step(self, run: Run) -> None:
        if time.perf_counter() - self.last > _INTERVAL:  # drawing each step would cost more than a small one
            self._show(run)

    def end(self, run: Run) -> None:
        self.bar.stop()
        super().end(run)

    def say(self, text: str) -> None:
        self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show(self, run: Run) -> None:
        progress = run.trainer.progress
        values = [f"{name} {number(value)}" for name, value in progress.averages().items()]
        if progress.seconds:
            values.append(f"{progress.samples / progress.seconds:,.0f} samples/s")
        shown = min(progress.epoch + 1, run.epochs)
        self.bar.update(
            self.task,
            description=f"epoch {shown}/{run.epochs}",
            completed=progress.position,
            total=run.batches,
            values="  ".join(values),
            visible=True,
        )
        self.last = time.perf_counter()


def epoch_line(row: Mapping[str, Any], epochs: int) -> str:
    """A row of the history in a line."""
    plain = ("epoch", "step", "seconds", "samples_per_second", "learning_rate")
    values = [f"{name} {number(value)}" for name, value in row.items() if name not in plain]
    rates = [f"lr {row['learning_rate']:.3g}", f"{row['samples_per_second']:,.0f} samples/s"]
    return "  ".join([f"epoch {row['epoch']:>{len(str(epochs))}}/{epochs}", *values, *rates])


def number(value: float) -> str:
    """Four digits."""
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4f}"
    return f"{value:.3e}"


def display(kind: str) -> Display:
    """The display called `kind`; raises `ArgumentError` for an unknown one."""
    check_names([kind], ["auto", "bar", "text", "none"], "progress")
    if kind == "auto":
        kind = "bar" if sys.stderr.isatty() else "text"
    return {"bar": Bar, "text": Lines, "none": Display}[kind]()
