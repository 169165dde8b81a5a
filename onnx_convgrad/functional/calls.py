"""Run the public functions: check and compile a call once, then only run it.

Plans are cached by the arguments as passed, so a repeated call costs one look-up. Sessions are cached by the meaning of
the arguments, so `padding=1` and `padding=(1, 1)` share one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from onnx_convgrad.base.memory import machine_bytes
from onnx_convgrad.base.numbers import flag
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.functional.geometry import Geometry, settle
from onnx_convgrad.functional.graph import Kind, Task
from onnx_convgrad.functional.keys import frozen, resolved, thawed
from onnx_convgrad.functional.sessions import SESSIONS, Array, Compiled, compiled
from onnx_convgrad.runtime.providers import Providers
from onnx_convgrad.runtime.session_options import Options, SessionOptions

DTYPES = ("float16", "float32", "float64", "complex64", "complex128")

PLANS = SESSIONS
"""The number of plans kept, each with its session."""

Window = tuple[Any, Any, Any, Any, Any, Any]
"""stride, padding, dilation, transposed, output_padding and groups, as passed."""

Sizes = tuple[int, ...]
Signature = tuple[tuple[Sizes, np.dtype] | None, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Function:
    """A public function.

    Attributes:
        kind: The kind of model.
        arrays: Its arrays in order: the name, and the operand or `output` whose shape it has.
        results: The operand (or `output`) that each result belongs to and has the shape of.
        per_sample: Whether every sample has gradients of its own.
        rank: Number of spatial axes, if fixed.
    """

    kind: Kind
    arrays: Mapping[str, str]
    results: tuple[str, ...]
    per_sample: bool = False
    rank: int | None = None

    def __call__(
        self,
        arrays: Sequence[Any],
        window: Window,
        *,
        sizes: tuple[Any, Any, Any] = (None, None, None),
        mask: Sequence[bool] = (True,),
        providers: Providers | None = None,
        options: Options | None = None,
    ) -> tuple[Any, ...]:
        """The results, `None` where `mask` is false. `sizes`: those of input, weight and bias where there is no array."""
        operands = [a if a is None or (type(a) is np.ndarray and a.dtype.isnative) else _array(a) for a in arrays]
        signature = tuple([None if a is None else (a.shape, a.dtype) for a in operands])
        rest = [frozen(value) for value in (sizes, window, mask, providers, options)]
        return _plan(self, signature, *rest).run(operands)


def _array(values: Any) -> Array:
    try:
        array = np.asarray(values)
    except Exception as problem:
        raise ArgumentError(
            f"An operand of type {type(values).__name__} cannot become an array: {problem}."
        ) from problem
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


# -- plans -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Feed:
    """One input: name, position of its array, and the dtype and shape to view the array with where they differ."""

    name: str
    position: int
    dtype: np.dtype | None
    shape: Sizes | None


@dataclass(frozen=True, slots=True)
class Result:
    """One result: position among the outputs (`None`: it is zero), shape and dtype."""

    position: int | None
    shape: Sizes
    dtype: np.dtype

    def take(self, outputs: Sequence[Array]) -> Array:
        if self.position is None:
            return np.zeros(self.shape, self.dtype)
        array = outputs[self.position]
        if array.dtype != self.dtype:  # real and imaginary parts
            array = array.view(self.dtype)
        return array if array.shape == self.shape else array.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked and compiled call that needs only its arrays."""

    session: Compiled | None
    feeds: tuple[Feed, ...]
    results: tuple[Result | None, ...]

    def run(self, arrays: Sequence[Array | None]) -> tuple[Array | None, ...]:
        outputs: list[Array] = []
        if self.session is not None:
            feeds = {}
            for feed in self.feeds:
                array = arrays[feed.position]
                assert array is not None, "the model reads an absent array"
                if feed.dtype is not None:
                    array = np.ascontiguousarray(array).view(feed.dtype)
                feeds[feed.name] = array if feed.shape is None else array.reshape(feed.shape)
            outputs = self.session.run(feeds)
        return tuple([None if result is None else result.take(outputs) for result in self.results])


