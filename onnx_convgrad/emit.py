"""Writing nodes: the one way in which rules, lowerings and passes add operators to a graph.

An `Emitter` appends to (or inserts into) an onnx_ir graph. Every new value gets its dtype and, where it can be known, its
shape; equal pure nodes are emitted once; operations on sizes fold while the graph is built, so that a static model gets
constants and a dynamic one gets run-time shape arithmetic from the same rule.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

from onnx_convgrad.constants import constant_of
from onnx_convgrad.cost import TARGETS, Target
from onnx_convgrad.errors import UnknownShape
from onnx_convgrad.namespace import Namespace

__all__ = ["DOMAIN", "RANDOM", "VIEWS", "Dim", "Emitter", "Operand", "dims_equal", "known", "static_dims"]

logger = logging.getLogger(__name__)

DOMAIN = "convgrad"
"""Private domain of the abstract gradient operators; nothing of it is left after lowering."""

CANONICAL_OPSET = 21

Dim: TypeAlias = int | ir.Value
"""A size: an `int` when known while building, else a one-element int64 vector computed by the graph."""

Operand: TypeAlias = ir.Value | float | int | None

_ELEMENTWISE = frozenset(
    "Abs Add Cos Div Erf Exp Floor Log Max Min Mul Neg Pow Reciprocal Relu Sigmoid Sign Sin Sqrt Sub Sum Tanh".split()
)
RANDOM = frozenset(
    "RandomNormal RandomNormalLike RandomUniform RandomUniformLike Bernoulli Multinomial Dropout".split()
)
"""Operators of which two equal nodes may give two results."""

VIEWS = frozenset(("Reshape", "Squeeze", "Unsqueeze", "Identity", "Flatten"))
"""Operators whose result shares the memory of their first operand."""


def known(dim: Any) -> int | None:
    """The dimension as an `int`, or `None` when it is symbolic."""
    return dim if isinstance(dim, int) else None


def dims_equal(a: Any, b: Any) -> bool:
    """Whether two dimensions are certainly equal: the same number, or the same named symbol."""
    if isinstance(a, int) or isinstance(b, int):
        return a == b if isinstance(a, int) and isinstance(b, int) else False
    return a.value is not None and a.value == b.value


def static_dims(value: ir.Value) -> list[int | None] | None:
    """The dimensions of a value with `None` for unknown ones, or `None` when even the rank is unknown."""
    return None if value.shape is None else [known(d) for d in value.shape]


class Emitter:
    """Adds operators to `graph`, at its end or before the node `anchor`.

    `op` is the general form; the named helpers fold trivial cases (adding 0, a Transpose that moves nothing) and take
    Python numbers where ONNX wants constant tensors. `samples` says that a batch of unknown size is never empty.
    """

    def __init__(
        self,
        graph: ir.Graph,
        *,
        opsets: Mapping[str, int] | None = None,
        target: Target | None = None,
        joint: bool = False,
        samples: bool = False,
    ) -> None:
        self.graph = graph
        self.joint = joint
        self.samples = samples
        self.target = target or TARGETS["cpu"]
        self.anchor: ir.Node | None = None
        self.origin: str = ""
        self.emitted: list[ir.Node] = []
        self.order: dict[ir.Node, int] = {node: i for i, node in enumerate(graph)}
        self._memo: dict[Any, tuple[ir.Value, ...]] = {}
        self._constants: dict[Any, ir.Value] = {}
        self._reserved: set[str | None] | None = None  # looked up with the first constant
        self._context = ShapeInferenceContext({"": CANONICAL_OPSET, **(opsets or {})}, policy="skip")
        self._context.reserve_symbol_names(_symbols(graph))
        registry.collect()

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def op(self, op_type: str, *inputs: Operand, domain: str = "", **attributes: Any) -> ir.Value:
        """Emit a node with one output. Numbers among `inputs` become constants of the first tensor input's dtype."""
        return self.ops(op_type, *inputs, outputs=1, domain=domain, **attributes)[0]

    def ops(
        self, op_type: str, *inputs: Operand, outputs: int, domain: str = "", **attributes: Any
    ) -> tuple[ir.Value, ...]:
        """Emit a node with several outputs; an attribute that is `None` is left out."""
        reference = next((v for v in inputs if isinstance(v, ir.Value)), None)
        operands = [v if v is None or isinstance(v, ir.Value) else self.scalar(v, reference) for v in inputs]
        while operands and operands[-1] is None:
            operands.pop()
        attributes = {k: v for k, v in attributes.items() if v is not None}
        key = (
            domain,
            op_type,
            outputs,
            tuple(map(id, operands)),
            tuple(sorted((k, _freeze(v)) for k, v in attributes.items())),
        )
        pure = op_type not in RANDOM
        if pure and key in self._memo:
            return self._memo[key]
        attrs = [_attribute(name, value) for name, value in attributes.items()]
        node = ir.Node(domain, op_type, operands, attrs, num_outputs=outputs)
        self.place(node)
        self.infer(node)
        results = tuple(node.outputs)
        if pure:
            self._memo[key] = results
        return results

    def place(self, node: ir.Node) -> None:
        """Put a node of the caller's making where this emitter writes."""
        if self.origin:
            node.metadata_props["onnx_convgrad.origin"] = self.origin
        if self.anchor is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.anchor, node)
        self.order[node] = len(self.order)
        self.emitted.append(node)

    def infer(self, node: ir.Node) -> None:
        """Dtype and shape of the outputs: a shortcut for the common case, else onnx-shape-inference."""
        first = next((v for v in node.inputs if v is not None), None)
        if node.op_type in _ELEMENTWISE and first is not None and not node.domain and self._same_shape(node, first):
            node.outputs[0].dtype = first.dtype  # type: ignore[assignment]
            node.outputs[0].shape = first.shape
            return
        if node.domain == DOMAIN:
            self.typed(node.outputs[0], node.inputs[-1])  # type: ignore[arg-type] # they name a value of their shape last
            return
        infer = registry.get(node.domain, node.op_type, version=CANONICAL_OPSET)
        if infer is None:
            return
        try:
            infer(self._context, node)
        except Exception as problem:  # noqa: BLE001 - a missing shape is never fatal here; say so and go on
            logger.debug("shape inference of %s failed: %s", node.op_type, problem)
        if (
            node.op_type in _ELEMENTWISE
            and first is not None
            and node.outputs[0].dtype is None
            and first.dtype is not None
        ):
            node.outputs[0].dtype = first.dtype

    @staticmethod
    def _same_shape(node: ir.Node, first: ir.Value) -> bool:
        if first.shape is None or first.dtype is None:
            return False
        for other in node.inputs:
            if other is None or other is first:
                continue
            if other.shape is None:
                return False
            scalar = not other.shape
            equal = len(other.shape) == len(first.shape) and all(map(dims_equal, other.shape, first.shape))
            if not (scalar or equal):
                return False
        return True

    def typed(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """State that `value` has the dtype and shape of `like`, which the rule knows and inference may not."""
        if like.dtype is not None:
            value.dtype = like.dtype
        if like.shape is not None:
            value.shape = like.shape
        return value

    # -- constants -----------------------------------------------------------------------------------------------------

    def const(self, array: Any, dtype: ir.DataType | None = None) -> ir.Value:
        """A constant tensor (an initializer, shared when equal). `dtype` defaults to the array's own."""
        array = np.asarray(array)
        if dtype is None:
            dtype = ir.DataType.from_numpy(array.dtype)
        array = np.ascontiguousarray(array, dtype=dtype.numpy()).reshape(array.shape)
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"const_{len(self._constants)}"
            if self._reserved is None:
                self._reserved = Namespace.of_values(self.graph).used
            while name in self.graph.initializers or name in self._reserved:
                name += "_"
            value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(dtype))
            value.const_value = ir.Tensor(array, dtype=dtype, name=name)
            self.graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def scalar(self, number: float, like: ir.Value | None) -> ir.Value:
        """A rank-0 constant of `like`'s dtype (float32 when that is unknown)."""
        dtype = (like.dtype if like is not None else None) or ir.DataType.FLOAT
        return self.const(np.asarray(number), dtype)

    def ints(self, values: Iterable[int]) -> ir.Value:
        """An int64 vector constant."""
        return self.const(np.asarray(list(values), np.int64))

    def constant_of(self, value: ir.Value | None) -> np.ndarray | None:
        """The value as an array if it is known while building (a constant, or folded from shapes), else `None`."""
        return constant_of(value)

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def rank(self, value: ir.Value, why: str = "its gradient") -> int:
        """The rank of `value`; raises `UnknownShape` when inference could not find it."""
        if value.shape is None:
            raise UnknownShape(
                f"the rank of {value.name!r} is unknown and {why} needs it.",
                hint="Give the shapes of the inputs with --input-shape NAME:1,3,224,224.",
            )
        return len(value.shape)

    def shape(self, value: ir.Value) -> ir.Value:
        """The shape as an int64 vector: a constant when static, else a `Shape` node."""
        dims = static_dims(value)
        if dims is not None and None not in dims:
            return self.ints(d for d in dims if d is not None)
        return self.op("Shape", value)

    def dim(self, value: ir.Value, axis: int) -> Dim:
        """One dimension: an `int` when static, else `Shape(start, end)`."""
        if value.shape is not None:
            size = known(value.shape[axis])
            if size is not None:
                return size
        end = axis + 1
        return self.op("Shape", value, start=axis, end=end if end != 0 else None)

    def dims(self, value: ir.Value) -> list[Dim]:
        """All dimensions; the rank must be known."""
        return [self.dim(value, axis) for axis in range(self.rank(value))]

    def vector(self, dims: Sequence[Dim]) -> ir.Value:
        """An int64 vector from sizes: one constant, or a Concat whose static runs are constants."""
        if all(isinstance(d, int) for d in dims):
            return self.ints(d for d in dims if isinstance(d, int))
        parts: list[ir.Value] = []
        run: list[int] = []
        for d in dims:
            if isinstance(d, int):
                run.append(d)
                continue
            if run:
                parts.append(self.ints(run))
                run = []
            parts.append(d)
        if run:
            parts.append(self.ints(run))
        return parts[0] if len(parts) == 1 else self.op("Concat", *parts, axis=0)

    def size_add(self, a: Dim, b: Dim) -> Dim:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if a == 0 and isinstance(a, int):
            return b
        if b == 0 and isinstance(b, int):
            return a
        return self.op("Add", self._size(a), self._size(b))

    def size_sub(self, a: Dim, b: Dim) -> Dim:
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        return a if isinstance(b, int) and b == 0 else self.op("Sub", self._size(a), self._size(b))

    def size_mul(self, *factors: Dim) -> Dim:
        """Product of sizes, constants folded."""
        static = 1
        dynamic: list[ir.Value] = []
        for f in factors:
            if isinstance(f, int):
                static *= f
            else:
                dynamic.append(f)
        if not dynamic or static == 0:
            return static
        result = dynamic[0]
        for f in dynamic[1:]:
            result = self.op("Mul", result, f)
        return result if static == 1 else self.op("Mul", result, self.ints([static]))

    def size_div(self, a: Dim, b: Dim) -> Dim:
        """Quotient of non-negative sizes, rounded down."""
        if isinstance(a, int) and isinstance(b, int):
            return a // b
        return a if isinstance(b, int) and b == 1 else self.op("Div", self._size(a), self._size(b))

    def size_max(self, a: Dim, b: Dim) -> Dim:
        return max(a, b) if isinstance(a, int) and isinstance(b, int) else self.op("Max", self._size(a), self._size(b))

    def size_min(self, a: Dim, b: Dim) -> Dim:
        return min(a, b) if isinstance(a, int) and isinstance(b, int) else self.op("Min", self._size(a), self._size(b))

    def _size(self, d: Dim) -> ir.Value:
        return self.ints([d]) if isinstance(d, int) else d

    def size_as(self, d: Dim, like: ir.Value) -> ir.Value:
        """A size as a rank-0 floating tensor of `like`'s dtype, for means and counts."""
        if isinstance(d, int):
            return self.scalar(d, like)
        return self.op("Squeeze", self.cast(d, like.dtype or ir.DataType.FLOAT), self.ints([0]))

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def add(self, a: Operand, b: Operand) -> ir.Value:
        return _first(a, b, neutral=0) or self._binary("Add", a, b)

    def sub(self, a: Operand, b: Operand) -> ir.Value:
        if isinstance(a, ir.Value) and _is(b, 0):
            return a
        if isinstance(b, ir.Value) and _is(a, 0):
            return self.neg(b)
        return self._binary("Sub", a, b)

    def mul(self, a: Operand, b: Operand) -> ir.Value:
        if isinstance(a, ir.Value) and _is(b, -1):
            return self.neg(a)
        if isinstance(b, ir.Value) and _is(a, -1):
            return self.neg(b)
        return _first(a, b, neutral=1) or self._binary("Mul", a, b)

    def div(self, a: Operand, b: Operand) -> ir.Value:
        return a if isinstance(a, ir.Value) and _is(b, 1) else self._binary("Div", a, b)

    def neg(self, a: ir.Value) -> ir.Value:
        return self.op("Neg", a)

    def square(self, a: ir.Value) -> ir.Value:
        return self.op("Mul", a, a)

    def _binary(self, op_type: str, a: Operand, b: Operand) -> ir.Value:
        reference = a if isinstance(a, ir.Value) else b
        assert isinstance(reference, ir.Value), "at least one operand is a tensor"
        if isinstance(a, ir.Value) and isinstance(b, ir.Value):
            a, b = _narrowed(a, b), _narrowed(b, a)
        return self.op(
            op_type,
            a if isinstance(a, ir.Value) or a is None else self.scalar(a, reference),
            b if isinstance(b, ir.Value) or b is None else self.scalar(b, reference),
        )

    def sum(self, terms: Sequence[ir.Value]) -> ir.Value:
        """Sum of tensors of one shape. A chain of Add: every execution provider has it."""
        total = terms[0]
        for term in terms[1:]:
            total = self.add(total, term)
        return total

    def where(self, condition: ir.Value, a: Operand, b: Operand) -> ir.Value:
        reference = a if isinstance(a, ir.Value) else b
        assert isinstance(reference, ir.Value), "at least one branch is a tensor"
        a, b = (v if isinstance(v, ir.Value) else self.scalar(v or 0, reference) for v in (a, b))
        return self.op("Where", condition, a, b)

    def compare(self, op_type: str, a: Operand, b: Operand) -> ir.Value:
        """`Greater`, `Less`, `Equal`, ...: a bool tensor."""
        result = self._binary(op_type, a, b)
        result.dtype = ir.DataType.BOOL
        return result

    def mask(self, condition: ir.Value, like: ir.Value) -> ir.Value:
        """A bool tensor as 0/1 in `like`'s dtype."""
        return self.cast(condition, like.dtype or ir.DataType.FLOAT)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        return value if value.dtype == dtype else self.op("Cast", value, to=int(dtype))

    # -- layout --------------------------------------------------------------------------------------------------------

    def reshape(self, value: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """Reshape to `dims`; a single unknown size is left to ONNX as -1 unless a zero could make that ambiguous."""
        current = static_dims(value)
        if current is not None and None not in current and list(dims) == current:
            return value
        dynamic = [i for i, d in enumerate(dims) if not isinstance(d, int)]
        if len(dynamic) == 1 and all(isinstance(d, int) and d > 0 for i, d in enumerate(dims) if i not in dynamic):
            return self.op("Reshape", value, self.ints(d if isinstance(d, int) else -1 for d in dims))
        # a size that turns out to be 0 at run time means 0, not "as in the input"; -1 and allowzero exclude each other
        literal = -1 not in dims and (0 in dims or bool(dynamic))
        return self.op("Reshape", value, self.vector(dims), allowzero=1 if literal else None)

    def reshape_like(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Reshape to the shape of another value."""
        if value.shape is not None and like.shape is not None and _same(value.shape, like.shape):
            return value
        if like.shape is not None:
            return self.typed(self.reshape(value, self.dims(like)), like)
        return self.typed(self.op("Reshape", value, self.shape(like), allowzero=1), like)

    def transpose(self, value: ir.Value, perm: Sequence[int]) -> ir.Value:
        return value if list(perm) == list(range(len(perm))) else self.op("Transpose", value, perm=list(perm))

    def swap_last(self, value: ir.Value) -> ir.Value:
        """Transpose of the last two axes (of matrices in a batch)."""
        n = self.rank(value)
        return self.transpose(value, [*range(n - 2), n - 1, n - 2])

    def unsqueeze(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        return self.op("Unsqueeze", value, self.ints(axes)) if axes else value

    def squeeze(self, value: ir.Value, axes: Sequence[int]) -> ir.Value:
        return self.op("Squeeze", value, self.ints(axes)) if axes else value

    def concat(self, values: Sequence[ir.Value], axis: int) -> ir.Value:
        return values[0] if len(values) == 1 else self.op("Concat", *values, axis=axis)

    def expand(self, value: ir.Value, like: ir.Value) -> ir.Value:
        """Broadcast to the shape of `like`."""
        if value.shape is not None and like.shape is not None and _same(value.shape, like.shape):
            return value
        shape = self.shape(like)
        result = self.op("Expand", value, shape)
        if like.shape is not None:
            result.shape = like.shape
        return result

    def full_like(self, value: ir.Value, number: float) -> ir.Value:
        """A tensor of `value`'s shape and dtype filled with `number`."""
        if value.shape is not None and not value.shape:
            return self.scalar(number, value)
        return self.typed(self.op("Expand", self.scalar(number, value), self.shape(value)), value)

    def zeros_like(self, value: ir.Value) -> ir.Value:
        return self.full_like(value, 0)

    def slice(
        self,
        value: ir.Value,
        starts: Sequence[Dim],
        ends: Sequence[Dim],
        axes: Sequence[int],
        steps: Sequence[int] | None = None,
    ) -> ir.Value:
        """Slice along `axes`; axes on which everything is kept are left out."""
        picked = [
            (start, end, axis, step)
            for start, end, axis, step in zip(starts, ends, axes, steps or [1] * len(axes), strict=True)
            if not (_is(start, 0) and step == 1 and self._covers(value, axis, end))
        ]
        if not picked:
            return value
        first, last, where, by = zip(*picked, strict=True)
        extra = [self.ints(by)] if any(step != 1 for step in by) else []
        return self.op("Slice", value, self.vector(first), self.vector(last), self.ints(where), *extra)

    @staticmethod
    def _covers(value: ir.Value, axis: int, end: Dim) -> bool:
        size = None if value.shape is None else known(value.shape[axis])
        return isinstance(end, int) and size is not None and end >= size

    def pad(
        self, value: ir.Value, begin: Sequence[Dim], end: Sequence[Dim], axes: Sequence[int], fill: float = 0
    ) -> ir.Value:
        """Pad along `axes` with `fill`; negative amounts trim. All-zero padding emits nothing."""
        if all(_is(d, 0) for d in (*begin, *end)):
            return value
        constant = self.scalar(fill, value) if fill else None
        if value.shape is None:
            amounts, where = [*begin, *end], self.ints(axes)
        else:  # all axes: ONNX Runtime moves a Transpose through a Pad as if it had no `axes` operand
            rank = len(value.shape)
            amounts, where = [0] * (2 * rank), None
            for axis, low, high in zip(axes, begin, end, strict=True):
                amounts[axis % rank], amounts[rank + axis % rank] = low, high
        result = self.op("Pad", value, self.vector(amounts), constant, where)
        if value.dtype is not None:
            result.dtype = value.dtype
        return result

    def all_pads(self, value: ir.Value, pads: ir.Value, axes: ir.Value | None) -> ir.Value:
        """The amounts of a Pad for every axis of `value`, from those of some `axes`.

        No Pad is emitted with the operand `axes`: ONNX Runtime's transpose optimizer moves a Transpose through it as if
        the amounts were for all axes, and the session fails.
        """
        if axes is None:
            return pads
        rank = self.ints([len(value.shape)]) if value.shape is not None else self.op("Shape", self.op("Shape", value))
        axes = self.cast(axes, ir.DataType.INT64)
        axes = self.op("Where", self.op("Less", axes, self.ints([0])), self.op("Add", axes, rank), axes)
        slots = self.op("Concat", axes, self.op("Add", axes, rank), axis=0)
        nothing = self.op("Expand", self.ints([0]), self.op("Add", rank, rank))
        return self.op("ScatterElements", nothing, slots, pads, axis=0)

    # -- reductions and products ---------------------------------------------------------------------------------------

    def reduce_sum(self, value: ir.Value, axes: Sequence[int], *, keepdims: bool = True) -> ir.Value:
        return self.reduce("ReduceSum", value, axes, keepdims=keepdims) if axes else value

    def reduce(self, op_type: str, value: ir.Value, axes: Sequence[int], *, keepdims: bool = True) -> ir.Value:
        """Any Reduce operator over the given, non-empty axes."""
        return self.op(op_type, value, self.ints(axes), keepdims=int(keepdims))

    def matmul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.op("MatMul", a, b)


def _attribute(name: str, value: Any) -> ir.Attr:
    """The common kinds directly: onnx_ir's general conversion costs more than the rest of emitting a node."""
    if isinstance(value, int):
        return ir.AttrInt64(name, int(value))
    if isinstance(value, (list, tuple)) and all(type(v) is int for v in value):
        return ir.AttrInt64s(name, value)
    return ir.convenience.convert_attribute(name, value)


def _freeze(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_freeze, value))
    if isinstance(value, (int, float, str, bytes)):
        return (type(value).__name__, value)
    return id(value)


def _narrowed(value: ir.Value, other: ir.Value) -> ir.Value:
    """What an Expand has filled up to the shape of `other`: the operator broadcasts it by itself, without a copy."""
    node = value.producer()
    if node is None or node.op_type != "Expand" or node.domain or value.shape is None or other.shape is None:
        return value
    source, fellow = node.inputs[0], other.producer()
    if source is None or not _same(value.shape, other.shape) or (fellow is not None and fellow.op_type == "Expand"):
        return value
    return source


def _is(operand: Operand | Dim, number: float) -> bool:
    return isinstance(operand, (int, float)) and operand == number


def _first(a: Operand, b: Operand, *, neutral: float) -> ir.Value | None:
    """The other operand when one is the neutral element."""
    if isinstance(a, ir.Value) and _is(b, neutral):
        return a
    return b if isinstance(b, ir.Value) and _is(a, neutral) else None


def _same(a: ir.Shape, b: ir.Shape) -> bool:
    return len(a) == len(b) and all(map(dims_equal, a, b))


def _symbols(graph: ir.Graph) -> set[str]:
    values = [*graph.inputs, *(v for node in graph for v in node.outputs)]
    return {
        d.value for v in values if v.shape is not None for d in v.shape if isinstance(d, ir.SymbolicDim) and d.value
    }
