"""Quantize a float model with calibration data: by rounding to the nearest level, or by gradients of the error."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import whole
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.frontend.bound_inputs import InputValues
from onnx_convgrad.frontend.files import AnyModel, cloned
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.frontend.metadata import preprocessing_of
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import MANIFEST
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import build
from onnx_convgrad.quantization.blocks import Layer, blocks_of, float_name, layers_of, single_layers
from onnx_convgrad.quantization.fold import fold_batchnorm
from onnx_convgrad.quantization.insert import float_model, insert_quantizers
from onnx_convgrad.quantization.measure import Arrays, Error, first_samples, values_on
from onnx_convgrad.quantization.rounding import Schedule, apply, learn
from onnx_convgrad.runtime import session
from onnx_convgrad.training.data.batches import DataLike
from onnx_convgrad.training.data.calibration import inputs_of
from onnx_convgrad.training.optim.optimizers import Adam
from onnx_convgrad.training.program.build import build_training
from onnx_convgrad.training.run.trainer import Trainer
from onnx_convgrad.training.surgery.quantization import fold_scales, prepare, quantized, store_integers

METHODS = ("nearest", "bias", "adaround", "brecq", "qat")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LayerError:
    """The errors of one layer's result, after its activation, in a quantized model.

    Attributes:
        node: Name of the layer's node.
        weight: Name of the weight.
        operator: `Conv`, `ConvTranspose`, `Gemm` or `MatMul`.
        shape: Of the weight.
        nearest: With weights rounded to the nearest level.
        after: With the weights of the method.
        changed: Part of the weights that the method stores as another level.
    """

    node: str
    weight: str
    operator: str
    shape: tuple[int, ...]
    nearest: Error
    after: Error
    changed: float


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """What `quantize` did: errors per layer and of the outputs, against the float model, on the calibration data."""

    method: str
    weights: str
    activations: str
    samples: int
    layers: tuple[LayerError, ...]
    outputs: Mapping[str, tuple[Error, Error]] = field(default_factory=dict)
    """Output -> errors with weights rounded to the nearest level, and after the method."""

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values; infinite numbers become `None`."""
        outputs = {name: {"nearest": asdict(a), "after": asdict(b)} for name, (a, b) in self.outputs.items()}
        plain = asdict(self) | {"layers": [asdict(layer) for layer in self.layers], "outputs": outputs}
        result: dict[str, Any] = _finite(plain)
        return result


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class Settings:
    """Arguments of `quantize`, which documents them."""

    method: str = "adaround"
    weights: str = "int8"
    activations: str = "int8"
    per_channel: bool = True
    calibration: str = "minmax"
    exclude: Sequence[str] = ()
    iterations: int | None = None
    lr: float | None = None
    batch_size: int = 32
    samples: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        check_names([self.method], METHODS, "method")
        whole(self.samples, "samples")
        self.schedule(1000, 1e-2)

    def schedule(self, iterations: int, lr: float) -> Schedule:
        """The steps of a method, by its own defaults."""
        return Schedule(
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
    exclude: Sequence[str] = (),
    iterations: int | None = None,
    lr: float | None = None,
    batch_size: int = 32,
    samples: int = 256,
    seed: int = 0,
    names: Mapping[str, str] | None = None,
    input_values: InputValues | None = None,
    base_dir: str | os.PathLike[str] | None = None,
) -> ir.Model:
    """Quantize a float model with a few hundred samples, without labels.

    | method | what it changes |
    |---|---|
    | `"nearest"` | nothing: each weight is rounded to the nearest level |
    | `"bias"` | adds to each bias by how much the mean of each channel is off (Nagel et al. 2019, section 4.2) |
    | `"adaround"` | learns for each weight whether it is rounded up or down, layer by layer (Nagel et al. 2020) |
    | `"brecq"` | the same for all layers of a block together, with errors weighted by squared gradients (Li et al. 2021) |
    | `"qat"` | trains weights, biases and scales, so that the outputs are those of the float model |

    Args:
        model: A path, an `onnx.ModelProto` or an `onnx_ir.Model`, with float32 weights. Never changed.
        data: Samples as the model meets them: what `Trainer.fit` takes. Targets are not needed, and are left out.
        method: See above.
        weights: `"int8"`, `"int4"`, `"uint8"` or `"uint4"`.
        activations: `"int8"`, `"uint8"`, `"int16"` or `"uint16"`.
        per_channel: One scale for each channel of a weight, instead of one for the whole weight.
        calibration: `"minmax"`, `"entropy"` or `"percentile"`: how ONNX Runtime chooses the ranges of activations.
        exclude: Names of nodes that stay in floating point.
        iterations: Steps of `"adaround"` and `"brecq"` for each layer or block (1000), of `"qat"` altogether (500).
        lr: Learning rate of Adam: 1e-2, for `"qat"` 1e-4.
        batch_size: Samples in each step.
        samples: Most samples to use, in random order, always the same.
        seed: Seed of the order of samples in the steps.
        names: Input -> name of its array, for inputs that cannot be matched automatically.
        input_values: Inputs that are bound to constants, as for `augment`; the result does not have them.
        base_dir: The folder of external weights, for a model that is not given by its path.

    Returns:
        The model at opset 21, with integer weights between QuantizeLinear and DequantizeLinear, which ONNX Runtime fuses
        into integer kernels. The other inputs and all outputs are those of the model.

    Raises:
        ArgumentError: An unknown option, data that do not fit the inputs, or a value of an input that does not.
        ModelError: The model cannot be read, has quantizers already, or ONNX Runtime cannot quantize it.
        ExecutionError: ONNX Runtime, or its module for quantization, is missing.
    """
    settings = Settings(
        method=method, weights=weights, activations=activations, per_channel=per_channel, calibration=calibration,
        exclude=tuple(exclude), iterations=iterations, lr=lr, batch_size=batch_size, samples=samples, seed=seed,
    )  # fmt: skip
    return run(model, data, settings, names=names, input_values=input_values, base_dir=base_dir)[0]


