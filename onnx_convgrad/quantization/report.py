"""The report of `quantize`: the errors of layers and outputs against the float model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.quantization.blocks import QuantizedLayer, float_name
from onnx_convgrad.quantization.measure import Arrays, Error, floating_outputs, values_on


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
        plain = asdict(self) | {"layers": [asdict(layer) for layer in self.layers], "outputs": outputs}
        result: dict[str, Any] = _finite(plain)
        return result


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


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
