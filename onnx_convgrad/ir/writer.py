"""Add nodes and constants to a graph: the lowest layer of an `Emitter`.

Every new value gets its dtype and, if it can be inferred, its shape; equal pure nodes are emitted once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any, Self, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

from onnx_convgrad.base.limits import check_limit
from onnx_convgrad.errors import LimitError
from onnx_convgrad.ir.constants import RANDOM_SOURCES, constant_of, number_of
from onnx_convgrad.ir.dims import dims_equal, symbols
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.notes import ORIGIN, is_detach, keep_detach, origin_of
from onnx_convgrad.ir.targets import TARGETS, TargetInfo

logger = logging.getLogger(__name__)

DOMAIN = "convgrad"
"""Private domain of the abstract gradient operators; lowering removes all of them."""

CANONICAL_OPSET = 21
"""The opset of every emitted node; see quirks.CUDA_OPSET."""

Operand: TypeAlias = ir.Value | float | int | None

_LARGE = 2**20
"""Smallest number of elements of a constant whose size is compared with the limits."""

_ELEMENTWISE = frozenset(
    "Abs Add Cos Div Erf Exp Floor Log Max Min Mul Neg Pow Reciprocal Relu Sigmoid Sign Sin Sqrt Sub Sum Tanh".split()
)
_VALUES = frozenset((ir.Value, type(None)))
RANDOM = RANDOM_SOURCES | {"Dropout"}
"""Operators whose results may differ from run to run and between equal nodes."""


@lru_cache(maxsize=1024)
def _operand_of_result_type(op_type: str) -> int | None:
    """The index of the first operand that has the type of the result, by the operator's schema."""
    try:
        schema = onnx.defs.get_schema(op_type, CANONICAL_OPSET)
    except onnx.defs.SchemaError:
        return None
    kinds = [operand.type_str for operand in schema.inputs]
    result = schema.outputs[0].type_str if schema.outputs else None
    return kinds.index(result) if result in kinds else None


class _Inference(ShapeInferenceContext):  # type: ignore[misc] # the library has no type hints
    """Shape inference that logs failures at debug level only, since not every rank is known."""

    def record_error(self, node: ir.Node, message: str) -> None:
        logger.debug("shape inference of %s: %s", node.op_type, message)


