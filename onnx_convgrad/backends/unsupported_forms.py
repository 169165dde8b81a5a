"""Rewrite nodes whose form a target lacks: BatchNormalization in training, asymmetric padding, some grouped convolutions.

Differentiation keeps the model's own nodes, which are written for any provider. CUDA's kernels (see
`onnx_convgrad.backends.cuda.cuda_kernels`) and the web's have no BatchNormalization in training mode, none with statistics
of another type than its data, and no different padding at the two ends in Conv and ConvTranspose. The web's on WebGPU
compute a grouped Conv wrongly if a group has more than four features and not a multiple of four, and have none over three
axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.facts import is_view
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import is_constant
from onnx_convgrad.ir.convolution import biased, window
from onnx_convgrad.ir.emit import Emitter, static_dims
from onnx_convgrad.ir.geometry import Window
from onnx_convgrad.ir.half_sums import channel_products, channel_sum, multiplies_rows
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.passes import NodePass

_END = 2**63 - 1


class ReplaceUnsupportedForms(NodePass):
    """Rewrite BatchNormalization, Conv and ConvTranspose into forms that the target has; nothing for the CPU.

    It rests on quirks.CUDA_BATCH_STATISTICS, quirks.CUDA_ASYMMETRIC_PADS, quirks.CUDA_HALF_BIAS,
    quirks.WEBGPU_GROUPED_CONV and quirks.WEBGPU_CONV_OF_THREES. Nodes of unknown
    shape are left alone.
    """

    operators = ("BatchNormalization", "Conv", "ConvTranspose")
    label = "supported"
    bodies = True

    def rewrite_node(self, e: Emitter, node: ir.Node) -> ir.Value | bool | None:
        """Rewrite one node."""
        if node.op_type == "BatchNormalization":
            return not e.target.batch_statistics and _batch_normalization(e, node)
        if node.op_type == "ConvTranspose":
            return None if e.target.asymmetric_pads else _conv_transpose(e, node)
        changed = not e.target.asymmetric_pads and _conv(e, node)
        other = _bias_apart(e, node) if e.target.grouped_conv else _grouped_conv(e, node)
        return changed if other is None else other


# -- BatchNormalization ------------------------------------------------------------------------------------------------


def _batch_normalization(e: Emitter, node: ir.Node) -> bool:
    """Compute the statistics outside: with given ones of the type of x, every provider has a kernel."""
    x, scale, bias, *stored = node.inputs[:5]
    if x is None or scale is None or bias is None or x.shape is None or any(v is None for v in stored):
        return False
    mean, variance = (v for v in stored if v is not None)
    if Call(node).int("training_mode", 0):
        mean, variance = _statistics(e, node, x, mean, variance)
    elif len({v.dtype for v in (x, scale, bias, mean, variance)}) == 1:
        return False
    operands = [scale, bias, mean, variance]
    if any(v.dtype != x.dtype for v in operands):
        operands = _in_type_of(e, node, x, *operands)
    node.attributes.pop("training_mode", None)
    node.attributes.pop("momentum", None)
    node.resize_outputs(1)
    for index, operand in enumerate(operands, 1):
        node.replace_input_with(index, operand)
    return True


def _statistics(
    e: Emitter, node: ir.Node, x: ir.Value, old_mean: ir.Value, old_variance: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Mean and variance of the batch, centered before squaring; replaces the node's running statistics."""
    mean, variance = _moments_for(e, x)(e, x)
    kept = Call(node).float("momentum", 0.9)
    for output, batch, old in zip(node.outputs[1:], (mean, variance), (old_mean, old_variance), strict=False):
        if not output.uses() and not output.is_graph_output():
            continue
        fresh = batch if old.dtype is None else e.cast(batch, old.dtype)
        running = fresh if kept == 0 else e.add(e.mul(old, kept), e.mul(fresh, 1 - kept))
        if output.is_graph_output() and (running is batch or running.is_graph_output()):
            running = e.copied(running)
        output.replace_all_uses_with(e.typed(running, output), replace_graph_outputs=True)
        if running.is_graph_output():
            running.name, output.name = output.name, None
    return mean, variance


def _moments_for(e: Emitter, x: ir.Value) -> Callable[[Emitter, ir.Value], tuple[ir.Value, ir.Value]]:
    """The fastest form of the moments."""
    if not _has_rows(e, x):
        return _moments
    batch, channels, *sizes = static_dims(x) or [None, None]
    if multiplies_rows(e, x):
        several = batch is None or batch >= _FEWEST_SAMPLES
        return _product_moments if several and _is_convolved(x) else _row_moments
    turns = x.dtype == ir.DataType.FLOAT16 and batch and math.prod(d or 1 for d in sizes) <= _TURNED_ROW
    return _turned_moments if turns and (channels or 0) >= _TURNED_CHANNELS else _row_moments


def _is_convolved(x: ir.Value | None) -> bool:
    """Whether x is the result of a convolution, or of the product of one tap."""
    node = None if x is None else x.producer()
    if node is not None and is_view(node):
        return _is_convolved(node.inputs[0])
    return is_op(node, "Conv", "ConvTranspose", "MatMul")


