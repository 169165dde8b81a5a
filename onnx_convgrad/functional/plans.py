"""Compile checked calls into plans, which only need their arrays; split large ones over the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from onnx_convgrad.functional.layouts import axis_to_end, inverse
from onnx_convgrad.functional.requests import Definition, Request, Signature, Sizes, Window, request
from onnx_convgrad.functional.sessions import SESSIONS, Array, Compiled, compiled

__all__ = ["INDEX_LIMIT", "PLANS", "plan"]

PLANS = SESSIONS
"""The number of plans kept, each with its session."""

INDEX_LIMIT = 2**31
"""Number of elements of an operand at which a call is split over the batch: kernels count elements in 32 bits."""


@dataclass(frozen=True, slots=True)
class Feed:
    """One input of the model that a call runs.

    Attributes:
        name: Of the input.
        position: Of its array among those of the call.
        axes: The permutation that brings the array into C order, if it is in another one.
        cast: The dtype to convert the array to, if it differs.
        view: The dtype to view the array with, if it differs: parts of complex numbers.
        shape: The shape of the input, if it differs.
    """

    name: str
    position: int
    axes: tuple[int, ...] | None
    cast: np.dtype | None
    view: np.dtype | None
    shape: Sizes | None

    def of(self, array: Array | None) -> Array:
        assert array is not None, "the model reads an absent array"
        if self.axes is not None:
            array = array.transpose(self.axes)
        if self.cast is not None:
            array = array.astype(self.cast)
        if self.view is not None:
            array = np.ascontiguousarray(array).view(self.view)
        return array if self.shape is None else array.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Result:
    """One result of a call.

    Attributes:
        position: Among the outputs of the model; `None`: it is zero.
        shape: In the order of memory.
        dtype: Of the result.
        axes: The permutation that puts the axes into the order of the call, if they are in another one.
    """

    position: int | None
    shape: Sizes
    dtype: np.dtype
    axes: tuple[int, ...] | None

    def take(self, outputs: Sequence[Array]) -> Array:
        if self.position is None:
            array: Array = np.zeros(self.shape, self.dtype)
        else:
            array = outputs[self.position]
            if array.dtype != self.dtype:  # real and imaginary parts, or float32 for bfloat16
                array = array.view(self.dtype) if self.dtype.kind == "c" else array.astype(self.dtype)
            if array.shape != self.shape:
                array = array.reshape(self.shape)
        return array if self.axes is None else array.transpose(self.axes)

    def empty(self, samples: int) -> Array:
        """An array for the results of several parts of the batch."""
        array: Array = np.empty((samples, *self.shape[1:]), self.dtype)
        return array if self.axes is None else array.transpose(self.axes)


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked and compiled call that needs only its arrays."""

    session: Compiled | None
    feeds: tuple[Feed, ...]
    results: tuple[Result | None, ...]

    def run(self, arrays: Sequence[Array | None]) -> tuple[Array | None, ...]:
        outputs: list[Array] = []
        if self.session is not None:
            outputs = self.session.run({feed.name: feed.of(arrays[feed.position]) for feed in self.feeds})
        return tuple([None if result is None else result.take(outputs) for result in self.results])


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """A call in parts of the batch.

    Attributes:
        parts: The range of samples and the plan of each.
        of_batch: Which arrays have a batch axis.
        joined: Which results have one; the others are summed.
    """

    parts: tuple[tuple[slice, Plan], ...]
    of_batch: tuple[bool, ...]
    joined: tuple[bool, ...]

    def run(self, arrays: Sequence[Array | None]) -> tuple[Array | None, ...]:
        results = self.parts[0][1].results
        totals: list[Array | None] = [None] * len(results)
        for samples, part in self.parts:
            own = [a[samples] if a is not None and cut else a for a, cut in zip(arrays, self.of_batch, strict=True)]
            for i, (value, result) in enumerate(zip(part.run(own), results, strict=True)):
                if value is None or result is None:
                    continue
                total = totals[i]
                if self.joined[i]:
                    total = result.empty(self.parts[-1][0].stop) if total is None else total
                    total[samples] = value
                else:
                    exact = value.astype(np.float32) if value.dtype.itemsize == 2 else value  # rounded once
                    total = exact if total is None else np.add(total, exact, out=total)
                totals[i] = total
        return tuple(
            None if total is None or result is None else total.astype(result.dtype, copy=False)
            for total, result in zip(totals, results, strict=True)
        )


@lru_cache(maxsize=PLANS)
def plan(
    function: Definition, signature: Signature, sizes: tuple[Any, Any, Any], window: Window, *rest: Any
) -> Plan | SplitPlan:
    """The plan of a call, by arguments that `keys.frozen` has converted; see `requests.request`."""
    asked = request(function, signature, sizes, window, *rest)
    batch = asked.geometry.input[0]
    count = min(-(-asked.geometry.index_range // INDEX_LIMIT), batch)
    if count <= 1:
        return _plan(function, asked)
    step = -(-batch // count)
    of_batch = tuple(of in ("input", "output") for of in function.arrays.values())
    parts = []
    for start in range(0, batch, step):
        size = min(step, batch - start)
        own = tuple(
            (((size, *entry[0][1:]), *entry[1:]) if entry is not None and cut else entry)
            for entry, cut in zip(signature, of_batch, strict=True)
        )
        own_sizes = ((size, *sizes[0][1:]) if sizes[0] is not None else None, *sizes[1:])
        parts.append((slice(start, start + size), _plan(function, request(function, own, own_sizes, window, *rest))))
    joined = tuple(function.per_sample or name not in ("weight", "bias") for name in function.results)
    return SplitPlan(tuple(parts), of_batch, joined)


def _plan(function: Definition, asked: Request) -> Plan:
    model = None if asked.hollow else compiled(asked)
    outputs = () if model is None else model.outputs
    results = []
    for name in function.results:
        position = outputs.index(f"result_{name}") if f"result_{name}" in outputs else None
        results.append(_result(asked, name, position) if name in asked.results else None)
    feeds = []
    for name, (shape, kind) in ({} if model is None else model.inputs).items():
        own, axes = asked.shapes[name], None
        if name in asked.task.channels_last:
            axes = axis_to_end(len(own), asked.channel_axis(name))
            own = tuple(own[axis] for axis in axes)
        cast = asked.computed if asked.computed != asked.dtype else None
        view = kind if kind != asked.computed else None
        position = list(function.arrays).index(name)
        feeds.append(Feed(name, position, axes, cast, view, None if own == shape else shape))
    return Plan(model, tuple(feeds), tuple(results))


def _result(asked: Request, name: str, position: int | None) -> Result:
    shape = asked.results[name]
    if not asked.channels_last or name == "bias":
        return Result(position, shape, asked.dtype, None)
    axes = axis_to_end(len(shape), asked.channel_axis(name))
    return Result(position, tuple(shape[axis] for axis in axes), asked.dtype, inverse(axes))
