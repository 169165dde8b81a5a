"""Learn for each weight of a block whether it is rounded up or down (AdaRound, BRECQ).

AdaRound (Nagel et al. 2020, arXiv:2004.10568) minimizes the error of a layer's result over a variable V per weight:

    W(V) = s clip(floor(W / s) + h(V), n, p),    h(V) = clip(1.2 sigmoid(V) - 0.1, 0, 1)
    |f(W x) - f(W(V) x')|^2 + lambda sum of 1 - |2 h(V) - 1|^beta

x' is the input in the quantized model, f the activation. The second term, in which beta falls from 20 to 2 after the first
fifth of the steps, drives h to 0 or 1. BRECQ (Li et al. 2021, arXiv:2102.05426) does so for all layers of a block at once,
and weighs each squared error by the squared gradient of the loss with respect to that result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.numbers import above_zero, check_fields, natural, whole
from onnx_convgrad.frontend.files import cloned
from onnx_convgrad.frontend.quantizers import level_range
from onnx_convgrad.frontend.tidy import store
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.passes import RemoveUnused
from onnx_convgrad.programs.build import build_training
from onnx_convgrad.programs.optim.update_rules import Adam
from onnx_convgrad.quantization.blocks import Block, QuantizedLayer
from onnx_convgrad.surgery.quantization import spread_over
from onnx_convgrad.training.trainer import Trainer

GAMMA, ZETA = -0.1, 1.1
"""The range of the stretched sigmoid, before it is clipped to 0 .. 1."""

TARGET, WEIGHT, BETA, FACTOR, LOSS = "block_target", "block_weight", "rounding_beta", "rounding_factor", "block_loss"


_FACTOR, _WARMUP, _BETAS = 0.01, 0.2, (20.0, 2.0)
"""Lambda, the share of the steps without that term, and the first and last beta."""


@dataclass(frozen=True, slots=True)
class RoundingSchedule:
    """The steps that learn a rounding.

    Attributes:
        iterations: Number of steps, of Adam for each block.
        lr: Learning rate.
        batch_size: Samples in each step.
        seed: Of the order of the samples.
    """

    iterations: int = 1000
    lr: float = 1e-2
    batch_size: int = 32
    seed: int = 0

    checks: ClassVar = {"iterations": whole, "lr": above_zero, "batch_size": whole, "seed": natural}

    def __post_init__(self) -> None:
        check_fields(self)

    def at(self, step: int) -> tuple[float, float]:
        """The factor lambda and beta of a step, counted from 0."""
        start = _WARMUP * self.iterations
        if step < start:
            return 0.0, _BETAS[0]
        part = (step - start) / max(self.iterations - start, 1)
        return _FACTOR, _BETAS[1] + (_BETAS[0] - _BETAS[1]) * max(0.0, 1 - part)

    def rows(self, count: int) -> Iterator[np.ndarray]:
        """The samples of each step out of `count`, each once before any comes again."""
        generator, order = np.random.default_rng(self.seed), np.empty(0, np.int64)
        size = min(self.batch_size, count)
        for _ in range(self.iterations):
            if len(order) < size:
                order = generator.permutation(count)
            yield order[:size]
            order = order[size:]


def variable_of(layer: QuantizedLayer) -> str:
    """The name of V of a layer."""
    return f"{layer.name}.rounding"


def parts_of(layer: QuantizedLayer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """floor(W / s), the rest W / s - floor(W / s), and s, broadcast to the shape of W."""
    scale = spread_over(layer.quantizer, 1)
    ratio = layer.numbers / scale
    whole_part = np.floor(ratio)
    return whole_part, ratio - whole_part, np.broadcast_to(scale, ratio.shape)


def start_of(rest: np.ndarray) -> np.ndarray:
    """V with h(V) = rest."""
    return -np.log((ZETA - GAMMA) / (rest - GAMMA) - 1)


def rounded_up(variable: np.ndarray) -> np.ndarray:
    """Whether h(V) >= 1/2, which is V >= 0."""
    return variable >= 0


def reconstruction(model: ir.Model, block: Block, *, weighted: bool) -> ir.Model:
    """The block alone, with soft rounding, as a model of its loss.

    Inputs are the sources of the block, `block_target`, `block_weight` if the error is weighted, `rounding_beta` and
    `rounding_factor` (scalars); the output is `block_loss`. The error is summed over each position's channels (axis 1) and
    averaged over all positions and samples.
    """
    m = cloned(model)
    graph, values = m.graph, named_values(m.graph)
    e = Emitter(graph)
    penalties = []
    beta, factor = (_input(graph, name, ir.Shape(()), ir.TensorType(ir.DataType.FLOAT)) for name in (BETA, FACTOR))
    for layer in block.layers:
        real = values[layer.real.name or ""]
        back = real.producer()
        assert back is not None, "it is the result of a DequantizeLinear"
        e.anchor = back
        whole_part, rest, scale = parts_of(layer)
        low, high = level_range(layer.dtype) or (-128.0, 127.0)
        zero = np.broadcast_to(spread_over(layer.quantizer, 2), rest.shape).astype(np.float32)
        variable = store(graph, variable_of(layer), start_of(rest).astype(np.float32))
        stretched = e.add(e.mul(e.op("Sigmoid", variable), ZETA - GAMMA), GAMMA)
        h = e.op("Clip", stretched, e.scalar(0, variable), e.scalar(1, variable))
        levels = e.op(
            "Clip", e.add(h, e.const(whole_part + zero, ir.DataType.FLOAT)), e.scalar(low, h), e.scalar(high, h)
        )
        soft = e.mul(e.sub(levels, e.const(zero)), e.const(scale, ir.DataType.FLOAT))
        real.replace_all_uses_with(soft)
        certainty = e.op("Pow", e.op("Abs", e.sub(e.mul(h, 2), 1)), beta)
        penalties.append(e.op("ReduceSum", e.sub(1, certainty), keepdims=0))
    e.anchor = None
    result = values[block.result.name or ""]
    error = e.square(e.sub(_within_range(e, result), _input(graph, TARGET, result.shape, result.type)))
    if weighted:
        error = e.mul(error, _input(graph, WEIGHT, result.shape, result.type))
    error = e.op("ReduceMean", e.op("ReduceSum", error, e.ints([1]), keepdims=0), keepdims=0)
    loss = e.add(error, e.mul(factor, e.sum(penalties)))
    loss.name, loss.shape = LOSS, ir.Shape(())
    for source in block.sources:
        _cut(graph, values[source.name or ""])
    graph.outputs.clear()
    graph.outputs.append(loss)
    RemoveUnused()(m)
    kept = {s.name for s in block.sources} | {TARGET, WEIGHT, BETA, FACTOR}
    for value in [v for v in graph.inputs if v.name not in kept]:
        graph.inputs.remove(value)
    return m


def _within_range(e: Emitter, result: ir.Value) -> ir.Value:
    """The result clipped to the range of the quantizer behind it, which stands for a Relu that the quantizer replaced."""
    for use in result.uses():
        scale, zero = (*use.node.inputs[1:], None)[:2]
        bounds = level_range(use.node.outputs[0].dtype or ir.DataType.UINT8)
        if not is_op(use.node, "QuantizeLinear") or use.idx or bounds is None or scale is None:
            continue
        numbers = e.constant_of(scale)
        offset = np.zeros(()) if zero is None else e.constant_of(zero)
        if numbers is not None and offset is not None and numbers.size == 1:
            low, high = ((bound - float(offset.reshape(()))) * float(numbers.reshape(())) for bound in bounds)
            return e.op("Clip", result, e.scalar(low, result), e.scalar(high, result))
    return result


def _input(graph: ir.Graph, name: str | None, shape: ir.Shape | None, kind: ir.TypeProtocol | None) -> ir.Value:
    """Add an input to a graph."""
    value = ir.Value(name=name, shape=shape, type=kind)
    graph.inputs.append(value)
    return value


def _cut(graph: ir.Graph, value: ir.Value) -> None:
    """Make a value that a node computes an input of the graph."""
    if value.is_graph_input():
        return
    name, value.name = value.name, None
    value.replace_all_uses_with(_input(graph, name, value.shape, value.type), replace_graph_outputs=True)


def learn(
    model: ir.Model,
    block: Block,
    inputs: dict[str, np.ndarray],
    target: np.ndarray,
    weight: np.ndarray | None,
    schedule: RoundingSchedule,
) -> dict[str, np.ndarray]:
    """Learn the rounding of a block of a model in which earlier blocks are rounded; returns V by the name of the weight.

    `inputs` are the sources of the block on the calibration data, `target` is its result in the float model, and `weight`
    the factor of each squared error.
    """
    program = build_training(
        reconstruction(model, block, weighted=weight is not None),
        loss=LOSS,
        optimizer=Adam(schedule.lr),
        wrt=[variable_of(layer) for layer in block.layers],
    )
    trainer = Trainer(program)
    for step, rows in enumerate(schedule.rows(len(target))):
        factor, beta = schedule.at(step)
        batch = {name: array[rows] for name, array in inputs.items()} | {TARGET: target[rows]}
        batch |= {BETA: np.asarray(beta, np.float32), FACTOR: np.asarray(factor, np.float32)}
        if weight is not None:
            batch[WEIGHT] = weight[rows]
        trainer.step(batch)
    learned = trainer.parameters()
    return {layer.name: learned[variable_of(layer)] for layer in block.layers}


def apply(layer: QuantizedLayer, variable: np.ndarray) -> None:
    """Store the weight as the learned levels times the scale, in place."""
    whole_part, _, scale = parts_of(layer)
    numbers = (whole_part + rounded_up(variable)) * scale
    layer.weight.const_value = ir.Tensor(numbers.astype(np.float32), name=layer.name)
