"""Run checked calls: compile each into a plan, which needs only its arrays; split large ones over the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from onnx_convgrad.functional.checks import Sizes
from onnx_convgrad.functional.requests import Function, Request, Signature, request
from onnx_convgrad.functional.sessions import SESSIONS, Array, Compiled, compiled

INDEX_LIMIT = 2**31
"""Number of elements of an operand at which a call is split over the batch: kernels count elements in 32 bits."""

_WHOLE = ("weight", "bias", "weight_direction", "bias_direction")
"""Operands and results that all samples share."""


@dataclass(frozen=True, slots=True)
class Feed:
    """One input of the model that a call runs.

    Attributes:
        position: Of its array among those of the call.
        axes: The permutation that brings the array into C order, if it is in another one.
        cast: The dtype to convert the array to, if it differs.
        view: The dtype to view the array with, if it differs: parts of complex numbers.
        shape: The shape of the input, if it differs.
    """

    position: int
    axes: tuple[int, ...] | None
    cast: np.dtype | None
    view: np.dtype | None
    shape: Sizes | None

    def of(self, arrays: Sequence[Array | None]) -> Array:
        array = arrays[self.position]
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


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked and compiled call that needs only its arrays.

    Attributes:
        session: Computes the results, unless all are zero.
        feeds: The inputs of the session by name.
        results: The results; `None` for one that is not wanted.
        step: The number of samples to be computed at once, by plans of their own, if all are too many.
    """

    session: Compiled | None = None
    feeds: tuple[tuple[str, Feed], ...] = ()
    results: tuple[Result | None, ...] = ()
    step: int | None = None

    def run(self, arrays: Sequence[Array | None]) -> tuple[Array | None, ...]:
        outputs: list[Array] = []
        if self.session is not None:
            outputs = self.session.run({name: feed.of(arrays) for name, feed in self.feeds})
        return tuple([None if result is None else result.take(outputs) for result in self.results])


def run(function: Function, arrays: Sequence[Array | None], settings: tuple[Any, ...]) -> tuple[Array | None, ...]:
    """The results of a call; `settings` are frozen."""
    made = plan(function, signature_of(arrays), settings)
    return made.run(arrays) if made.step is None else _in_parts(function, arrays, settings, made.step)


def signature_of(arrays: Sequence[Array | None]) -> Signature:
    """The description of arrays by which plans are cached."""
    return tuple([None if a is None else (a.shape, a.dtype, moved_axis(a)) for a in arrays])


def moved_axis(array: Array) -> int | None:
    """The axis that is innermost in memory, of an array that is otherwise in C order; `None` for every other array."""
    if array.flags.c_contiguous:
        return None
    strides, itemsize = array.strides, array.itemsize
    for axis in range(len(strides) - 1):
        if strides[axis] == itemsize:
            order = (*range(axis), *range(axis + 1, len(strides)), axis)
            if array.transpose(order).flags.c_contiguous:
                return axis
    return None


@lru_cache(maxsize=SESSIONS)
def plan(function: Function, signature: Signature, settings: tuple[Any, ...]) -> Plan:
    """The plan of a call; see `requests.request`."""
    asked = request(function, signature, settings)
    count = min(-(-asked.largest // INDEX_LIMIT), asked.samples)
    return Plan(step=-(-asked.samples // count)) if count > 1 else _compiled(function, asked)


def _compiled(function: Function, asked: Request) -> Plan:
    model, order = compiled(asked), list(function.arrays)
    outputs = () if model is None else model.outputs
    results = tuple([_result(asked, name, outputs) if name in asked.results else None for name in function.results])
    feeds = []
    for name, (shape, kind) in ({} if model is None else model.inputs).items():
        own, axes = asked.shapes[name], None
        if name in asked.channels_last:
            axes, _ = _orders(len(own), asked.spec.rank)
            own = tuple(own[axis] for axis in axes)
        cast = asked.dtype if asked.dtype != asked.arrays else None
        view = kind if kind != asked.dtype else None
        feeds.append((name, Feed(order.index(name), axes, cast, view, None if own == shape else shape)))
    return Plan(model, tuple(feeds), results)


def _result(asked: Request, name: str, outputs: Sequence[str]) -> Result:
    output, shape, back = f"result_{name}", asked.results[name], None
    if output in asked.channels_last:
        axes, back = _orders(len(shape), asked.spec.rank)
        shape = tuple(shape[axis] for axis in axes)
    return Result(outputs.index(output) if output in outputs else None, shape, asked.arrays, back)


def _orders(count: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The permutations of `count` axes that move the channels, before `rank` spatial axes, to the end and back."""
    channels = count - rank - 1
    before, after = range(channels), range(channels + 1, count)
    return (*before, *after, channels), (*before, count - 1, *range(channels, count - 1))


def _in_parts(
    function: Function, arrays: Sequence[Array | None], settings: tuple[Any, ...], step: int
) -> tuple[Array | None, ...]:
    """Compute a call for `step` samples at a time; join results that have samples, and sum the others."""
    samples = next(
        len(a) for name, a in zip(function.arrays, arrays, strict=True) if name not in _WHOLE and a is not None
    )
    totals: dict[str, Array] = {}
    dtypes: dict[str, np.dtype] = {}
    for start in range(0, samples, step):
        cut = slice(start, min(start + step, samples))
        own = [a if a is None or name in _WHOLE else a[cut] for name, a in zip(function.arrays, arrays, strict=True)]
        given = tuple(
            (cut.stop - start, *value[1:]) if name == "input_size" else value
            for name, value in zip(function.settings, settings, strict=True)
        )
        for name, value in zip(function.results, run(function, own, given), strict=True):
            if value is None:
                continue
            dtypes[name] = value.dtype
            if function.per_sample or name not in _WHOLE:
                if start == 0:
                    totals[name] = _room(value, samples)
                totals[name][cut] = value
            else:
                exact = value.astype(np.float32) if value.dtype.itemsize == 2 else value  # rounded once
                totals[name] = np.add(totals[name], exact, out=totals[name]) if start else exact
    return tuple(totals[name].astype(dtypes[name], copy=False) if name in totals else None for name in function.results)


def _room(value: Array, samples: int) -> Array:
    """An array for all samples, in the memory format of the results of some."""
    shape, axis = (samples, *value.shape[1:]), moved_axis(value)
    if axis is None:
        return np.empty(shape, value.dtype)
    return np.moveaxis(np.empty((*shape[:axis], *shape[axis + 1 :], shape[axis]), value.dtype), -1, axis)
