"""Choose 4 or 8 bits for the weights of each layer: mixed precision by sensitivity.

With the float model's probabilities p of labels, a change D of one weight causes the divergence, to second order,

    KL(p | p') = 1/2 D' G D,    G = E[g g'],    g = gradient of log p(label) with respect to the weight, label drawn from p

G is the Fisher matrix, and here the Hessian of the divergence as well, which is at its minimum. Of outputs that are no
logits each number counts as the mean of a normal distribution with variance 1, so that the divergence is half the squared
difference.

| sensitivity | cost of D | from |
|---|---|---|
| `"gradient"` | 1/2 E[(g' D)^2] | the gradient times the perturbation |
| `"trace"` | 1/2 tr(G) / n |D|^2 with n weights | HAWQ-V2 (Dong et al. 2020, arXiv:1911.03852, equation 2) |

Labels of different samples are independent, and E[g] = 0: the gradient of a batch's sum is one draw of the sum over samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.tidy import store
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.quantization.blocks import QuantizedLayer
from onnx_convgrad.quantization.measure import (
    Arrays,
    floating_outputs,
    gradients_of,
    is_logits,
    size_of,
    softmax,
    values_by_batch,
)
from onnx_convgrad.surgery.quantization import array_of, spread_over

SENSITIVITIES = ("gradient", "trace")

DRAWS = 64
"""Least number of batches with drawn labels: the relative deviation of a sensitivity is then 18 %."""

_NARROW = {ir.DataType.INT8: ir.DataType.INT4, ir.DataType.UINT8: ir.DataType.UINT4}

_STEPS = 17
"""A step between levels of 4 bits, in steps of 8 bits: 15 of these cover as much as 255 of those."""


def choose_precision(
    real: ir.Model, layers: Sequence[QuantizedLayer], batches: Sequence[Arrays], most: int, sensitivity: str, seed: int
) -> dict[str, float]:
    """Give weights 4 bits instead of 8, in place, where that costs least, until all have at most `most` bytes.

    Returns:
        Weight -> its sensitivity: the divergence per sample that 4 bits add to that of 8 bits.

    Raises:
        ArgumentError: The weights have more bytes with 4 bits each.
    """
    unique = {layer.name: layer for layer in layers}
    small = {name: bytes_of(layer, 4) for name, layer in unique.items()}
    room = most - sum(small.values())
    if room < 0:
        raise ArgumentError(f"The weights have {sum(small.values())} bytes with 4 bits each, and {most} are wanted.")
    costs = sensitivities(real, list(unique.values()), batches, sensitivity, seed)
    sizes = [bytes_of(layer, 8) - small[name] for name, layer in unique.items()]
    kept = knapsack([max(costs[name], 0.0) for name in unique], sizes, room)
    for i, layer in enumerate(unique.values()):
        if i not in kept:
            narrow(layer)
    return costs


def bits_of(layer: QuantizedLayer) -> int:
    """The bits of one weight of a layer."""
    return round(8 * layer.dtype.itemsize)


def bytes_of(layer: QuantizedLayer, bits: float | None = None) -> int:
    """The bytes of a layer's weights, without scales and bias."""
    return math.ceil(layer.numbers.size * (bits or bits_of(layer)) / 8)


def most_bytes(layers: Sequence[QuantizedLayer], bits: float | None, size: float | None) -> int:
    """The bytes that all weights may have, by an average of bits, a number of bytes, or a share of those of float32."""
    unique = {layer.name: layer for layer in layers}.values()
    if bits is None and size is not None:
        return int(size if size > 1 else size * sum(bytes_of(layer, 32) for layer in unique))
    return sum(bytes_of(layer, bits) for layer in unique)


# -- sensitivity -------------------------------------------------------------------------------------------------------


