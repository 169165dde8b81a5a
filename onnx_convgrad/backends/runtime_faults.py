"""Rewrite nodes that are valid ONNX but that ONNX Runtime computes wrongly, refuses, or crashes on, on any provider.

Each rewrite works around a fault listed in `onnx_convgrad.backends.quirks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.function_bodies import emit_body
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import CANONICAL_OPSET, Emitter, static_dims
from onnx_convgrad.ir.kernels import CPU_WITHOUT_FLOAT64
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.passes import NodePass


def _expand_to_nothing(e: Emitter, node: ir.Node) -> ir.Value | None:
    """Expand to a shape with a zero, as a constant; see quirks.EXPAND_TO_NOTHING."""
    x, shape = node.inputs
    sizes = e.constant_of(shape)
    if x is None or x.shape is None or x.dtype is None or sizes is None or 0 not in sizes:
        return None
    if None in (have := static_dims(x) or [None]):
        return None
    try:
        result = np.broadcast_shapes(tuple(d for d in have if d is not None), tuple(sizes))
    except ValueError:  # the model is wrong, and its node fails as it does without gradients
        return None
    value = ir.tensor(np.zeros(1, x.dtype.numpy()), x.dtype)
    return e.op("ConstantOfShape", e.ints(result), value=value)


_MOVES = frozenset(("Identity", "Transpose"))
"""Operators that ONNX Runtime may remove between a Pad and a Conv."""


def _pad_of_weight(e: Emitter, node: ir.Node) -> bool:
    """Give a Pad of a weight the operand `axes`, with which it is not fused; see quirks.PAD_OF_WEIGHT."""
    value = node.outputs[0]
    if len(node.inputs) > 3 or value.shape is None or not _is_weight(value):
        return False
    node.resize_inputs(4)
    node.replace_input_with(3, e.ints(range(len(value.shape))))
    return True


def _is_weight(value: ir.Value) -> bool:
    """Whether a Conv reads the value, directly or through `_MOVES`, as an operand other than its data."""
    for use in value.uses():
        if use.node.op_type == "Conv" and use.idx > 0:
            return True
        if use.node.op_type in _MOVES and _is_weight(use.node.outputs[0]):
            return True
    return False


def _resize_by_sizes(e: Emitter, node: ir.Node) -> bool:
    """Resize by sizes where the size by scales is ambiguous; see quirks.RESIZE_ROUNDING.

    Sizes are equivalent to scales if their quotient is that scale to the last bit.
    """
    n, y = Call(node), node.outputs[0]
    scales, have, want = e.constant_of(n.get("scales")), static_dims(n["X"]), static_dims(y)
    cropped = n.string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    if scales is None or not scales.size or have is None or want is None or cropped:
        return False
    axes = [a % len(have) for a in n.ints("axes") or range(len(have))]
    ratios = scales.astype(np.float32)
    moved = [(a, scale, have[a], want[a]) for a, scale in zip(axes, ratios, strict=True) if scale != 1]
    if any(old is None or new is None or np.float32(new) / np.float32(old) != scale for _, scale, old, new in moved):
        return False
    if all(int(float(scale) * (old or 0)) == new for _, scale, old, new in moved):
        return False
    node.resize_inputs(4)
    for unread in (1, 2):
        node.replace_input_with(unread, None)
    node.replace_input_with(3, e.ints(new for *_, new in moved if new is not None))
    node.attributes["axes"] = ir.AttrInt64s("axes", [a for a, *_ in moved])
    return True


_PROPAGATED = frozenset(("MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"))
"""Operators behind which ONNX Runtime moves a DequantizeLinear."""


def _unsigned_levels(e: Emitter, node: ir.Node) -> bool:
    """Quantize to uint8 instead of int8, with the zero point raised by 128: the same numbers; see quirks.INT8_LEVELS."""
    q = node.outputs[0]
    zero = e.constant_of(node.inputs[2]) if len(node.inputs) > 2 else None
    readers = [use.node for use in q.uses()]
    if zero is None or zero.dtype != np.int8 or zero.size != 1 or q.is_graph_output():
        return False
    if not all(is_op(n, "DequantizeLinear") and len(n.inputs) > 2 and n.inputs[2] is node.inputs[2] for n in readers):
        return False
    if not any(_is_propagated(n.outputs[0]) for n in readers):
        return False
    raised = e.const((zero.astype(np.int16) + 128).astype(np.uint8))
    for n in (node, *readers):
        n.replace_input_with(2, raised)
    node.attributes.pop("output_dtype", None)
    q.type = ir.TensorType(ir.DataType.UINT8)
    return True


def _plain_levels(e: Emitter, node: ir.Node) -> ir.Value | bool:
    """Dequantize int8 without a zero point: leave out one of 0, write out the formula of another; see quirks.INT8_LEVELS."""
    x, scale = node.inputs[:2]
    zero = e.constant_of(node.inputs[2]) if len(node.inputs) > 2 else None
    if x is None or zero is None or zero.dtype != np.int8 or zero.size != 1 or not _is_propagated(node.outputs[0]):
        return False
    if x.is_initializer() and not x.is_graph_input():
        return False
    if not zero.any():
        node.replace_input_with(2, None)
        return True
    dtype = node.outputs[0].dtype or ir.DataType.FLOAT
    return e.mul(e.sub(e.cast(x, dtype), int(zero.item())), scale)


def _is_propagated(value: ir.Value) -> bool:
    """Whether ONNX Runtime moves a DequantizeLinear behind a reader of its result, unless quantizers follow at once."""
    moved = [use.node.outputs[0] for use in value.uses() if use.node.op_type in _PROPAGATED]
    return any(y.is_graph_output() or any(use.node.op_type != "QuantizeLinear" for use in y.uses()) for y in moved)


_REWRITES: Mapping[str, Callable[[Emitter, ir.Node], ir.Value | bool | None]] = {
    "DequantizeLinear": _plain_levels,
    "Expand": _expand_to_nothing,
    "Pad": _pad_of_weight,
    "QuantizeLinear": _unsigned_levels,
    "Resize": _resize_by_sizes,
}


class AvoidRuntimeFaults(NodePass):
    """Rewrite Expand to no elements, Pad of a convolution's weight, Resize by scales that round two ways, and int8 levels.

    It rests on quirks.EXPAND_TO_NOTHING, quirks.PAD_OF_WEIGHT, quirks.RESIZE_ROUNDING and quirks.INT8_LEVELS. Nodes of
    unknown shape are left alone.
    """

    operators = _REWRITES
    label = "runtime"
    bodies = True

    def rewrite_node(self, e: Emitter, node: ir.Node) -> ir.Value | bool | None:
        """Rewrite one node."""
        return _REWRITES[node.op_type](e, node)


class WriteFloat64(NodePass):
    """Replace float64 nodes without a kernel by their function bodies; CUDA has kernels. See quirks.FLOAT64_ACTIVATIONS."""

    operators = CPU_WITHOUT_FLOAT64
    label = "float64"
    bodies = True

    def rewrite(self, model: ir.Model) -> bool:
        """Rewrite all nodes, and then those among what was written for them."""
        changed = False
        while super().rewrite(model):
            changed = True
        return changed

    def rewrite_node(self, e: Emitter, node: ir.Node) -> ir.Value | None:
        """Return the result of the function body of a float64 node."""
        has_kernels = self.target is not None and ir.DataType.DOUBLE in self.target.conv_dtypes
        if node.outputs[0].dtype is not ir.DataType.DOUBLE or has_kernels:
            return None
        result = emit_body(e, Call(node), CANONICAL_OPSET)[0][0]
        return None if result is None else e.typed(result, node.outputs[0])


class SeparateTransposes(NodePass):
    """Put an axis of one element between a Transpose and a MatMul that ONNX Runtime must not fuse; the last pass.

    It rests on quirks.FLOAT64_FUSED_MATMUL, quirks.FLOAT16_FUSED_MATMUL and, for the nodes of the model itself,
    quirks.VECTOR_TIMES_TRANSPOSE.
    """

    operators = ("MatMul",)
    label = "parted"
    bodies = True

    def rewrite_node(self, e: Emitter, node: ir.Node) -> ir.Value | None:
        """Multiply factors of higher rank."""
        y = node.outputs[0]
        factors = [v for v in node.inputs if v is not None and v.shape is not None]
        by_vector = len(factors[-1].shape or ()) == 1 if factors else False
        must_not_fuse = _always if by_vector else None if y.dtype is None else _MUST_NOT_FUSE.get(y.dtype)
        if must_not_fuse is None:
            return None
        fused = [v for v in factors if len(perm := _permutation(v)) > 1 and must_not_fuse(perm)]
        if len(factors) < 2 or not fused:
            return None
        rank = max(len(v.shape or ()) for v in factors)
        grows = any(len(v.shape or ()) == rank for v in fused)  # then all factors of this rank get the axis
        parted = [v for v in factors if v in fused or (grows and len(v.shape or ()) == rank)]
        product = e.matmul(*(e.unsqueeze(v, [0]) if v in parted else v for v in factors))
        return e.squeeze(product, [0]) if grows else product


def _permutation(value: ir.Value) -> Sequence[int]:
    """The permutation of the Transpose that computes a value; empty if none does."""
    node = value.producer()
    while is_op(node, "Identity", "Cast") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if not is_op(node, "Transpose"):
        return ()
    perm = Call(node).ints("perm")
    return tuple(reversed(range(len(value.shape or ())))) if perm is None else perm


def _moves_batch(perm: Sequence[int]) -> bool:
    """Whether the first axis becomes the last or second-last and the others stay in order."""
    axes = range(1, len(perm))
    return len(perm) > 2 and list(perm) in ([*axes[:-1], 0, axes[-1]], [*axes, 0])


def _always(_: Sequence[int]) -> bool:
    return True


_MUST_NOT_FUSE: Mapping[ir.DataType, Callable[[Sequence[int]], bool]] = {
    ir.DataType.FLOAT16: _moves_batch,
    ir.DataType.DOUBLE: _always,
}
"""Element type -> whether a Transpose by these axes must not be fused into a product."""
