"""Run a model on calibration data and keep values inside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.frontend.files import cloned
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.runtime import session

Arrays = dict[str, np.ndarray]


def first_samples(batches: Iterator[Mapping[str, np.ndarray]], samples: int) -> list[Arrays]:
    """Batches with at most `samples` samples together.

    Raises:
        ArgumentError: There is none.
    """
    kept: list[Arrays] = []
    left = samples
    for batch in batches:
        size = max((len(array) for array in batch.values() if array.ndim), default=1)
        kept.append({name: array[:left] if array.ndim else array for name, array in batch.items()})
        left -= size
        if left <= 0:
            break
    if not kept:
        raise ArgumentError("The data hold no batch to calibrate with.")
    return kept


def values_on(model: ir.Model, names: Sequence[str], batches: Sequence[Arrays]) -> Arrays:
    """The named values of a model on all batches, joined along the first axis; numbers become an array of one per batch.

    Quantizers are computed as the file says, without fused kernels, whose sums may be clipped on some processors.

    Raises:
        ModelError: A value is not finite.
    """
    m = cloned(model)
    values = named_values(m.graph)
    kept = [values[name] for name in dict.fromkeys(names)]
    inputs = {v.name for v in m.graph.inputs}
    m.graph.outputs.clear()
    m.graph.outputs.extend(v for v in kept if v.name not in inputs)
    computed = [v.name or "" for v in m.graph.outputs]
    live = session(m, optimize=False) if computed else None
    parts: dict[str, list[np.ndarray]] = {v.name or "": [] for v in kept}
    for batch in batches:
        results = [] if live is None else live.run(computed, dict(batch))
        for name, array in [*zip(computed, results, strict=True), *((n, batch[n]) for n in parts if n in inputs)]:
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise ModelError(f"{name!r} is not finite on the data.", hint="Look for NaN and huge numbers in them.")
            parts[name].append(array)
    return {name: np.concatenate([np.atleast_1d(a) for a in arrays]) for name, arrays in parts.items()}


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
