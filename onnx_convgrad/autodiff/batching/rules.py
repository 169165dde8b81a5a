"""Batching rules of operators whose attributes or operands hold axes, and of weights of each example."""

from __future__ import annotations

import string
from collections.abc import Sequence

import onnx_ir as ir

from onnx_convgrad.autodiff.batching.walk import Batched, batch_rule, require_rule, shifted
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of

Results = Sequence[ir.Value]


_AXIS = {"Softmax": -1, "LogSoftmax": -1, "Hardmax": -1, "LpNormalization": -1, "ArgMax": 0, "ArgMin": 0, "TopK": -1}


@batch_rule(*_AXIS)
def along_axis(b: Batched, n: Call) -> Results:
    """Shift the attribute `axis`."""
    b.only(n, n.names[0][0])
    x = n.inputs[0]
    assert x is not None
    require_rule(b.rank(x))
    axis = shifted(n.int("axis", _AXIS[n.node.op_type]), b.rank(x))
    inputs = [None if v is None else b[v] for v in n.inputs]
    return b.e.ops(n.node.op_type, *inputs, outputs=len(n.node.outputs), **{**n.attributes(), "axis": axis})


@batch_rule("LayerNormalization", "RMSNormalization")
def normalize_layer(b: Batched, n: Call) -> Results:
    """Shift `axis`; scale and bias of every example the same."""
    b.only(n, "X")
    axis = shifted(n.int("axis", -1), b.rank(n["X"]))
    inputs = [None if v is None else b[v] for v in n.inputs]
    return b.e.ops(n.node.op_type, *inputs, outputs=len(n.node.outputs), **{**n.attributes(), "axis": axis})


@batch_rule("CumSum", "CumProd")
def cumulate(b: Batched, n: Call) -> Results:
    b.only(n, "x")
    axis = shifted(int(b.constant(n.inputs[1]).item()), b.rank(n["x"]))
    return [b.e.op(n.node.op_type, b[n["x"]], b.e.const(axis), **n.attributes())]


@batch_rule(*(f"Reduce{kind}" for kind in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()))
def reduce(b: Batched, n: Call) -> Results:
    """Reduce the same axes, or all but that of the examples."""
    b.only(n, "data")
    x, attributes = n["data"], n.attributes()
    rank, axes = b.rank(x), n.inputs[1] if len(n.inputs) > 1 else None
    if axes is not None and constant_of(axes) is None and axes not in b:  # fed: negative axes stay as they are
        require_rule(axes.shape is not None and isinstance(axes.shape[0], int) and axes.shape[0] > 0)
        fed = b.e.op("Add", axes, b.e.cast(b.e.compare("GreaterOrEqual", axes, 0), ir.DataType.INT64))
        return [b.e.typed(b.e.op(n.node.op_type, b[x], fed, **attributes), _stacked_type(b, n.y))]
    numbers = [] if axes is None else [int(a) for a in b.constant(axes)]
    if not numbers and n.int("noop_with_empty_axes", 0):
        return [b.e.op(n.node.op_type, b[x], **attributes)]
    reduced = [shifted(a, rank) for a in numbers] or [*range(1, rank + 1)]
    if not reduced:  # a number of each example: a reduction over one more axis
        return [b.e.op(n.node.op_type, b.e.unsqueeze(b[x], [1]), b.e.ints([1]), **{**attributes, "keepdims": 0})]
    return [b.e.op(n.node.op_type, b[x], b.e.ints(reduced), **attributes)]


def _stacked_type(b: Batched, one: ir.Value) -> ir.Value:
    """A value with the type of the results of all examples, of which `one` is one."""
    size = b.size if isinstance(b.size, int) else None
    shape = None if one.shape is None else ir.Shape([size, *one.shape])
    return ir.Value(shape=shape, type=one.type)


@batch_rule("MatMul")
def matmul(b: Batched, n: Call) -> Results:
    a, c = n["A"], n["B"]
    ranks = b.rank(a), b.rank(c)
    require_rule(min(ranks) >= 1)
    if c not in b and ranks[1] == 2:
        return [b.e.matmul(b[a], c)]  # vectors of all examples are a matrix
    require_rule(min(ranks) >= 2)
    return [b.e.matmul(b.aligned(a, max(ranks)), b.aligned(c, max(ranks)))]


@batch_rule("Gemm")
def gemm(b: Batched, n: Call) -> Results:
    """A product of batches of matrices, scaled and shifted as Gemm does."""
    e = b.e
    a, c = b[n["A"]], b[n["B"]]
    a = _turned(b, n["A"], a) if n.int("transA", 0) else a
    c = _turned(b, n["B"], c) if n.int("transB", 0) else c
    product = e.mul(e.matmul(a, c), n.float("alpha", 1.0))
    bias, beta = n.get("C"), n.float("beta", 1.0)
    if bias is None or beta == 0:
        return [product]
    return [e.add(product, e.mul(b.aligned(bias, 2), beta))]


def _turned(b: Batched, value: ir.Value, matrix: ir.Value) -> ir.Value:
    return b.e.transpose(matrix, [0, 2, 1] if value in b else [1, 0])


@batch_rule("Einsum")
def einsum(b: Batched, n: Call) -> Results:
    """A letter of its own for the axis of the examples."""
    equation = n.string("equation", "").replace(" ", "")
    require_rule("->" in equation and "." not in equation)
    letter = next(x for x in string.ascii_letters if x not in equation)
    terms, result = equation.split("->")
    parts = zip(terms.split(","), n.inputs, strict=True)
    terms = ",".join(f"{letter}{term}" if v in b else term for term, v in parts)
    return [b.e.op("Einsum", *(None if v is None else b[v] for v in n.inputs), equation=f"{terms}->{letter}{result}")]


# -- layers over a batch of their own --------------------------------------------------------------------------------------


@batch_rule("Conv")
def convolution(b: Batched, n: Call) -> Results:
    """Weights of each example become groups; without them the axis of the examples is folded into that of the samples."""
    require_rule(n["W"] in b)
    return [_grouped(b, n)]


def _grouped(b: Batched, n: Call) -> ir.Value:
    """A convolution with a weight for each example: `[N, B C, ...]` by B times as many groups."""
    e, group = b.e, n.int("group", 1)
    x, w = b.all(n["X"]), b[n["W"]]
    require_rule(isinstance(b.size, int) and b.size)
    assert isinstance(b.size, int)
    sizes = e.dims(x)
    turned = e.transpose(x, [1, 0, *range(2, len(sizes))])
    joined = e.reshape(turned, [sizes[1], e.size_mul(b.size, sizes[2]), *sizes[3:]])
    kernels = e.dims(w)
    weight = e.reshape(w, [e.size_mul(b.size, kernels[1]), *kernels[2:]])
    bias = n.get("B")
    if bias is not None:
        bias = e.reshape(b.all(bias), [e.size_mul(b.size, kernels[1])])
    y = e.conv(joined, weight, bias, **{**n.attributes(), "group": group * b.size})
    found = e.dims(y)
    split = e.reshape(y, [found[0], b.size, kernels[1], *found[2:]])
    return e.transpose(split, [1, 0, *range(2, len(found) + 1)])
