"""Look up values that are known while the graph is built: constants, and small values computed from constants and sizes.

Nodes are never replaced, so forward results keep every bit. Only small tensors are folded, which is enough for arithmetic of
shapes and scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.nodes import all_nodes, is_op
from onnx_convgrad.ir.notes import FOLDED_VALUE, MARKED_CONSTANT, REPLACEABLE, VARIES

Look = Callable[[ir.Value | None], np.ndarray | None]
"""Operand -> its value if known."""

_LIMIT = 4096
RANDOM_SOURCES = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}
)
_NEVER_FOLDED = RANDOM_SOURCES | {"If", "Loop", "Scan"}
"""Operators that are not folded: random ones, and those with a body, which may read more than the operands."""

_DEPTH = 40


def is_constant(value: ir.Value | None) -> bool:
    """Whether the value is an initializer and not a graph input, or the output of a Constant node."""
    if value is None or value.is_graph_input():
        return False
    return value.is_initializer() or value.const_value is not None


def mark_constant(value: ir.Value) -> None:
    """Note that a value without data represents a constant."""
    value.meta[MARKED_CONSTANT] = True


def mark_varying(graph: ir.Graph, values: Iterable[ir.Value]) -> None:
    """Note that initializers are variables: folding them would lose the derivative with respect to them."""
    for value in values:
        value.meta[VARIES] = True
    forget_constants(graph)


def mark_replaceable(graph: ir.Graph, values: Iterable[ir.Value]) -> None:
    """Note that initializers may get other numbers later: nothing that is built now may depend on those of today."""
    for value in values:
        value.meta[REPLACEABLE] = True
    forget_constants(graph)


def mark_folded(nodes: Iterable[ir.Node]) -> None:
    """Mark the results of nodes, given in topological order, that depend on constants and marked values alone."""
    for node in nodes:
        if node.op_type not in _NEVER_FOLDED and all(map(is_folded, node.inputs)):
            for value in node.outputs:
                mark_constant(value)


def is_folded(value: ir.Value | None) -> bool:
    """Whether the value is a constant or marked as one; `Folding` answers it without marks."""
    return value is None or is_constant(value) or MARKED_CONSTANT in value.meta


class Folding:
    """Whether a runtime knows a value after loading the model: constants, and results computed from constants alone.

    Answers are cached: use a new object after graph inputs or constants have changed.
    """

    def __init__(self) -> None:
        self._answers: dict[ir.Value, bool] = {}

    def __call__(self, value: ir.Value) -> bool:
        if is_folded(value):
            return True
        todo = [value]
        while todo:  # no recursion: the path to a graph input may be long
            node = todo[-1].producer()
            operands = [] if node is None else [v for v in node.inputs if v is not None and not is_folded(v)]
            answers = [self._answers.get(v) for v in operands]
            if node is None or node.op_type in _NEVER_FOLDED or False in answers:
                self._answers[todo.pop()] = False
            elif None in answers:
                todo.append(operands[answers.index(None)])
            else:
                self._answers[todo.pop()] = True
        return self._answers[value]


def constant_of(value: ir.Value | None, depth: int = _DEPTH) -> np.ndarray | None:
    """The value as an array, or `None` if it depends on run-time data or variables or is a large computed tensor."""
    if value is None or value.is_graph_input():
        return None
    stored, node = value.const_value, value.producer()
    computed = node is not None and node.op_type in _FOLDABLE
    if stored is None and not computed:
        return None
    meta = value.meta.data
    if VARIES in meta or REPLACEABLE in meta:
        return None
    if stored is not None and not computed:
        return stored.numpy()
    if FOLDED_VALUE in meta:
        cached: np.ndarray | None = meta[FOLDED_VALUE]
        return cached
    result = _fold(value, lambda v: constant_of(v, depth - 1)) if depth else None
    if result is None and stored is not None:  # found by shape inference, from sizes known in part
        result = stored.numpy()
    value.meta[FOLDED_VALUE] = result
    return result


def at_sizes(value: ir.Value | None, sizes: Mapping[str, int]) -> np.ndarray | None:
    """The value for given sizes of the symbols in shapes; `None` if it depends on more than sizes."""
    found: dict[ir.Value, np.ndarray | None] = {}

    def look(operand: ir.Value | None) -> np.ndarray | None:
        if operand is not None and operand not in found:
            found[operand] = constant_of(operand)
            if found[operand] is None:
                found[operand] = _fold(operand, look, sizes)
        return None if operand is None else found[operand]

    return look(value)


def number_of(value: ir.Value | None) -> Any:
    """The first element of a known value as a Python number, for operands of one element; else `None`."""
    constant = constant_of(value)
    return None if constant is None or not constant.size else constant.reshape(-1)[0].item()


def is_number(value: ir.Value | None, wanted: float) -> bool:
    """Whether a value is a scalar known to equal `wanted`."""
    number = constant_of(value)
    return number is not None and number.shape == () and float(number) == wanted


def forget_constants(graph: ir.Graph) -> None:
    """Clear the cache of folded values, after inputs or variables have changed."""
    for node in all_nodes(graph):
        if node.op_type in _FOLDABLE:
            for value in node.outputs:
                value.meta.pop(FOLDED_VALUE, None)


def _fold(value: ir.Value, look: Look, sizes: Mapping[str, int] | None = None) -> np.ndarray | None:
    node = value.producer()
    if node is None or node.domain:
        return None
    if node.op_type == "Constant":
        tensor = ir.convenience.get_const_tensor(value)
        return None if tensor is None or tensor.dtype == ir.DataType.STRING else tensor.numpy()
    if node.op_type in ("Shape", "Size"):
        return _fold_shape(node, sizes or {})
    fold = _FOLDS.get(node.op_type)
    if fold is None or "axes" in node.attributes:  # an operand since opset 13, or 18
        return None
    if node.op_type in ("Gather", "Slice") and (picked := _picked(node, fold, look)) is not None:
        return picked
    return _applied(node, fold, look)


def _applied(node: ir.Node, fold: Callable[..., Any], look: Look) -> np.ndarray | None:
    inputs = [None if v is None else look(v) for v in node.inputs]
    if any(v is not None and x is None for v, x in zip(node.inputs, inputs, strict=True)):
        return None
    if any(x is not None and (x.size > _LIMIT or x.dtype.kind not in "iubf") for x in inputs):
        return None
    try:
        result = fold(node, *inputs)
    except (ValueError, IndexError, TypeError, ArithmeticError):
        return None
    return None if result is None else np.asarray(result)


def _fold_shape(node: ir.Node, sizes: Mapping[str, int]) -> np.ndarray | None:
    source = node.inputs[0]
    if source is None or source.shape is None:
        return None
    dims = list(source.shape.evaluate(sizes) if sizes else source.shape)
    if node.op_type == "Shape":
        dims = dims[_attr(node, "start", 0) : _attr(node, "end", len(dims))]
    if not all(isinstance(d, int) for d in dims):
        return None
    numbers = [int(d) for d in dims if isinstance(d, int)]
    return np.asarray(math.prod(numbers) if node.op_type == "Size" else numbers, np.int64)


def _picked(node: ir.Node, fold: Callable[..., Any], look: Look) -> np.ndarray | None:
    """Known sizes that a Gather or Slice picks from a shape with unknown ones."""
    source = node.inputs[0]
    producer = None if source is None else source.producer()
    if not is_op(producer, "Shape"):
        return None
    of, where = producer.inputs[0], [look(v) for v in node.inputs[1:]]
    if of is None or of.shape is None or any(array is None for array in where):
        return None
    dims = [d if isinstance(d, int) else None for d in of.shape]
    dims = dims[_attr(producer, "start", 0) : _attr(producer, "end", len(dims))]
    try:
        picked = np.asarray(fold(node, np.asarray(dims, object), *where))
    except (ValueError, IndexError, TypeError):
        return None
    return None if None in picked.reshape(-1) else picked.astype(np.int64)


def _attr(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default


def _axes(axes: np.ndarray | None) -> tuple[int, ...] | None:
    return None if axes is None else tuple(int(a) for a in axes.reshape(-1))


def _slice(_: ir.Node, data: Any, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Any:
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    index: list[slice] = [slice(None)] * data.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        index[axis] = (
            backwards(int(start), int(end), int(step), data.shape[axis]) if step < 0 else slice(start, end, step)
        )
    return data[tuple(index)]


def backwards(start: int, end: int, step: int, size: int) -> slice:
    """The Python slice of an ONNX Slice with a negative step; an end beyond the axis includes the first element.

    ONNX Runtime treats the largest integers as such an end too (see quirks.NEGATIVE_STEP_TO_MAX).
    """
    if end in _FAR:
        end = -size - 1
    start, end = (at + size if at < 0 else at for at in (start, end))
    start, end = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
    return slice(start, None if end < 0 else end, step)


_FAR = (2**31 - 1, 2**63 - 1)


def _reshape(node: ir.Node, data: Any, shape: Any) -> Any:
    if not _attr(node, "allowzero", 0):
        shape = [data.shape[i] if size == 0 else size for i, size in enumerate(shape)]
    return data.reshape(tuple(shape))


def _divide(_: ir.Node, a: Any, b: Any) -> Any:
    """Integer quotients are truncated towards zero."""
    if a.dtype.kind == "f":
        with np.errstate(all="ignore"):
            return a / b
    if not np.all(b):
        raise ZeroDivisionError
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)


def _reduced(total: Callable[..., Any]) -> Callable[..., Any]:
    def fold(node: ir.Node, x: Any, axes: Any = None) -> Any:
        every = axes is None or not axes.size
        if every and _attr(node, "noop_with_empty_axes", 0):
            return x
        kept = bool(_attr(node, "keepdims", 1))
        return total(x, axis=None if every else _axes(axes), keepdims=kept, dtype=x.dtype)

    return fold


def _range(_: ir.Node, start: Any, limit: Any, delta: Any) -> Any:
    """Add the step to each member in turn, rounding as ONNX Runtime does."""
    count = math.ceil((float(limit) - float(start)) / float(delta))
    if count > _LIMIT:
        return None
    return np.add.accumulate(np.array([start, *[delta] * (count - 1)][: max(count, 0)], start.dtype), dtype=start.dtype)


def _tile(_: ir.Node, x: Any, repeats: Any) -> Any:
    return np.tile(x, repeats) if x.size * math.prod(map(int, repeats)) <= _LIMIT else None


def _expand(_: ir.Node, x: Any, shape: Any) -> Any:
    whole = np.broadcast_shapes(x.shape, tuple(shape))
    return np.broadcast_to(x, whole) if math.prod(map(int, whole)) <= _LIMIT else None


def _fill(node: ir.Node, shape: Any) -> Any:
    fill = node.attributes["value"].as_tensor().numpy().reshape(-1)[0] if "value" in node.attributes else np.float32(0)
    return np.full(tuple(shape), fill) if math.prod(map(int, shape)) <= _LIMIT else None


def _elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *xs: function(*xs)


_FOLDS: dict[str, Callable[..., Any]] = {
    "Identity": lambda _, x: x,
    "Gather": lambda n, x, i: np.take(x, i, axis=_attr(n, "axis", 0)),
    "Concat": lambda n, *xs: np.concatenate(xs, axis=_attr(n, "axis", 0)),
    "Unsqueeze": lambda _, x, axes: np.expand_dims(x, _axes(axes) or ()),
    "Squeeze": lambda _, x, axes=None: np.squeeze(x, _axes(axes)),
    "Slice": _slice,
    "Reshape": _reshape,
    "Transpose": lambda n, x: np.transpose(x, n.attributes["perm"].as_ints() if "perm" in n.attributes else None),
    "Cast": lambda n, x: x.astype(ir.DataType(_attr(n, "to", 7)).numpy()),
    "CastLike": lambda _, x, like: x.astype(like.dtype),
    "Div": _divide,
    "Mod": lambda n, a, b: np.fmod(a, b) if _attr(n, "fmod", 0) else np.mod(a, b),
    "Min": lambda _, *xs: reduce(np.minimum, xs),
    "Max": lambda _, *xs: reduce(np.maximum, xs),
    "Where": lambda _, c, a, b: np.where(c, a, b),
    "ReduceProd": _reduced(np.prod),
    "ReduceSum": _reduced(np.sum),
    "Range": _range,
    "Expand": _expand,
    "Tile": _tile,
    "ConstantOfShape": _fill,
    "Add": _elementwise(np.add),
    "And": _elementwise(np.bitwise_and),
    "Ceil": _elementwise(np.ceil),
    "Equal": _elementwise(np.equal),
    "Floor": _elementwise(np.floor),
    "Greater": _elementwise(np.greater),
    "GreaterOrEqual": _elementwise(np.greater_equal),
    "Less": _elementwise(np.less),
    "LessOrEqual": _elementwise(np.less_equal),
    "Mul": _elementwise(np.multiply),
    "Neg": _elementwise(np.negative),
    "Not": _elementwise(np.invert),
    "Or": _elementwise(np.bitwise_or),
    "Sub": _elementwise(np.subtract),
}
"""Operator -> its result from the node and the known operands, or `None`."""

_FOLDABLE = frozenset((*_FOLDS, "Constant", "Shape", "Size"))
"""Operators whose results may follow from constants and sizes."""