def run(
    model: AnyModel,
    data: DataLike,
    settings: Settings,
    *,
    names: Mapping[str, str] | None = None,
    input_values: InputValues | None = None,
    base_dir: str | os.PathLike[str] | None = None,
    progress: Progress = lambda _: None,
) -> tuple[ir.Model, QuantizationReport]:
    """`quantize`, with a report; `progress` is called with a line of text before each step."""
    progress("calibrating")
    real = float_model(model, input_values, base_dir)
    fold_batchnorm(real.graph)
    found = inputs_of(real.graph, data, settings.batch_size, names, preprocessing_of(real))
    batches = first_samples(found, settings.samples)
    m: ir.Model = insert_quantizers(
        real, iter(batches), weights=settings.weights, activations=settings.activations,
        per_channel=settings.per_channel, calibration=settings.calibration, exclude=list(settings.exclude),
        samples=settings.samples,
    )  # fmt: skip
    prepare(m, "qat")
    layers = layers_of(m.graph)
    if not layers:
        raise ModelError("No layer with a stored weight was quantized.", hint="Include Conv, Gemm or MatMul nodes.")
    before = _Measured.of(m, real, layers, batches)
    levels = {layer.name: _levels(layer) for layer in layers}
    if settings.method == "qat":
        m = _trained(m, real, batches, settings, progress)
        layers = layers_of(m.graph)
    elif settings.method == "bias":
        _correct_biases(m, real, layers, batches, progress)
    elif settings.method != "nearest":
        _learn_rounding(m, real, batches, settings, progress)
    progress("measuring")
    after = _Measured.of(m, real, layers, batches)
    rows = [
        LayerError(
            layer.node.name or "",
            layer.name,
            layer.node.op_type,
            tuple(levels[layer.name].shape),
            before.layers[layer.name],
            after.layers[layer.name],
            float(np.mean(_levels(layer) != levels[layer.name])),
        )
        for layer in layers
        if layer.name in before.layers and layer.name in after.layers
    ]
    store_integers(m)
    count = sum(max((len(a) for a in batch.values() if a.ndim), default=1) for batch in batches)
    outputs = {name: (error, after.outputs[name]) for name, error in before.outputs.items()}
    report = QuantizationReport(
        settings.method, settings.weights, settings.activations, count, tuple(rows), outputs
    )  # fmt: skip
    return m, report


