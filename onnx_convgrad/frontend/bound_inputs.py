"""Bind graph inputs to constants: the sample rate of a speech model, the length of a prompt, a flag."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.limits import check_limit
from onnx_convgrad.base.names import INSPECT, matches, select
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.tidy import store
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.notes import mark_bound
from onnx_convgrad.ir.passes import GraphPass

InputValues: TypeAlias = Mapping[str, Any]
"""Name or glob of inputs -> their value: a number, a bool, a list of them, or an array."""

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_WHOLE = tuple(getattr(ir.DataType, f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64))


class BindInputs(GraphPass):
    """Turn graph inputs into initializers with the given values.

    Raises:
        ArgumentError: A name is unknown, or a value does not fit the dtype or the shape of its input.
    """

    def __init__(self, values: InputValues) -> None:
        super().__init__()
        self.values = values

    def rewrite(self, model: ir.Model) -> bool:
        graph, inputs = model.graph, {v.name: v for v in model.graph.inputs if v.name}
        values = by_input(self.values, inputs)
        others = [v for name, v in inputs.items() if name not in values]
        for name, given in values.items():
            value = inputs[name]
            array = bound_array(value, given, _symbols(others))
            graph.inputs.remove(value)
            if value.shape is not None and array.ndim < len(value.shape):
                value = _repeated(graph, value, others, array.shape)
            value.shape, value.const_value = ir.Shape(array.shape), ir.Tensor(array, dtype=value.dtype, name=value.name)
            mark_bound(value)
            if not value.is_initializer():
                graph.register_initializer(value)
        return bool(values)


def by_input(values: InputValues, inputs: Iterable[str]) -> dict[str, Any]:
    """The value of each bound input; a name in full counts before a glob.

    Raises:
        ArgumentError: A name or glob matches nothing.
    """
    names = {name: [name] for name in inputs}
    chosen = ((pattern, select([pattern], names, what="input in input_values:", see=INSPECT))
              for pattern in sorted(values, key=names.__contains__))  # fmt: skip
    return {name: values[pattern] for pattern, found in chosen for name in found}


def known_values(values: InputValues, inputs: Iterable[str]) -> dict[str, Any]:
    """The values that are given for names or globs of these inputs, by that name or glob."""
    names = list(inputs)
    return {pattern: given for pattern, given in values.items() if any(matches(pattern, name) for name in names)}


def as_json(given: Any) -> Any:
    """A bound value as JSON: numbers in lists; of an array without numbers, whose sizes they would not tell, the shape."""
    array = np.asarray(given)
    return array.tolist() if array.size else {"shape": list(array.shape)}


def bound_arrays(inputs: Sequence[ir.Value], values: InputValues) -> dict[str, np.ndarray]:
    """The array of each bound input; one with fewer axes than its input is to be repeated, see `with_all_axes`.

    Raises:
        ArgumentError: A value does not fit the dtype or the shape of its input.
    """
    by_name = {v.name or "": v for v in inputs}
    known = _symbols([v for name, v in by_name.items() if name not in values])
    return {name: bound_array(by_name[name], value, known) for name, value in values.items()}


def with_all_axes(
    bound: Mapping[str, np.ndarray], inputs: Sequence[ir.Value], fed: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Bound arrays as they are fed: those with fewer axes are repeated to the sizes of what other inputs are fed."""
    shapes = {v.name or "": list(v.shape or ()) for v in inputs}
    pairs = [pair for name, array in fed.items() for pair in zip(shapes[name], np.shape(array), strict=False)]
    sizes = {d.value: n for d, n in pairs if not isinstance(d, int)}
    whole = {}
    for name, array in bound.items():
        missing = max(len(shapes[name]) - array.ndim, 0)
        own = zip((1,) * missing + array.shape, shapes[name], strict=False)
        shape = [n if n != 1 else d if isinstance(d, int) else sizes.get(d.value, 1) for n, d in own]
        whole[name] = np.broadcast_to(array, shape) if missing else array
    return whole


def _symbols(inputs: Sequence[ir.Value]) -> dict[str, tuple[ir.Value, int]]:
    """Name of a free size -> an input that has it, and the axis."""
    return {
        str(d.value): (v, axis)
        for v in reversed(inputs)
        for axis, d in enumerate(v.shape or ())
        if not isinstance(d, int) and d.value
    }


