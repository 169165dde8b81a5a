"""Replace nodes with slow kernels in ONNX Runtime's CPU provider by equal forms with fast ones.

    ReduceSum over the first axes, as bias gradients are      a product with a row of ones: 2 to 25 times faster
    ReduceSum of a product over the last axes                 a batch of scalar products: the product is never stored
    Reshape into a graph output, a copy by one thread         a pass by all threads: half the time
    g s + (g x) s', with the gate y = x s(x)                  g (s + x s'), and g (s + y (1 - s)) for the logistic gate
    a' b, updates of weights, gradients of picked classes     see `fast_products`
    PRelu, computed by element                                max(x, 0) + slope min(x, 0), exact: 5 to 20 times
    [N, C, h, w] op [C, 1, 1], small images                   see `fast_broadcasts`
    [N, C, 1, 1] op a scalar                                  see `fast_broadcasts`
    Gather of windows of the last axis, as unfolding does     see `fast_windows`
    Transpose of single elements, DepthToSpace                see `fast_transposes`
    Resize, cubic or linear                                   see `fast_resize`
    AveragePool, unless it is over two axes of 16 n channels  see `fast_pools`
    Softplus, Mish, Elu, Selu, Celu, Min and Max of a number  see `fast_activations`
    Softmax over any axis but the last                        see `fast_activations`

Only nodes that differentiation added are rewritten, and in training mode those of the model too.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_convgrad.backends.cpu import Forms
from onnx_convgrad.backends.cpu.fast_activations import ACTIVATIONS
from onnx_convgrad.backends.cpu.fast_broadcasts import BROADCASTS
from onnx_convgrad.backends.cpu.fast_pools import POOLS
from onnx_convgrad.backends.cpu.fast_products import PRODUCTS
from onnx_convgrad.backends.cpu.fast_resize import RESIZES
from onnx_convgrad.backends.cpu.fast_transposes import TRANSPOSES
from onnx_convgrad.backends.cpu.fast_windows import WINDOWS
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of, is_number
from onnx_convgrad.ir.emit import Emitter, known, static_dims
from onnx_convgrad.ir.nodes import is_op, sole_producer
from onnx_convgrad.ir.passes import NodePass
from onnx_convgrad.ir.targets import TargetInfo
from onnx_convgrad.lowering.cost.movement import leading_axes

_ROWS = range(8, 1 << 22)
"""Range of the number of rows for which a product is faster: fewer rows are summed quickly anyway, and more of them need a
large vector of ones."""

_COLUMNS = 4

_ROW = 768
"""Smallest number of terms for which a scalar product is faster."""

_LARGE = 1 << 16
"""Smallest number of elements for which more than one thread is faster."""

_CALLS = 8
"""Fewest scalar products that use all threads."""


def _sum_of_products(e: Emitter, node: ir.Node) -> ir.Value | None:
    """Sums or means of a * b over rows, [r, p] -> [r], as [r, 1, p] [r, p, 1], then over the first axes.

    Otherwise the product is stored and read again. Short rows do not pay for a call each. The Transpose becomes part of the
    product, whose kernel then reads both rows in vectors: ten times as fast as with a Reshape, which reads single elements.
    """
    a, b = _product(node.inputs[0])
    axes = constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if a is None or b is None or axes is None:
        return None
    sizes = static_dims(a)
    if not sizes or sizes != static_dims(b) or None in sizes:
        return None
    dims = [d or 0 for d in sizes]
    summed = {int(axis) % len(dims) for axis in axes.reshape(-1)}
    kept = [axis for axis in range(len(dims)) if axis not in summed]
    if not kept or kept[-1] == len(dims) - 1 or kept != list(range(kept[0], kept[-1] + 1)):
        return None
    lead, rows = math.prod(dims[: kept[0]]), math.prod(dims[axis] for axis in kept)
    row = math.prod(dims[kept[-1] + 1 :])
    if row < _ROW or lead * rows < _CALLS:
        return None
    left, right = (e.reshape(v, [lead * rows, 1, row]) for v in (a, b))
    total = e.matmul(left, e.op("Transpose", right, perm=[0, 2, 1]))
    if lead > 1:
        total = e.matmul(e.const(np.ones((1, lead), np.float32)), e.reshape(total, [lead, rows]))
    keep = bool(Call(node).int("keepdims", 1))
    result = e.op("Reshape", total, e.ints(1 if i in summed else d for i, d in enumerate(dims) if keep or i in kept))
    # last: the runtime would fuse an earlier factor into the product, which is then many times slower
    return e.mul(result, 1 / (lead * row)) if node.op_type == "ReduceMean" else result


def _sum_of_rows(e: Emitter, node: ir.Node) -> ir.Value | None:
    """[r, c] -> [c] as [1, r] [r, c]."""
    x, count = node.inputs[0], leading_axes(node)
    if x is None or x.shape is None or not count:
        return None
    sizes = [known(d) for d in x.shape]
    rows = math.prod(d or 0 for d in sizes[:count])
    columns = math.prod(d or 0 for d in sizes[count:])
    if rows not in _ROWS or columns < _COLUMNS:
        return None
    total = e.matmul(e.const(np.ones((1, rows), np.float32)), e.reshape(x, [rows, columns]))
    lead = [1] * count if Call(node).int("keepdims", 1) else []
    return e.op("Reshape", total, e.ints([*lead, *(d or 0 for d in sizes[count:])]))


def _copy(e: Emitter, node: ir.Node) -> ir.Value | None:
    """A Reshape into a graph output is a copy; LeakyRelu with a slope of 1 copies every bit on all threads."""
    x, y = node.inputs[0], node.outputs[0]
    sizes = static_dims(y)
    if x is None or x.producer() is None or not y.is_graph_output() or sizes is None:
        return None
    if math.prod(d or 1 for d in sizes) < _LARGE:
        return None
    return e.op("LeakyRelu", e.op("Reshape", *node.inputs, allowzero=Call(node).int("allowzero", 0) or None), alpha=1.0)


def _gated(e: Emitter, node: ir.Node) -> ir.Value | None:
    """The cotangent of x for y = x s(x): the sum over both factors, with g multiplied once, at the end.

    For the logistic function x s' = x s (1 - s) = y (1 - s), and y exists already.
    """
    for direct, through in (node.inputs, node.inputs[::-1]):
        factors = _product(through)
        for inner, slope in (factors, factors[::-1]):
            shared = [(g, s, x) for g, s in _pairs(direct) for h, x in _pairs(inner) if g is h and s is not x]
            if slope is None or not shared:
                continue
            g, s, x = shared[0]
            if any(v.shape is None or v.shape != node.outputs[0].shape for v in (g, s, x, slope)):
                continue
            return e.mul(g, e.add(s, _logistic(e, x, s, slope) or e.mul(x, slope)))
    return None


def _product(value: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
    """The factors of a product with a single reader."""
    node = sole_producer(value)
    return (node.inputs[0], node.inputs[1]) if is_op(node, "Mul") else (None, None)


def _pairs(value: ir.Value | None) -> list[tuple[ir.Value, ir.Value]]:
    a, b = _product(value)
    return [] if a is None or b is None else [(a, b), (b, a)]


def _logistic(e: Emitter, x: ir.Value, s: ir.Value, slope: ir.Value) -> ir.Value | None:
    """y (1 - s), if `slope` is s (1 - s) and the graph computes y = x s."""
    rest = next((b for a, b in _pairs(slope) if a is s), None)
    node = None if rest is None else rest.producer()
    if rest is None or not is_op(node, "Sub") or node.inputs[1] is not s or not is_number(node.inputs[0], 1):
        return None
    outputs = (use.node.outputs[0] for use in s.uses() if use.node.op_type == "Mul" and set(use.node.inputs) == {x, s})
    y = next(outputs, None)
    return None if y is None else e.mul(y, rest)


def _rectified(e: Emitter, node: ir.Node) -> ir.Value | None:
    x, slope = node.inputs
    if x is None or slope is None or x.shape is None or slope.shape is None or len(slope.shape) > len(x.shape):
        return None
    lower = e.op("Clip", x, None, e.scalar(0, x))
    for use in list(x.uses()):  # the gradient of the slope reads it too
        other = use.node.outputs[0]
        if (
            use.node.op_type == "Min"
            and other is not lower
            and not other.is_graph_output()
            and is_number(use.node.inputs[1], 0)
        ):
            other.replace_all_uses_with(lower)
            e.graph.remove(use.node, safe=True)
    return e.add(e.op("Relu", x), e.mul(lower, slope))


_SUMS_AND_GATES: Forms = {
    "Add": _gated,
    "PRelu": _rectified,
    "ReduceMean": _sum_of_products,
    "ReduceSum": _sum_of_products,
    "Reshape": _copy,
}

_TABLES = (
    PRODUCTS,
    _SUMS_AND_GATES,
    WINDOWS,
    ACTIVATIONS,
    POOLS,
    RESIZES,
    TRANSPOSES,
    {"ReduceSum": _sum_of_rows},
    BROADCASTS,
)

_FORMS = {op: [table[op] for table in _TABLES if op in table] for table in _TABLES for op in table}
"""Operator -> its forms; the first that applies is used."""


class UseFastForms(NodePass):
    """Replace float32 nodes of a lowered graph by the forms listed in this module, which are 2 to 200 times faster.

    Args:
        target: The CPU.
        training: Whether nodes of the model itself may be rewritten too, not only those of gradients.
    """

    operators = _FORMS
    label = "fast"

    def __init__(self, target: TargetInfo | None = None, *, training: bool = False) -> None:
        super().__init__(target)
        self.training = training

    def rewrite_node(self, e: Emitter, node: ir.Node) -> ir.Value | None:
        """Return the result of the first form that applies."""
        if not (e.origin or self.training) or node.outputs[0].dtype != ir.DataType.FLOAT:
            return None
        results = (form(e, node) for form in _FORMS[node.op_type])
        return next((value for value in results if value is not None), None)