class NodeWriter:
    """Adds nodes and constants to `graph`, at its end or before the node `anchor`."""

    def __init__(
        self,
        graph: ir.Graph,
        *,
        opsets: Mapping[str, int] | None = None,
        target: TargetInfo | None = None,
        joint: bool = False,
        samples: bool = False,
    ) -> None:
        self.graph = graph
        self.joint = joint
        self.samples = samples
        self.target = target or TARGETS["cpu"]
        self.outer: NodeWriter | None = None
        self.anchor: ir.Node | None = None
        self.origin: str = ""
        self.emitted: list[ir.Node] = []
        self.placed = len(graph)
        self._memo: dict[Any, tuple[ir.Value, ...]] = {}
        self._constants: dict[Any, ir.Value] = {}
        self._vectors: dict[tuple[int, ...], ir.Value] = {}
        self._opsets = {"": CANONICAL_OPSET, **(opsets or {})}

    def of_body(self, body: ir.Graph) -> Self:
        """A writer of a body of this graph, with names that are unique in both."""
        writer = type(self)(body, target=self.target, joint=self.joint, samples=self.samples)
        writer.outer = self
        return writer

    @cached_property
    def names(self) -> Namespace:
        """The names of the graph's values at the first use of this property, and those claimed since."""
        return Namespace.of_values(self.graph) if self.outer is None else self.outer.names

    @cached_property
    def order(self) -> dict[ir.Node, int]:
        """The positions of the graph's nodes at the first use of this property, and those of nodes emitted since."""
        emitted = set(self.emitted)
        return {node: i for i, node in enumerate((*(n for n in self.graph if n not in emitted), *self.emitted))}

    @cached_property
    def _context(self) -> _Inference:
        """The opsets and symbols for general shape inference, collected at the first use of this property."""
        registry.collect()
        context = _Inference(self._opsets, policy="skip")
        context.reserve_symbol_names(symbols(self.graph))
        return context

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def op(self, op_type: str, *inputs: Operand, domain: str = "", **attributes: Any) -> ir.Value:
        """Emit a node with one output. Numbers among `inputs` become constants of the first tensor input's dtype."""
        return self.ops(op_type, *inputs, outputs=1, domain=domain, **attributes)[0]

    def op_like(self, like: ir.Value, op_type: str, *inputs: ir.Value) -> ir.Value:
        """Emit a node without attributes; its output has dtype and shape of `like`, which need not be inferred."""
        key = ("", op_type, 1, inputs, ())
        if key not in self._memo:
            node = ir.Node("", op_type, inputs, num_outputs=1)
            self.place(node)
            self._memo[key] = (self.typed(node.outputs[0], like),)
        return self._memo[key][0]

    def ops(
        self, op_type: str, *inputs: Operand, outputs: int, domain: str = "", **attributes: Any
    ) -> tuple[ir.Value, ...]:
        """Emit a node with several outputs; attributes that are `None` are omitted."""
        operands: list[Any] = list(inputs)
        if not _VALUES.issuperset(map(type, operands)):
            reference = next((v for v in operands if isinstance(v, ir.Value)), None)
            operands = [v if v is None or isinstance(v, ir.Value) else self.scalar(v, reference) for v in operands]
        while operands and operands[-1] is None:
            operands.pop()
        attributes = {k: v for k, v in attributes.items() if v is not None}
        if op_type == "STFT":
            attributes.setdefault("onesided", 1)  # see quirks.STFT_SIDES
        frozen = tuple(sorted([(k, _freeze(v)) for k, v in attributes.items()])) if attributes else ()
        key = (domain, op_type, outputs, tuple(operands), frozen)
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

    def again(
        self, node: ir.Node, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
    ) -> Sequence[ir.Value]:
        """Emit a node without bodies once more, on other operands; a `detach` of PyTorch stays one."""
        if is_detach(node) and inputs[0] is not None:
            copy = ir.Node("", "Identity", inputs, num_outputs=1)  # not shared with a copy that has a derivative
            keep_detach(copy, node)
            self.place(copy)
            return [self.typed(copy.outputs[0], inputs[0])]
        return self.ops(node.op_type, *inputs, outputs=len(node.outputs), domain=node.domain, **attributes)

    def place(self, node: ir.Node) -> None:
        """Insert a node that the caller made at the place where this emitter writes."""
        if self.origin:
            node.metadata_props[ORIGIN] = self.origin
        unnamed, used = [value for value in node.outputs if value.name is None], self.names.used
        if self.anchor is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.anchor, node)
        for value in unnamed:  # see quirks.RESULT_NAMES
            if self.outer or value.name in used:
                value.name = self.names.claim("inner" if self.outer else value.name or "val")
        self.placed += 1
        if "order" in self.__dict__:
            self.order[node] = len(self.order)
        self.emitted.append(node)

    def copied(self, value: ir.Value) -> ir.Value:
        """A value equal to another one that may have a name of its own; equal calls give different values."""
        node = ir.Node("", "Identity", [value], num_outputs=1)
        self.place(node)
        return self.typed(node.outputs[0], value)

    def forget(self, nodes: Collection[ir.Node]) -> None:
        """Take nodes out of those emitted: they move to another graph, where later nodes cannot read their results."""
        self.emitted[:] = [node for node in self.emitted if node not in nodes]
        self._memo = {key: made for key, made in self._memo.items() if made[0].producer() not in nodes}

    def repeat(self) -> None:
        """Emit new nodes from now, even if equal ones exist, so that older results need not be kept."""
        self._memo.clear()

    @contextmanager
    def rewriting(self, node: ir.Node, label: str) -> Iterator[int]:
        """Write before `node`, for its origin.

        Yields:
            The number of nodes emitted so far. Nodes added for a node of the model itself are named
            `<node>/<label>_<count>`; those of gradients are named by the last stage.
        """
        start = self.before(node)
        yield start
        self.name_since(start, f"{node.name}/{label}")

    def before(self, node: ir.Node) -> int:
        """Write before `node`, for its origin, from now; return the number of nodes emitted so far."""
        self.anchor, self.origin = node, origin_of(node)
        return len(self.emitted)

    def name_since(self, start: int, stem: str) -> None:
        """Name the nodes emitted since there were `start` of them, unless they belong to a gradient."""
        if not self.origin:
            for count, added in enumerate(self.emitted[start:], 1):
                added.name = f"{stem}_{count}"

    def infer(self, node: ir.Node) -> None:
        """Set dtype and shape of the outputs: by shortcuts for common cases, else by onnx-shape-inference."""
        first = next((v for v in node.inputs if v is not None), None)
        if node.op_type in _ELEMENTWISE and first is not None and not node.domain and self._same_shape(node, first):
            node.outputs[0].dtype = first.dtype  # type: ignore[assignment]
            node.outputs[0].shape = first.shape
            return
        shape = None
        if not node.domain and node.op_type in _PLAIN and first is not None and _is_data(first):
            shape = _PLAIN[node.op_type](node)
        if shape is not None:
            node.outputs[0].dtype = first.dtype  # type: ignore[union-attr, assignment]
            node.outputs[0].shape = ir.Shape(shape)
            return
        if node.domain == DOMAIN:
            self.typed(node.outputs[0], node.inputs[-1])  # type: ignore[arg-type] # the last operand has its shape
            return
        context = self._context  # first: it fills the registry
        infer = registry.get(node.domain, node.op_type, version=CANONICAL_OPSET)
        if infer is None:
            return
        try:
            infer(context, node)
        except Exception as problem:  # noqa: BLE001 - a missing shape is not fatal
            logger.debug("shape inference of %s failed: %s", node.op_type, problem)
        if node.outputs[0].dtype is None and not node.domain:
            alike = _operand_of_result_type(node.op_type)
            operand = node.inputs[alike] if alike is not None and alike < len(node.inputs) else None
            if operand is not None and operand.dtype is not None:
                node.outputs[0].dtype = operand.dtype

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
        """Give `value` the dtype and shape of `like`, which inference may not find; return it."""
        if like.dtype is not None:
            value.dtype = like.dtype
        if like.shape is not None:
            value.shape = like.shape
        return value

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        return value if value.dtype == dtype else self.op("Cast", value, to=int(dtype))

    # -- constants -----------------------------------------------------------------------------------------------------

    def const(self, array: Any, dtype: ir.DataType | None = None) -> ir.Value:
        """An initializer with the array as its value; equal ones are shared. `dtype` defaults to the array's."""
        array = np.asarray(array)
        if dtype is None:
            dtype = ir.DataType.from_numpy(array.dtype)
        if array.size > _LARGE:
            self.check_bytes(array.size * dtype.numpy().itemsize, "A constant")
        array = np.ascontiguousarray(array, dtype=dtype.numpy()).reshape(array.shape)
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.initializer(ir.Tensor(array, dtype=dtype))
        return self._constants[key]

    def initializer(self, tensor: ir.TensorProtocol) -> ir.Value:
        """An initializer of its own with this tensor, which is not copied."""
        name = self.names.claim(f"const_{len(self._constants)}", self.graph.initializers)
        value = ir.Value(name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype))
        value.const_value, tensor.name = tensor, name
        self.graph.register_initializer(value)
        return value

    def scalar(self, number: float, like: ir.Value | None) -> ir.Value:
        """A rank-0 constant of `like`'s dtype (float32 when that is unknown)."""
        dtype = (like.dtype if like is not None else None) or ir.DataType.FLOAT
        return self.const(np.asarray(number), dtype)

    def ints(self, values: Iterable[int]) -> ir.Value:
        """An int64 vector constant."""
        key = tuple(values)
        if key not in self._vectors:
            try:
                array = np.asarray(key, np.int64)
            except OverflowError:
                raise LimitError(f"A size{self._of_node()} is {max(key, key=abs):,}, more than 64 bits hold.") from None
            self._vectors[key] = self.const(array)
        return self._vectors[key]

    def check_bytes(self, count: int, what: str) -> None:
        """Raise `LimitError` if a constant of `count` bytes is larger than the limits allow; `what` begins the sentence."""
        check_limit("constant_bytes", count, what + self._of_node())

    def _of_node(self) -> str:
        return f" for node {self.origin!r}" if self.origin else ""

    constant_of = staticmethod(constant_of)
    number_of = staticmethod(number_of)


