"""Decide which declared shapes to trust: those of the caller, those of the file, or those of inference."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import index
from typing import SupportsIndex, TypeAlias

import onnx_ir as ir

from onnx_convgrad.base.names import INSPECT, check_names
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.shapes.infer import all_values
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.passes import GraphPass

InputShapes: TypeAlias = Mapping[str, Sequence[int | str | None]]
"""Input name -> its sizes: numbers, symbols, or `None` for an unknown size."""

DeclaredShapes: TypeAlias = dict[ir.Value, ir.Shape]
"""Value -> the shape that the file declares for it."""

_PLACEHOLDERS = frozenset({"", "?", "None", "none", "unk", "-1", "dynamic", "Unknown", "unknown"})
"""Dimension names that exporters give to every unknown size: two dimensions of such a name need not be equal."""

_LONGEST = 2**31
"""Length that no axis reaches."""


class OverrideShapes(GraphPass):
    """Give inputs the shapes that the caller wants, and let reshapes follow another batch size."""

    def __init__(self, shapes: InputShapes) -> None:
        super().__init__()
        self.shapes = shapes

    def rewrite(self, model: ir.Model) -> bool:
        inputs = {v.name: v for v in model.graph.inputs if v.name}
        check_names(list(self.shapes), list(inputs), "input", INSPECT)
        shapes = {inputs[name]: _checked_shape(inputs[name], dims) for name, dims in self.shapes.items()}
        _free_batch(model.graph, {size for x, after in shapes.items() for size in _former_batch(x.shape, after)})
        for x, after in shapes.items():
            x.shape = after
        return bool(self.shapes)


def _checked_shape(value: ir.Value, dims: Sequence[int | str | None]) -> ir.Shape:
    allowed = (SupportsIndex, str, type(None))
    if isinstance(dims, str) or not isinstance(dims, Iterable) or not all(isinstance(d, allowed) for d in dims):
        raise ArgumentError(
            f"The shape of input {value.name!r} must be a list of sizes, symbols and None, not {dims!r}."
        )
    if any(isinstance(d, SupportsIndex) and not 0 <= index(d) < _LONGEST for d in dims):
        raise ArgumentError(
            f"Input {value.name!r} cannot have the shape {list(dims)!r}: sizes are from 0 to {_LONGEST - 1}."
        )
    if value.shape is not None and len(value.shape) != len(dims):
        raise ArgumentError(f"Input {value.name!r} has rank {len(value.shape)}, but {len(dims)} sizes were given.")
    return ir.Shape([index(d) if isinstance(d, SupportsIndex) else d for d in dims])


def declare_shapes(model: ir.Model, canonical: ir.Graph, names: Collection[str]) -> None:
    """Give a model the shapes of its canonical form, in place: the named inputs, and all outputs.

    Other shapes that its file declares are forgotten, since they belong to other inputs, and Reshapes follow another batch
    size, as they do in the canonical form.
    """
    pairs = [(v, w) for v in model.graph.inputs for w in canonical.inputs if v.name == w.name and v.name in names]
    _free_batch(model.graph, {size for v, w in pairs for size in _former_batch(v.shape, w.shape)})
    for graph in model.graphs():
        bodies = [] if graph is model.graph else list(graph.inputs)
        for value in (*bodies, *(v for node in graph for v in node.outputs)):
            value.shape = None
    for value, found in [*zip(model.graph.outputs, canonical.outputs, strict=True), *pairs]:
        value.shape = None if found.shape is None else ir.Shape(found.shape)


def _former_batch(before: ir.Shape | None, after: ir.Shape | None) -> set[int]:
    """The batch size that an input had before, if its shape names another one now."""
    if not before or not after or before[0] == after[0]:
        return set()
    return {size for size in before[:1] if isinstance(size, int)}


def _free_batch(graph: ir.Graph, batches: set[int]) -> None:
    """Let the first size of each Reshape follow the batch, if it is one of `batches`.

    An exporter that traces one batch stores its size in the shape of every Reshape, such as that of a flattening: [1, 512].
    For inputs of the former size nothing changes. Declared shapes are those of the former size, too.
    """
    e = Emitter(graph)
    for node in graph if batches else ():
        if not is_op(node, "Reshape") or node.inputs[0] is None or node.inputs[0].is_initializer():
            continue
        sizes = constant_of(node.inputs[1])
        if sizes is None or sizes.ndim != 1 or not sizes.size or sizes[0] not in batches:
            continue
        first = _following(node, sizes[1:].tolist(), batches)
        if first is not None:
            node.replace_input_with(1, e.ints([first, *sizes[1:].tolist()]))


def _following(node: ir.Node, others: list[int], batches: set[int]) -> int | None:
    """The size in a Reshape that stands for the batch: what is left, or that of the operand; `None` if neither fits."""
    if all(size > 0 for size in others):
        return -1
    before = node.inputs[0].shape if node.inputs[0] is not None else None
    copies = not node.attributes.get_int("allowzero", 0) and before and before[0] in batches
    return 0 if copies and 0 not in others else None


class DeclaredShapesPass(GraphPass):
    """Base class of passes that share the declared shapes of a model."""

    def __init__(self, declared: DeclaredShapes) -> None:
        super().__init__()
        self.declared = declared


class ForgetShapes(DeclaredShapesPass):
    """Move the declared shapes of results that inference can find to `declared`: exporters write some that are wrong."""

    def rewrite(self, model: ir.Model) -> bool:
        values = [v for node in model.graph if not node.domain for v in node.outputs if v.shape is not None]
        for value in values:
            assert value.shape is not None
            self.declared[value], value.shape = value.shape, None
        return bool(values)


class RecallShapes(DeclaredShapesPass):
    """Restore a declared shape where inference found none."""

    def rewrite(self, model: ir.Model) -> bool:  # noqa: ARG002 - `declared` holds values of the model
        missing = {value: shape for value, shape in self.declared.items() if value.shape is None}
        for value, shape in missing.items():
            value.shape = shape
        return bool(missing)


class CleanDimensions(GraphPass):
    """Make placeholder names such as `?` anonymous and negative sizes unknown; distinct unknown sizes stay distinct.

    Stored values have the shape and the type that they are stored with, whatever is declared.
    """

    def rewrite(self, model: ir.Model) -> bool:
        changed = False
        for value in (v for graph in model.graphs() for v in graph.initializers.values()):
            stored = value.const_value
            if stored is not None and (value.dtype, value.shape) != (stored.dtype, stored.shape):
                value.type, value.shape, changed = ir.TensorType(stored.dtype), ir.Shape(stored.shape.numpy()), True
        for value in all_values(model.graph):
            before = tuple(value.shape or ())
            dims = [_clean(d) for d in before]
            if any(new is not old for new, old in zip(dims, before, strict=True)):
                value.shape, changed = ir.Shape(dims), True
        return changed


def _clean(dim: int | ir.SymbolicDim) -> int | ir.SymbolicDim | None:
    if isinstance(dim, int):
        return None if dim < 0 else dim
    name = dim.value
    if name is None:
        return dim
    return dim if name not in _PLACEHOLDERS and _is_expression(name) else None


_LONGEST_NAME, _MOST_POWERS, _MOST_PARENTHESES = 500, 4, 40
_UNBOUNDED = re.compile(r"\d{13}|\*\*(?!\s*\d(?![\w.]|\s*\*\*))")
"""A huge number, or a power whose exponent is not one digit: evaluating it may take forever."""


@lru_cache(maxsize=4096)
def _is_expression(name: str) -> bool:
    """Whether shape inference can parse the name of a dimension, as an expression of symbols, in bounded time.

    A name that stands for a number, such as "0", is a name to runtimes, and only to shape inference that number.
    """
    powers, parentheses = name.count("**"), name.count("(")
    if len(name) > _LONGEST_NAME or powers > _MOST_POWERS or parentheses > _MOST_PARENTHESES or _UNBOUNDED.search(name):
        return False
    try:
        return bool(ir.SymbolicDim(name).free_symbols())
    except (ValueError, ArithmeticError, TypeError, RecursionError):
        return False
