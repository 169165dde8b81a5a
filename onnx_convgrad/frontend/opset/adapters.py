"""The operators that changed between opsets 7 and 28, and how each old or newer form is written at opset 21.

`ADAPTERS` is the table; everything above it is one small function per change. An operator that is not in it only gained
element types, broadcasting or attributes whose default is its old behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_convgrad.frontend.gradient_edges import TRAINING_DOMAIN
from onnx_convgrad.frontend.opset import adapters_above_21 as above
from onnx_convgrad.frontend.opset import adapters_experimental as experimental
from onnx_convgrad.frontend.opset import adapters_fused as fused
from onnx_convgrad.frontend.opset import adapters_training as training
from onnx_convgrad.frontend.opset.rewriter import Rewriter, Unsupported

__all__ = ["ADAPTERS", "FUSED", "Adapter", "Step"]

Adapter: TypeAlias = Callable[[ir.Node, int, Rewriter], None]

_FLOAT_MAX = float(np.finfo(np.float32).max)


class Step(NamedTuple):
    """A change of an operator at opset `since`.

    Up to 21 the adapter rewrites nodes from before `since` to the form valid there; above 21 it rewrites nodes from
    `since` on to the form valid before it.
    """

    since: int
    adapt: Adapter


# -- attributes that became inputs -------------------------------------------------------------------------------------


def _axes_input(node: ir.Node, version: int, h: Rewriter) -> None:
    attribute = node.attributes.get("axes")
    if attribute is not None and not attribute.is_ref() and not attribute.as_ints():
        # An empty list meant "all"; that is now said by leaving the input out.
        del node.attributes["axes"]
    h.set_inputs(h.required(0), h.pop_as_input("axes"))


def _unsqueeze(node: ir.Node, version: int, h: Rewriter) -> None:
    h.set_inputs(h.required(0), h.pop_as_input("axes"))


def _split(node: ir.Node, version: int, h: Rewriter) -> None:
    h.set_inputs(h.required(0), h.pop_as_input("split"))


def _split_outputs(node: ir.Node, version: int, h: Rewriter) -> None:
    if h.input(1) is None:
        h.set_attribute("num_outputs", len(node.outputs))


def _slice(node: ir.Node, version: int, h: Rewriter) -> None:
    h.set_inputs(h.required(0), *(h.pop_as_input(name) for name in ("starts", "ends", "axes")))


def _pad(node: ir.Node, version: int, h: Rewriter) -> None:
    data, number = h.required(0), h.get_float("value", 0.0)
    node.attributes.pop("value", None)
    constant = h.get_string("mode", "constant") == "constant"
    value = h.scalar(number, data, "pad_value", node.outputs[0]) if constant and number != 0.0 else None
    h.set_inputs(data, h.pop_as_input("pads"), value)


def _clip(node: ir.Node, version: int, h: Rewriter) -> None:
    data, double = h.required(0), h.dtype(h.input(0), node.outputs[0]) == ir.DataType.DOUBLE

    def bound(name: str, default: float) -> ir.Value | None:
        number = h.get_float(name, default)
        explicit = node.attributes.pop(name, None) is not None
        # Exporters write the defaults out. They bound nothing, except a float64 that the author limited on purpose.
        if number == default and not (explicit and double):
            return None
        return h.scalar(number, data, f"clip_{name}", node.outputs[0])

    h.set_inputs(data, bound("min", -_FLOAT_MAX), bound("max", _FLOAT_MAX))


def _dropout_ratio(node: ir.Node, version: int, h: Rewriter) -> None:
    h.set_inputs(h.required(0), h.pop_as_input("ratio"))


def _topk(node: ir.Node, version: int, h: Rewriter) -> None:
    h.set_inputs(h.required(0), h.pop_as_input("k", vector=True))


def _upsample_scales(node: ir.Node, version: int, h: Rewriter) -> None:
    h.set_inputs(h.required(0), h.pop_as_input("scales"))


def _dft(node: ir.Node, version: int, h: Rewriter) -> None:
    # The default axis changed with the move, from 1 to -2.
    axis = h.pop_as_input("axis") or h.ints(1, "axis")
    h.set_inputs(h.required(0), h.input(1), axis)


# -- operators whose meaning changed -----------------------------------------------------------------------------------


def _dropout_mask(node: ir.Node, version: int, h: Rewriter) -> None:
    """The mask had the type of the data; it became a bool."""
    if len(node.outputs) < 2:
        return
    mask = node.outputs[1]
    if not mask.uses() and not mask.is_graph_output():
        node.resize_outputs(1)
        return
    dtype = h.dtype(h.input(0), node.outputs[0], mask)
    cast = ir.Node("", "Cast" if dtype else "CastLike", [], {"to": ir.AttrInt64("to", dtype)} if dtype else {})
    h.redirect(mask, cast.outputs[0])
    inputs = [mask] if dtype else [mask, h.required(0)]
    cast.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        cast.replace_input_with(index, value)
    mask.type = ir.TensorType(ir.DataType.BOOL)
    h.graph.insert_after(node, cast)


def _softmax(node: ir.Node, version: int, h: Rewriter) -> None:
    """Before 13 the input was flattened to a matrix at `axis` (default 1) and normalised over its rows."""
    x, axis = h.required(0), h.get_int("axis", 1)
    rows_are_one_axis = axis == -1
    if x.shape is not None:
        rank = x.shape.rank()
        at = axis + rank if axis < 0 else axis
        rows_are_one_axis |= at < rank and all(size == 1 for size in x.shape[at + 1 :])
        if at == rank - 1:
            axis = -1
    if rows_are_one_axis:
        h.set_attribute("axis", axis)
        return
    dtype = h.dtype(x, node.outputs[0])
    matrix = h.emit("Flatten", [x], {"axis": axis}, dtype=dtype)
    rows = h.emit(node.op_type, [matrix], {"axis": -1}, dtype=dtype)
    shape = h.emit("Shape", [x], dtype=ir.DataType.INT64)
    # Without allowzero an empty dimension would be taken from the matrix.
    h.become("Reshape", [rows, shape], {"allowzero": 1})


def _batchnorm_spatial(node: ir.Node, version: int, h: Rewriter) -> None:
    if h.get_int("spatial", 1):
        node.attributes.pop("spatial", None)
        return
    if any(output.name for output in node.outputs[1:]):
        raise Unsupported("it trains with statistics per position (spatial=0)")
    x, scale, bias, mean, var = (h.required(index) for index in range(5))
    dtype = h.dtype(x, scale, bias, mean, var, node.outputs[0])
    epsilon = h.scalar(h.get_float("epsilon", 1e-5), x, "epsilon", scale, bias, mean, var, node.outputs[0])
    deviation = h.emit("Sqrt", [h.emit("Add", [var, epsilon], dtype=dtype)], dtype=dtype)
    normal = h.emit("Div", [h.emit("Sub", [x, mean], dtype=dtype), deviation], dtype=dtype)
    node.resize_outputs(1)
    h.become("Add", [h.emit("Mul", [normal, scale], dtype=dtype), bias])


def _batchnorm_mode(node: ir.Node, version: int, h: Rewriter) -> None:
    """The mode was told by the number of outputs: Y alone when testing, Y and four statistics when training."""
    if any(output.name for output in node.outputs[1:]):
        if any(output.uses() or output.is_graph_output() for output in node.outputs[3:]):
            raise Unsupported("its outputs saved_mean and saved_var, which no longer exist, are read")
        node.resize_outputs(min(3, len(node.outputs)))
        h.set_attribute("training_mode", 1)
    else:
        node.resize_outputs(1)


def _scatter(node: ir.Node, version: int, h: Rewriter) -> None:
    node.op_type = "ScatterElements"


def _upsample(node: ir.Node, version: int, h: Rewriter) -> None:
    h.become("Resize", [h.required(0), None, h.required(1)], _asymmetric(h.get_string("mode", "nearest")))


def _asymmetric(mode: str, nearest_mode: str = "floor") -> dict[str, str]:
    attributes = {"mode": mode, "coordinate_transformation_mode": "asymmetric"}
    return {**attributes, "nearest_mode": nearest_mode} if mode == "nearest" else attributes


def _resize_10(node: ir.Node, version: int, h: Rewriter) -> None:
    """The only coordinates were asymmetric; the nearest source was rounded down if enlarging and up if reducing."""
    x, scales, mode = h.required(0), h.required(1), h.get_string("mode", "nearest")
    known = h.array(scales)
    if mode != "nearest" or (known is not None and bool((known >= 1).all())):
        h.become("Resize", [x, None, scales], _asymmetric(mode))
        return
    if known is not None and bool((known <= 1).all()):
        h.become("Resize", [x, None, scales], _asymmetric(mode, "ceil"))
        return
    # One node rounds one way only. Axes are independent, so that enlarging some and then reducing others is the same.
    one = h.constant(np.array(1, dtype=np.float32), "one")
    enlarge = h.emit("Max", [scales, one], dtype=ir.DataType.FLOAT)
    reduce = h.emit("Min", [scales, one], dtype=ir.DataType.FLOAT)
    enlarged = h.emit("Resize", [x, None, enlarge], _asymmetric(mode), dtype=h.dtype(x, node.outputs[0]))
    h.become("Resize", [enlarged, None, reduce], _asymmetric(mode, "ceil"))


_TF_HALF_PIXEL = {"floor": "round_prefer_ceil", "round_prefer_floor": "ceil"}
"""Rounding y is rounding y - 1/2 in another way: for two of the four ways, and those are the ones in use."""


def _resize_11(node: ir.Node, version: int, h: Rewriter) -> None:
    """Empty tensors stood for omitted inputs, and there was a mode `tf_half_pixel_for_nn`."""
    x, roi, scales, sizes = h.required(0), h.input(1), h.input(2), h.input(3)
    coordinates = h.get_string("coordinate_transformation_mode", "half_pixel")
    known_sizes = h.array(sizes)
    if sizes is not None and (known_sizes is None or known_sizes.size):
        scales = None
    else:
        sizes = None
    h.set_inputs(x, roi if coordinates == "tf_crop_and_resize" else None, scales, sizes)
    nearest_mode = h.get_string("nearest_mode", "round_prefer_floor")
    nearest = h.get_string("mode", "nearest") == "nearest"
    if coordinates == "tf_half_pixel_for_nn" and nearest and nearest_mode in _TF_HALF_PIXEL:
        h.set_attribute("coordinate_transformation_mode", "half_pixel")
        h.set_attribute("nearest_mode", _TF_HALF_PIXEL[nearest_mode])


def _roi_align(node: ir.Node, version: int, h: Rewriter) -> None:
    if "coordinate_transformation_mode" not in node.attributes:
        h.set_attribute("coordinate_transformation_mode", "output_half_pixel")


def _grid_sample(node: ir.Node, version: int, h: Rewriter) -> None:
    mode = h.get_string("mode", "bilinear")
    h.set_attribute("mode", {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode))


def _group_norm(node: ir.Node, version: int, h: Rewriter) -> None:
    """Scale and bias were per group. They are repeated in the graph, so that a parameter stays a parameter."""
    x, scale, bias, groups = h.required(0), h.required(1), h.required(2), h.get_int("num_groups", 1)
    channels = x.shape[1] if x.shape is not None and x.shape.rank() > 1 else None
    if isinstance(channels, int):
        if channels == groups:
            return
        target = h.ints([1, channels // groups], "repeat")
    else:
        count = h.emit("Shape", [x], {"start": 1, "end": 2}, dtype=ir.DataType.INT64)
        ratio = h.emit("Div", [count, h.ints([groups], "groups")], dtype=ir.DataType.INT64)
        target = h.emit("Concat", [h.ints([1], "one"), ratio], {"axis": 0}, dtype=ir.DataType.INT64)
    dtype = h.dtype(scale, bias, x)
    flat, column = h.ints([-1], "flat"), h.ints([-1, 1], "column")
    wide = (h.emit("Expand", [h.emit("Reshape", [v, column], dtype=dtype), target], dtype=dtype) for v in (scale, bias))
    h.set_inputs(x, *(h.emit("Reshape", [v, flat], dtype=dtype) for v in wide))


def _scan_8(node: ir.Node, version: int, h: Rewriter) -> None:
    raise Unsupported("it is a Scan of opset 8, which runs over a batch and takes sequence lengths")


_ATTRIBUTE_AXES = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")

ADAPTERS: dict[str, tuple[Step, ...]] = {
    **{f"Reduce{name}": (Step(18, _axes_input),) for name in _ATTRIBUTE_AXES},
    "ReduceSum": (Step(13, _axes_input),),
    "Squeeze": (Step(13, _axes_input),),
    "Unsqueeze": (Step(13, _unsqueeze),),
    "Split": (Step(13, _split), Step(18, _split_outputs)),
    "Slice": (Step(10, _slice),),
    "DynamicSlice": (Step(10, lambda node, version, h: h.become("Slice", node.inputs)),),
    "Pad": (Step(11, _pad),),
    "Clip": (Step(11, _clip),),
    "Dropout": (Step(10, _dropout_mask), Step(12, _dropout_ratio)),
    "TopK": (Step(10, _topk),),
    # Upsample ends at opset 10, but is turned directly into the Resize of 13, whose inputs are optional.
    "Upsample": (Step(9, _upsample_scales), Step(13, _upsample)),
    "Resize": (Step(11, _resize_10), Step(13, _resize_11)),
    "Softmax": (Step(13, _softmax),),
    "LogSoftmax": (Step(13, _softmax),),
    "Hardmax": (Step(13, _softmax),),
    "BatchNormalization": (Step(9, _batchnorm_spatial), Step(14, _batchnorm_mode)),
    "Scatter": (Step(11, _scatter),),
    "Scan": (Step(9, _scan_8),),
    "RoiAlign": (Step(16, _roi_align),),
    "GridSample": (Step(20, _grid_sample),),
    "DFT": (Step(20, _dft),),
    "GroupNormalization": (Step(21, _group_norm),),
    "MeanVarianceNormalization": (Step(9, experimental.mvn),),
    "Affine": (Step(10, experimental.affine),),
    "ImageScaler": (Step(10, experimental.image_scaler),),
    "ParametricSoftplus": (Step(10, experimental.parametric_softplus),),
    "ScaledTanh": (Step(10, experimental.scaled_tanh),),
    # Above the canonical opset, newest last.
    **{name: (Step(22, above.pool),) for name in ("AveragePool", "LpPool", "MaxPool")},
    "Cast": (Step(23, above.cast),),
    "CastLike": (Step(24, above.cast_like),),
    "Celu": (Step(28, above.celu),),
    "DequantizeLinear": (Step(23, above.dequantize),),
    "QuantizeLinear": (Step(23, above.quantize),),
    "RMSNormalization": (Step(23, above.rms_norm),),
    "Swish": (Step(24, above.swish),),
    "Range": (Step(27, above.range_),),
    "Mod": (Step(28, above.mod),),
    "SpaceToDepth": (Step(28, above.space_to_depth),),
}
"""Operator -> its changes, oldest first."""

FUSED: dict[tuple[str, str], Callable[[ir.Node, Rewriter], None]] = {
    ("com.microsoft", "FusedConv"): fused.activated_conv,
    ("com.microsoft", "FusedGemm"): fused.activated_gemm,
    ("com.microsoft", "FusedMatMul"): fused.activated_matmul,
    ("com.microsoft", "FusedMatMulActivation"): fused.activated_matmul,
    ("com.microsoft", "TransposeMatMul"): fused.activated_matmul,
    ("com.microsoft", "Gelu"): fused.bias_gelu,
    ("com.microsoft", "BiasGelu"): fused.bias_gelu,
    ("com.microsoft", "FastGelu"): fused.bias_gelu,
    ("com.microsoft", "QuickGelu"): fused.quick_gelu,
    ("com.microsoft", "SkipLayerNormalization"): fused.skip_layer_norm,
    (TRAINING_DOMAIN, "Adagrad"): training.adagrad,
    (TRAINING_DOMAIN, "Adam"): training.adam,
    (TRAINING_DOMAIN, "Momentum"): training.momentum,
}
"""Operators of other domains, by domain and name, and what takes them apart: what ONNX Runtime fuses, and optimizers."""
