"""Matrix products in forms that ONNX Runtime's CPU provider is fast at, and what is added to one.

    a' b, a no wider than b                   a is transposed before: a sixth faster
    a transposed a' b                         b' a of this form
    w - a b into a graph output, an update    one Gemm: a gradient as large as its weight is never stored
    scatter of u into zeros, minus b          a scatter that adds u to -b in place: three passes fewer

The provider's product transposes a part of `a` for every 128 columns of `b`, one element at a time. It folds a Transpose
into a product, unless a Reshape is between them.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_convgrad.backends.cpu import Forms
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of, is_number
from onnx_convgrad.ir.emit import Emitter, static_dims
from onnx_convgrad.ir.geometry import HINT_BATCH, HINT_SIZE
from onnx_convgrad.ir.nodes import is_op, sole_producer

_LARGE, _WIDE = 1 << 14, 16
"""Smallest numbers of elements and columns of a factor for which a Transpose of it before the product is faster."""

_WIDER = 2
"""Smallest width of the other factors of a batch, relative to the transposed copy: it is small beside them then."""


def _gemm(e: Emitter, node: ir.Node) -> ir.Value | None:
    a, b = node.inputs[:2]
    n = Call(node)
    readers = [use.node for use in node.outputs[0].uses()]
    if a is None or b is None or not _turns(node) or (len(readers) == 1 and _swaps(readers[0])):
        return None
    return _product(e, a, b, n.float("alpha", 1.0))


def _transposed(e: Emitter, node: ir.Node) -> ir.Value | None:
    """(a' b)' = b' a."""
    gemm = sole_producer(node.inputs[0]) if _swaps(node) else None
    if not is_op(gemm, "Gemm") or not _turns(gemm) or gemm.inputs[0] is None or gemm.inputs[1] is None:
        return None
    b, a, alpha = gemm.inputs[0], gemm.inputs[1], Call(gemm).float("alpha", 1.0)
    return _product(e, a, b, alpha) or e.op("Gemm", a, b, transA=1, alpha=alpha if alpha != 1 else None)


def _turns(gemm: ir.Node) -> bool:
    """Whether a Gemm transposes its first factor only and adds nothing."""
    n = Call(gemm)
    added = len(gemm.inputs) > 2 and gemm.inputs[2] is not None
    return bool(n.int("transA", 0)) and not n.int("transB", 0) and not added


def _swaps(node: ir.Node) -> bool:
    return is_op(node, "Transpose") and list(Call(node).ints("perm") or (1, 0)) == [1, 0]


def _product(e: Emitter, a: ir.Value, b: ir.Value, alpha: float) -> ir.Value | None:
    """alpha a' b with a transposed before, or `None` where that is not faster."""
    turned = _turned(e, a, b, 1)
    return None if turned is None else e.op("Gemm", turned, b, alpha=alpha if alpha != 1 else None)


def _batch(e: Emitter, node: ir.Node) -> ir.Value | None:
    """a' b for each member of a batch, with a transposed before, or `None` where that is not faster."""
    a, b = _swapped(node.inputs[0]), node.inputs[1]
    if a is None or b is None or len(a.shape or ()) < 3:
        return None
    turned = _turned(e, a, b, _WIDER)
    return None if turned is None else e.matmul(turned, b)


def _turned(e: Emitter, a: ir.Value, b: ir.Value, wider: int) -> ir.Value | None:
    """a', computed by a node of its own, or `None` unless b is `wider` times as wide."""
    sizes, columns = static_dims(a), (static_dims(b) or [None])[-1]
    if sizes is None or columns is None or not _WIDE <= (sizes[-1] or 0) <= columns // wider:
        return None
    if math.prod(size or HINT_BATCH * HINT_SIZE for size in sizes) < _LARGE:
        return None
    *batch, terms, rows = e.dims(a)
    apart = e.reshape(a, [1, *batch, terms, rows])
    return e.reshape(e.swap_last(apart), [*batch, rows, terms])


def _update(e: Emitter, node: ir.Node) -> ir.Value | None:
    """w - a b as one Gemm, which adds -a b to a copy of w in the buffer of the next weights."""
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
    n = Call(gemm)
    attributes = {**n.attributes(), "alpha": -n.float("alpha", 1.0), "beta": None}  # beta had no effect without a bias
    return e.op("Gemm", *gemm.inputs[:2], weights, **attributes)


def _scattered(e: Emitter, node: ir.Node) -> ir.Value | None:
    """scatter(0, i, u) - s t, with t along the axis of one element, as the scatter that adds u to s (-t)."""
    scatter, other = _into_zeros(node.inputs[0]), sole_producer(node.inputs[1])
    if scatter is None or not is_op(other, "Mul"):
        return None
    sizes = static_dims(node.outputs[0])
    for s, t in (other.inputs, other.inputs[::-1]):
        if s is not None and t is not None and sizes == static_dims(s) and static_dims(t) != sizes:
            data = e.mul(s, e.neg(t))
            axis = Call(scatter).int("axis", 0)
            return e.typed(e.op("ScatterElements", data, *scatter.inputs[1:], axis=axis, reduction="add"), data)
    return None


def _sum_of_scattered(node: ir.Node) -> ir.Value | None:
    """The sum of scatter(0, i, u) along its axis, with one index for each sum: u."""
    scatter = _into_zeros(node.inputs[0])
    if scatter is None or scatter.inputs[2] is None:
        return None
    updates, rank = scatter.inputs[2], len(scatter.inputs[2].shape or ())
    same = rank > 0 and _summed_axis(node, rank) == Call(scatter).int("axis", 0) % rank
    return updates if same and static_dims(updates) == static_dims(node.outputs[0]) else None


def _summed_axis(node: ir.Node, rank: int) -> int | None:
    """The axis of a ReduceSum over one, which keeps size one."""
    axes = constant_of(node.inputs[1]) if len(node.inputs) > 1 else None
    single = axes is not None and axes.size == 1 and Call(node).int("keepdims", 1)
    return int(axes.reshape(())) % rank if axes is not None and single else None


def _swapped(value: ir.Value | None) -> ir.Value | None:
    """x, if the value is x with its last two axes exchanged."""
    node = None if value is None else value.producer()
    if not is_op(node, "Transpose") or node.inputs[0] is None or node.inputs[0].shape is None:
        return None
    rank = len(node.inputs[0].shape)
    return node.inputs[0] if Call(node).ints("perm") == (*range(rank - 2), rank - 1, rank - 2) else None


def _into_zeros(value: ir.Value | None) -> ir.Node | None:
    """The node that scatters into zeros, with one index along its axis, if it computes the value."""
    node = None if value is None else value.producer()
    if not is_op(node, "ScatterElements") or Call(node).string("reduction", "none") != "none":
        return None
    data, indices = node.inputs[:2]
    zeros = None if data is None else data.producer()
    filled = is_op(zeros, "Expand") and is_number(zeros.inputs[0], 0)
    sizes = None if indices is None else static_dims(indices)
    return node if filled and sizes and sizes[Call(node).int("axis", 0)] == 1 else None


PRODUCTS: Forms = {
    "Gemm": _gemm,
    "MatMul": _batch,
    "ReduceSum": lambda _, node: _sum_of_scattered(node),
    "Sub": lambda e, node: _update(e, node) or _scattered(e, node),
    "Transpose": _transposed,
}