def _moments(e: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Mean and variance per channel in three passes: the mean, the centered entries, and their squares."""
    rank = e.rank(x)
    axes = [0, *range(2, rank)] if rank > 1 else [0]
    data = e.cast(x, ir.DataType.FLOAT) if x.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else x
    mean = e.reduce("ReduceMean", data, axes, keepdims=False)
    centered = e.sub(data, e.unsqueeze(mean, range(1, rank - 1)))
    total = e.reduce("ReduceSumSquare", centered, axes, keepdims=False)
    return mean, e.averaged(total, e.size_mul(*(e.dim(x, axis) for axis in axes)))


_SHORTEST_ROW = 32
"""Smallest number of entries of a channel of a sample for which CUDA's LayerNormalization is fast."""


def _has_rows(e: Emitter, x: ir.Value) -> bool:
    """Whether CUDA computes the moments of the rows of x, one per sample and channel, in one pass."""
    sizes = static_dims(x)
    if e.target.name != "cuda" or x.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16) or sizes is None:
        return False
    points = [0 if d is None else d for d in sizes[1:]]
    return len(sizes) > 2 and all(points) and math.prod(points[1:]) >= _SHORTEST_ROW


def _row_moments(e: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Mean and variance per channel from the moments of rows, which LayerNormalization returns in float32:

    mean = mean of m[n], variance = mean of v[n] + (m[n] - mean)^2    (Chan, Golub and LeVeque 1979)
    """
    _, channels, *sizes = (d or 1 for d in static_dims(x) or ())
    points = math.prod(sizes)
    means, inverses = (e.reshape(v, [-1, channels]) for v in _moments_of_rows(e, e.reshape(x, [-1, points])))
    mean = e.reduce("ReduceMean", means, [0], keepdims=False)
    each = e.add(e.op("Reciprocal", e.square(inverses)), e.square(e.sub(means, mean)))
    return mean, e.reduce("ReduceMean", each, [0], keepdims=False)


def _moments_of_rows(e: Emitter, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Mean and inverse deviation of each row of a matrix, in float32."""
    ones = e.const(np.ones(e.dim(rows, 1)), rows.dtype or ir.DataType.FLOAT)
    _, means, inverses = e.ops("LayerNormalization", rows, ones, outputs=3, axis=-1, epsilon=0.0)
    for value in (means, inverses):
        value.type = ir.TensorType(ir.DataType.FLOAT)
    return means, inverses


_TURNED_ROW = 64
"""Largest number of entries of a channel of a sample for which laying the samples side by side is faster, in float16.

On an H100, microseconds with and without, for a batch of 64: 2048 channels of 7 x 7 44 and 120, 512 of 7 x 7 17 and 33, but
256 of 14 x 14 29 and 30, 1024 of 14 x 14 155 and 111.
"""

_TURNED_CHANNELS = 512
"""Fewest channels that keep a GPU busy with a row each."""


def _turned_moments(e: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Mean and variance per channel, with its entries in all samples as one row of a LayerNormalization."""
    batch, channels, *sizes = (d or 1 for d in static_dims(x) or ())
    points = math.prod(sizes)
    rows = e.reshape(e.transpose(e.reshape(x, [batch, channels, points]), [1, 0, 2]), [channels, batch * points])
    mean, inverse = (e.reshape(value, [channels]) for value in _moments_of_rows(e, rows))
    return mean, e.op("Reciprocal", e.square(inverse))


_FEWEST_SAMPLES = 8
"""Fewest samples whose rounding errors average out well enough."""

_LARGEST = 65504.0
"""The largest number of float16."""

_SMALLEST_SHARE = 2.0**-12
"""Variances are raised to this share of the squared mean: the errors of `_product_moments` are about as large."""


def _product_moments(e: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Mean and variance per channel from sums of x and of its squares: float16 for each row, added up in float32.

    On an H100 LayerNormalization takes twice as long: 40 instead of 19 microseconds for [64, 64, 56, 56]. Its variances have
    the digits of float32; these have errors of about (1 + (mean / deviation)^2) / 3000 / sqrt(N). The results of a
    convolution seldom have a mean that is much larger than the deviation, or a row of a root mean square above 255; where
    they have, the variance stays positive and finite.
    """
    mean = channel_sum(e, x, mean=True)
    squared = e.op("Min", channel_products(e, x, x, mean=True), e.scalar(_LARGEST, mean))
    of_mean = e.square(mean)
    return mean, e.op("Max", e.sub(squared, of_mean), e.mul(of_mean, _SMALLEST_SHARE))


def _in_type_of(
    e: Emitter, node: ir.Node, x: ir.Value, scale: ir.Value, bias: ir.Value, mean: ir.Value, variance: ir.Value
) -> list[ir.Value]:
    """The operands in the type of x; a narrow type cannot hold every variance, so the factor is computed in float32."""
    wide = ir.DataType.FLOAT
    shifted = e.add(e.cast(variance, wide), Call(node).float("epsilon", 1e-5))
    factor = e.div(e.cast(scale, wide), e.op("Sqrt", shifted))
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.0)
    return [e.cast(v, x.dtype or wide) for v in (factor, bias, mean, e.full_like(factor, 1))]


# -- padding -----------------------------------------------------------------------------------------------------------


def _uneven(node: ir.Node) -> Window | None:
    """The window of a convolution if its padding differs between begin and end, else `None`."""
    win = window(Call(node))
    return win if win.begin != win.end else None


def _conv(e: Emitter, node: ir.Node) -> bool:
    """Pad beforehand."""
    win, x = _uneven(node), node.inputs[0]
    if win is None or x is None:
        return False
    node.replace_input_with(0, e.pad(x, win.begin, win.end, range(2, 2 + win.rank)))
    node.attributes["pads"] = ir.AttrInt64s("pads", [0] * 2 * win.rank)
    return True


def _bias_apart(e: Emitter, node: ir.Node) -> ir.Value | None:
    """Add a bias in float16 in a pass of its own, see quirks.CUDA_HALF_BIAS; the runtime would merge a constant one."""
    n, y = Call(node), node.outputs[0]
    bias = n.get("B")
    halves = e.target.fast_halves and y.dtype == ir.DataType.FLOAT16
    if not halves or bias is None or y.shape is None or is_constant(bias):
        return None
    plain = e.typed(e.conv(n["X"], n["W"], **n.attributes()), y)
    return biased(e, plain, bias, len(y.shape) - 2)


def _conv_transpose(e: Emitter, node: ir.Node) -> ir.Value | None:
    """Trim the result instead: that is the effect of padding in a transposed convolution."""
    win = _uneven(node)
    if win is None or "output_shape" in node.attributes or node.outputs[0].shape is None:
        return None
    even = tuple(map(min, win.begin, win.end))
    attributes = {**Call(node).attributes(), "pads": (*even, *even), "auto_pad": None}
    full = e.op("ConvTranspose", *node.inputs, **attributes)
    begin = [low - kept for low, kept in zip(win.begin, even, strict=True)]
    lost = [high - kept for high, kept in zip(win.end, even, strict=True)]
    return e.slice(full, begin, [-rows if rows else _END for rows in lost], range(2, 2 + win.rank))


# -- groups ------------------------------------------------------------------------------------------------------------

_VECTOR = 4
"""Features of a group that WebGPU's kernel computes together."""


def _filled_channels(e: Emitter, n: Call, x: ir.Value, w: ir.Value, sizes: list[int]) -> ir.Value | None:
    """Fill the channels up to a multiple of four with zeros, see quirks.WEBGPU_CONV_OF_THREES."""
    features, channels, *kernel = sizes
    wrong = channels > 3 and channels % 3 == 0 and channels % _VECTOR and features % _VECTOR == 0
    if len(sizes) != 4 or not wrong or set(kernel) == {1}:
        return None
    more = -channels % _VECTOR
    bias = n.get("B")
    return e.conv(e.pad(x, [0], [more], [1]), e.pad(w, [0], [more], [1]), bias, **n.attributes())


def _grouped_conv(e: Emitter, node: ir.Node) -> ir.Value | None:
    """Fill the features of a group up to a multiple of four with zeros; over three axes, convolve the groups one by one."""
    n, (x, w, *bias) = Call(node), node.inputs
    groups, sizes = n.int("group", 1), None if w is None else static_dims(w)
    if x is None or w is None or sizes is None or None in sizes or x.shape is None:
        return None
    if groups == 1:
        return _filled_channels(e, n, x, w, [size or 0 for size in sizes])
    features, *rest = (size or 0 for size in sizes)
    each = features // groups
    if len(sizes) == 5:
        return _one_by_one(e, node, groups)
    if each <= _VECTOR or each % _VECTOR == 0:
        return None
    wide = each + -each % _VECTOR

    def filled(v: ir.Value, sizes: list[int]) -> ir.Value:
        split = e.reshape(v, [groups, each, *sizes])
        return e.reshape(e.pad(split, [0], [wide - each], [1]), [groups * wide, *sizes])

    operands = [filled(w, rest), *(filled(b, []) for b in bias if b is not None)]
    y = e.conv(x, *operands, **n.attributes())
    points = [e.dim(y, axis) for axis in range(2, len(sizes))]
    batch = e.dim(x, 0)
    kept = e.slice(e.reshape(y, [batch, groups, wide, *points]), [0], [each], [2])
    return e.reshape(kept, [batch, features, *points])


def _one_by_one(e: Emitter, node: ir.Node, groups: int) -> ir.Value:
    """A convolution for each group, of the same attributes."""
    attributes = {**Call(node).attributes(), "group": 1}
    operands = [v for v in node.inputs if v is not None]
    parts = [
        e.ops("Split", v, outputs=groups, axis=0 if at else 1, num_outputs=groups) for at, v in enumerate(operands)
    ]
    return e.concat([e.conv(*some, **attributes) for some in zip(*parts, strict=True)], 1)
