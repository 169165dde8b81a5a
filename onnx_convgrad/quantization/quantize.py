"""Quantize a float model with calibration data: by rounding to the nearest level, or by gradients of the error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.names import one_of
from onnx_convgrad.base.numbers import above_zero, check_fields, whole
from onnx_convgrad.base.progress import announce
from onnx_convgrad.data.batches import DataLike
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.evaluation.calibration import inputs_manifest, inputs_of
from onnx_convgrad.frontend.files import AnyModel, cloned
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.ir.notes import MANIFEST
from onnx_convgrad.programs.build import build_training
from onnx_convgrad.programs.optim.update_rules import Adam
from onnx_convgrad.quantization.blocks import QuantizedLayer, blocks_of, float_name, layers_of, single_layers
from onnx_convgrad.quantization.insert import float_model, fold_batchnorm, insert_quantizers
from onnx_convgrad.quantization.measure import (
    Arrays,
    LayerError,
    QuantizationReport,
    errors_of,
    first_samples,
    floating_outputs,
    gradients_of,
    is_logits,
    joined,
    size_of,
    softmax,
    values_by_batch,
    values_on,
)
from onnx_convgrad.quantization.precision import SENSITIVITIES, bits_of, bytes_of, choose_precision, most_bytes
from onnx_convgrad.quantization.rounding import RoundingSchedule, apply, learn
from onnx_convgrad.surgery.quantization import fold_scales, prepare, store_integers
from onnx_convgrad.training.trainer import Trainer

METHODS = ("nearest", "bias", "adaround", "brecq", "qat")


@dataclass(frozen=True, slots=True)
class QuantizationSettings:
    """Arguments of `quantize`, which documents them."""

    method: str = "adaround"
    weights: str = "int8"
    activations: str = "int8"
    per_channel: bool = True
    calibration: str = "minmax"
    exclude: str | Sequence[str] = ()
    iterations: int | None = None
    lr: float | None = None
    batch_size: int = 32
    samples: int = 256
    seed: int = 0
    bits: float | None = None
    size: float | None = None
    sensitivity: str = "gradient"

    checks: ClassVar = {
        "method": one_of(*METHODS),
        "samples": whole,
        "sensitivity": one_of(*SENSITIVITIES),
        "bits": above_zero,
        "size": above_zero,
    }

    def __post_init__(self) -> None:
        check_fields(self)
        if self.bits is not None and self.size is not None:
            raise ArgumentError("bits and size both limit the weights: give one of them.")
        if self.bits is not None and not 4 <= self.bits <= 8:
            raise ArgumentError(f"bits must be between 4 and 8, not {self.bits!r}.")
        if (self.bits is not None or self.size is not None) and self.weights not in ("int8", "uint8"):
            raise ArgumentError(
                f"bits and size choose between 8 and 4 bits, and weights={self.weights!r} has 4.",
                hint="Use 'int8' or 'uint8'.",
            )
        self.schedule(1000, 1e-2)

    def schedule(self, iterations: int, lr: float) -> RoundingSchedule:
        """The steps of a method, by its own defaults."""
        return RoundingSchedule(
            iterations=iterations if self.iterations is None else self.iterations,
            lr=lr if self.lr is None else self.lr,
            batch_size=self.batch_size,
            seed=self.seed,
        )


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
    manifest = inputs_manifest(real)
    for name in manifest.states:
        if axis := manifest.batch_axes.get(name):
            raise ArgumentError(
                f"The state {name!r} has its streams along axis {axis}, and quantize takes those along axis 0.",
                hint="Use onnx_convgrad.transforms.insert_quantizers(model, data), which takes any.",
            )
    batches = first_samples(found, settings.samples, manifest.batch_axes)
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


# -- rounding ----------------------------------------------------------------------------------------------------------


def learn_rounding(m: ir.Model, real: ir.Model, batches: Sequence[Arrays], settings: QuantizationSettings) -> None:
    """Round the weights of each block in turn, in place: AdaRound by layers, BRECQ by blocks."""
    brecq = settings.method == "brecq"
    schedule = settings.schedule(1000, 1e-2)
    blocks = [
        (block, name)
        for block in (blocks_of(m.graph) if brecq else single_layers(m.graph))
        if (name := float_name(block.result, real.graph)) is not None
    ]
    slopes = output_slopes(m, real, [block.result for block, _ in blocks], batches) if brecq else {}
    rounded = set[str]()
    for i, (block, name) in enumerate(blocks, 1):
        fresh = {layer.name: layer for layer in block.layers if layer.name not in rounded}  # layers may share a weight
        if not fresh:
            continue
        rounded.update(fresh)
        block = replace(block, layers=tuple(fresh.values()))  # noqa: PLW2901
        weights = ", ".join(fresh)
        announce(f"{'block' if brecq else 'layer'} {i} of {len(blocks)}: {weights}")
        target = values_on(real, [name], batches)[name]
        inputs = values_on(m, [v.name or "" for v in block.sources], batches)
        weight = slopes.get(block.result.name or "")
        if weight is not None:
            weight = np.square(weight) / max(float(np.mean(np.square(weight))), 1e-30)
        learned = learn(m, block, inputs, target, weight, schedule)
        for layer in block.layers:
            apply(layer, learned[layer.name])


def output_slopes(
    m: ir.Model, real: ir.Model, values: Sequence[ir.Value], batches: Sequence[Arrays]
) -> dict[str, np.ndarray]:
    """The gradient of the loss between the outputs of both models with respect to values of the quantized one.

    The loss is the divergence of the softmax of the quantized model's outputs from that of the float model's if these are
    logits (`is_logits`); else half the squared difference. Its gradient with respect to the output is the difference of the
    probabilities, or of the outputs.
    """
    outputs = floating_outputs(real)
    pairs = zip(*(values_by_batch(model, outputs, batches) for model in (m, real)), strict=True)
    cotangents = [{name: difference(got[name], want[name]) for name in outputs} for got, want in pairs]
    ends = {v.name for v in values if v.is_graph_output()}
    slopes = {name: array for name, array in joined(cotangents).items() if name in ends}
    names = [v.name or "" for v in dict.fromkeys(values) if not v.is_graph_output()]
    if names:
        gradients = gradients_of(m, names, outputs)
        found = [gradients(batch, own) for batch, own in zip(batches, cotangents, strict=True)]
        slopes |= joined([dict(zip(names, arrays, strict=True)) for arrays in found])
    return slopes


def difference(mine: np.ndarray, real: np.ndarray) -> np.ndarray:
    """The gradient of the loss of `output_slopes` with respect to the output."""
    slopes: np.ndarray = softmax(mine) - softmax(real) if is_logits(real) else mine - real
    return slopes


# -- bias correction ---------------------------------------------------------------------------------------------------


def correct_biases(m: ir.Model, real: ir.Model, layers: Sequence[QuantizedLayer], batches: Sequence[Arrays]) -> None:
    """Add to each bias the mean of the float model's results minus that of the quantized one's, layer by layer, in place."""
    nodes = {node.name: node for node in real.graph}
    for i, layer in enumerate(layers, 1):
        announce(f"bias {i} of {len(layers)}: {layer.name}")
        bias = layer.node.inputs[2] if len(layer.node.inputs) > 2 else None
        other = nodes.get(layer.node.name)
        if bias is None or bias.const_value is None or other is None or other.op_type != layer.node.op_type:
            continue
        mine, name = layer.node.outputs[0].name or "", other.outputs[0].name or ""
        got, want = values_on(m, [mine], batches)[mine], values_on(real, [name], batches)[name]
        axes = tuple(axis for axis in range(want.ndim) if axis != layer.channel_axis % want.ndim)
        shift = (want.astype(np.float64) - got).mean(axes)
        numbers = bias.const_value.numpy()
        bias.const_value = ir.Tensor((numbers + shift.reshape(numbers.shape)).astype(numbers.dtype), name=bias.name)


# -- training ----------------------------------------------------------------------------------------------------------


def trained(m: ir.Model, real: ir.Model, batches: Sequence[Arrays], settings: QuantizationSettings) -> ir.Model:
    """Train weights, biases and scales so that the outputs are those of the float model; returns the trained model."""
    outputs = floating_outputs(real)
    if len(outputs) != 1:
        raise ArgumentError("method='qat' is for models with one floating output.", hint="Use 'adaround' or 'brecq'.")
    targets, arrays = values_on(real, outputs, batches)[outputs[0]], joined(batches)
    schedule = settings.schedule(500, 1e-4)
    program = build_training(m, loss="mse", optimizer=Adam(schedule.lr), quantization="lsq")
    trainer, target = Trainer(program), program.manifest.targets[0].name
    for step, rows in enumerate(schedule.rows(len(targets))):
        result = trainer.step({name: array[rows] for name, array in arrays.items()} | {target: targets[rows]})
        if step % 100 == 0:
            announce(f"step {step} of {schedule.iterations}: loss {float(result['loss']):.3g}")
    trained = cloned(program.model("inference"))
    for name, array in trainer.parameters().items():
        trained.graph.initializers[name].const_value = ir.Tensor(array, name=name)
    trained.metadata_props.pop(MANIFEST, None)
    fold_scales(trained.graph)
    return trained
