"""Check a call by its shapes and dtypes, and say what has to be computed for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnx_convgrad.base.memory import machine_bytes
from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import flag
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.functional.geometry import Geometry, settle
from onnx_convgrad.functional.graph import COMPUTED_AS, Kind, Task
from onnx_convgrad.functional.keys import Resolved, frozen, resolved, thawed
from onnx_convgrad.lowering.candidates import ALLOWED
from onnx_convgrad.lowering.lower import check_choice
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.runtime.session_options import SessionOptions

__all__ = ["Definition", "Request", "Signature", "Window", "request"]

DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")

Window = tuple[Any, Any, Any, Any, Any, Any]
"""stride, padding, dilation, transposed, output_padding and groups, as passed."""

Sizes = tuple[int, ...]
Signature = tuple[tuple[Sizes, np.dtype, int | None] | None, ...]
"""Shape, dtype and innermost axis (see `layouts.moved_axis`) of each array."""


@dataclass(frozen=True, eq=False, slots=True)
class Definition:
    """The operands and results of a public function.

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


@dataclass(frozen=True, slots=True)
class Request:
    """A checked call.

    Attributes:
        geometry: The convolution, with a batch axis.
        dtype: The dtype of the arrays.
        task: What the model computes.
        shapes: The shapes of the arrays that are present, and of a bias whose size was passed.
        results: The shapes of the wanted results, by name.
        hollow: Whether `grad_output` is PyTorch's output for an input without channels, which has none either.
        providers: Execution providers.
        options: Options of the session.
        channels_last: Whether results have their channels innermost in memory.
    """

    geometry: Geometry
    dtype: np.dtype
    task: Task
    shapes: Mapping[str, Sizes]
    results: Mapping[str, Sizes]
    hollow: bool
    providers: Resolved
    options: SessionOptions
    channels_last: bool

    @property
    def computed(self) -> np.dtype:
        """The dtype of the model's inputs and outputs, or that of their pairs for complex arrays."""
        return COMPUTED_AS.get(self.dtype.name, self.dtype)

    @property
    def model_geometry(self) -> Geometry:
        """The convolution that the model computes: for gradients of each sample, every sample is a group."""
        return self.geometry.per_sample() if self.task.per_sample else self.geometry

    def channel_axis(self, name: str) -> int:
        """The axis of an array or result of the call that holds channels."""
        return len({**self.shapes, **self.results}[name]) - self.geometry.rank - 1


def request(
    function: Definition,
    signature: Signature,
    sizes: tuple[Any, Any, Any],
    window: Window,
    mask: Any,
    lowering: Any,
    alpha: Any,
    providers: Any,
    options: Any,
) -> Request:
    """Check the arguments of a call, which `keys.frozen` has converted.

    Raises:
        ArgumentError: PyTorch refuses them too, a dtype is not supported, or the results would not fit into memory.
    """
    arrays = {name: entry for name, entry in zip(function.arrays, signature, strict=True) if entry is not None}
    for name in _REQUIRED:
        if name in function.arrays and name not in arrays:
            raise ArgumentError(f"{name} must be an array, not None.")
    dtype = _common_dtype({name: kind for name, (_, kind, _) in arrays.items()})
    if "relu" in function.kind and dtype.kind == "c":
        raise ArgumentError(f"{function.kind} is not supported for complex types, but the arrays are {dtype}.")
    shapes = {name: shape for name, (shape, _, _) in arrays.items()}
    g, batched = _geometry(function, shapes, sizes, window)
    wanted = _wanted(function, mask)
    bias_size = sizes[2]
    if bias_size not in {None, (0,)} and "bias" in wanted:  # ATen's graphs have [0] for no bias
        shapes["bias"] = bias_size if isinstance(bias_size, tuple) else (bias_size,)
    _check_shapes(function, g, shapes, batched=batched)
    _check_memory(g, wanted, dtype, per_sample=function.per_sample)
    chosen = SessionOptions.of(thawed(options))
    results = {name: _shape_of(g, name, batched=batched) for name in wanted}
    hollow = "grad_output" in shapes and shapes["grad_output"] != _shape_of(g, "output", batched=batched)
    if hollow and "output" in results:
        results["output"] = shapes["grad_output"]
    if function.per_sample and batched:
        results = {name: (g.input[0], *shape) for name, shape in results.items()}
    innermost = {name: axis for name, (_, _, axis) in arrays.items()}
    last = {name for name, axis in innermost.items() if axis == len(shapes[name]) - g.rank - 1}
    deciding = {"input" if "input" in arrays else "grad_output", "weight"}
    task = Task(
        function.kind,
        tuple(name.removesuffix("_direction") for name in function.arrays if name in arrays and name not in _REQUIRED),
        wanted,
        per_sample=function.per_sample,
        alpha=_factor(alpha),
        lowering=_choosing(lowering),
        channels_last=_in_model(function, last, wanted if last & deciding else ()),
    )
    return Request(g, dtype, task, shapes, results, hollow, resolved(providers, chosen), chosen, bool(last & deciding))


