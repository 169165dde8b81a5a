"""A training program on a device: its sessions, made when first used, and its values, which go from run to run there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np

from onnx_convgrad.runtime import import_runtime
from onnx_convgrad.runtime.providers import CUDA, check_available, resolve_providers
from onnx_convgrad.training.program.build import TrainingProgram
from onnx_convgrad.training.program.masks import first_state
from onnx_convgrad.training.run.buffers import BoundGraph, Buffers, Device
from onnx_convgrad.training.run.sessions import Accumulation, blank, defaults, fed_session
from onnx_convgrad.training.run.shares import joined, shares

__all__ = ["Arrays", "Engine", "Results"]

Arrays = Mapping[str, np.ndarray]

Results = dict[str, Any]
"""Output of a graph -> array, or number."""

Run = Literal["step", "accumulate", "update", "evaluate"]


class Engine:
    """Runs the graphs of a program on values that stay on the device of the sessions' first provider.

    Args:
        program: The program.
        seed: Other than 0: what the random state begins with, together with the program's own seed.
        options: Those of `runtime.session`.
    """

    def __init__(self, program: TrainingProgram, seed: int, options: Mapping[str, Any]) -> None:
        self.program, self.seed, self.options = program, seed, dict(options)
        m = self.manifest = program.manifest
        self.losses = (m.loss, *m.terms)
        self._next = {entry.next: entry.name for entry in m.moving()}
        self._fed = {entry.name for entry in m.moving()} | {m.learning_rate.name}
        self._device = _device(self.options)
        self._graphs: dict[Run, BoundGraph] = {}

    # -- runs ----------------------------------------------------------------------------------------------------------

    def step(self, batch: Arrays, rate: float, wanted: Sequence[str]) -> Results:
        """One update from one batch; returns the outputs `wanted`."""
        graph = self._graph("step")
        return graph({**_values(batch), self.manifest.learning_rate.name: _value(np.float32(rate))}, wanted)

    def step_over(self, batches: Sequence[Arrays], rate: float, wanted: Sequence[str]) -> Results:
        """One update from several batches; of one without any target that counts, only the forward pass has effect."""
        graph, sums = self._graph("accumulate"), self._accumulation
        factors, found, first = shares(self.manifest, batches), [], True
        for batch, factor in zip(batches, factors, strict=True):
            own = {sums.weight: _value(np.float32(factor)), sums.first: _value(np.bool_(first))}
            found.append(graph({**_values(batch), **own}, wanted, keep=() if factor else ("gradient",)))
            first = first and not factor
        results = {name: self._joined(name, [r[name] for r in found], factors) for name in wanted}  # refused before it
        self._graph("update")({self.manifest.learning_rate.name: _value(np.float32(rate))}, ())
        return results

    def prepare(self, *parts: Run) -> None:
        """Make the sessions of some graphs now rather than in their first run."""
        for part in parts:
            self._graph(part)

    def evaluate(self, batch: Arrays, wanted: Sequence[str]) -> Results:
        """The outputs `wanted` in inference mode."""
        return self._graph("evaluate")(_values(batch), wanted)

    def _joined(self, name: str, results: list[Any], factors: list[float]) -> Any:
        """A loss averaged, anything else one batch after the other."""
        if name in self.losses and not np.ndim(results[0]):
            return type(results[0])(sum(f * float(r) for f, r in zip(factors, results, strict=True) if f))
        return joined(name, results)

    # -- values --------------------------------------------------------------------------------------------------------

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Copies of values."""
        return self._buffers.read(names)

    def write(self, values: Arrays) -> None:
        """Replace values by others of their shape and dtype."""
        self._buffers.write(values)

    # -- pieces --------------------------------------------------------------------------------------------------------

    @cached_property
    def _accumulation(self) -> Accumulation:
        return Accumulation(self.program.model("gradients"), self.manifest)

    def _graph(self, part: Run) -> BoundGraph:
        if part not in self._graphs:
            self._graphs[part] = self._bound(part)
        return self._graphs[part]

    def _bound(self, part: Run) -> BoundGraph:
        model = self._accumulation.model if part == "accumulate" else self.program.model(part)
        reads, writes = {name: name for name in self._fed if name in self._buffers}, dict(self._next)
        if part in ("accumulate", "update"):
            zeros = blank(self.manifest.parameters)
            self._buffers.add({k: v for k, v in zeros.items() if k not in self._buffers}, "gradient")
            reads |= {name: name for name in zeros} | self._accumulation.reads
            writes |= self._accumulation.writes
        return BoundGraph(fed_session(model, self._fed, **self.options), self._buffers, reads, writes)

    @cached_property
    def _buffers(self) -> Buffers:
        """The values that the program begins with. What `update` moves is a group, and what the rest move."""
        start = defaults(self.program.model("step"), self._next.values())
        kinds = {s.name: s.kind for s in self.manifest.state}
        for name in start:
            if kinds.get(name) == "random" and self.seed:
                start[name] = np.asarray(first_state((self.manifest.options["seed"], self.seed)), start[name].dtype)
        buffers = Buffers(self._device)
        buffers.add({k: v for k, v in start.items() if kinds.get(k, "optimizer") == "optimizer"}, "update")
        buffers.add({k: v for k, v in start.items() if kinds.get(k) in ("statistic", "random")}, "forward")
        return buffers


def _device(options: Mapping[str, Any]) -> Device:
    """The device of the first provider; raises `ExecutionError` where it cannot run."""
    wanted = resolve_providers(options["providers"])
    check_available(import_runtime(), [name for name, _ in wanted])
    name, own = wanted[0]
    return ("cuda", int(own.get("device_id", "0"))) if name == CUDA else ("cpu", 0)


def _value(array: Any) -> Any:
    return import_runtime().OrtValue.ortvalue_from_numpy(np.asarray(array))


def _values(batch: Arrays) -> dict[str, Any]:
    return {name: _value(array) for name, array in batch.items()}
