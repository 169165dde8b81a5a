"""Timing that compares: the sides of a comparison take turns in one process, and medians are taken.

A machine may be slower one minute than the next, so ratios mean something only between what ran interleaved.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from onnx_convgrad.lowering.cost.calibration import cores, processor
from onnx_convgrad.runtime import Providers, session
from onnx_convgrad.runtime.binding import Binding

__all__ = ["Bound", "Run", "Side", "Turns", "calm", "interleave", "lap", "machine", "machine_text"]

Run = Callable[[], object]

Side = Callable[[], float]
"""One turn of a side: the seconds of one call of what it runs."""

_PAUSE = 0.05
"""Seconds before a turn: an idle worker thread of ONNX Runtime spins for 40 ms after a run, and takes a core."""

_SHORTEST = 1e-2
"""Calls are repeated until they take this long together, or else the scheduler decides what is measured."""

_DISTURBED = 0.1
"""A turn is tried again when threads waited for a core for more than this part of it."""

_PATIENCE = 0.25
"""Seconds between two tries."""

_PRESSURE = Path("/proc/pressure/cpu")


def lap(run: Run, calls: int = 1) -> float:
    """Seconds per call."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


class Turns:
    """A side that runs in this process.

    A turn is some calls that are not counted, which bring threads and caches back, then as many that are.
    """

    def __init__(self, run: Run, *, tries: int = 12) -> None:
        run()
        self.run = run
        self.calls = max(1, round(_SHORTEST / max(lap(run), 1e-6)))
        self.tries = tries

    def __call__(self) -> float:
        def turn() -> float:
            return lap(self.run, self.calls)

        seconds, was_calm = calm(turn, before=turn, tries=self.tries)
        if not was_calm:
            self.tries = 1  # as with more threads than cores: take each turn as it comes
        return seconds


def calm(measure: Side, before: Run = lambda: None, *, tries: int) -> tuple[float, bool]:
    """What `measure` says when no other process gets in its way, and whether that came about.

    Each try begins with a pause and with `before`. The least disturbed one counts when none was calm.
    """
    found = []
    for attempt in range(tries):
        time.sleep(_PATIENCE if attempt else _PAUSE)
        before()
        stalled, start = _stalled(), time.perf_counter()
        result = measure()
        waited = (_stalled() - stalled) / (time.perf_counter() - start)
        if waited < _DISTURBED:
            return result, True
        found.append((waited, result))
    return min(found)[1], False


def _stalled() -> float:
    """Seconds in which some thread of the machine was ready to run and had no core; 0 where the system does not tell."""
    try:
        return int(_PRESSURE.read_text(encoding="utf-8").splitlines()[0].rpartition("=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return 0.0


def interleave(sides: Mapping[str, Side], *, repeats: int = 7) -> dict[str, float]:
    """Median seconds of one call of each side, measured in turns."""
    laps: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            laps[name].append(side())
    return {name: statistics.median(times) for name, times in laps.items()}


class Bound:
    """A model on inputs that are bound once, called without arguments; the runtime reuses its memory from call to call."""

    def __init__(
        self, model: bytes | str, feed: Mapping[str, np.ndarray], threads: int, providers: Providers = "cpu"
    ) -> None:
        """Load a model, from its bytes or its path; raises `ExecutionError` when the runtime is missing or refuses it."""
        self.session = session(model, providers=providers, options={"threads": threads, "memory_pattern": True})
        self.binding = Binding(self.session)
        self.binding.bind({value.name: feed[value.name] for value in self.session.get_inputs()})
        self.binding.bind_results()

    def __call__(self) -> None:
        self.binding.run()

    def outputs(self) -> dict[str, np.ndarray]:
        """The results of the last call."""
        return {name: value.numpy() for name, value in self.binding.results().items()}


# -- where it was measured ----------------------------------------------------------------------------------------------


def machine(threads: int) -> dict[str, Any]:
    """Processor, cores, threads and versions."""
    versions = {}
    for package in ("onnx-convgrad", "onnxruntime", "torch", "onnx", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "processor": processor(),
        "cores": cores(),
        "threads": threads,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
    }


def machine_text(facts: Mapping[str, Any]) -> str:
    """The machine in one sentence."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    having, using = (
        f"{n} {what}{'s' * (n != 1)}" for n, what in ((facts["cores"], "core"), (facts["threads"], "thread"))
    )
    return f"{facts['processor']}, {having}, {using}; {facts['system']}; Python {facts['python']}, {versions}."
