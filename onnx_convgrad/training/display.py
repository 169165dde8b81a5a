"""Show the progress of a training run: a bar on a terminal, a line per epoch elsewhere, or nothing."""

from __future__ import annotations

import math
import sys
import time
from datetime import timedelta

from onnx_convgrad.base.names import check_names
from onnx_convgrad.errors import shown
from onnx_convgrad.training.callbacks import Callback
from onnx_convgrad.training.protocols import Row, Run

_PLAIN = frozenset(("epoch", "step", "seconds", "samples_per_second", "learning_rate"))


def measures(row: Row) -> dict[str, float]:
    """Losses and metrics of a row of the history that are one number each; norms of layers are too many to show."""
    plain = {name for name in row if name in _PLAIN or name.startswith("grad_norm.")}
    return {name: value for name, value in row.items() if name not in plain and not isinstance(value, list)}


_BRIEF = 10
"""Least number of seconds left that are shown."""

_INTERVAL = 0.2
"""Least number of seconds between two updates of the bar."""


class Lines(Callback):
    """A line of text for each epoch, with the time that is left."""

    def on_begin(self, run: Run) -> None:
        self.started, self.done = time.perf_counter(), run.trainer.progress.epoch

    def on_epoch(self, run: Run, row: Row) -> None:
        each = (time.perf_counter() - self.started) / max(
            row["epoch"] - self.done, 1
        )  # with validation and checkpoints
        self.write_line(_epoch_line(row, run.epochs, each * (run.epochs - row["epoch"])))

    def on_end(self, run: Run) -> None:
        if run.reason:
            self.write_line(f"Stopped after epoch {run.trainer.progress.epoch}: {run.reason}.")

    def write_line(self, text: str) -> None:
        """Print a line to stderr."""
        sys.stderr.write(f"{shown(text)}\n")
        sys.stderr.flush()


class Bar(Lines):
    """A bar for the current epoch, below the lines of the finished ones."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[values]}", markup=False),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=1 / _INTERVAL,
            transient=True,
        )
        self.task = self.bar.add_task("", values="", visible=False)
        self.last = 0.0

    def on_begin(self, run: Run) -> None:
        super().on_begin(run)
        self._show(run)
        self.bar.start()

    def on_step(self, run: Run, results: Row) -> None:  # noqa: ARG002 - the signature of every callback
        if time.perf_counter() - self.last > _INTERVAL:  # drawing costs more than a small step
            self._show(run)

    def on_end(self, run: Run) -> None:
        self.bar.stop()
        super().on_end(run)

    def write_line(self, text: str) -> None:
        self.bar.console.print(shown(text), markup=False, highlight=False, soft_wrap=True)

    def _show(self, run: Run) -> None:
        progress = run.trainer.progress
        values = [f"{name} {number(value)}" for name, value in progress.averages().items()]
        if run.epsilon is not None:
            values.append(f"epsilon {number(run.epsilon)}")
        if progress.seconds:
            values.append(f"{progress.samples / progress.seconds:,.0f} samples/s")
        self.bar.update(
            self.task,
            description=f"epoch {min(progress.epoch + 1, run.epochs)}/{run.epochs}",
            completed=progress.position,
            total=run.batches,
            values=shown("  ".join(values)),
            visible=True,
        )
        self.last = time.perf_counter()


def _epoch_line(row: Row, epochs: int, left: float) -> str:
    """Format a row of the history as a line, with the seconds that are left."""
    values = [f"{name} {number(value)}" for name, value in measures(row).items()]
    rates = [f"lr {row['learning_rate']:.3g}", f"{row['samples_per_second']:,.0f} samples/s"]
    rates += [f"{timedelta(seconds=round(left))} left"] if left >= _BRIEF else []
    return "  ".join([f"epoch {row['epoch']:>{len(str(epochs))}}/{epochs}", *values, *rates])


def number(value: float) -> str:
    """Format a number with four decimals, or in scientific notation."""
    if not math.isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4f}"
    return f"{value:.3e}"


def display_named(kind: str) -> Callback:
    """Create a display by name; raises `ArgumentError` for an unknown one."""
    check_names([kind], ["auto", "bar", "text", "none"], "progress")
    if kind == "auto":
        kind = "bar" if sys.stderr.isatty() else "text"
    return {"bar": Bar, "text": Lines, "none": Callback}[kind]()
