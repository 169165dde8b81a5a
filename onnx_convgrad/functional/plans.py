"""Run checked calls: compile each into a plan, which needs only its arrays; split large ones over the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from onnx_convgrad.functional.checks import Sizes
from onnx_convgrad.functional.requests import Function, Request, Signature, request, shape_of
from onnx_convgrad.functional.sessions import SESSIONS, Array, Compiled, compiled

INDEX_LIMIT = 2**31
"""Number of elements of an operand at which a call is split over the batch: kernels count elements in 32 bits."""

_WHOLE = ("weight", "bias", "weight_direction", "bias_direction")
"""Operands and results that all samples share."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The form that an array takes on its way from a call into the model, or back.

    Attributes:
        position: Of the array, among those of the call or among the outputs of the model; `None`: it is zero.
        before: The permutation that puts its axes into the order of memory.
        cast: The dtype that it is converted to.
        view: The dtype that it is then viewed with: complex numbers are pairs in the model.
        shape: Its new shape.
        after: The permutation that puts the axes of a result into the order of the call.
    """

    position: int | None
    before: Sizes
    cast: np.dtype
    view: np.dtype
    shape: Sizes
    after: Sizes

    def of(self, arrays: Sequence[Array | None]) -> Array:
        if self.position is None:
            return np.zeros(self.shape, self.view).transpose(self.after)
        array = arrays[self.position]
        assert array is not None, "the model reads an absent array"
        array = array.transpose(self.before).astype(self.cast, copy=False)
        return np.ascontiguousarray(array).view(self.view).reshape(self.shape).transpose(self.after)


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
    feeds: tuple[tuple[str, Transfer], ...] = ()
    results: tuple[Transfer | None, ...] = ()
    step: int | None = None

    def run(self, arrays: Sequence[Array | None]) -> tuple[Array | None, ...]:
        outputs: list[Array] = []
        if self.session is not None:
            outputs = self.session.run({name: feed.of(arrays) for name, feed in self.feeds})
        return tuple([None if result is None else result.of(outputs) for result in self.results])


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
        before, _ = _orders(asked, name, len(asked.shapes[name]))
        feed = Transfer(order.index(name), before, asked.dtype, kind, shape, tuple(range(len(shape))))
        feeds.append((name, feed))
    return Plan(model, tuple(feeds), results)


def _result(asked: Request, name: str, outputs: Sequence[str]) -> Transfer:
    output, shape, dtype = f"result_{name}", asked.results[name], asked.arrays
    axes, back = _orders(asked, output, len(shape))
    position = outputs.index(output) if output in outputs else None
    before = range(len(shape_of(asked.spec, name)) + (dtype.kind == "c"))
    return Transfer(position, tuple(before), np.zeros(0, dtype).real.dtype, dtype, tuple(shape[i] for i in axes), back)


def _orders(asked: Request, name: str, count: int) -> tuple[Sizes, Sizes]:
    """The permutations of the axes of an input or output that put them into the order of memory, and back."""
    axes, channels = list(range(count)), count - asked.spec.rank - 1
    if name not in asked.channels_last:
        return tuple(axes), tuple(axes)
    return (*axes[:channels], *axes[channels + 1 :], channels), (*axes[:channels], count - 1, *axes[channels:-1])


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
