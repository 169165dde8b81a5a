"""Write each operator that changed between opsets 7 and 28 in its form at opset 21.

`CONVERTERS` is the table; above it stands one small function per change. An operator that is not in it only gained element
types, broadcasting or attributes whose default is its old behavior.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.frontend.gradient_edges import TRAINING_DOMAIN
from onnx_convgrad.frontend.opset import converters_above_21 as above
from onnx_convgrad.frontend.opset import converters_attention as attention
from onnx_convgrad.frontend.opset import converters_fused as fused
from onnx_convgrad.frontend.opset import converters_layers as layers
from onnx_convgrad.frontend.opset import converters_ml as ml
from onnx_convgrad.frontend.opset import converters_own as own
from onnx_convgrad.frontend.opset import converters_training as training
from onnx_convgrad.frontend.opset.contrib import CONTRIB
from onnx_convgrad.frontend.opset.rewriter import Converter, Rewriter, is_used
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.nodes import REDUCTIONS
from onnx_convgrad.ir.notes import RATIO

_FLOAT_MAX = float(np.finfo(np.float32).max)


class Conversion(NamedTuple):
    """A change of an operator at opset `since`.

    Up to 21 the converter rewrites older nodes to the form that is valid at `since`; above 21 it rewrites nodes of opset
    `since` or newer to the form that was valid before.
    """

    since: int
    convert: Converter


# -- attributes that became inputs -------------------------------------------------------------------------------------


def _axes_input(h: Rewriter) -> None:
    if h.ints("axes") == ():  # meant "all", as a missing input does now
        h.drop("axes")
    h.set_inputs(h.required(0), h.attribute_as_input("axes"))


def _as_inputs(*names: str, vector: bool = False) -> Converter:
    """Move attributes behind the only operand."""

    def convert(h: Rewriter) -> None:
        h.set_inputs(h.required(0), *(h.attribute_as_input(name, vector=vector) for name in names))

    return convert


def _split_outputs(h: Rewriter) -> None:
    if h.operand(1) is None:
        h.set_attributes(num_outputs=len(h.node.outputs))


def _pad(h: Rewriter) -> None:
    data, number = h.required(0), h.float("value", 0.0)
    h.drop("value")
    constant = h.string("mode", "constant") == "constant"
    value = h.e.scalar(number, data) if constant and number != 0.0 else None
    h.set_inputs(data, h.attribute_as_input("pads"), value)


def _clip(h: Rewriter) -> None:
    data, double = h.required(0), h.dtype(h.operand(0), h.y) == ir.DataType.DOUBLE

    def bound(name: str, default: float) -> ir.Value | None:
        number = h.float(name, default)
        explicit = h.node.attributes.pop(name, None) is not None
        # Exporters write the defaults, which only bound a float64 that the author limited on purpose.
        if number == default and not (explicit and double):
            return None
        return h.e.scalar(number, data)

    h.set_inputs(data, bound("min", -_FLOAT_MAX), bound("max", _FLOAT_MAX))


def _dft(h: Rewriter) -> None:
    # The default axis changed with the move, from 1 to -2.
    axis = h.attribute_as_input("axis") or h.e.const(np.int64(1))
    h.set_inputs(h.required(0), h.operand(1), axis)


# -- operators whose meaning changed -----------------------------------------------------------------------------------


def _dropout_mask(h: Rewriter) -> None:
    """The mask had the type of the data; now it is a bool."""
    if len(h.node.outputs) < 2:
        return
    mask = h.node.outputs[1]
    if not is_used(mask):
        h.node.resize_outputs(1)
        return
    dtype = h.dtype(h.operand(0), h.y, mask)
    if dtype is None:
        h.append(mask, "CastLike", h.required(0))
    else:
        h.append(mask, "Cast", to=dtype)
    mask.type = ir.TensorType(ir.DataType.BOOL)


def _dropout_ratio(h: Rewriter) -> None:
    """Nodes before 12 only drop in training; ONNX Runtime refuses a ratio outside of [0, 1) as an operand in any mode."""
    ratio = h.float("ratio", 0.5)
    if 0 <= ratio < 1:
        h.set_inputs(h.required(0), h.attribute_as_input("ratio"))
    else:
        h.drop("ratio")
        h.node.meta[RATIO] = ratio


def _softmax(h: Rewriter) -> ir.Value | None:
    """Before 13 the input was flattened to a matrix at `axis` (default 1) and its rows were normalized."""
    x, axis = h.required(0), h.int("axis", 1)
    rows_are_one_axis = axis == -1
    if x.shape is not None:
        rank = x.shape.rank()
        at = axis + rank if axis < 0 else axis
        rows_are_one_axis |= at < rank and all(size == 1 for size in x.shape[at + 1 :])
        if at == rank - 1:
            axis = -1
    if rows_are_one_axis:
        h.set_attributes(axis=axis)
        return None
    return h.flattened(h.node.op_type, x, axis)


def _batchnorm_spatial(h: Rewriter) -> ir.Value | None:
    if h.int("spatial", 1):
        h.drop("spatial")
        return None
    if any(output.name for output in h.node.outputs[1:]):
        raise UnsupportedCase("it trains with statistics per position (spatial=0)")
    x, scale, bias, mean, var = (h.required(index) for index in range(5))
    deviation = h.e.op("Sqrt", h.e.add(var, h.float("epsilon", 1e-5)))
    normal = h.e.div(h.e.sub(x, mean), deviation)
    return h.e.add(h.e.mul(normal, scale), bias)


def _batchnorm_mode(h: Rewriter) -> None:
    """The number of outputs gave the mode: Y alone when testing, Y and four statistics when training."""
    outputs = h.node.outputs
    training = any(output.name for output in outputs[1:])
    if any(map(is_used, outputs[3:])):
        raise UnsupportedCase("its outputs saved_mean and saved_var, which no longer exist, are read")
    h.node.resize_outputs(min(3, len(outputs)) if training else 1)
    if training:
        h.set_attributes(training_mode=1)


def _scatter(h: Rewriter) -> None:
    h.node.op_type = "ScatterElements"


def _resized(h: Rewriter, x: ir.Value, scales: ir.Value, nearest_mode: str = "floor") -> ir.Value:
    mode = h.string("mode", "nearest")
    rounding = nearest_mode if mode == "nearest" else None
    return h.e.op(
        "Resize", x, None, scales, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode=rounding
    )


def _resize_10(h: Rewriter) -> ir.Value:
    """The only coordinates were asymmetric; the nearest source was rounded down if enlarging and up if reducing."""
    x, scales = h.required(0), h.required(1)
    known = constant_of(scales)
    if h.string("mode", "nearest") != "nearest" or (known is not None and bool((known >= 1).all())):
        return _resized(h, x, scales)
    if known is not None and bool((known <= 1).all()):
        return _resized(h, x, scales, "ceil")
    # One node rounds in one way only. Axes are independent, so that enlarging some and then reducing others is the same.
    one = h.e.const(np.float32(1))
    enlarged = _resized(h, x, h.e.op("Max", scales, one))
    return _resized(h, enlarged, h.e.op("Min", scales, one), "ceil")


_TF_HALF_PIXEL = {"floor": "round_prefer_ceil", "round_prefer_floor": "ceil"}
"""Way to round y -> the equal way to round y - 1/2, for the two of four ways that are in use."""


def _resize_11(h: Rewriter) -> None:
    """Empty tensors stood for omitted inputs, and there was a mode `tf_half_pixel_for_nn`."""
    x, roi, scales, sizes = h.required(0), h.operand(1), h.operand(2), h.operand(3)
    coordinates = h.string("coordinate_transformation_mode", "half_pixel")
    known_sizes = constant_of(sizes)
    if sizes is not None and (known_sizes is None or known_sizes.size):
        scales = None
    else:
        sizes = None
    h.set_inputs(x, roi if coordinates == "tf_crop_and_resize" else None, scales, sizes)
    nearest_mode = h.string("nearest_mode", "round_prefer_floor")
    nearest = h.string("mode", "nearest") == "nearest"
    if coordinates == "tf_half_pixel_for_nn" and nearest and nearest_mode in _TF_HALF_PIXEL:
        h.set_attributes(coordinate_transformation_mode="half_pixel", nearest_mode=_TF_HALF_PIXEL[nearest_mode])


def _roi_align(h: Rewriter) -> None:
    if "coordinate_transformation_mode" not in h.node.attributes:
        h.set_attributes(coordinate_transformation_mode="output_half_pixel")


def _group_norm(h: Rewriter) -> None:
    """Scale and bias were per group. The graph repeats them per channel, so that the stored parameter stays."""
    x, scale, bias, e = h.required(0), h.required(1), h.required(2), h.e
    repeats = e.size_div(e.dim(x, 1), h.int("num_groups", 1))
    if repeats != 1:
        wide = (e.op("Expand", e.reshape(v, [-1, 1]), e.vector([1, repeats])) for v in (scale, bias))
        h.set_inputs(x, *(e.reshape(v, [-1]) for v in wide))


def _mean_variance(h: Rewriter) -> ir.Value | None:
    """`across_channels` gave the axes, always with the batch; the division was optional."""
    if "axes" in h.node.attributes:
        return None
    x = h.required(0)
    rank = 4 if x.shape is None else x.shape.rank()
    axes = [axis for axis in range(rank) if axis != 1 or h.int("across_channels", 0)]
    if h.int("normalize_variance", 1):
        return h.e.op("MeanVarianceNormalization", x, axes=axes)
    return h.e.sub(x, h.e.op("ReduceMean", x, h.e.ints(axes)))


def _image_scaler(h: Rewriter) -> ir.Value:
    """scale * x + bias, with a bias per channel: experimental until opset 9, and used by converters from CoreML."""
    x = h.required(0)
    bias = h.e.const(np.array(h.attributes().get("bias") or (0.0,), dtype=np.float32).reshape(-1, 1, 1))
    if h.dtype(x, h.y) != ir.DataType.FLOAT:
        bias = h.e.op("CastLike", bias, x)
    return h.e.add(h.e.mul(x, h.float("scale", 1.0)), bias)


def _exponent(h: Rewriter) -> None:
    """Cast an exponent of an integer type that ONNX Runtime does not take."""
    y = h.required(1)
    if not (y.dtype is None or y.dtype.is_floating_point() or y.dtype in (ir.DataType.INT32, ir.DataType.INT64)):
        h.set_inputs(h.required(0), h.e.cast(y, ir.DataType.INT64))


CONVERTERS: dict[str, tuple[Conversion, ...]] = {
    **dict.fromkeys(REDUCTIONS, (Conversion(18, _axes_input),)),
    "ReduceSum": (Conversion(13, _axes_input),),
    "Squeeze": (Conversion(13, _axes_input),),
    "Unsqueeze": (Conversion(13, _as_inputs("axes")),),
    "Split": (Conversion(13, _as_inputs("split")), Conversion(18, _split_outputs)),
    "Slice": (Conversion(10, _as_inputs("starts", "ends", "axes")),),
    "Pad": (Conversion(11, _pad),),
    "Clip": (Conversion(11, _clip),),
    "Dropout": (Conversion(10, _dropout_mask), Conversion(12, _dropout_ratio)),
    "TopK": (Conversion(10, _as_inputs("k", vector=True)),),
    # Upsample ends at opset 10; it becomes the Resize of 13, whose inputs are optional.
    "Upsample": (
        Conversion(9, _as_inputs("scales")),
        Conversion(13, lambda h: _resized(h, h.required(0), h.required(1))),
    ),
    "Resize": (Conversion(11, _resize_10), Conversion(13, _resize_11)),
    "Softmax": (Conversion(13, _softmax),),
    "LogSoftmax": (Conversion(13, _softmax),),
    "Hardmax": (Conversion(13, _softmax),),
    "BatchNormalization": (Conversion(9, _batchnorm_spatial), Conversion(14, _batchnorm_mode)),
    "Scatter": (Conversion(11, _scatter),),
    "Scan": (Conversion(9, layers.scan_over_batch),),
    "RoiAlign": (Conversion(16, _roi_align),),
    "GridSample": (Conversion(20, own.grid_modes),),
    "DFT": (Conversion(20, _dft),),
    "GroupNormalization": (Conversion(21, _group_norm),),
    "MeanVarianceNormalization": (Conversion(9, _mean_variance),),
    "ImageScaler": (Conversion(10, _image_scaler),),
    # Above the canonical opset, newest last.
    **{name: (Conversion(22, above.pool),) for name in ("AveragePool", "LpPool", "MaxPool")},
    "Cast": (Conversion(23, above.cast),),
    "CastLike": (Conversion(24, above.cast),),
    "Celu": (Conversion(28, above.celu),),
    "CumProd": (Conversion(26, above.cum_prod),),
    "DequantizeLinear": (Conversion(23, above.dequantize),),
    "QuantizeLinear": (Conversion(23, above.quantize),),
    "Attention": (Conversion(23, attention.masked_rows),),
    "RMSNormalization": (Conversion(23, above.rms_norm),),
    "Swish": (Conversion(24, above.swish),),
    "TensorScatter": (Conversion(24, above.tensor_scatter),),
    "Range": (Conversion(27, above.range_),),
    "Mod": (Conversion(28, above.mod),),
    "SpaceToDepth": (Conversion(28, above.space_to_depth),),
}
"""Operator -> its changes, oldest first."""

PLAIN: dict[str, Converter] = {**dict.fromkeys(("GRU", "LSTM", "RNN"), layers.batch_first), "Pow": _exponent}
"""Operator -> a converter for its forms that ONNX Runtime does not run, at any opset."""

FUSED: dict[tuple[str, str], Converter] = {
    **{("com.microsoft", op): convert for op, convert in CONTRIB.items()},
    ("", "SimplifiedLayerNormalization"): fused.simplified_layer_norm,
    ("ai.onnx.ml", "LinearClassifier"): ml.linear_classifier,
    ("ai.onnx.ml", "LinearRegressor"): ml.linear_regressor,
    (attention.PREVIEW_DOMAIN, "FlexAttention"): attention.flex_attention,
    (TRAINING_DOMAIN, "Adagrad"): training.adagrad,
    (TRAINING_DOMAIN, "Adam"): training.adam,
    (TRAINING_DOMAIN, "Momentum"): training.momentum,
}
"""(Domain, operator) -> its converter: operators of ONNX Runtime, linear models, FlexAttention, and optimizers.

The first line of a converter's docstring says what the operator becomes, for the command `rules`.
"""