def _levels(layer: Layer) -> np.ndarray:
    assert layer.weight.const_value is not None, "the weight is stored"
    return quantized(layer.quantizer, layer.weight.const_value.numpy())


@dataclass(frozen=True, slots=True)
class _Measured:
    """Errors of a quantized model against the float one: of layers by weight, and of outputs."""

    layers: dict[str, Error]
    outputs: dict[str, Error]

    @classmethod
    def of(cls, m: ir.Model, real: ir.Model, layers: Sequence[Layer], batches: Sequence[Arrays]) -> _Measured:
        pairs = {layer.name: (_rounded(layer.result), float_name(layer.result, real.graph)) for layer in layers}
        found = {name: (mine.name or "", other) for name, (mine, other) in pairs.items() if other is not None}
        outputs = [v.name or "" for v in real.graph.outputs if v.dtype is not None and v.dtype.is_floating_point()]
        got = values_on(m, [*(mine for mine, _ in found.values()), *outputs], batches)
        want = values_on(real, [*(other for _, other in found.values()), *outputs], batches)
        return cls(
            {name: Error.of(got[mine], want[other]) for name, (mine, other) in found.items()},
            {name: Error.of(got[name], want[name]) for name in outputs},
        )


def _rounded(value: ir.Value) -> ir.Value:
    """The value after the quantizer that reads it, if there is one."""
    for use in value.uses():
        if is_op(use.node, "QuantizeLinear"):
            for reader in use.node.outputs[0].uses():
                if is_op(reader.node, "DequantizeLinear"):
                    return reader.node.outputs[0]
    return value


# -- rounding ----------------------------------------------------------------------------------------------------------


def _learn_rounding(
    m: ir.Model, real: ir.Model, batches: Sequence[Arrays], settings: Settings, progress: Progress
) -> None:
    """Round the weights of each block in turn, in place: AdaRound by layers, BRECQ by blocks."""
    brecq = settings.method == "brecq"
    schedule = settings.schedule(1000, 1e-2)
    blocks = [
        (block, name)
        for block in (blocks_of(m.graph) if brecq else single_layers(m.graph))
        if (name := float_name(block.result, real.graph)) is not None
    ]
    slopes = output_slopes(m, real, [block.result for block, _ in blocks], batches) if brecq else {}
    for i, (block, name) in enumerate(blocks, 1):
        weights = ", ".join(layer.name for layer in block.layers)
        progress(f"{'block' if brecq else 'layer'} {i} of {len(blocks)}: {weights}")
        target = values_on(real, [name], batches)[name]
        inputs = values_on(m, [v.name or "" for v in block.sources], batches)
        weight = slopes.get(block.result.name or "")
        if weight is not None:
            weight = np.square(weight) / max(float(np.mean(np.square(weight))), 1e-30)
        for name_, variable in learn(m, block, inputs, target, weight, schedule).items():
            apply(next(layer for layer in block.layers if layer.name == name_), variable)