def sensitivities(
    real: ir.Model,
    layers: Sequence[QuantizedLayer],
    batches: Sequence[Arrays],
    kind: str,
    seed: int,
    draws: int = DRAWS,
) -> dict[str, float]:
    """Weight -> how much more divergence 4 bits cause than 8, per sample; a member of `SENSITIVITIES` says how."""
    changes = {layer.name: _changes(layer) for layer in layers}
    outputs, generator = floating_outputs(real), np.random.default_rng(seed)
    results = values_by_batch(real, outputs, batches)
    gradients = gradients_of(real, list(changes), outputs)
    costs, samples = dict.fromkeys(changes, 0.0), 0
    for batch, got in islice(cycle(zip(batches, results, strict=True)), max(draws, len(batches))):
        samples += size_of(batch)
        slopes = gradients(batch, {name: drawn(y, generator) for name, y in got.items()})
        for (name, pair), g in zip(changes.items(), slopes, strict=True):
            exact = g.astype(np.float64)
            narrow, wide = (
                float(np.vdot(exact, d) ** 2 if kind == "gradient" else np.square(exact).mean() * np.vdot(d, d)) / 2
                for d in pair
            )
            costs[name] += narrow - wide
    return {name: cost / samples for name, cost in costs.items()}


def drawn(y: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The gradient of log p by an output, of a label drawn from its softmax or of a number with this mean."""
    if not is_logits(y):
        return np.asarray(generator.standard_normal(y.shape), y.dtype)
    shares = softmax(y)
    labels = (shares.cumsum(1) < generator.random((len(y), 1))).sum(1).clip(max=y.shape[1] - 1)
    gradient: np.ndarray = (np.eye(y.shape[1])[labels] - shares).astype(y.dtype)
    return gradient


def _changes(layer: QuantizedLayer) -> tuple[np.ndarray, np.ndarray]:
    """The changes of a weight by rounding to 4 bits and to 8."""
    numbers = layer.numbers.astype(np.float64)
    step, zero = (spread_over(layer.quantizer, operand) for operand in (1, 2))
    wide = (layer.levels - zero) * step
    low, high = (0, 15) if layer.dtype == ir.DataType.UINT8 else (-8, 7)
    step, zero = step * _STEPS, np.rint(zero / _STEPS)
    narrow = (np.clip(np.rint(numbers / step) + zero, low, high) - zero) * step
    return narrow - numbers, wide - numbers


# -- choice ------------------------------------------------------------------------------------------------------------


def knapsack(gains: Sequence[float], sizes: Sequence[int], room: int) -> set[int]:
    """The positions with the greatest sum of gains, of those with a sum of sizes of at most `room`.

    Sizes are counted in units of `room` / 10,000, rounded up.
    """
    if sum(sizes) <= room:
        return set(range(len(sizes)))
    unit = max(room / 10_000, 1)
    units, reach = [math.ceil(size / unit) for size in sizes], int(room / unit)
    best, taken = np.zeros(reach + 1), []
    for gain, size in zip(gains, units, strict=True):
        other = np.full(reach + 1, -1.0)
        if size <= reach:
            other[size:] = best[: reach + 1 - size] + gain
        taken.append(other > best)
        best = np.maximum(best, other)
    found, left = set[int](), reach
    for i in reversed(range(len(units))):
        if taken[i][left]:
            found.add(i)
            left -= units[i]
    return found


def narrow(layer: QuantizedLayer) -> None:
    """Give a layer's weight 4 bits instead of 8, with steps 17 times as large, in place."""
    graph, quantizer = layer.quantizer.graph, layer.quantizer
    assert isinstance(graph, ir.Graph), "the layer is of a graph"
    levels, names, dtype = quantizer.outputs[0], Namespace.of_values(graph), _NARROW[layer.dtype]
    scale, zero = array_of(quantizer.inputs[1]), (*quantizer.inputs, None)[2]
    operands = [store(graph, names.claim(f"{layer.name}_scale"), scale * np.float32(_STEPS))]
    if zero is not None:
        points = np.rint(array_of(zero) / _STEPS).astype(dtype.numpy())
        operands.append(store(graph, names.claim(f"{layer.name}_zero_point"), points, dtype))
    elif "output_dtype" in quantizer.attributes:
        quantizer.attributes["output_dtype"] = ir.AttrInt64("output_dtype", int(dtype))
    levels.dtype = dtype
    for node in (quantizer, *(use.node for use in levels.uses())):
        if is_op(node, "QuantizeLinear", "DequantizeLinear"):
            for position, value in enumerate(operands, 1):
                node.replace_input_with(position, value)
