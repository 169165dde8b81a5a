"""The squared norm of each sample's gradient.

The gradient of a convolution or a matrix product need not be computed for that: an abstract operator takes its factors.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.autodiff.facts import is_view
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import DOMAIN, Emitter, dims_equal
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import origin_of
from onnx_convgrad.ir.samples import squares


def squared_norm(e: Emitter, gradient: ir.Value) -> ir.Value:
    """The squared norms, `[N]`, of gradients with the samples on the first axis; in float32 or wider."""
    e.origin, before = _origin(gradient), e.origin
    try:
        return _norm(e, gradient)
    finally:
        e.origin = before


def _norm(e: Emitter, gradient: ir.Value) -> ir.Value:
    inner = _before_layout_changes(gradient)
    node = inner.producer()
    if node is not None and node.domain == DOMAIN and node.op_type == "ConvPerSampleGrad":
        return _per_sample(e.op("ConvGradSquaredNorm", *node.inputs, domain=DOMAIN, **Call(node).attributes()), inner)
    if is_op(node, "MatMul") and _paired(node):
        return _per_sample(e.op("ProductSquaredNorm", *node.inputs, domain=DOMAIN), inner)
    return squares(e, gradient)


def _per_sample(norm: ir.Value, gradient: ir.Value) -> ir.Value:
    assert gradient.shape is not None
    norm.shape = ir.Shape([gradient.shape[0]])
    if gradient.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        norm.dtype = ir.DataType.FLOAT
    return norm


def _before_layout_changes(gradient: ir.Value) -> ir.Value:
    """The value before changes of layout that keep the samples on the first axis, which do not change the norm."""
    while True:
        node = gradient.producer()
        source = node.inputs[0] if node is not None and (is_view(node) or is_op(node, "Transpose")) else None
        if node is None or source is None or not _same_first(source, gradient):
            return gradient
        if node.op_type == "Transpose" and node.attributes["perm"].as_ints()[0] != 0:
            return gradient
        gradient = source


def _same_first(a: ir.Value, b: ir.Value) -> bool:
    return bool(a.shape and b.shape and dims_equal(a.shape[0], b.shape[0]))


def _paired(node: ir.Node) -> bool:
    """Whether a MatMul multiplies one pair of matrices per sample."""
    a, b = node.inputs
    if a is None or b is None or any(v.shape is None or len(v.shape) != 3 for v in (a, b)):
        return False
    return _same_first(a, b)


def _origin(value: ir.Value) -> str:
    node = value.producer()
    return "" if node is None else origin_of(node)