_INT, _INTS = ir.AttributeType.INT, ir.AttributeType.INTS


def _attribute(name: str, value: Any) -> ir.Attr:
    """Convert an attribute; common kinds directly, since onnx_ir's conversion takes longer than the rest of `op`."""
    if isinstance(value, int):
        return ir.Attr(name, _INT, value)
    if isinstance(value, (list, tuple)) and set(map(type, value)) <= {int}:
        return ir.Attr(name, _INTS, value)
    if type(value) is str:
        return ir.Attr(name, ir.AttributeType.STRING, value)
    return ir.convenience.convert_attribute(name, value)


def _freeze(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return (int, *value) if set(map(type, value)) == {int} else tuple(map(_freeze, value))
    if isinstance(value, (int, float, str, bytes)):
        return (type(value).__name__, value)
    return value if isinstance(value, Hashable) else id(value)


# -- shapes of common operators of static sizes, ten times faster than general inference --------------------------------

Size = int | ir.SymbolicDim


def _is_data(value: ir.Value) -> bool:
    """Whether the value is not a size: only general inference propagates the notes that sizes carry."""
    return value.dtype is not None and value.dtype.is_floating_point()


def _sizes(value: ir.Value | None) -> list[int] | None:
    if value is None or value.shape is None:
        return None
    dims = value.shape.dims
    sizes = [d for d in dims if isinstance(d, int)]
    return sizes if len(sizes) == len(dims) else None


def _reshaped(node: ir.Node) -> Sequence[Size] | None:
    x, wanted = node.inputs[0], _integers(node.inputs[1])
    if x is None or x.shape is None or wanted is None:
        return None
    symbols = [d for d in x.shape if not isinstance(d, int)]
    count = math.prod(d for d in x.shape if isinstance(d, int))
    others = math.prod(d for d in wanted if d != -1)
    if symbols:  # one that moves as it is needs no arithmetic on symbols
        moves = len(symbols) == 1 and symbols[0].value is not None and wanted.count(-1) == 1 and others == count > 0
        return [symbols[0] if d == -1 else d for d in wanted] if moves else None
    if min(wanted, default=1) > 0:
        return wanted if others == count else None
    alone = wanted.count(-1) == 1 and others > 0 and count % others == 0
    return [count // others if d == -1 else d for d in wanted] if alone else None


def _transposed(node: ir.Node) -> list[int] | None:
    sizes, perm = _sizes(node.inputs[0]), node.attributes.get("perm")
    return None if sizes is None or perm is None else [sizes[axis] for axis in perm.as_ints()]


def _multiplied(node: ir.Node) -> list[int] | None:
    a, b = map(_sizes, node.inputs)
    if a is None or b is None or min(len(a), len(b)) < 2 or a[-1] != b[-2]:
        return None
    batch = a[:-2] if len(a) >= len(b) else b[:-2]
    fits = all(side[:-2] in ([], batch) for side in (a, b))
    return [*batch, a[-2], b[-1]] if fits else None


def _integers(value: ir.Value | None) -> list[int] | None:
    if value is None or value.const_value is None:
        return None
    found: list[int] = value.const_value.numpy().tolist()
    return found


def _sliced(node: ir.Node) -> list[int] | None:
    sizes, vectors = _sizes(node.inputs[0]), [_integers(v) for v in node.inputs[1:]]
    if sizes is None or None in vectors:
        return None
    starts, ends, *others = (v for v in vectors if v is not None)
    axes = others[0] if others else range(len(starts))
    steps = others[1] if len(others) > 1 else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        sizes[axis] = len(range(sizes[axis])[start:end:step])
    return sizes


def _padded(node: ir.Node) -> list[int] | None:
    sizes, amounts = _sizes(node.inputs[0]), _integers(node.inputs[1])
    if sizes is None or amounts is None or len(node.inputs) > 3:  # with axes
        return None
    return [size + begin + end for size, begin, end in zip(sizes, amounts, amounts[len(sizes) :], strict=False)]


_PLAIN: Mapping[str, Callable[[ir.Node], Sequence[Size] | None]] = {
    "Reshape": _reshaped,
    "Transpose": _transposed,
    "MatMul": _multiplied,
    "Slice": _sliced,
    "Pad": _padded,
}
