"""Quantize a float model with calibration data: by rounding to the nearest level, or by gradients of the error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.progress import announce
from onnx_convgrad.data.batches import DataLike
from onnx_convgrad.errors import ModelError
from onnx_convgrad.evaluation.calibration import inputs_of
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.quantization.blocks import layers_of
from onnx_convgrad.quantization.insert import float_model, fold_batchnorm, insert_quantizers
from onnx_convgrad.quantization.measure import LayerError, QuantizationReport, errors_of, first_samples, size_of
from onnx_convgrad.quantization.methods import QuantizationSettings, correct_biases, learn_rounding, trained
from onnx_convgrad.quantization.precision import bits_of, bytes_of, choose_precision, most_bytes
from onnx_convgrad.surgery.quantization import prepare, store_integers


@transformation
def quantize(
    model: AnyModel,
    data: DataLike,
    *,
    method: str = "adaround",
    weights: str = "int8",
    activations: str = "int8",
    per_channel: bool = True,
    calibration: str = "minmax",
    exclude: str | Sequence[str] = (),
    iterations: int | None = None,
    lr: float | None = None,
    batch_size: int = 32,
    samples: int = 256,
    seed: int = 0,
    bits: float | None = None,
    size: float | None = None,
    sensitivity: str = "gradient",
    names: Mapping[str, str] | None = None,
) -> ir.Model:
    """Quantize a float model with a few hundred samples, without labels (tool: may change in a minor version).

    | method | what it changes |
    |---|---|
    | `"nearest"` | nothing: each weight is rounded to the nearest level |
    | `"bias"` | adds to each bias by how much the mean of each channel is off (Nagel et al. 2019, section 4.2) |
    | `"adaround"` | learns for each weight whether it is rounded up or down, layer by layer (Nagel et al. 2020) |
    | `"brecq"` | the same for all layers of a block together, with errors weighted by squared gradients (Li et al. 2021) |
    | `"qat"` | trains weights, biases and scales, so that the outputs are those of the float model |

    Other arguments as for `insert_quantizers`.

    Args:
        model: A path, an `onnx.ModelProto` or an `onnx_ir.Model`, with float32 weights. Never changed.
        method: Method: `"nearest"`, `"bias"`, `"adaround"`, `"brecq"` or `"qat"`. See above.
        weights: Type of the weights: `"int8"`, `"int4"`, `"uint8"` or `"uint4"`.
        calibration: Ranges of activations: `"minmax"`, `"entropy"` or `"percentile"`. ONNX Runtime finds them.
        iterations: Steps for each layer or block, by default 1000; of `"qat"` altogether, by default 500. `"nearest"` and
            `"bias"` take none.
        lr: Learning rate. Of Adam, by default 1e-2, for `"qat"` 1e-4.
        batch_size: Samples at a time. In each step.
        samples: Most samples to use. They are taken in random order, always the same.
        seed: Random seed: order of the samples.
        bits: Most bits per weight on average, between 4 and 8. Some layers get 4 bits, the others the 8 of `weights`.
        size: Most bytes of all layers' weights, or up to 1 the share of those of float32. In place of `bits`.
        sensitivity: Estimate of the cost of 4 bits in a layer: `"gradient"` or `"trace"`. `"gradient"` is the squared
            product of gradient and rounding error, `"trace"` the trace of the Hessian times the mean squared rounding error.

    Returns:
        The model at opset 21, with integer weights between QuantizeLinear and DequantizeLinear, which ONNX Runtime fuses
        into integer kernels. The other inputs and all outputs are those of the model.

    Raises:
        ArgumentError: An unknown option, data that do not fit the inputs, or a value of an input that does not.
        ModelError: The model cannot be read, has quantizers already, or ONNX Runtime cannot quantize it.
        ExecutionError: ONNX Runtime, or its module for quantization, is missing.
    """
    settings = QuantizationSettings(
        method=method, weights=weights, activations=activations, per_channel=per_channel, calibration=calibration,
        exclude=exclude, iterations=iterations, lr=lr, batch_size=batch_size, samples=samples, seed=seed,
        bits=bits, size=size, sensitivity=sensitivity,
    )  # fmt: skip
    return run(model, data, settings, names=names)[0]


def run(
    model: AnyModel,
    data: DataLike,
    settings: QuantizationSettings,
    *,
    names: Mapping[str, str] | None = None,
) -> tuple[ir.Model, QuantizationReport]:
    """`quantize`, with a report."""
    announce("calibrating")
    real = float_model(model)
    fold_batchnorm(real.graph)
    found = inputs_of(real, data, settings.batch_size, names)
    batches = first_samples(found, settings.samples)
    m: ir.Model = insert_quantizers(
        real, iter(batches), weights=settings.weights, activations=settings.activations,
        per_channel=settings.per_channel, calibration=settings.calibration, exclude=settings.exclude,
        samples=settings.samples,
    )  # fmt: skip
    prepare(m, "qat")
    layers = layers_of(m.graph)
    if not layers:
        raise ModelError("No layer with a stored weight was quantized.", hint="Include Conv, Gemm or MatMul nodes.")
    costs: dict[str, float] = {}
    if settings.bits is not None or settings.size is not None:
        announce("measuring sensitivities")
        most = most_bytes(layers, settings.bits, settings.size)
        costs = choose_precision(real, layers, batches, most, settings.sensitivity, settings.seed)
    before, outputs_before = errors_of(m, real, layers, batches)
    levels = {layer.name: layer.levels for layer in layers}
    if settings.method == "qat":
        m = trained(m, real, batches, settings)
        layers = layers_of(m.graph)
    elif settings.method == "bias":
        correct_biases(m, real, layers, batches)
    elif settings.method != "nearest":
        learn_rounding(m, real, batches, settings)
    announce("measuring")
    after, outputs_after = errors_of(m, real, layers, batches)
    rows = [
        LayerError(
            layer.node.name or "",
            layer.name,
            layer.node.op_type,
            tuple(levels[layer.name].shape),
            before[layer.name],
            after[layer.name],
            float(np.mean(layer.levels != levels[layer.name])),
            bits_of(layer),
            bytes_of(layer),
            costs.get(layer.name),
        )
        for layer in layers
        if layer.name in before and layer.name in after
    ]
    store_integers(m)
    outputs = {name: (error, outputs_after[name]) for name, error in outputs_before.items()}
    kinds = settings.method, settings.weights, settings.activations
    return m, QuantizationReport(*kinds, sum(map(size_of, batches)), tuple(rows), outputs)
