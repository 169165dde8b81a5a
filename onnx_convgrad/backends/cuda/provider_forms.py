"""Forward nodes that a provider refuses, brought into a form that it runs.

A graph that is differentiated keeps the nodes of the model, and these are written for any provider. CUDA's kernels (see
`onnx_convgrad.backends.cuda.cuda_kernels`) lack three of their forms: BatchNormalization in training mode, one
whose statistics are of another type than its data, and uneven padding in Conv and ConvTranspose. And ONNX Runtime itself
takes an Expand to no elements for one that changes nothing, any padded operand of a Conv for its data, and a Resize for
smaller than it makes it, and does not survive certain products of float16, or refuses them in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter, static_dims
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import origin_of
from onnx_convgrad.ir.targets import Target

__all__ = ["fit_provider", "part_products"]

_END = 2**63 - 1


def fit_provider(graph: ir.Graph, target: Target) -> None:
    """Rewrite, in place, the nodes of `graph` whose form the target lacks; values and names stay.

    Shapes that are not known leave a node as it is.
    """
    e = Emitter(graph, opsets=graph.opset_imports, target=target)
    for node in list(graph):
        if node.domain:
            continue
        e.anchor, start = node, len(e.emitted)
        e.origin = origin_of(node)
        if node.op_type == "Expand":
            _expand_to_nothing(e, node)
        elif node.op_type == "Pad":
            _pad_of_weight(e, node)
        elif node.op_type == "Resize":
            _resize_by_sizes(e, node)
        elif node.op_type == "BatchNormalization" and not target.batch_statistics:
            _batch_normalization(e, node)
        elif node.op_type == "Conv" and not target.asymmetric_pads:
            _conv(e, node)
        elif node.op_type == "ConvTranspose" and not target.asymmetric_pads:
            _conv_transpose(e, node)
        if not e.origin:  # nodes of gradients are named last
            for count, made in enumerate(e.emitted[start:], 1):
                made.name = f"{node.name}/{target.name}_{count}"


# -- MatMul ------------------------------------------------------------------------------------------------------------


def part_products(graph: ir.Graph) -> None:
    """Put an axis between a Transpose and a MatMul that reads it, where ONNX Runtime must not make one node of both.

    Up to 1.24 it has no kernel for that node in float64, and refuses the model. In float16 1.32 dies while it loads the
    model, if the first axis is moved back and the other factor is a constant.
    """
    e = Emitter(graph, opsets=graph.opset_imports)
    for node in list(graph):
        y = node.outputs[0]
        fuses = _FUSES.get(y.dtype) if is_op(node, "MatMul") and y.dtype is not None else None
        if fuses is None:
            continue
        factors = [v for v in node.inputs if v is not None and v.shape is not None]
        fused = [v for v in factors if (perm := _arrangement(v)) and fuses(perm)]
        if len(factors) < 2 or not fused:
            continue
        e.anchor, e.origin, start = node, origin_of(node), len(e.emitted)
        rank = max(len(v.shape or ()) for v in factors)
        grows = any(
            len(v.shape or ()) == rank for v in fused
        )  # the product has an axis more, and so has all of its rank
        parted = [v for v in factors if v in fused or (grows and len(v.shape or ()) == rank)]
        product = e.matmul(*(e.unsqueeze(v, [0]) if v in parted else v for v in factors))
        _replace(e, node, e.typed(e.squeeze(product, [0]) if grows else product, y))
        if not e.origin:
            for count, made in enumerate(e.emitted[start:], 1):
                made.name = f"{node.name}/parted_{count}"


def _arrangement(value: ir.Value) -> Sequence[int] | None:
    """How the axes of a transposed value are arranged."""
    node = value.producer()
    while is_op(node, "Identity", "Cast") and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return Call(node).ints("perm") if is_op(node, "Transpose") else None


def _moves_batch(perm: Sequence[int]) -> bool:
    """Whether what was the first axis is the last or last but one."""
    axes = range(1, len(perm))
    return len(perm) > 2 and list(perm) in ([*axes[:-1], 0, axes[-1]], [*axes, 0])


_FUSES: Mapping[ir.DataType, Callable[[Sequence[int]], bool]] = {
    ir.DataType.FLOAT16: _moves_batch,
    ir.DataType.DOUBLE: lambda _: True,
}
"""The arrangements that must not become one with a product, for each type."""


# -- Expand ------------------------------------------------------------------------------------------------------------


def _expand_to_nothing(e: Emitter, node: ir.Node) -> None:
    """ONNX Runtime 1.32 leaves an Expand out where the sizes wanted are 0 and the operand's 1: it takes 0 for at most 1."""
    (x, shape), (old,) = node.inputs, node.outputs
    sizes = e.constant_of(shape)
    if x is None or x.shape is None or x.dtype is None or sizes is None or 0 not in sizes:
        return
    if None in (have := static_dims(x) or [None]):
        return
    result = np.broadcast_shapes(tuple(d for d in have if d is not None), tuple(sizes))
    value = ir.tensor(np.zeros(1, x.dtype.numpy()), x.dtype)
    _replace(e, node, e.typed(e.op("ConstantOfShape", e.ints(result), value=value), old))


