"""AdaRound and BRECQ: losses, gradients and learned rounding equal the formulas of the papers in PyTorch."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional

import onnx_convgrad as og
from onnx_convgrad.frontend.files import read
from onnx_convgrad.ir.serialize import whole_proto
from onnx_convgrad.quantization.blocks import Block, QuantizedLayer, blocks_of, layers_of, single_layers
from onnx_convgrad.quantization.rounding import (
    BETA,
    FACTOR,
    LOSS,
    TARGET,
    WEIGHT,
    RoundingSchedule,
    apply,
    learn,
    parts_of,
    reconstruction,
    rounded_up,
    start_of,
    variable_of,
)
from onnx_convgrad.runtime import run
from onnx_convgrad.surgery.quantization import prepare
from onnx_convgrad.training.trainer import Trainer
from tests.support.quantized import X, depthwise

GENERATOR = np.random.default_rng(7)


@cache
def proto(weights: str) -> bytes:
    return og.transforms.insert_quantizers(depthwise(), {"x": X}, weights=weights).SerializeToString()


def quantized(weights: str = "int4") -> ir.Model:
    import onnx

    model = read(onnx.load_from_string(proto(weights)))
    prepare(model, "qat")
    return model


def block_of(model: ir.Model, name: str) -> Block:
    return next(b for b in single_layers(model.graph) if b.layers[0].name == name)


def sampled(block: Block, count: int = 8) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random inputs of the second layer, and a target of the shape of its result."""
    generator = np.random.default_rng(1)
    inputs = {block.sources[0].name or "": np.abs(generator.normal(size=(count, 8, 8, 8))).astype(np.float32)}
    return inputs, generator.normal(size=(count, 16, 8, 8)).astype(np.float32)


class AdaRound:
    """Formulas 19 to 24 of Nagel et al. 2020, for the layer c3 with its input and the range of its result."""

    def __init__(self, model: ir.Model, layer: QuantizedLayer) -> None:
        stored = {
            name: v.const_value.numpy() for name, v in model.graph.initializers.items() if v.const_value is not None
        }
        self.scale = torch.tensor(stored["c3.weight_scale"]).reshape(-1, 1, 1, 1)
        self.weight = torch.tensor(stored["c3.weight"])
        self.bias = torch.tensor(stored[layer.node.inputs[2].name or ""])
        data = next(v for v in [layer.node.inputs[0]] if v is not None).producer()
        assert data is not None
        self.data = [float(stored[v.name or ""]) for v in data.inputs[1:] if v is not None]
        quantizer = next(use.node for use in layer.node.outputs[0].uses())
        self.range = [float(stored[v.name or ""]) for v in quantizer.inputs[1:] if v is not None]
        self.low, self.high = (-8, 7) if layer.quantizer.outputs[0].dtype == ir.DataType.INT4 else (-128, 127)

    @staticmethod
    def h(v: torch.Tensor) -> torch.Tensor:
        return torch.clamp(torch.sigmoid(v) * 1.2 - 0.1, 0, 1)

    def start(self) -> torch.Tensor:
        rest = self.weight / self.scale - torch.floor(self.weight / self.scale)
        return -torch.log(1.2 / (rest + 0.1) - 1)

    def loss(
        self, v: torch.Tensor, x: torch.Tensor, target: torch.Tensor, factor: float, beta: float, weight: torch.Tensor
    ) -> torch.Tensor:
        soft = torch.clamp(torch.floor(self.weight / self.scale) + self.h(v), self.low, self.high) * self.scale
        step, zero = self.data
        inputs = (torch.clamp(torch.round(x / step) + zero, -128, 127) - zero) * step
        y = functional.conv2d(inputs, soft, self.bias)
        scale, offset = self.range
        y = torch.clamp(y, (-128 - offset) * scale, (127 - offset) * scale)
        error = ((y - target) ** 2 * weight).sum(1).mean()
        return error + factor * (1 - (2 * self.h(v) - 1).abs() ** beta).sum()


