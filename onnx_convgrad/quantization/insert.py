"""Insert quantizers into a float model, with the ranges that ONNX Runtime's calibration finds on data."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_ir as ir

from onnx_convgrad.base.names import as_names, check_names
from onnx_convgrad.base.numbers import flag, whole
from onnx_convgrad.base.optional import imported
from onnx_convgrad.data.batches import DataLike
from onnx_convgrad.errors import ModelError
from onnx_convgrad.evaluation.calibration import inputs_of
from onnx_convgrad.frontend.files import AnyModel, cloned
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.frontend.load import load
from onnx_convgrad.frontend.quantizers import is_quantizer
from onnx_convgrad.ir.passes import RemoveUnused
from onnx_convgrad.ir.serialize import whole_proto
from onnx_convgrad.pipeline.modes import set_inference
from onnx_convgrad.quantization.fold import fold_batchnorm
from onnx_convgrad.quantization.measure import Arrays, first_samples

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
    BatchNormalization is folded into the convolution before it first. Weights stay floating numbers behind their quantizers,
    so that the model can be trained (`build_training(quantization="qat")`) or quantized by gradients (`quantize`); biases
    become int32, in units of the product of both scales.

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
    batches = first_samples(inputs_of(m, data, batch_size, names), whole(samples, "samples"))
    return _quantized(
        m, _Reader(batches), weights, activations, calibration,
        per_channel=flag(per_channel, "per_channel"), exclude=excluded,
    )  # fmt: skip


def float_model(model: AnyModel) -> ir.Model:
    """The canonical model in inference mode, with some inputs bound to constants."""
    m = cloned(load(model).canonical)
    set_inference(m.graph)
    return m


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
