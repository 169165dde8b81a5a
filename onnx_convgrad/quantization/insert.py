"""Insert quantizers into a float model, with the ranges that ONNX Runtime's calibration finds on data.

BatchNormalization is folded into the convolution before it, so that a quantizer sees the weights of inference.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.autodiff.layers import WeightLayer, layer_of
from onnx_convgrad.base.names import as_names, check_names
from onnx_convgrad.base.numbers import flag, whole
from onnx_convgrad.base.optional import imported
from onnx_convgrad.data.batches import DataLike
from onnx_convgrad.errors import ModelError
from onnx_convgrad.evaluation.calibration import inputs_manifest, inputs_of
from onnx_convgrad.frontend.files import AnyModel, cloned
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.frontend.load import load
from onnx_convgrad.frontend.quantizers import is_quantizer
from onnx_convgrad.frontend.tidy import store
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.nodes import is_op, sole_producer
from onnx_convgrad.ir.passes import RemoveUnused
from onnx_convgrad.ir.serialize import whole_proto
from onnx_convgrad.pipeline.modes import set_inference
from onnx_convgrad.quantization.measure import Arrays, first_samples
from onnx_convgrad.surgery.adapters.add import merge_adapters
from onnx_convgrad.surgery.adapters.layers import adapters_of
from onnx_convgrad.surgery.quantization import array_of

WEIGHTS = {"int8": "QInt8", "int4": "QInt4", "uint8": "QUInt8", "uint4": "QUInt4"}
ACTIVATIONS = {"int8": "QInt8", "uint8": "QUInt8", "int16": "QInt16", "uint16": "QUInt16"}
METHODS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}

_PREPROCESSED = "onnx.quant.pre_process"


@transformation
def insert_quantizers(
    model: AnyModel,
    data: DataLike,
    *,
    weights: str = "int8",
    activations: str = "int8",
    per_channel: bool = True,
    calibration: str = "minmax",
    exclude: str | Sequence[str] = (),
    samples: int = 256,
    batch_size: int | None = None,
    names: Mapping[str, str] | None = None,
) -> ir.Model:
    """Insert quantizers around the layers of a float model (tool: may change in a minor version).

    `onnxruntime.quantization.quantize_static` calibrates and inserts them, as QuantizeLinear and DequantizeLinear.
    Adapters are merged into their weights first, and BatchNormalization is folded into the convolution before it. Weights
    stay floating numbers behind their quantizers, so that the model can be trained (`build_training(quantization="qat")`)
    or quantized by gradients (`quantize`); biases become int32, in units of the product of both scales.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`. Never changed.
        data: Samples as the model meets them: what `Trainer.fit` takes. Labels are not needed, and are left out.
        weights: `"int8"`, `"int4"`, `"uint8"` or `"uint4"`; the signed ones are symmetric, with zero point 0.
        activations: Type of the activations: `"int8"`, `"uint8"`, `"int16"` or `"uint16"`.
        per_channel: One scale for each channel of a weight, instead of one for the whole weight.
        calibration: `"minmax"`, `"entropy"` or `"percentile"`, as `onnxruntime.quantization.CalibrationMethod`.
        exclude: Names of nodes that stay in floating point.
        samples: Most samples to calibrate with, in random order, always the same.
        batch_size: Samples that are run at a time.
        names: Input -> name of its array, for inputs that cannot be matched automatically.

    Returns:
        The model at opset 21, with the other inputs and all outputs of the model.

    Raises:
        ArgumentError: An unknown type or method, data that do not fit the inputs, or a value of an input that does not.
        ModelError: The model cannot be read, is quantized already, or ONNX Runtime cannot quantize it.
        ExecutionError: ONNX Runtime, or its module for quantization, is missing.
    """
    check_names([weights], WEIGHTS, "weights")
    check_names([activations], ACTIVATIONS, "activations")
    check_names([calibration], METHODS, "calibration")
    m = float_model(model)
    if any(map(is_quantizer, m.graph)):
        raise ModelError(
            "The model has quantizers already.",
            hint="Train it with build_training(quantization='qat'), or begin with the float model.",
        )
    fold_batchnorm(m.graph)
    nodes = {node.name or "" for node in m.graph}
    excluded = as_names(exclude, "exclude")
    check_names(excluded, sorted(nodes), "node in exclude")
    axes = inputs_manifest(m).batch_axes
    batches = first_samples(inputs_of(m, data, batch_size, names), whole(samples, "samples"), axes)
    return _quantized(
        m, _Reader(batches), weights, activations, calibration,
        per_channel=flag(per_channel, "per_channel"), exclude=excluded,
    )  # fmt: skip


def float_model(model: AnyModel) -> ir.Model:
    """The canonical model in inference mode, with adapters in their weights, and some inputs bound to constants."""
    m = cloned(load(model).canonical)
    if adapters_of(m) and not any(map(is_quantizer, m.graph)):
        m = merge_adapters(m)
    set_inference(m.graph)
    _avoid_faults(m.graph)
    return m


def _avoid_faults(graph: ir.Graph) -> None:
    """Rewrite what ONNX Runtime's quantizer would change; see quirks.QUANTIZED_BETA and QUANTIZED_OUTPUT."""
    names = Namespace.of_values(graph)
    for node in list(graph):
        x = node.inputs[0] if node.inputs else None
        if is_op(node, "Relu", "Clip") and x is not None and x.is_graph_output():
            between = ir.node("Identity", [x], name=names.claim(f"{x.name}_kept"))
            between.outputs[0].type, between.outputs[0].shape = x.type, x.shape
            graph.insert_before(node, between)
            node.replace_input_with(0, between.outputs[0])
        elif is_op(node, "Gemm") and (beta := Call(node).float("beta", 1.0)) != 1:
            bias = node.inputs[2] if len(node.inputs) > 2 else None
            if bias is not None and bias.const_value is not None:
                scaled = array_of(bias) * np.asarray(beta, bias.const_value.dtype.numpy())
                node.replace_input_with(2, store(graph, names.claim(f"{bias.name}_scaled"), scaled))
                del node.attributes["beta"]


class _Reader:
    """Batches, as ONNX Runtime's calibration takes them: one per call, then `None`."""

    def __init__(self, batches: Sequence[Arrays]) -> None:
        self._batches = iter(batches)

    def get_next(self) -> Arrays | None:
        return next(self._batches, None)

    def __iter__(self) -> Iterator[Arrays]:
        return self._batches


def _quantized(
    m: ir.Model,
    reader: _Reader,
    weights: str,
    activations: str,
    calibration: str,
    *,
    per_channel: bool,
    exclude: list[str],
) -> ir.Model:
    quantization = imported("onnxruntime.quantization", "Quantizing needs ONNX Runtime")
    kinds, marked = quantization.QuantType, m.metadata_props.get(_PREPROCESSED)
    m.metadata_props[_PREPROCESSED] = "onnxruntime.quant"  # it is as its preprocessing would leave it
    options = {"AddQDQPairToWeight": True, "WeightSymmetric": not weights.startswith("u"), "ActivationSymmetric": False}
    with tempfile.TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "model.onnx"
        try:
            quantization.quantize_static(
                whole_proto(m),
                str(path),
                reader,
                quant_format=quantization.QuantFormat.QDQ,
                activation_type=getattr(kinds, ACTIVATIONS[activations]),
                weight_type=getattr(kinds, WEIGHTS[weights]),
                per_channel=per_channel,
                nodes_to_exclude=exclude,
                calibrate_method=getattr(quantization.CalibrationMethod, METHODS[calibration]),
                extra_options=options,
            )
        except Exception as problem:
            raise ModelError(f"ONNX Runtime cannot quantize the model: {problem}") from problem
        result = cloned(load(onnx.load(path)).canonical)
    RemoveUnused()(result)
    for key in (_PREPROCESSED, "onnx.infer"):
        result.metadata_props.pop(key, None)
    if marked is not None:
        result.metadata_props[_PREPROCESSED] = marked
    if not any(map(is_quantizer, result.graph)):
        raise ModelError(
            "No layer of the model was quantized.",
            hint="ONNX Runtime quantizes Conv, MatMul, Gemm and others of float32.",
        )
    return result


@contextmanager
def _quiet() -> Iterator[None]:
    """Mute the advice that ONNX Runtime's quantizer logs."""
    logger = logging.getLogger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


# -- folding BatchNormalization ----------------------------------------------------------------------------------------


def fold_batchnorm(graph: ir.Graph) -> int:
    """Fold each BatchNormalization in inference mode into the convolution that it alone reads, in place.

    With f = scale / sqrt(variance + epsilon) per channel: w' = f w and b' = f (b - mean) + bias (Jacob et al. 2018,
    section 3.2).

    Returns:
        How many were folded. Those behind other operators, or with operands that are not stored, stay.
    """
    names, folded = Namespace.of_values(graph), 0
    for node in [node for node in graph if is_op(node, "BatchNormalization")]:
        layer = layer_of(sole_producer(node.inputs[0]))
        if layer is None or not layer.convolves or not layer.takes_bias or Call(node).int("training_mode", 0):
            continue
        stored = [*node.inputs[1:], *layer.node.inputs[1:]]
        if any(v is not None and (v.const_value is None or v.is_graph_input()) for v in stored):
            continue
        _fold(graph, layer, node, names)
        folded += 1
    return folded


def _fold(graph: ir.Graph, layer: WeightLayer, norm: ir.Node, names: Namespace) -> None:
    scale, bias, mean, variance = (_numbers(v) for v in norm.inputs[1:5])
    conv, features, weight = layer.node, layer.features, layer.weight
    old = conv.inputs[2] if len(conv.inputs) > 2 else None
    assert features is not None, "a convolution has an axis of features"
    factor = scale / np.sqrt(variance + Call(norm).float("epsilon", 1e-5))
    before, groups, dtype = _numbers(weight), features.parts, (weight.dtype or ir.DataType.FLOAT).numpy()
    if groups == 1:
        scaled = before * factor.reshape([-1 if i == features.of_weight else 1 for i in range(before.ndim)])
    else:  # [C, M / group, *kernel]: the rows of a group have its factors
        rows = factor.reshape(groups, 1, -1).repeat(before.shape[0] // groups, 1).reshape(before.shape[:2])
        scaled = before * rows.reshape(*rows.shape, *[1] * (before.ndim - 2))
    shift = factor * ((0 if old is None else _numbers(old)) - mean) + bias
    name = weight.name or "weight"
    for place, value, array, new in (
        (1, weight, scaled, name),
        (2, old, shift, f"{name.removesuffix('.weight')}.bias"),
    ):
        array = array.astype(dtype)  # noqa: PLW2901
        if value is not None and len(value.uses()) == 1:
            value.const_value = ir.Tensor(array, name=value.name)
        else:
            conv.resize_inputs(3)
            conv.replace_input_with(place, store(graph, names.claim(new), array))
    result, through = norm.outputs[0], conv.outputs[0]
    name_after, result.name = result.name, None
    result.replace_all_uses_with(through, replace_graph_outputs=True)
    through.name = name_after
    operands = {v.name: v for v in norm.inputs[1:] if v is not None}
    graph.remove(norm, safe=True)
    for stored_name, value in operands.items():
        if stored_name and not value.uses() and not value.is_graph_output():
            graph.initializers.pop(stored_name, None)


def _numbers(value: ir.Value | None) -> np.ndarray:
    return array_of(value).astype(np.float64)