@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradient(weights: str, weighted: bool) -> None:
    model = quantized(weights)
    block = block_of(model, "c3.weight")
    reference = AdaRound(model, block.layers[0])
    inputs, target = sampled(block)
    fisher = np.square(GENERATOR.normal(size=target.shape)).astype(np.float32) if weighted else np.ones_like(target)
    name = variable_of(block.layers[0])
    alone = whole_proto(reconstruction(model, block, weighted=weighted))
    v = torch.tensor(start_of(parts_of(block.layers[0])[1]).astype(np.float32)) + 0.3
    v.requires_grad_()
    np.testing.assert_allclose(v.detach().numpy() - 0.3, reference.start().numpy(), rtol=1e-3, atol=1e-4)
    (x,) = inputs.values()
    want = reference.loss(v, torch.tensor(x), torch.tensor(target), 0.02, 3.5, torch.tensor(fisher))
    want.backward()
    feed = {**inputs, TARGET: target, BETA: np.asarray(3.5, np.float32), FACTOR: np.asarray(0.02, np.float32)}
    feed |= {WEIGHT: fisher} if weighted else {}
    gradients = og.grad(alone, wrt=[name], of=LOSS, trainable_inputs=True)
    augmented = og.augment(alone, wrt=[name], of=[LOSS], trainable_inputs=True)
    feed[name] = v.detach().numpy()
    got = run(augmented, feed)
    np.testing.assert_allclose(got[LOSS], float(want.detach()), rtol=1e-5)
    assert v.grad is not None
    largest = float(v.grad.abs().max())
    np.testing.assert_allclose(got[f"{name}_grad"], v.grad.numpy(), rtol=1e-5, atol=1e-5 * largest)
    np.testing.assert_array_equal(run(gradients, feed)[f"{name}_grad"], got[f"{name}_grad"])


def test_rounding_after_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 steps of Adam from the same start give the same variables, and so the same weights."""
    model = quantized()
    block = block_of(model, "c3.weight")
    layer = block.layers[0]
    reference = AdaRound(model, layer)
    inputs, target = sampled(block)
    schedule = RoundingSchedule(iterations=60, lr=0.05, batch_size=8)
    losses, step_of = [], Trainer.step

    def recorded(trainer: Trainer, *batch: Any) -> Any:
        result = step_of(trainer, *batch)
        losses.append(float(result["loss"]))
        return result

    monkeypatch.setattr(Trainer, "step", recorded)
    learned = learn(model, block, inputs, target, None, schedule)["c3.weight"]
    v = torch.tensor(start_of(parts_of(layer)[1]).astype(np.float32)).requires_grad_()
    optimizer = torch.optim.Adam([v], 0.05)
    (x,) = map(torch.tensor, inputs.values())
    wanted = []
    for step in range(60):
        optimizer.zero_grad()
        loss = reference.loss(v, x, torch.tensor(target), *schedule.at(step), torch.ones(()))
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    far = np.abs(v.detach().numpy()) > 1e-2
    np.testing.assert_array_equal(rounded_up(learned)[far], (v.detach().numpy() >= 0)[far])
    floors = np.floor(reference.weight.numpy() / reference.scale.numpy())
    apply(layer, learned)
    assert layer.weight.const_value is not None
    levels = layer.weight.const_value.numpy() / reference.scale.numpy()
    np.testing.assert_allclose(levels, floors + rounded_up(learned), atol=1e-4)


def test_the_schedule_of_the_penalty() -> None:
    """Nothing for the first fifth, then beta falls in a line from 20 to 2."""
    schedule = RoundingSchedule(iterations=100)
    assert [schedule.at(step) for step in (0, 19)] == [(0.0, 20.0)] * 2
    assert schedule.at(20) == (0.01, 20.0)
    assert schedule.at(60) == (0.01, pytest.approx(11.0))


@pytest.mark.parametrize(
    ("options", "reason"), [({"iterations": 0}, "iterations"), ({"lr": 0.0}, "lr"), ({"batch_size": 0}, "batch_size")]
)
def test_wrong_schedules(options: dict[str, float], reason: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=reason):
        RoundingSchedule(**options)  # type: ignore[arg-type]


def test_layers_and_blocks_of_a_chain() -> None:
    model = quantized()
    layers = [layer.name for layer in layers_of(model.graph)]
    assert layers == ["c1.weight", "c2.weight", "c3.weight", "fc.weight"]
    blocks = blocks_of(model.graph)
    assert [[layer.name for layer in block.layers] for block in blocks] == [[name] for name in layers]
    assert [v.name for v in blocks[0].sources] == ["x"]
    assert all(block.sources == (before.result,) for before, block in pairwise(blocks))
