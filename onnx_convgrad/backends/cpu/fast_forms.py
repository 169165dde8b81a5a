"""Nodes for which ONNX Runtime's CPU provider has a slow kernel, in a form with a fast one.

    ReduceSum over the first axes, as bias gradients are      a product with a row of ones: 2 to 25 times faster
    ReduceSum of a product over the last axes                 a batch of scalar products: the product is never written
    Reshape into a graph output, a copy by one thread         a pass by all threads: half the time
    g s + (g x) s', where y = x s(x) is gated              g (s + x s'), and g (s + y (1 - s)) for the logistic gate
    w - a b into a graph output, an update                    one Gemm: a gradient as large as its weight is never held
    PRelu, an element at a time                               max(x, 0) + slope min(x, 0), no rounding: 5 to 20 times
    [N, C, h, w] op [C, 1, 1], small images                   see `fast_broadcasts`
    [N, C, 1, 1] op a scalar                                  see `fast_broadcasts`
    Gather of windows of the last axis, as unfolding does     see `fast_windows`
    Transpose of single elements, DepthToSpace                see `fast_transposes`
    Resize, cubic or linear                                   see `fast_resize`
    AveragePool, unless it is over two axes of 16 n channels  see `fast_pools`
    Softplus, Mish, Elu, Selu, Celu, Min and Max of a number  see `fast_activations`
    Softmax over any axis but the last                        see `fast_activations`

Only nodes that differentiation added are rewritten, and the model's own where it is in training mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir

from onnx_convgrad.backends.cpu.fast_activations import ACTIVATIONS
from onnx_convgrad.backends.cpu.fast_broadcasts import BROADCASTS
from onnx_convgrad.backends.cpu.fast_pools import POOLS
from onnx_convgrad.backends.cpu.fast_resize import RESIZES
from onnx_convgrad.backends.cpu.fast_transposes import TRANSPOSES
from onnx_convgrad.backends.cpu.fast_windows import WINDOWS
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of, is_number
from onnx_convgrad.ir.emit import Emitter, known, static_dims
from onnx_convgrad.ir.nodes import is_op, sole_producer
from onnx_convgrad.ir.notes import origin_of
from onnx_convgrad.ir.replace import OutputPlaces, put_in_place
from onnx_convgrad.lowering.cost.movement import leading_axes

__all__ = ["use_fast_forms"]

Form = Callable[[Emitter, ir.Node], ir.Value | None]
"""What computes the same as a node, or `None` where that is no faster."""

_ROWS = range(8, 1 << 22)
"""Fewer rows are summed in no time; the ones of more would take memory."""

_COLUMNS = 4

_ROW = 768
"""Terms of a scalar product that are worth a call."""

_LARGE = 1 << 16
"""Elements that are worth a second thread."""

_CALLS = 8
"""Scalar products that keep all threads busy."""


def use_fast_forms(graph: ir.Graph, e: Emitter, *, training: bool) -> None:
    """Rewrite nodes of `graph` in place; values and names of graph outputs stay.

    Args:
        graph: A graph for the CPU provider, after lowering.
        e: Writes to it.
        training: Whether forward nodes may be rewritten too.
    """
    outputs, done = OutputPlaces(graph), []
    for node in list(graph):
        origin = origin_of(node)
        if node.domain or not (origin or training) or node.outputs[0].dtype != ir.DataType.FLOAT:
            continue
        e.anchor, e.origin, start = node, origin, len(e.emitted)
        found = (form(e, node) for form in _FORMS.get(node.op_type, ()))
        new = next((value for value in found if value is not None), None)
        if new is None:
            continue
        put_in_place(e, outputs, node.outputs[0], new, new=new.producer() in e.emitted[start:])
        done.append(node)
        if not origin:  # nodes of gradients are named last
            for count, made in enumerate(e.emitted[start:], 1):
                made.name = f"{node.name}/fast_{count}"
    graph.remove(done, safe=True)


def _sum_of_products(e: Emitter, node: ir.Node) -> ir.Value | None:
    """Sums or means of a * b over rows, [r, p] -> [r], as [r, 1, p] [r, p, 1]; those over the first axes follow.

    Product and sum write and read p numbers that nobody wants. Short rows are not worth a call each.
    """
    a, b = _product(node.inputs[0])
    axes = constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if a is None or b is None or axes is None:
        return None
    sizes = static_dims(a)
    if sizes is None or sizes != static_dims(b) or None in sizes:
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
    total = e.matmul(left, e.transpose(right, [0, 2, 1]))
    if lead > 1:
        total = e.matmul(e.const(np.ones((1, lead), np.float32)), e.reshape(total, [lead, rows]))
    keep = bool(Call(node).int("keepdims", 1))
    result = e.op("Reshape", total, e.ints(1 if i in summed else d for i, d in enumerate(dims) if keep or i in kept))
    # not before: the runtime moves a factor into the product, which is then many times slower
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
    """The runtime copies what a Reshape makes a graph output of; LeakyRelu with a slope of 1 copies every bit, faster."""
    x, y = node.inputs[0], node.outputs[0]
    sizes = static_dims(y)
    if x is None or x.producer() is None or not y.is_graph_output() or sizes is None:
        return None
    if math.prod(d or 1 for d in sizes) < _LARGE:
        return None
    return e.op("LeakyRelu", e.op("Reshape", *node.inputs, allowzero=Call(node).int("allowzero", 0) or None), alpha=1.0)


def _gated(e: Emitter, node: ir.Node) -> ir.Value | None:
    """The cotangent of x where y = x s(x), as both factors contribute it: g is multiplied in once, at the end.

    For the logistic function x s' = x s (1 - s) = y (1 - s), and y is at hand.
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
    """The factors of a product that nothing else reads."""
    node = sole_producer(value)
    return (node.inputs[0], node.inputs[1]) if is_op(node, "Mul") else (None, None)


