"""States of streams: outputs of one batch that are inputs of the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from onnx_convgrad.data.inputs import STATE_ROWS, Batch
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.metrics.batch_weights import samples
from onnx_convgrad.programs.manifest import Manifest, Port

Compute = Callable[[Batch, Sequence[str]], Mapping[str, Any]]
"""Computes outputs, by name, of a batch."""


class StreamStates:
    """Holds the states of streams, feeds them to batches, and takes the next ones from results.

    A batch continues the streams of the batch before, row by row, or as its array `state_rows` says. States begin with
    zeros. An array for a state in a batch goes before. A model without states is run as it is.

    Args:
        manifest: Names the states.
        values: Input -> state after the last batch; changed in place.
    """

    def __init__(self, manifest: Manifest, values: dict[str, np.ndarray] | None = None) -> None:
        self.manifest, self.pairs = manifest, manifest.states
        self.values = {} if values is None else values

    def run(self, compute: Compute, batch: Batch, outputs: Sequence[str]) -> dict[str, Any]:
        """Compute outputs of a batch that continues the streams, and hold the states behind it."""
        found = compute(self.fed(batch), self.with_states(outputs))
        return self.taken(found, outputs)

    def with_states(self, outputs: Sequence[str]) -> list[str]:
        """The outputs, and those that are states."""
        return list(dict.fromkeys([*outputs, *self.pairs.values()])) if self.pairs else list(outputs)

    def taken(self, found: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
        """Hold the states among some results; return the results without those that are not among the `outputs`."""
        if not self.pairs:
            return dict(found)
        self.values.update({name: np.asarray(found[output]) for name, output in self.pairs.items() if output in found})
        return {name: value for name, value in found.items() if name in outputs or name not in self.pairs.values()}

    def fed(self, batch: Batch) -> Batch:
        """A batch with the states that it begins with; a batch without samples stays empty.

        Raises:
            ArgumentError: The streams before are not those that the batch continues, or a size of a state is not known.
        """
        if not self.pairs or not batch:
            return batch
        rows = batch.get(STATE_ROWS)
        given = {name: array for name, array in batch.items() if name != STATE_ROWS}
        ports = {port.name: port for port in self.manifest.data}
        missing = [name for name in self.pairs if name not in given]
        return given | {name: self._state(ports[name], given, rows) for name in missing}

    def _state(self, port: Port, batch: Batch, rows: np.ndarray | None) -> np.ndarray:
        count, axis = samples(self.manifest, batch), self.manifest.batch_axes.get(port.name, 0)
        held = self.values.get(port.name)
        if held is None or (rows is not None and (rows < 0).all()):
            return np.zeros(self._sizes(port, batch, count, axis), port.dtype)
        if not held.ndim:
            return _shared(port, held, rows)
        before = held.shape[axis]
        fits = before == count or _fixed(port)
        if rows is None or (fits and np.array_equal(rows, np.arange(count))):
            if not fits:
                raise ArgumentError(
                    f"The state {port.name!r} is that of {before} streams, and the batch has {count} samples.",
                    hint=f"Give batches of one size, or call trainer.reset_states(); or say with the array {STATE_ROWS!r} "
                    "[samples] in which row each stream was before, -1 for one that begins.",
                )
            return held
        if rows.max() >= before or (_fixed(port) and before != count):
            raise ArgumentError(
                f"The array {STATE_ROWS!r} names row {rows.max()} of the batch before, and the state {port.name!r} has the "
                f"size {before} along the axis {axis} of the streams.",
                hint="Count rows from 0. If streams lie along another axis, name their number in the shapes: "
                "og.load(model, input_shapes=...).",
            )
        begins = (rows < 0).reshape(-1, *[1] * (held.ndim - 1 - axis))
        return np.where(begins, np.zeros((), held.dtype), held.take(rows.clip(0), axis))

    def _sizes(self, port: Port, batch: Batch, count: int, axis: int) -> list[int]:
        """The sizes of a state of so many streams."""
        known: dict[int | str | None, int] = {
            name: size
            for other in self.manifest.data
            if other.name in batch and other.shape is not None
            for name, size in zip(other.shape, batch[other.name].shape, strict=False)
            if isinstance(name, str)
        }
        sizes = [
            size if isinstance(size, int) else known.get(size, count if i == axis else None)
            for i, size in enumerate((None, None) if port.shape is None else port.shape)
        ]
        if None in sizes:
            raise ArgumentError(
                f"The sizes of the state {port.name!r} are not known: the model declares {port.shape}.",
                hint=f"Give them: og.load(model, input_shapes={{{port.name!r}: [...]}}), with the name of the number of "
                f"samples; or give the first batch an array {port.name!r}.",
            )
        return [size for size in sizes if size is not None]


def _shared(port: Port, held: np.ndarray, rows: np.ndarray | None) -> np.ndarray:
    """A state that is one number, such as a position: all streams have it."""
    if rows is not None and (rows < 0).any():
        raise ArgumentError(
            f"The state {port.name!r} is one number for all streams, of which some begin in this batch and others go on.",
            hint="Give sequences of one length, so that all begin together, or one stream: batch_size=1.",
        )
    return held


def _fixed(port: Port) -> bool:
    """Whether the model fixes all sizes of a state, so that nothing tells the axis of the streams."""
    return all(isinstance(size, int) for size in port.shape or (None,))


def carrying(manifest: Manifest, compute: Compute, outputs: Sequence[str]) -> Callable[[Batch], dict[str, Any]]:
    """A function that computes outputs of one batch after the other, with the states of the one before."""
    states = StreamStates(manifest)
    return lambda batch: states.run(compute, batch, outputs)
