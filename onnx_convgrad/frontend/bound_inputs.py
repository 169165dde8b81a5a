"""Bind graph inputs to constants: the sample rate of a speech model, the length of a prompt, a flag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.limits import check_limit
from onnx_convgrad.base.names import INSPECT, check_names
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.notes import mark_bound

InputValues: TypeAlias = Mapping[str, Any]
"""Input name -> its value: a number, a bool, a list of them, or an array."""

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_WHOLE = tuple(getattr(ir.DataType, f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64))


def bind_inputs(model: ir.Model, values: InputValues | None) -> ir.Model:
    """Turn graph inputs into initializers with the given values, in place, and return the model.

    Raises:
        ArgumentError: A name is unknown, or a value does not fit the dtype or the shape of its input.
    """
    graph, values = model.graph, values or {}
    inputs = {v.name: v for v in graph.inputs if v.name}
    check_names(list(values), list(inputs), "input in input_values:", INSPECT)
    for name, given in values.items():
        value = inputs[name]
        array = bound_array(value, given)
        graph.inputs.remove(value)
        value.shape, value.const_value = ir.Shape(array.shape), ir.Tensor(array, dtype=value.dtype, name=name)
        mark_bound(value)
        if not value.is_initializer():
            graph.register_initializer(value)
    return model


def bound_array(value: ir.Value, given: Any) -> np.ndarray:
    """The array that a given value is for an input, in its dtype and, where it is fixed, its shape.

    Raises:
        ArgumentError: The value does not fit the dtype or the shape of the input.
    """
    return _shaped(value, _converted(value, given))


def _converted(value: ir.Value, given: Any) -> np.ndarray:
    """The given value in the dtype of the input; raises `ArgumentError` where that would change it."""
    dtype = value.dtype if isinstance(value.type, ir.TensorType) else None
    if dtype is None or dtype not in (ir.DataType.BOOL, *_WHOLE, *_FLOATS):
        kind = "no tensor of known dtype" if dtype is None else dtype.name.lower()
        raise _misfit(value, f"it is {kind}, and only numbers and bools can be bound")
    try:
        array = np.asarray(given)
    except (ValueError, TypeError, RuntimeError) as problem:
        raise _misfit(value, f"{given!r:.60} is no array ({problem})") from None
    if array.dtype.kind not in "biuf":
        raise _misfit(value, f"{given!r:.60} is not made of numbers")
    wanted = "true or false" if dtype == ir.DataType.BOOL else f"{dtype.name.lower()} numbers"
    with np.errstate(all="ignore"):
        result = array.astype(dtype.numpy())
    if not _same(array, result, dtype):
        raise _misfit(value, f"it takes {wanted}, not {given!r:.60}")
    return result


def _same(array: np.ndarray, result: np.ndarray, dtype: ir.DataType) -> bool:
    """Whether a conversion kept the values, up to the rounding of floats."""
    if dtype == ir.DataType.BOOL:
        return bool(np.isin(array, (0, 1)).all())
    if array.dtype.kind == "b":
        return False
    if dtype in _FLOATS:
        return bool((np.isfinite(result.astype(np.float64)) == np.isfinite(array)).all())
    limits = np.iinfo(result.dtype)
    if not np.isfinite(array).all() or any(not limits.min <= int(edge) <= limits.max for edge in _edges(array)):
        return False
    return bool((result == array).all())


def _edges(array: np.ndarray) -> list[Any]:
    return [array.min(), array.max()] if array.size else []


def _shaped(value: ir.Value, array: np.ndarray) -> np.ndarray:
    """The array in the shape of the input: broadcast to a fixed shape, else of the same rank and known sizes."""
    if value.shape is None:
        return array
    sizes = [d if isinstance(d, int) and d >= 0 else None for d in value.shape]
    if None not in sizes:
        shape = tuple(size for size in sizes if size is not None)
        check_limit(
            "constant_bytes", int(np.prod(shape, dtype=object)) * array.itemsize, f"The value of {value.name!r}"
        )
        try:
            return np.array(np.broadcast_to(array, shape))
        except ValueError:
            raise _misfit(value, f"a value of shape {list(array.shape)} does not fit {sizes}") from None
    if len(sizes) != array.ndim or any(size not in (None, n) for size, n in zip(sizes, array.shape, strict=True)):
        declared = [d if isinstance(d, int) else str(d.value or "?") for d in value.shape]
        raise _misfit(
            value, f"a value of shape {list(array.shape)} does not fit {declared}", "Give every number of it."
        )
    return array


def _misfit(value: ir.Value, reason: str, hint: str = "") -> ArgumentError:
    return ArgumentError(f"The input {value.name!r} cannot be bound: {reason}.", hint=hint)