def output_slopes(
    m: ir.Model, real: ir.Model, values: Sequence[ir.Value], batches: Sequence[Arrays]
) -> dict[str, np.ndarray]:
    """The gradient of the loss between the outputs of both models with respect to values of the quantized one.

    The loss is the divergence of the softmax of the quantized model's outputs from that of the float model's if an output
    is a matrix of more than one column with rows that are no probabilities, as in classifiers; else half the squared
    difference. Its gradient with respect to the output is the difference of the probabilities, or of the outputs.
    """
    names = [v.name or "" for v in dict.fromkeys(values) if not v.is_graph_output()]
    outputs = [v.name or "" for v in real.graph.outputs if v.dtype is not None and v.dtype.is_floating_point()]
    got, want = (values_on(model, outputs, batches) for model in (m, real))
    seeds = {name: difference(got[name], want[name]) for name in outputs}
    ends = {v.name or "": seeds[v.name or ""] for v in values if v.is_graph_output() and v.name in seeds}
    if not names:
        return ends
    built = build(cloned(m), Options(wrt=names, of=outputs), mode="vjp")
    live = session(built.model, optimize=False)
    wanted = {v.name for v in live.get_inputs()}
    parts: dict[str, list[np.ndarray]] = {name: [] for name in names}
    start = 0
    for batch in batches:
        size = max((len(array) for array in batch.values() if array.ndim), default=1)
        feed = dict(batch) | {f"{name}_grad": seed[start : start + size] for name, seed in seeds.items()}
        results = live.run([built.gradients[n] for n in names], {k: v for k, v in feed.items() if k in wanted})
        for name, array in zip(names, results, strict=True):
            parts[name].append(array)
        start += size
    return ends | {name: np.concatenate(arrays) for name, arrays in parts.items()}


def difference(mine: np.ndarray, real: np.ndarray) -> np.ndarray:
    """The gradient of the loss of `output_slopes` with respect to the output."""
    matrix = real.ndim == 2 and real.shape[1] > 1
    probabilities = matrix and float(real.min()) >= 0 and np.allclose(real.sum(1), 1, atol=1e-3)
    slopes: np.ndarray = mine - real if not matrix or probabilities else _softmax(mine) - _softmax(real)
    return slopes


def _softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(1, keepdims=True))
    result: np.ndarray = powers / powers.sum(1, keepdims=True)
    return result


# -- bias correction ---------------------------------------------------------------------------------------------------


def _correct_biases(
    m: ir.Model, real: ir.Model, layers: Sequence[Layer], batches: Sequence[Arrays], progress: Progress
) -> None:
    """Add to each bias the mean of the float model's results minus that of the quantized one's, layer by layer, in place."""
    nodes = {node.name: node for node in real.graph}
    for i, layer in enumerate(layers, 1):
        progress(f"bias {i} of {len(layers)}: {layer.name}")
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


def _trained(
    m: ir.Model, real: ir.Model, batches: Sequence[Arrays], settings: Settings, progress: Progress
) -> ir.Model:
    """Train weights, biases and scales so that the outputs are those of the float model; returns the trained model."""
    outputs = [v.name or "" for v in real.graph.outputs if v.dtype is not None and v.dtype.is_floating_point()]
    if len(outputs) != 1:
        raise ArgumentError("method='qat' is for models with one floating output.", hint="Use 'adaround' or 'brecq'.")
    (output,) = outputs
    targets = values_on(real, [output], batches)[output]
    schedule = settings.schedule(500, 1e-4)
    program = build_training(m, loss="mse", optimizer=Adam(schedule.lr), quantization="lsq")
    trainer = Trainer(program)
    arrays = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    generator, order = np.random.default_rng(schedule.seed), np.empty(0, np.int64)
    size = min(schedule.batch_size, len(targets))
    target = program.manifest.targets[0].name
    for step in range(schedule.iterations):
        if len(order) < size:
            order = generator.permutation(len(targets))
        rows, order = order[:size], order[size:]
        result = trainer.step({name: array[rows] for name, array in arrays.items()} | {target: targets[rows]})
        if step % 100 == 0:
            progress(f"step {step} of {schedule.iterations}: loss {float(result['loss']):.3g}")
    trained = cloned(program.model("inference"))
    for name, array in trainer.parameters().items():
        trained.graph.initializers[name].const_value = ir.Tensor(array, name=name)
    trained.metadata_props.pop(MANIFEST, None)
    fold_scales(trained.graph)
    return trained