_REQUIRED = ("input", "weight", "grad_output", "output", "z")
"""Operands that cannot be left out of a function that has them."""


def _geometry(
    function: Definition, shapes: Mapping[str, Sizes], sizes: tuple[Any, Any, Any], window: Window
) -> tuple[Geometry, bool]:
    stride, padding, dilation, transposed, output_padding, groups = window
    numbers = (stride, padding, dilation, flag(transposed, "transposed"), output_padding, groups)
    return settle(shapes.get("input", sizes[0]), shapes.get("weight", sizes[1]), *numbers, function.rank)


def _wanted(function: Definition, mask: Any) -> tuple[str, ...]:
    if not isinstance(mask, tuple) or len(mask) != len(function.results):
        count = f"{len(mask)} entries" if isinstance(mask, tuple) else repr(mask)
        raise ArgumentError(f"output_mask needs {len(function.results)} entries, one per result, but has {count}.")
    return tuple(name for name, is_wanted in zip(function.results, mask, strict=True) if is_wanted)


def _shape_of(g: Geometry, name: str, *, batched: bool) -> Sizes:
    shape = g.shape(name)
    return shape if batched or name in ("weight", "bias") else shape[1:]


def _in_model(function: Definition, arrays: set[str], results: Sequence[str]) -> tuple[str, ...]:
    """Inputs and outputs of the model whose channels are its last axis; arrays of single samples become one sample."""
    names = [] if function.per_sample else sorted(arrays - {"bias", "bias_direction"})
    return (*names, *(f"result_{name}" for name in results if name != "bias"))


def _factor(alpha: Any) -> float:
    try:
        number = 1.0 if alpha is None else float(alpha)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or isinstance(alpha, str):
        raise ArgumentError(f"alpha must be a finite number, not {alpha!r}.")
    return number


def _choosing(lowering: Any) -> Any:
    """The caller's choice of lowerings as a key; the name of one lowering means every operator that has it."""
    choosing = thawed(lowering)
    if isinstance(choosing, str) and choosing not in ALLOWED:
        names = {name for entries in lowerings().values() for name in entries}
        check_names([choosing], [*ALLOWED, *sorted(names)], "lowering")
        choosing = {operator: choosing for operator, entries in lowerings().items() if choosing in entries}
    check_choice(choosing)
    return frozen(choosing)


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


def _check_shapes(function: Definition, g: Geometry, shapes: Mapping[str, Sizes], *, batched: bool) -> None:
    """Check each shape against that which follows from the input and the weight."""
    for name, shape in shapes.items():
        of = function.arrays.get(name, name)
        wanted = _shape_of(g, of, batched=batched)
        without_channels = (*wanted[: -g.rank - 1], 0, *wanted[-g.rank :])  # PyTorch's output for an input without any
        hollow = name == "grad_output" and not g.input[1] and shape == without_channels
        if shape == wanted or hollow:
            continue
        if name == "bias":
            kind = "transposed=1, " if g.transposed else ""
            raise ArgumentError(
                f"Given {kind}weight of size {list(g.weight)}, expected bias to be 1-dimensional with {g.features} elements,"
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
