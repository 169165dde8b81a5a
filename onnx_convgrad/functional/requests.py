"""Check a call by its shapes, dtypes and settings, and say what has to be computed for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnx_convgrad.base.limits import machine_bytes
from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import flag
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.functional.checks import Sizes, checked
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.lowering.candidates import ALLOWED
from onnx_convgrad.lowering.lower import check_choice
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.runtime.providers import CUDA, resolve_providers
from onnx_convgrad.runtime.session_options import SessionOptions

DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")

REQUIRED = ("input", "weight", "grad_output", "output", "z")
"""Operands that every function with them requires."""

Signature = tuple[tuple[Sizes, np.dtype, int | None] | None, ...]
"""Shape, dtype and innermost axis (see `plans.moved_axis`) of each array."""


@dataclass(frozen=True, eq=False, slots=True)
class Function:
    """The operands and results of a public function.

    Attributes:
        kind: The kind of model, see `model.DERIVATIVES`.
        arrays: Operand of the model -> the parameter that is its array.
        settings: The other parameters.
        results: The operand, or `output`, that each result belongs to and has the shape of.
        per_sample: Whether every sample has gradients of its own.
        rank: Number of spatial axes, if the function is for one.
        transposed: Whether the convolution is transposed, if no parameter says so.
    """

    kind: str
    arrays: Mapping[str, str]
    settings: tuple[str, ...]
    results: tuple[str, ...]
    per_sample: bool = False
    rank: int | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A checked call. Equal requests take the same session; what is not compared describes the arrays of the call.

    Attributes:
        kind: The kind of model.
        spec: The convolution that the model computes: for gradients of each sample, every sample is a group.
        dtype: The dtype of its operands; complex ones are pairs in the model.
        optional: The optional operands that are present: `bias`; or `input`, `weight`, `bias` for a cotangent of that
            gradient or a tangent of that operand.
        wanted: The results: `output`, `input`, `weight`, `z` or `bias`.
        alpha: The factor of `z`.
        lowering: How gradients are computed, frozen.
        channels_last: The inputs and outputs of the model whose channels are the last axis.
        providers: Execution providers and their options, as pairs.
        options: Options of the session.
        arrays: The dtype of the arrays.
        samples: The number of samples.
        shapes: The shapes of the arrays that are present, and of a bias whose size was passed.
        results: The shapes of the wanted results, by name.
        zero: Whether all results are zero, for the shapes alone.
    """

    kind: str
    spec: ConvSpec
    dtype: np.dtype
    optional: tuple[str, ...]
    wanted: tuple[str, ...]
    alpha: float
    lowering: Any
    channels_last: tuple[str, ...]
    providers: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    options: SessionOptions
    arrays: np.dtype = field(compare=False)
    samples: int = field(compare=False)
    shapes: Mapping[str, Sizes] = field(compare=False)
    results: Mapping[str, Sizes] = field(compare=False)
    zero: bool = field(compare=False)

    @property
    def target(self) -> str:
        """The target that the model is built for."""
        return "cuda" if self.providers[0][0] == CUDA else "cpu"

    @property
    def largest(self) -> int:
        """Elements of the input, with its padding, or of the output."""
        return max(math.prod(_padded_input(self.spec)), math.prod(self.spec.shape("output")))

    def __str__(self) -> str:
        return f"{self.kind} giving {', '.join(self.wanted)} for {self.dtype.name}, {self.spec}"


def request(function: Function, signature: Signature, settings: tuple[Any, ...]) -> Request:
    """Check the arguments of a call; `settings` are frozen.

    Raises:
        ArgumentError: PyTorch refuses them too, a dtype is not supported, or the results would not fit into memory.
    """
    arrays = {name: entry for name, entry in zip(function.arrays, signature, strict=True) if entry is not None}
    given = dict(zip(function.settings, settings, strict=True))
    for name in REQUIRED:
        if name in function.arrays and name not in arrays:
            raise ArgumentError(f"{name} must be an array, not None.")
    dtype = _common_dtype({name: kind for name, (_, kind, _) in arrays.items()})
    if "relu" in function.kind and dtype.kind == "c":
        raise ArgumentError(f"{function.kind} is not supported for complex types, but the arrays are {dtype}.")
    shapes = {name: shape for name, (shape, _, _) in arrays.items()}
    input_size, weight_size = (shapes.get(name, given.get(f"{name}_size")) for name in ("input", "weight"))
    transposed = flag(given.get("transposed", function.transposed), "transposed")
    spec, batched = checked(input_size, weight_size, given, transposed=transposed, rank=function.rank)
    wanted = _wanted(function, given)
    size = given.get("bias_sizes")
    if size not in {None, (0,)} and "bias" in wanted:  # ATen's graphs have [0] for no bias
        shapes["bias"] = size if isinstance(size, tuple) else (size,)
    _check_shapes(spec, shapes, batched=batched)
    results = {name: shape_of(spec, name, batched=batched) for name in wanted}
    hollow = "grad_output" in shapes and shapes["grad_output"] != shape_of(spec, "output", batched=batched)
    if hollow and "output" in results:
        results["output"] = shapes["grad_output"]
    samples = spec.batch or 0
    if function.per_sample and batched:
        results = {name: (samples, *shape) for name, shape in results.items()}
    _check_memory(spec, results, dtype)
    last = {name for name, (shape, _, axis) in arrays.items() if axis == len(shape) - spec.rank - 1}
    follow = wanted if last & {"input" if "input" in arrays else "grad_output", "weight"} else ()
    moved = [] if function.per_sample else sorted(last - {"bias", "bias_direction"})
    options = SessionOptions.of(thawed(given["options"]))
    computed = np.dtype(np.float32) if dtype.name == "bfloat16" else dtype  # ONNX Runtime takes no arrays of bfloat16
    providers = resolve_providers(thawed(given["providers"]), options)
    return Request(
        function.kind,
        spec.samples_as_groups() if function.per_sample else spec,
        computed,
        tuple(name.removesuffix("_direction") for name in arrays if name not in REQUIRED),
        wanted,
        _factor(given.get("alpha")),
        _choosing(given.get("lowering", "auto")),
        (*moved, *(f"result_{name}" for name in follow if name != "bias")),
        tuple((name, tuple(sorted(own.items()))) for name, own in providers),
        options,
        arrays=dtype,
        samples=samples,
        shapes=shapes,
        results=results,
        zero=hollow or (function.per_sample and not samples),
    )