def _repeated(graph: ir.Graph, value: ir.Value, others: Sequence[ir.Value], own: tuple[int, ...]) -> ir.Value:
    """Compute an input from numbers of the shape `own`, repeated to the sizes of other inputs; return what has them."""
    assert value.shape is not None
    names, found, nodes = Namespace.of_values(graph), _symbols(others), []
    number = ir.Value(name=names.claim(f"{value.name}_bound"), type=value.type)

    def stored(numbers: list[int]) -> ir.Value:
        return store(graph, names.claim(f"{value.name}_sizes"), np.array(numbers, np.int64))

    def emit(op_type: str, inputs: Sequence[ir.Value], *attributes: ir.Attr) -> ir.Value:
        nodes.append(ir.Node("", op_type, inputs, attributes, num_outputs=1))
        nodes[-1].outputs[0].name = names.claim(f"{value.name}_{op_type}")
        return nodes[-1].outputs[0]

    pairs = zip((1,) * (len(value.shape) - len(own)) + own, value.shape, strict=True)
    dims, sizes = [d if n == 1 else n for n, d in pairs], []
    for d in dims:
        if isinstance(d, int):
            sizes.append(stored([d]))
        else:
            like, axis = found[str(d.value)]
            sizes.append(emit("Gather", [emit("Shape", [like]), stored([axis])]))
    whole = emit("Expand", [number, emit("Concat", sizes, ir.AttrInt64("axis", 0))])
    whole.type, whole.shape = value.type, ir.Shape(dims)
    for node in reversed(nodes):
        graph.insert_before(graph[0], node) if len(graph) else graph.append(node)
    value.replace_all_uses_with(whole, replace_graph_outputs=True)
    value.name, whole.name = None, value.name
    return number


def bound_array(value: ir.Value, given: Any, known: Collection[str] = ()) -> np.ndarray:
    """The array that a given value is for an input, in its dtype and, where it is fixed, its shape.

    It may have fewer axes, if the free sizes along which it is then repeated are named in `known`: it is meant for every
    sample, row and so on.

    Raises:
        ArgumentError: The value does not fit the dtype or the shape of the input.
    """
    return _shaped(value, _converted(value, given), known)


def _converted(value: ir.Value, given: Any) -> np.ndarray:
    """The given value in the dtype of the input; raises `ArgumentError` where that would change it."""
    dtype = value.dtype if isinstance(value.type, ir.TensorType) else None
    if dtype is None or dtype not in (ir.DataType.BOOL, *_WHOLE, *_FLOATS):
        kind = "no tensor of known dtype" if dtype is None else dtype.name.lower()
        raise _misfit(value, f"it is {kind}, and only numbers and bools can be bound")
    try:
        empty = isinstance(given, Mapping) and 0 in given["shape"]  # see `as_json`
        array = np.zeros(given["shape"]) if empty else np.asarray(given)
    except (ValueError, TypeError, KeyError, RuntimeError) as problem:
        raise _misfit(value, f"{given!r:.60} is not an array ({problem})") from None
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


def _shaped(value: ir.Value, array: np.ndarray, known: Collection[str]) -> np.ndarray:
    """The array in the shape of the input: broadcast to a fixed shape, else of the same rank and known sizes.

    One with fewer axes stays as it is, if the free sizes along which it is repeated are `known`.
    """
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
    if array.ndim < len(sizes):
        own = (1,) * (len(sizes) - array.ndim) + array.shape
        if all(isinstance(d, int) or d.value in known if n == 1 else size in (None, n)
               for n, d, size in zip(own, value.shape, sizes, strict=True)):  # fmt: skip
            return array
    if len(sizes) != array.ndim or any(size not in (None, n) for size, n in zip(sizes, array.shape, strict=True)):
        declared = [d if isinstance(d, int) else str(d.value or "?") for d in value.shape]
        raise _misfit(
            value,
            f"a value of shape {list(array.shape)} does not fit {declared}",
            "Give every number of it. Fewer are repeated if another input has the free sizes, under the same names.",
        )
    return array


def _misfit(value: ir.Value, reason: str, hint: str = "") -> ArgumentError:
    return ArgumentError(f"The input {value.name!r} cannot be bound: {reason}.", hint=hint)
