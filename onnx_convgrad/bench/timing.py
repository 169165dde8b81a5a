"""Compare times: the sides of a comparison take turns in one process, and the medians are compared.

A machine may be slower one minute than the next, so only ratios of interleaved runs are meaningful.
"""

from __future__ import annotations

import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.version import __version__
from onnx_convgrad.lowering.cost.calibration import cores, processor
from onnx_convgrad.runtime import Providers, session
from onnx_convgrad.runtime.binding import Binding

Timed = Callable[[], object]

Side = Callable[[], float]
"""Runs one turn of a side and returns the seconds of one call."""

_PAUSE = 0.05
"""Pause before a turn, in seconds: idle worker threads of ONNX Runtime occupy cores for 40 ms after a run."""

_SHORTEST = 1e-2
"""Seconds that repeated calls take together at least, so that the scheduler's noise is small."""

_DISTURBED = 0.1
"""Largest share of a turn that threads may wait for a core; beyond it, the turn is repeated."""

_PATIENCE = 0.25
"""Pause between two tries, in seconds."""

_PRESSURE = Path("/proc/pressure/cpu")


def lap(run: Timed, calls: int = 1) -> float:
    """Return the seconds per call."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


class Budget:
    """The time that measurements may take; without a number of seconds, as long as they want."""

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, never fewer than 0."""
        return max(0.0, self._end - time.monotonic())

    def part(self, share: float) -> Budget:
        """A share of the time that is left, from now on."""
        return Budget(self.left * share)


class Turns:
    """A side that runs in this process.

    A turn is some untimed calls, which wake threads and fill caches, then the same number of timed calls. Where the budget
    has no time for that, the second call of all counts.
    """

    def __init__(self, run: Timed, *, tries: int = 12, budget: Budget | None = None) -> None:
        run()
        self.run = run
        self._second = lap(run)
        self.calls = max(1, round(_SHORTEST / max(self._second, 1e-6)))
        self.tries, self.budget = tries, budget or Budget()

    def __call__(self) -> float:
        def turn() -> float:
            return lap(self.run, self.calls)

        if self.budget.left < 2 * self.calls * self._second:
            return self._second
        seconds, was_calm = calm(turn, before=turn, tries=self.tries, budget=self.budget)
        if not was_calm:
            self.tries = 1  # as with more threads than cores: take each turn as it comes
        return seconds


def calm(
    measure: Side, before: Timed = lambda: None, *, tries: int, budget: Budget | None = None
) -> tuple[float, bool]:
    """Run `measure` until no other process disturbs it; return its result and whether it was undisturbed.

    Each try starts with a pause and a call of `before`. If every try within the budget was disturbed, the least disturbed
    one counts.
    """
    results = []
    for attempt in range(tries):
        if attempt and budget is not None and not budget.left:
            break
        time.sleep(_PATIENCE if attempt else _PAUSE)
        before()
        stalled, start = _stalled(), time.perf_counter()
        result = measure()
        waited = (_stalled() - stalled) / (time.perf_counter() - start)
        if waited < _DISTURBED:
            return result, True
        results.append((waited, result))
    return min(results)[1], False


def _stalled() -> float:
    """Return the seconds in which some thread waited for a core; 0 if the system does not report it."""
    try:
        return int(_PRESSURE.read_text(encoding="utf-8").splitlines()[0].rpartition("=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return 0.0


def interleave(sides: Mapping[str, Side], *, repeats: int = 7, budget: Budget | None = None) -> dict[str, float]:
    """Let the sides take turns, each at least once, while the budget lasts; return the median seconds of a call of each."""
    laps: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats):
        if turn and budget is not None and not budget.left:
            break
        for name, side in sides.items():
            laps[name].append(side())
    return {name: statistics.median(times) for name, times in laps.items()}


class Bound:
    """A model with inputs that are bound once, called without arguments; the runtime reuses its memory between calls."""

    def __init__(
        self, model: ir.Model | bytes | str, feed: Mapping[str, np.ndarray], threads: int, providers: Providers = "cpu"
    ) -> None:
        """Load a model, its bytes or a path; raises `ExecutionError` if the runtime is missing or refuses it."""
        self.session = session(model, providers=providers, options={"threads": threads, "memory_pattern": True})
        self.binding = Binding(self.session)
        self.binding.bind({value.name: feed[value.name] for value in self.session.get_inputs()})
        self.binding.bind_results()

    def __call__(self) -> None:
        self.binding.run()

    def outputs(self) -> dict[str, np.ndarray]:
        """Return the results of the last call."""
        return {name: value.numpy() for name, value in self.binding.results().items()}


# -- the machine -------------------------------------------------------------------------------------------------------


def machine(threads: int) -> dict[str, Any]:
    """Return processor, cores, threads and versions."""
    versions = {"onnx-convgrad": __version__}
    for package in ("onnxruntime", "torch", "onnx", "numpy"):
        loaded = getattr(sys.modules.get(package), "__version__", None)  # several packages provide onnxruntime
        with suppress(PackageNotFoundError):
            versions[package] = loaded or version(package)
    return {
        "processor": processor(),
        "cores": cores(),
        "threads": threads,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
    }


def machine_text(facts: Mapping[str, Any]) -> str:
    """Describe the machine in one line."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    having, using = (
        f"{n} {noun}{'s' * (n != 1)}" for n, noun in ((facts["cores"], "core"), (facts["threads"], "thread"))
    )
    return f"{facts['processor']}, {having}, {using}; {facts['system']}; Python {facts['python']}, {versions}."
