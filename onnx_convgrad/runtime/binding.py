"""Bind values of a session to its device, so that they are not copied to the host between runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.runtime import import_runtime
from onnx_convgrad.runtime.providers import CUDA


def device_of(live: Any) -> tuple[str, int]:
    """Kind and number of the device that a session computes on: `("cuda", 0)` or `("cpu", 0)`."""
    if live.get_providers()[0] != CUDA:
        return "cpu", 0
    return "cuda", int(live.get_provider_options()[CUDA].get("device_id", "0"))


def captures(live: Any) -> bool:
    """Whether a session captures CUDA graphs: `SessionOptions.cuda_graph`."""
    if live.get_providers()[0] != CUDA:
        return False
    return bool(live.get_provider_options()[CUDA].get("enable_cuda_graph") == "1")


def graph_number(number: int) -> Any:
    """Options of a run that captures or replays the CUDA graph of this number; -1 for neither."""
    options = import_runtime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options


class Binding:
    """Operands and results of a session, bound once and run many times.

    Operands are numpy arrays, copied to a GPU when they are bound (on the CPU they are read in place), or `OrtValue`s, used
    in place. Results are allocated on the device by the runtime, or written into given `OrtValue`s. A training loop holds
    two bindings of one session: the results of each are the parameters of the other.

    `graph` is the number of the CUDA graph of this binding, if the session captures graphs and has several bindings.
    """

    def __init__(self, live: Any, graph: int = 0) -> None:
        self.session = live
        self._options = graph_number(graph) if captures(live) else None
        self.device = device_of(live)
        self._io = live.io_binding()
        self._inputs = {value.name for value in live.get_inputs()}
        self._outputs = [value.name for value in live.get_outputs()]
        self._held: dict[str, Any] = {}  # the runtime does not keep an operand's memory alive
        self._into: dict[str, Any] = {}

    def put(self, array: np.ndarray) -> Any:
        """Copy `array` to the session's device; results may be written into the returned `OrtValue`."""
        return self._wrapped(np.array(array))

    def _wrapped(self, array: np.ndarray) -> Any:
        """An `OrtValue` of the array on the device; on the CPU it is a view."""
        return import_runtime().OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"), *self.device)

    def bind(self, inputs: Mapping[str, Any]) -> None:
        """Bind operands by name; those that were bound before stay bound.

        Raises:
            ArgumentError: The model has no input of that name.
        """
        for name, value in inputs.items():
            if name not in self._inputs:
                raise ArgumentError(f"The model has no input {name!r}.", hint=f"It has {', '.join(self._inputs)}.")
            held = self._wrapped(value) if isinstance(value, np.ndarray) else value
            self._io.bind_ortvalue_input(name, held)
            self._held[name] = held

    def bind_results(self, into: Mapping[str, Any] | None = None, *, host: Iterable[str] = ()) -> None:
        """Bind results: to the `OrtValue`s in `into`, to the host for names in `host`, else to new memory on the device."""
        self._into = dict(into or {})
        kind, number = self.device
        on_host = set(host)
        self._io.clear_binding_outputs()
        for name in self._outputs:
            if name in self._into:
                self._io.bind_ortvalue_output(name, self._into[name])
            elif name in on_host:
                self._io.bind_output(name, "cpu")
            else:
                self._io.bind_output(name, kind, number)

    def run(self) -> None:
        """Run the session on the bound values."""
        self.session.run_with_iobinding(self._io, self._options)

    def results(self) -> dict[str, Any]:
        """The results of the last run as `OrtValue`s by name; `.numpy()` copies one to the host."""
        return dict(zip(self._outputs, self._io.get_outputs(), strict=True))