def _pairs(value: ir.Value | None) -> list[tuple[ir.Value, ir.Value]]:
    a, b = _product(value)
    return [] if a is None or b is None else [(a, b), (b, a)]


def _logistic(e: Emitter, x: ir.Value, s: ir.Value, slope: ir.Value) -> ir.Value | None:
    """y (1 - s), if `slope` is s (1 - s) and y = x s is computed before."""
    rest = next((b for a, b in _pairs(slope) if a is s), None)
    node = None if rest is None else rest.producer()
    if rest is None or not is_op(node, "Sub") or node.inputs[1] is not s or not is_number(node.inputs[0], 1):
        return None
    outputs = (use.node.outputs[0] for use in s.uses() if use.node.op_type == "Mul" and set(use.node.inputs) == {x, s})
    y = next(outputs, None)
    return None if y is None else e.mul(y, rest)


def _update(e: Emitter, node: ir.Node) -> ir.Value | None:
    """w - a b as -a b + w: the product is added to what the next weights hold already."""
    weights, product = node.inputs
    gemm = sole_producer(product)
    if weights is None or product is None or not is_op(gemm, "Gemm") or not node.outputs[0].is_graph_output():
        return None
    sizes = static_dims(weights)
    if sizes is None or sizes != static_dims(product):
        return None
    bias = gemm.inputs[2] if len(gemm.inputs) > 2 else None
    if None in sizes or bias is not None:
        return None
    given = Call(gemm)
    attributes = {**given.attributes(), "alpha": -given.float("alpha", 1.0), "beta": None}  # it was for no bias
    return e.op("Gemm", *gemm.inputs[:2], weights, **attributes)


def _rectified(e: Emitter, node: ir.Node) -> ir.Value | None:
    x, slope = node.inputs
    if x is None or slope is None or x.shape is None or slope.shape is None or len(slope.shape) > len(x.shape):
        return None
    lower = e.op("Clip", x, None, e.scalar(0, x))
    for use in list(x.uses()):  # the gradient of the slope is made of it too
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


_OWN: Mapping[str, Form] = {
    "Add": _gated,
    "PRelu": _rectified,
    "ReduceMean": _sum_of_products,
    "ReduceSum": _sum_of_products,
    "Reshape": _copy,
    "Sub": _update,
}

_TABLES = (_OWN, WINDOWS, ACTIVATIONS, POOLS, RESIZES, TRANSPOSES, {"ReduceSum": _sum_of_rows}, BROADCASTS)

_FORMS = {op: [table[op] for table in _TABLES if op in table] for table in _TABLES for op in table}
"""Operator -> its forms; the first that applies is taken."""