# -- Pad ---------------------------------------------------------------------------------------------------------------

_MOVES = frozenset(("Identity", "Transpose"))
"""Nodes that ONNX Runtime may remove first, and so bring a Pad before a Conv."""


def _pad_of_weight(e: Emitter, node: ir.Node) -> None:
    """ONNX Runtime 1.32 makes a Pad before a Conv attributes of the Conv, also where it pads the weight; none with axes."""
    value = node.outputs[0]
    if len(node.inputs) > 3 or value.shape is None or not _is_weight(value):
        return
    node.resize_inputs(4)
    node.replace_input_with(3, e.ints(range(len(value.shape))))


def _is_weight(value: ir.Value) -> bool:
    """Whether a Conv takes the value, or an arrangement of it, as another operand than its data."""
    for use in value.uses():
        if use.node.op_type == "Conv" and use.idx > 0:
            return True
        if use.node.op_type in _MOVES and _is_weight(use.node.outputs[0]):
            return True
    return False


# -- Resize ------------------------------------------------------------------------------------------------------------


def _resize_by_sizes(e: Emitter, node: ir.Node) -> None:
    """ONNX Runtime 1.32 rounds sizes * scales to float32, but declares them as rounded down from float64.

    Where both differ, as for 12 * 0.58333333, sizes say the same as scales, if their quotient is that scale to the last bit.
    """
    n, y = Call(node), node.outputs[0]
    scales, have, want = e.constant_of(n.get("scales")), static_dims(n["X"]), static_dims(y)
    cropped = n.string("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize"
    if scales is None or not scales.size or have is None or want is None or cropped:
        return
    ratios = scales.astype(np.float32)
    axes = [a % len(have) for a in n.ints("axes") or range(len(have))]
    moved = [(a, scale, have[a], want[a]) for a, scale in zip(axes, ratios, strict=True) if scale != 1]
    if any(old is None or new is None or np.float32(new) / np.float32(old) != scale for _, scale, old, new in moved):
        return
    if any(int(float(scale) * old) != new for _, scale, old, new in moved if old is not None):
        node.resize_inputs(4)
        for unread in (1, 2):
            node.replace_input_with(unread, None)
        node.replace_input_with(3, e.ints(new for _, _, _, new in moved if new is not None))
        node.attributes["axes"] = ir.AttrInt64s("axes", [a for a, *_ in moved])


# -- BatchNormalization ------------------------------------------------------------------------------------------------


def _batch_normalization(e: Emitter, node: ir.Node) -> None:
    """With given statistics it is one affine map of x, which every provider has as a kernel."""
    x, scale, bias, *stored = node.inputs[:5]
    if x is None or scale is None or bias is None or x.shape is None or any(v is None for v in stored):
        return
    mean, variance = (v for v in stored if v is not None)
    if Call(node).int("training_mode", 0):
        mean, variance = _statistics(e, node, x, mean, variance)
    elif len({v.dtype for v in (x, scale, bias, mean, variance)}) == 1:
        return
    if any(v.dtype != x.dtype for v in (scale, bias, mean, variance)):
        scale, bias, mean, variance = _in_type_of(e, node, x, scale, bias, mean, variance)
    node.attributes.pop("training_mode", None)
    node.attributes.pop("momentum", None)
    node.resize_outputs(1)
    for index, operand in enumerate((scale, bias, mean, variance), 1):
        node.replace_input_with(index, operand)


def _statistics(
    e: Emitter, node: ir.Node, x: ir.Value, old_mean: ir.Value, old_variance: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Mean and variance of the batch, centred before squaring; the running ones take the place of the node's."""
    assert x.shape is not None
    rank = len(x.shape)
    axes = [0, *range(2, rank)] if rank > 1 else [0]
    data = e.cast(x, ir.DataType.FLOAT) if x.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else x
    mean = e.reduce("ReduceMean", data, axes, keepdims=False)
    centred = e.sub(data, e.unsqueeze(mean, range(1, rank - 1)))
    total = e.reduce("ReduceSumSquare", centred, axes, keepdims=False)
    count = e.size_mul(*(e.dim(x, axis) for axis in axes))
    variance = e.mul(total, 1 / max(count, 1)) if isinstance(count, int) else e.div(total, e.size_as(count, total))
    kept = Call(node).float("momentum", 0.9)
    for output, batch, old in zip(node.outputs[1:], (mean, variance), (old_mean, old_variance), strict=False):
        if not output.uses() and not output.is_graph_output():
            continue
        fresh = batch if old.dtype is None else e.cast(batch, old.dtype)
        running = fresh if kept == 0 else e.add(e.mul(old, kept), e.mul(fresh, 1 - kept))
        if output.is_graph_output() and (running is batch or running.is_graph_output()):
            running = e.op("Identity", running)
        output.replace_all_uses_with(e.typed(running, output), replace_graph_outputs=True)
        if running.is_graph_output():
            running.name, output.name = output.name, None
    return mean, variance


def _in_type_of(
    e: Emitter,
    node: ir.Node,
    x: ir.Value,
    scale: ir.Value,
    bias: ir.Value,
    mean: ir.Value,
    variance: ir.Value,
) -> list[ir.Value]:
    """Operands in x's type: a narrow one does not hold every variance, so the factor is made in float32."""
    assert x.dtype is not None
    wide = ir.DataType.FLOAT
    shifted = e.add(e.cast(variance, wide), Call(node).float("epsilon", 1e-5))
    factor = e.div(e.cast(scale, wide), e.op("Sqrt", shifted))
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.0)
    return [e.cast(v, x.dtype) for v in (factor, bias, mean, e.full_like(factor, 1))]


# -- padding -----------------------------------------------------------------------------------------------------------


def _uneven(node: ir.Node) -> list[int] | None:
    """The padding of a convolution, if begin and end differ."""
    amounts = list(Call(node).ints("pads") or ())
    half = len(amounts) // 2
    return amounts if amounts[:half] != amounts[half:] else None


def _conv(e: Emitter, node: ir.Node) -> None:
    pads, x = _uneven(node), node.inputs[0]
    if pads is None or x is None:
        return
    half = len(pads) // 2
    node.replace_input_with(0, e.pad(x, pads[:half], pads[half:], range(2, 2 + half)))
    node.attributes["pads"] = ir.AttrInt64s("pads", [0] * len(pads))


def _conv_transpose(e: Emitter, node: ir.Node) -> None:
    """Padding of a transposed convolution is what its result loses: cut it off afterwards."""
    pads, old = _uneven(node), node.outputs[0]
    if pads is None or "output_shape" in node.attributes or old.shape is None:
        return
    half = len(pads) // 2
    even = [min(pair) for pair in zip(pads[:half], pads[half:], strict=True)]
    attributes = {**Call(node).attributes(), "pads": (*even, *even), "auto_pad": None}
    full = e.op("ConvTranspose", *node.inputs, **attributes)
    axes: Sequence[int] = range(2, 2 + half)
    begin = [low - kept for low, kept in zip(pads[:half], even, strict=True)]
    lost = [high - kept for high, kept in zip(pads[half:], even, strict=True)]
    # from behind: the size of `old` is not to be asked for, it goes away
    ends = [-rows if rows else _END for rows in lost]
    _replace(e, node, e.typed(e.slice(full, begin, ends, axes), old))


def _replace(e: Emitter, node: ir.Node, new: ir.Value) -> None:
    """Put `new` in the place of the node's result, under its name."""
    (old,) = node.outputs
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    new.name, old.name = old.name, None
    e.graph.remove(node, safe=True)
