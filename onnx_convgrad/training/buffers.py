"""Double buffers on the device for the values that a step updates.

A graph reads one buffer of a value and writes the other, then the two swap roles. So nothing is copied, and an interrupted
run leaves its operands intact.

With a memory budget, values that may be written in place (`memory.in_place`) have one buffer. A run that fails then may have
changed some of them, so nothing runs any more until all are written anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.runtime import check_arrays_of, import_runtime
from onnx_convgrad.runtime.binding import captures, graph_number

Device = tuple[str, int]
"""Kind and number: `("cuda", 0)` or `("cpu", 0)`."""


def empty(like: np.ndarray, device: Device = ("cpu", 0)) -> Any:
    """An uninitialized OrtValue of the array's shape and dtype.

    Raises:
        ExecutionError: ONNX Runtime takes no arrays of this type.
    """
    check_arrays_of(like.dtype)
    return import_runtime().OrtValue.ortvalue_from_shape_and_type(list(like.shape), like.dtype, *device)


def ort_values(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """OrtValues with the contents of arrays.

    Raises:
        ExecutionError: ONNX Runtime takes no arrays of a type.
    """
    make, values = import_runtime().OrtValue.ortvalue_from_numpy, {}
    for name, value in arrays.items():
        array = np.asarray(value)
        check_arrays_of(array.dtype)
        values[name] = make(array)
    return values


class Buffers:
    """Two OrtValues for every value, or one if it is `shared`. The values of a group are swapped together.

    Attributes:
        shared: The values with one OrtValue.
        torn: Whether a run failed that may have changed some shared values.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.groups: dict[str, str] = {}
        self._turn: dict[str, int] = {}
        self._sets: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        self.shared: set[str] = set()
        self.torn = False

    def add(self, start: Mapping[str, np.ndarray], group: str, shared: Collection[str] = ()) -> None:
        """Add values with their initial content; those that are `shared` have one OrtValue for both roles."""
        if start:
            self._turn.setdefault(group, 0)
        for name, array in start.items():
            self.groups[name] = group
            for buffers in self._sets:
                buffers[name] = empty(array, self.device)
            if name in shared:
                self._sets[1][name] = self._sets[0][name]
                self.shared.add(name)
        self.write(start)

    def separate(self, names: Iterable[str]) -> None:
        """Give some shared values a second OrtValue."""
        for name in names:
            current = self.current(name)
            self._sets[1 - self._turn[self.groups[name]]][name] = empty(current.numpy(), self.device)
            self.shared.remove(name)

    def add_made(self, sets: tuple[Mapping[str, Any], Mapping[str, Any]], group: str) -> None:
        """Add values whose two OrtValues each exist already."""
        self._turn.setdefault(group, 0)
        for buffers, made in zip(self._sets, sets, strict=True):
            buffers.update(made)
        self.groups.update(dict.fromkeys(sets[0], group))

    def turn(self, group: str) -> int:
        """The current one of the two OrtValues of a group's values: 0 or 1."""
        return self._turn[group]

    def __contains__(self, name: str) -> bool:
        return name in self.groups

    @property
    def turns(self) -> tuple[int, ...]:
        """Number of the current buffer of each group, and of the shared values: what bindings depend on."""
        return (*self._turn.values(), len(self.shared))

    def current(self, name: str) -> Any:
        """The OrtValue that holds the value."""
        return self._sets[self._turn[self.groups[name]]][name]

    def spare(self, name: str) -> Any:
        """The OrtValue that takes the next value."""
        return self._sets[1 - self._turn[self.groups[name]]][name]

    def swap(self, groups: Iterable[str]) -> None:
        """Make the next values of some groups the current ones."""
        self._turn.update({group: 1 - self._turn[group] for group in groups})

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Copy values from the device."""
        self.check()
        return {name: np.array(self.current(name).numpy()) for name in names}

    def write(self, values: Mapping[str, np.ndarray]) -> None:
        """Replace values by others of the same shape and dtype."""
        for name, array in values.items():
            self.current(name).update_inplace(np.asarray(array, order="C"))
        self.torn = self.torn and not self.shared <= set(values)

    def check(self) -> None:
        """Raise `ExecutionError` if some values may be those of a step that failed."""
        if self.torn:
            raise ExecutionError(
                "A step failed while it updated parameters in place, as steps with a memory budget do, so some of them may "
                "have changed.",
                hint="Restore the last checkpoint, or begin again with a new Trainer.",
            )


class Roles(NamedTuple):
    """The buffers that a graph reads and writes.

    Attributes:
        buffers: The buffers.
        reads: Input -> name in `buffers`.
        writes: Output -> name in `buffers`.
    """

    buffers: Buffers
    reads: Mapping[str, str]
    writes: Mapping[str, str]


class BoundGraph:
    """A session with inputs and outputs bound to buffers; a binding is made once for every combination of roles.

    A session that captures CUDA graphs reads and writes the same memory in every run of a binding, also for what is fed and
    returned, and has a graph for every binding and for all shapes of what is fed.

    Args:
        session: An `InferenceSession`; `Any` because ONNX Runtime is untyped.
        roles: The buffers that it reads and writes, and perhaps others that it has no inputs or outputs for.
    """

    def __init__(self, session: Any, roles: Roles) -> None:
        buffers, reads, writes = roles
        self.session, self.buffers = session, buffers
        inputs, outputs = ({v.name for v in values} for values in (session.get_inputs(), session.get_outputs()))
        self.reads = {name: value for name, value in reads.items() if name in inputs}
        self.writes = {name: value for name, value in writes.items() if name in outputs}
        self.groups = tuple(dict.fromkeys(buffers.groups[value] for value in self.writes.values()))
        self._fixed: _Fixed | None = _Fixed(buffers.device) if captures(session) else None
        device: Device = buffers.device if self._fixed else ("cpu", 0)
        scalars = {v.name: ELEMENTS[v.type] for v in session.get_outputs() if v.shape == [] and v.type in ELEMENTS}
        self._scalars = {k: empty(np.zeros((), t), device) for k, t in scalars.items() if k not in self.writes}
        self._bindings: dict[tuple[Any, ...], Any] = {}

    def __call__(self, feeds: Mapping[str, Any], results: Sequence[str], keep: Collection[str] = ()) -> dict[str, Any]:
        """Run on OrtValues, swap the written groups except those to `keep`, and return some results."""
        arrays = [name for name in results if name not in self._scalars]
        self.buffers.check()
        self.buffers.torn = not self.buffers.shared.isdisjoint(self.writes.values())
        try:
            values = self._run(feeds, tuple(results), arrays)
        except Exception as problem:
            raise ExecutionError(f"ONNX Runtime could not run the program: {problem}") from problem
        self.buffers.torn = False
        self.buffers.swap(group for group in self.groups if group not in keep)
        found = {name: self._scalars[name].numpy()[()] for name in results if name in self._scalars}
        return found | {name: value.numpy() for name, value in zip(arrays, values, strict=True)}

    def _run(self, feeds: Mapping[str, Any], results: tuple[str, ...], arrays: Sequence[str]) -> Sequence[Any]:
        """Run; return the OrtValues of the results that are not scalars."""
        options = None
        if self._fixed is not None:
            feeds = self._fixed.fed(feeds)
        shapes = tuple(sorted((name, *value.shape()) for name, value in feeds.items())) if self._fixed else ()
        key = (self.buffers.turns, results, shapes)
        binding = self._binding(key, results)
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, value)
        if self._fixed is not None:
            options = self._fixed.graph(self.session, binding, key, arrays)
        else:
            for name in arrays:
                binding.bind_output(name, "cpu")  # new memory: that of the last run belongs to its results
        self.session.run_with_iobinding(binding, options)
        found = binding.get_outputs_as_ortvaluevector() if arrays else ()  # `get_outputs` wraps the written values, too
        return [found[i] for i in range(len(arrays))]

    def _binding(self, key: tuple[Any, ...], results: tuple[str, ...]) -> Any:
        if key not in self._bindings:
            binding = self._bindings[key] = self.session.io_binding()
            for name in results:
                if name not in self._scalars:
                    binding.bind_output(name, "cpu")  # before the others: `_run` reads the first outputs
            for name in results:
                if name in self._scalars:
                    binding.bind_ortvalue_output(name, self._scalars[name])
            for name, value in self.reads.items():
                binding.bind_ortvalue_input(name, self.buffers.current(value))
            for name, value in self.writes.items():
                binding.bind_ortvalue_output(name, self.buffers.spare(value))
        return self._bindings[key]


class _Fixed:
    """The memory and the number of each CUDA graph of a session."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._inputs: dict[tuple[Any, ...], Any] = {}
        self._graphs: dict[tuple[Any, ...], Any] = {}

    def fed(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Copy what is fed to memory that stays the same for every shape."""
        held = {}
        for name, value in feeds.items():
            array = value.numpy()
            place = (name, array.shape)
            if place not in self._inputs:
                self._inputs[place] = empty(array, self.device)
            self._inputs[place].update_inplace(np.ascontiguousarray(array))
            held[name] = self._inputs[place]
        return held

    def graph(self, session: Any, binding: Any, key: tuple[Any, ...], arrays: Sequence[str]) -> Any:
        """The options of a run of one binding. The first run is not captured: it tells the shapes of results."""
        if key not in self._graphs:
            if arrays:
                for name in arrays:
                    binding.bind_output(name, *self.device)
                session.run_with_iobinding(binding, graph_number(-1))
                for name, value in zip(arrays, binding.get_outputs(), strict=False):
                    binding.bind_ortvalue_output(name, empty(value.numpy(), self.device))
            self._graphs[key] = graph_number(len(self._graphs) + 1)
        return self._graphs[key]


ELEMENTS = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
"""The runtime's names of floating types -> dtype."""