@lru_cache(maxsize=PLANS)
def _plan(
    function: Function,
    signature: Signature,
    sizes: tuple[Any, Any, Any],
    window: Window,
    mask: Any,
    providers: Any,
    options: Any,
) -> Plan:
    arrays = {name: entry for name, entry in zip(function.arrays, signature, strict=True) if entry is not None}
    for name in _REQUIRED:
        if name in function.arrays and name not in arrays:
            raise ArgumentError(f"{name} must be an array, not None.")
    dtype = _common_dtype({name: kind for name, (_, kind) in arrays.items()})
    shapes = {name: shape for name, (shape, _) in arrays.items()}
    input_size, weight_size, bias_size = sizes
    stride, padding, dilation, transposed, output_padding, groups = window
    transposed = flag(transposed, "transposed")
    data, weight = shapes.get("input", input_size), shapes.get("weight", weight_size)
    numbers = (stride, padding, dilation, transposed, output_padding, groups)
    g, batched = settle(data, weight, *numbers, function.rank)
    wanted = _wanted(function, mask)
    if bias_size not in {None, (0,)} and "bias" in wanted:  # ATen's graphs have [0] for no bias
        shapes["bias"] = bias_size if isinstance(bias_size, tuple) else (bias_size,)
    _check_shapes(function, g, shapes, batched=batched)
    _check_memory(g, wanted, dtype, per_sample=function.per_sample)
    optional = [name for name in function.arrays if name in arrays and name not in _REQUIRED]
    task = Task(function.kind, tuple(name.removesuffix("_direction") for name in optional), wanted)
    chosen = SessionOptions.of(thawed(options))
    folded = g.per_sample() if function.per_sample else g
    output = _shape_of(g, "output", batched=batched)
    hollow = shapes.get("grad_output", output) != output
    model = None if hollow else compiled(folded, dtype, task, resolved(providers, chosen), chosen)
    outputs = () if model is None else model.outputs
    results = []
    for name in function.results:
        position = outputs.index(f"result_{name}") if f"result_{name}" in outputs else None
        shape = shapes["grad_output"] if hollow and name == "output" else _shape_of(g, name, batched=batched)
        if function.per_sample and batched:
            shape = (g.input[0], *shape)
        results.append(Result(position, shape, dtype) if name in wanted else None)
    feeds = []
    for name, (shape, kind) in ({} if model is None else model.inputs).items():
        view, same = None if kind == dtype else kind, shape == shapes[name]
        feeds.append(Feed(name, list(function.arrays).index(name), view, None if same else shape))
    return Plan(model, tuple(feeds), tuple(results))


_REQUIRED = ("input", "weight", "grad_output")
"""Operands that every function with them requires."""


def _wanted(function: Function, mask: Any) -> tuple[str, ...]:
    if not isinstance(mask, tuple) or len(mask) != len(function.results):
        count = f"{len(mask)} entries" if isinstance(mask, tuple) else repr(mask)
        raise ArgumentError(f"output_mask needs {len(function.results)} entries, one per result, but has {count}.")
    return tuple(name for name, is_wanted in zip(function.results, mask, strict=True) if is_wanted)


def _shape_of(g: Geometry, name: str, *, batched: bool) -> Sizes:
    shape = g.shape(name)
    return shape if batched or name in ("weight", "bias") else shape[1:]


# -- checks ------------------------------------------------------------------------------------------------------------


def _common_dtype(dtypes: Mapping[str, np.dtype]) -> np.dtype:
    first, dtype = next(iter(dtypes.items()))
    for name, other in dtypes.items():
        if other != dtype:
            raise ArgumentError(f"{first.capitalize()} type ({dtype}) and {name} type ({other}) should be the same.")
    if dtype.name not in DTYPES:
        raise ArgumentError(
            f"{first.capitalize()} type ({dtype}) is not supported.", hint=f"There are {', '.join(DTYPES)}."
        )
    return dtype


def _check_shapes(function: Function, g: Geometry, shapes: Mapping[str, Sizes], *, batched: bool) -> None:
    """Check each shape against that which follows from the input and the weight."""
    for name, shape in shapes.items():
        of = function.arrays.get(name, name)
        wanted = _shape_of(g, of, batched=batched)
        without_channels = (*wanted[: -g.rank - 1], 0, *wanted[-g.rank :])  # PyTorch's output for an input without any
        if shape == wanted or (of == "output" and not g.input[1] and shape == without_channels):
            continue
        if name == "bias":
            raise ArgumentError(
                f"Given weight of size {list(g.weight)}, expected bias to be 1-dimensional with {g.features} elements,"
                f" but got bias of size {list(shape)} instead."
            )
        raise ArgumentError(
            f"Expected {name} to have the size of the {of}, {list(wanted)}, but got {list(shape)} instead.",
            hint=f"The input is of size {list(g.input)}, the weight of size {list(g.weight)}.",
        )


def _check_memory(g: Geometry, wanted: Sequence[str], dtype: np.dtype, *, per_sample: bool) -> None:
    """Refuse results, and a padded input, that this machine cannot hold."""
    sizes = {f"The result for {name}": g.shape(name) for name in wanted}
    if per_sample:
        sizes = {what: (g.input[0], *shape) for what, shape in sizes.items()}
    if not g.transposed:
        sizes["The padded input"] = (*g.input[:2], *g.padded_size)
    for what, shape in sizes.items():
        count = math.prod(shape) * dtype.itemsize
        if count > machine_bytes():
            raise ArgumentError(
                f"{what}, of size {list(shape)}, would take {count:.1e} bytes, more than this machine has."
            )
