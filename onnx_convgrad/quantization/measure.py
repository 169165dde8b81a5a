"""Run models on calibration data, and report the errors of a quantized one against the float one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.forms import finite
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.frontend.files import cloned
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import build
from onnx_convgrad.quantization.blocks import QuantizedLayer, float_name
from onnx_convgrad.runtime import session

Arrays = dict[str, np.ndarray]


def size_of(batch: Mapping[str, np.ndarray]) -> int:
    """The number of samples of a batch."""
    return max((len(array) for array in batch.values() if array.ndim), default=1)


def first_samples(batches: Iterable[Mapping[str, np.ndarray]], samples: int, axes: Mapping[str, int]) -> list[Arrays]:
    """Batches with at most `samples` samples together; `axes` are those of the samples, where they are not the first.

    Raises:
        ArgumentError: There is none.
    """
    kept: list[Arrays] = []
    left = samples
    for batch in batches:
        kept.append({n: a[(*[slice(None)] * axes.get(n, 0), slice(left))] if a.ndim else a for n, a in batch.items()})
        left -= size_of(batch)
        if left <= 0:
            break
    if not kept:
        raise ArgumentError("The data hold no batch to calibrate with.")
    return kept


def joined(batches: Sequence[Arrays]) -> Arrays:
    """Arrays joined along the first axis; numbers become an array of one per batch."""
    return {name: np.concatenate([np.atleast_1d(batch[name]) for batch in batches]) for name in batches[0]}


def floating_outputs(model: ir.Model) -> list[str]:
    """Names of the outputs of a model that are floating numbers."""
    return [v.name or "" for v in model.graph.outputs if v.dtype is not None and v.dtype.is_floating_point()]


def values_by_batch(model: ir.Model, names: Sequence[str], batches: Sequence[Arrays]) -> list[Arrays]:
    """The named values of a model on each batch.

    Quantizers are computed as the file says, without fused kernels, whose sums may be clipped on some processors.

    Raises:
        ModelError: A value is not finite.
    """
    m = cloned(model)
    values, inputs = named_values(m.graph), {v.name for v in m.graph.inputs}
    computed = [name for name in dict.fromkeys(names) if name not in inputs]
    m.graph.outputs.clear()
    m.graph.outputs.extend(values[name] for name in computed)
    live = session(m, optimize=False) if computed else None
    found: list[Arrays] = []
    for batch in batches:
        results = [] if live is None else live.run(computed, dict(batch))
        found.append(dict(zip(computed, results, strict=True)) | {n: batch[n] for n in names if n in inputs})
        for name, array in found[-1].items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ModelError(f"{name!r} is not finite on the data.", hint="Look for NaN and huge numbers in them.")
    return found


def values_on(model: ir.Model, names: Sequence[str], batches: Sequence[Arrays]) -> Arrays:
    """The named values of a model on all batches, `joined`; see `values_by_batch`."""
    return joined(values_by_batch(model, names, batches))


def gradients_of(
    model: ir.Model, wrt: Sequence[str], of: Sequence[str]
) -> Callable[[Arrays, Arrays], list[np.ndarray]]:
    """A function of a batch and the cotangents of the values in `of`: the gradients of the values in `wrt`."""
    built = build(cloned(model), Options(wrt=list(wrt), of=list(of), outputs=False))
    live, names = session(built.model, optimize=False), [built.gradients[name] for name in wrt]
    wanted = {v.name for v in live.get_inputs()}

    def gradients(batch: Arrays, cotangents: Arrays) -> list[np.ndarray]:
        feed = batch | {f"{name}_grad": cotangent for name, cotangent in cotangents.items()}
        results: list[np.ndarray] = live.run(names, {name: array for name, array in feed.items() if name in wanted})
        return results

    return gradients


@dataclass(frozen=True, slots=True)
class Error:
    """The difference between a value of the quantized model and the same value of the float model.

    Attributes:
        mean_square: Mean of the squared difference.
        signal_to_noise: 10 log10 of the mean square of the float value divided by that of the difference, in decibels.
    """

    mean_square: float
    signal_to_noise: float

    @classmethod
    def of(cls, quantized: np.ndarray, real: np.ndarray) -> Error:
        noise = float(np.mean(np.square(quantized.astype(np.float64) - real)))
        signal = float(np.mean(np.square(real.astype(np.float64))))
        return cls(noise, 10 * float(np.log10(signal / noise)) if noise and signal else float("inf"))


def is_logits(y: np.ndarray) -> bool:
    """Whether an output is a matrix of more than one column whose rows are not probabilities, as in classifiers."""
    matrix = y.ndim == 2 and y.shape[1] > 1
    return matrix and not (float(y.min()) >= 0 and np.allclose(y.sum(1), 1, atol=1e-3))


def softmax(x: np.ndarray) -> np.ndarray:
    """The softmax of rows."""
    powers = np.exp(x - x.max(1, keepdims=True))
    result: np.ndarray = powers / powers.sum(1, keepdims=True)
    return result


# -- the report of `quantize` ------------------------------------------------------------------------------------------


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
        bits: Of one weight.
        bytes: Of all weights, without scales and bias.
        sensitivity: With mixed precision, how much divergence 4 bits add to that of 8 bits, per sample.
    """

    node: str
    weight: str
    operator: str
    shape: tuple[int, ...]
    nearest: Error
    after: Error
    changed: float
    bits: int
    bytes: int
    sensitivity: float | None = None


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """The errors of a quantized model, per layer and of the outputs, against the float model, on the calibration data."""

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
        result: dict[str, Any] = finite(asdict(self) | {"outputs": outputs})
        return result


def errors_of(
    m: ir.Model, real: ir.Model, layers: Sequence[QuantizedLayer], batches: Sequence[Arrays]
) -> tuple[dict[str, Error], dict[str, Error]]:
    """Errors of a quantized model against the float one: of layers by weight, and of outputs."""
    pairs = {layer.name: (_rounded(layer.result).name or "", float_name(layer.result, real.graph)) for layer in layers}
    found = {name: (mine, other) for name, (mine, other) in pairs.items() if other is not None}
    outputs = floating_outputs(real)
    got = values_on(m, [*(mine for mine, _ in found.values()), *outputs], batches)
    want = values_on(real, [*(other for _, other in found.values()), *outputs], batches)
    return (
        {name: Error.of(got[mine], want[other]) for name, (mine, other) in found.items()},
        {name: Error.of(got[name], want[name]) for name in outputs},
    )


def _rounded(value: ir.Value) -> ir.Value:
    """The value after the quantizer that reads it, if there is one."""
    levels = [node.outputs[0] for node in value.consumers() if is_op(node, "QuantizeLinear")]
    real = [node.outputs[0] for v in levels for node in v.consumers() if is_op(node, "DequantizeLinear")]
    return real[0] if real else value