def shape_of(spec: ConvSpec, name: str, *, batched: bool = True) -> Sizes:
    """The shape of an operand or a result."""
    owner = _owner(name)
    shape = spec.shape(owner)
    return shape if batched or owner in ("weight", "bias") else shape[1:]


def _owner(name: str) -> str:
    """The `input`, `weight`, `bias` or `output` whose shape an operand or a result has."""
    return "output" if name in ("grad_output", "z") else name.removesuffix("_direction")


def _padded_input(spec: ConvSpec) -> Sizes:
    shape = spec.shape("input")
    if spec.transposed:
        return shape
    return *shape[:2], *(x + b + e for x, b, e in zip(shape[2:], spec.begin, spec.end, strict=True))


def _wanted(function: Function, given: Mapping[str, Any]) -> tuple[str, ...]:
    mask = given.get("output_mask", (True,) * len(function.results))
    if function.per_sample:
        mask = (True, flag(given["bias"], "bias"))
    if not isinstance(mask, tuple) or len(mask) != len(function.results):
        count = f"{len(mask)} entries" if isinstance(mask, tuple) else repr(mask)
        raise ArgumentError(f"output_mask needs {len(function.results)} entries, one per result, but has {count}.")
    return tuple(name for name, is_wanted in zip(function.results, mask, strict=True) if is_wanted)


def _factor(alpha: Any) -> float:
    try:
        number = 1.0 if alpha is None else float(alpha)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or isinstance(alpha, str):
        raise ArgumentError(f"alpha must be a finite number, not {alpha!r}.")
    return number


def _choosing(lowering: Any) -> Any:
    """The caller's choice of lowerings, frozen; the name of one lowering means every operator that has it."""
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


def _check_shapes(spec: ConvSpec, shapes: Mapping[str, Sizes], *, batched: bool) -> None:
    """Check each shape against that which follows from the input and the weight."""
    data, weight = spec.shape("input"), spec.shape("weight")
    for name, shape in shapes.items():
        wanted = shape_of(spec, name, batched=batched)
        without_channels = (*wanted[: -spec.rank - 1], 0, *wanted[-spec.rank :])  # PyTorch's output for such an input
        hollow = name == "grad_output" and not data[1] and shape == without_channels
        if shape == wanted or hollow:
            continue
        if name == "bias":
            kind = "transposed=1, " if spec.transposed else ""
            raise ArgumentError(
                f"Given {kind}weight of size {list(weight)}, expected bias to be 1-dimensional with {wanted[0]} elements,"
                f" but got bias of size {list(shape)} instead."
            )
        raise ArgumentError(
            f"Expected {name} to have the size of the {_owner(name)}, {list(wanted)}, but got {list(shape)} instead.",
            hint=f"The input is of size {list(data)}, the weight of size {list(weight)}.",
        )


def _check_memory(spec: ConvSpec, results: Mapping[str, Sizes], dtype: np.dtype) -> None:
    """Refuse results, and a padded input, that this machine cannot hold."""
    sizes = {f"The result for {name}": shape for name, shape in results.items()}
    for what, shape in {**sizes, "The padded input": _padded_input(spec)}.items():
        count = math.prod(shape) * dtype.itemsize
        if count > machine_bytes():
            raise ArgumentError(
                f"{what}, of size {list(shape)}, would take {count:.1e} bytes, more than this machine has."
            )


# -- settings as keys --------------------------------------------------------------------------------------------------


class _Pairs(tuple[tuple[str, Any], ...]):
    """A hashable mapping."""

    __slots__ = ()


class _Inexact(float):
    """A floating number as a key that differs from the integer of the same value."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Inexact) and float(self) == float(other)

    __hash__ = float.__hash__


_PLAIN = {type(None), int, bool, str}


def frozen(value: Any) -> Any:
    """Return the value with lists as tuples, uninterpreted; raise `ArgumentError` for sets and other unhashable types."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is np.ndarray:
        return frozen(value.tolist())
    if isinstance(value, Mapping):
        return _Pairs((key, frozen(value[key])) for key in sorted(value))
    if isinstance(value, (float, np.floating)):
        return _Inexact(value)
    if isinstance(value, (list, tuple)):
        return tuple([v if type(v) in _PLAIN else frozen(v) for v in value])
    if kind.__hash__ is None:
        raise ArgumentError(f"{value!r} is neither a number, a name nor a sequence of them.")
    return value


def thawed(value: Any) -> Any:
    """Return the value with mappings instead of pairs."""
    if isinstance(value, _Pairs):
        return dict(value)
    return tuple(map(thawed, value)) if isinstance(value, tuple) else value
