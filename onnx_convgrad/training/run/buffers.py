"""Values that go from step to step, on the device of the sessions: two buffers each, which change roles after a run.

A graph reads the one and writes the other, so nothing is copied and an interrupted run leaves what it read as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from onnx_convgrad.runtime import import_runtime

__all__ = ["BoundGraph", "Buffers", "Device"]


Device = tuple[str, int]
"""Kind and number: `("cuda", 0)` or `("cpu", 0)`."""


def empty(like: np.ndarray, device: Device = ("cpu", 0)) -> Any:
    """An OrtValue of the array's shape and dtype, with any content."""
    return import_runtime().OrtValue.ortvalue_from_shape_and_type(list(like.shape), like.dtype, *device)


def copied(array: np.ndarray, device: Device) -> Any:
    """An OrtValue with a copy of the array."""
    value = empty(array, device)
    value.update_inplace(np.asarray(array, order="C"))
    return value


class Buffers:
    """Two OrtValues for every value that moves. Those of a group move together."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.groups: dict[str, str] = {}
        self._turn: dict[str, int] = {}
        self._sets: tuple[dict[str, Any], dict[str, Any]] = ({}, {})

    def add(self, start: Mapping[str, np.ndarray], group: str) -> None:
        """Make room for more values, which begin as given."""
        if start:
            self._turn.setdefault(group, 0)
        for name, array in start.items():
            self.groups[name] = group
            values = (copied(array, self.device), empty(array, self.device))
            self._sets[self._turn[group]][name], self._sets[1 - self._turn[group]][name] = values

    def __contains__(self, name: str) -> bool:
        return name in self.groups

    @property
    def turns(self) -> tuple[int, ...]:
        """Which of the two buffers each group is in."""
        return tuple(self._turn.values())

    def current(self, name: str) -> Any:
        """The OrtValue with the value."""
        return self._sets[self._turn[self.groups[name]]][name]

    def spare(self, name: str) -> Any:
        """The OrtValue that takes the next value."""
        return self._sets[1 - self._turn[self.groups[name]]][name]

    def swap(self, groups: Iterable[str]) -> None:
        """What was written becomes what is read."""
        self._turn.update({group: 1 - self._turn[group] for group in groups})

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Copies of the values."""
        return {name: np.array(self.current(name).numpy()) for name in names}

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Replace values by others of their shape and dtype."""
        for name, array in values.items():
            self.current(name).update_inplace(np.asarray(array, order="C"))


class BoundGraph:
    """A session whose moving operands and results are bound to buffers, once for every state that those can be in.

    Args:
        live: The session.
        buffers: What moves.
        reads: Input -> name of the buffer.
        writes: Output -> name of the buffer.
    """

    def __init__(self, live: Any, buffers: Buffers, reads: Mapping[str, str], writes: Mapping[str, str]) -> None:
        self.live, self.buffers = live, buffers
        inputs, outputs = ({v.name for v in values} for values in (live.get_inputs(), live.get_outputs()))
        self.reads = {name: held for name, held in reads.items() if name in inputs}
        self.writes = {name: held for name, held in writes.items() if name in outputs}
        self.fed = inputs - set(self.reads)
        self.groups = tuple(dict.fromkeys(buffers.groups[held] for held in self.writes.values()))
        scalars = {v.name: _ELEMENTS[v.type] for v in live.get_outputs() if v.shape == [] and v.type in _ELEMENTS}
        self._scalars = {k: empty(np.zeros((), t)) for k, t in scalars.items() if k not in self.writes}
        self._bindings: dict[tuple[Any, ...], Any] = {}

    def __call__(self, feeds: Mapping[str, Any], wanted: Sequence[str], keep: Collection[str] = ()) -> dict[str, Any]:
        """Run once on OrtValues, swap what was written but for the groups to `keep`, and return some results."""
        others = [name for name in wanted if name not in self._scalars]
        binding = self._binding(tuple(wanted))
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, value)
        for name in others:
            binding.bind_output(name, "cpu")  # memory of its own, or it would be that of the last run
        self.live.run_with_iobinding(binding)
        self.buffers.swap(group for group in self.groups if group not in keep)
        results = {name: self._scalars[name].numpy()[()] for name in wanted if name in self._scalars}
        if others:
            values = binding.get_outputs()[: len(others)]
            results |= {name: value.numpy() for name, value in zip(others, values, strict=True)}
        return results

    def _binding(self, wanted: tuple[str, ...]) -> Any:
        key = (self.buffers.turns, wanted)
        if key not in self._bindings:
            binding = self._bindings[key] = self.live.io_binding()
            for name in wanted:
                if name not in self._scalars:
                    binding.bind_output(name, "cpu")  # first, to be found first
            for name in wanted:
                if name in self._scalars:
                    binding.bind_ortvalue_output(name, self._scalars[name])
            for name, held in self.reads.items():
                binding.bind_ortvalue_input(name, self.buffers.current(held))
            for name, held in self.writes.items():
                binding.bind_ortvalue_output(name, self.buffers.spare(held))
        return self._bindings[key]


_ELEMENTS = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
