"""Updates of weights that are stored as integers: those of the paper, rounded at random, and repeatable."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.programs.footprint import footprint
from onnx_convgrad.runtime import run, session
from tests.support.one_input import graph_of
from tests.support.quantized import LABELS, X, depthwise, fused_operators

BATCH = {"x": X, "target": LABELS}


@cache
def quantized(weights: str = "int8", activations: str = "int8") -> onnx.ModelProto:
    return og.transforms.insert_quantizers(depthwise(), {"x": X}, weights=weights, activations=activations)


def program(optimizer: og.optim.Optimizer, **options: Any) -> og.TrainingProgram:
    chosen = {"quantization": "int8", **options}
    return og.build_training(quantized(), loss="cross_entropy", optimizer=optimizer, **chosen)


def stored(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def test_the_update_is_that_of_quantization_aware_scaling() -> None:
    """q - eta G / s^2, with the gradient G of the levels, is rounded up or down; the mean over many draws is exact."""
    rate, steps, name = 0.3, 30, "c2.weight_quantized"
    made, other = (program(og.optim.SGD(rate), seed=seed) for seed in (0, 1))
    scale = stored(quantized())["c2.weight_scale"].reshape(-1, 1, 1, 1)
    slope = run(made.gradients, BATCH)[f"{name}_grad"]
    q = og.Trainer(made).parameters()[name].astype(np.float64)
    levels = slope * scale  # the gradient of the levels
    exact = np.clip(q - rate * levels / np.square(scale), -128, 127)
    assert np.abs(exact - q).max() > 1
    found = []
    for opened in (session(made.step), session(other.step)):
        for step in range(steps):
            found += opened.run([f"{name}_next"], {**BATCH, "step": np.array(step)})
            assert found[-1].dtype == np.int8
            assert np.abs(found[-1] - exact).max() < 1 + 1e-3
    mean, share = np.mean(found, 0), exact - np.floor(exact)
    deviation = np.sqrt(share * (1 - share) / len(found))
    errors = np.abs(mean - exact)[deviation > 0.01] / deviation[deviation > 0.01]
    assert errors.max() < 4.5
    assert 0.5 < np.sqrt(np.square(errors).mean()) < 1.5
    assert len({array.tobytes() for array in found}) == len(found)


@pytest.mark.parametrize("optimizer", [og.optim.Adam(1e-2), og.optim.SGD(0.5, momentum=0.9)])
def test_training_lowers_the_loss_as_with_float_masters(optimizer: og.optim.Optimizer, tmp_path: Path) -> None:
    losses = {}
    for mode in ("qat", "int8"):
        trainer = og.Trainer(program(optimizer, quantization=mode))
        losses[mode] = [float(trainer.step(BATCH)["loss"]) for _ in range(40)]
    assert losses["int8"][0] == pytest.approx(losses["qat"][0], rel=1e-6)
    fell = {mode: each[0] - each[-1] for mode, each in losses.items()}
    assert fell["int8"] > 0.7 * fell["qat"] > 0.05
    trainer.export(tmp_path / "trained.onnx")
    arrays = stored(onnx.load(tmp_path / "trained.onnx"))
    assert {arrays[f"{name}.weight_quantized"].dtype for name in ("c1", "c2", "c3", "fc")} == {np.dtype(np.int8)}
    fused = fused_operators(tmp_path / "trained.onnx", tmp_path)
    assert (fused["QLinearConv"], fused["QGemm"], fused["Conv"], fused["Gemm"]) == (3, 1, 0, 0)


def test_runs_can_be_repeated_in_two_halves_and_from_a_checkpoint(tmp_path: Path) -> None:
    made = program(og.optim.Adam(1e-2))
    whole, halves = og.Trainer(made), og.Trainer(made)
    for _ in range(3):
        whole.step(BATCH)
    state = {**halves.parameters()}
    gradients = run(made.gradients, BATCH)
    updated = run(made.update, {p.gradient: gradients[p.gradient] for p in made.manifest.parameters})
    halves.step(BATCH)
    for name, array in halves.parameters().items():
        np.testing.assert_array_equal(updated[f"{name}_next"], array)
        assert (array != state[name]).any()
    halves.save(tmp_path / "checkpoint")
    again = og.Trainer(made)
    again.restore(tmp_path / "checkpoint")
    for _ in range(2):
        again.step(BATCH)
    for name, array in again.parameters().items():
        np.testing.assert_array_equal(array, whole.parameters()[name])


def test_gradients_are_accumulated_as_floats() -> None:
    trainer = og.Trainer(program(og.optim.SGD(0.5)))
    before = trainer.parameters()
    trainer.fit(BATCH, epochs=1, batch_size=8, accumulate=2)
    assert all((array != before[name]).any() for name, array in trainer.parameters().items())


def test_the_report_counts_what_integers_save() -> None:
    masters, integers = (footprint(program(og.optim.SGD(0.1), quantization=mode)) for mode in ("qat", "int8"))
    weights = 8 * 9 + 8 * 9 + 16 * 8 + 10 * 16
    assert (masters.narrowed, integers.narrowed) == (0, 3 * weights)
    assert masters.inputs - integers.inputs == 3 * weights


def test_zero_points_and_unsigned_levels() -> None:
    made = og.build_training(
        quantized("uint8", "uint8"), loss="cross_entropy", optimizer=og.optim.Adam(1e-2), quantization="int8"
    )
    trainer = og.Trainer(made)
    losses = [float(trainer.step(BATCH)["loss"]) for _ in range(20)]
    assert losses[-1] < losses[0] - 0.05
    assert trainer.parameters()["c1.weight_quantized"].dtype == np.uint8


def test_weights_of_four_bits_keep_float_masters() -> None:
    made = og.build_training(
        quantized("int4"), loss="cross_entropy", optimizer=og.optim.SGD(0.1), quantization="int8"
    )  # fmt: skip
    assert {p.dtype for p in made.manifest.parameters} == {"float32"}


def test_frozen_weights_stay() -> None:
    made = program(og.optim.SGD(0.1), freeze="c*.weight_quantized")
    assert [p.name for p in made.manifest.parameters if p.dtype == "int8"] == ["fc.weight_quantized"]


def test_a_weight_of_two_layers_is_updated_once() -> None:
    text = """(float[N,2] x) => (float[N,2] y) <int8[2,2] w = {10,20,-30,40}, float s = {0.02}, float t = {0.1}> {
        w1 = DequantizeLinear (w, s)
        q = QuantizeLinear (x, t)
        d = DequantizeLinear (q, t)
        h = MatMul (d, w1)
        r = Sin (h)
        w2 = DequantizeLinear (w, s)
        y = MatMul (r, w2)
    }"""
    x, target = np.asarray([[1, 2], [3, 0.5]], np.float32), np.ones((2, 2), np.float32)
    gradients = {}
    for mode in ("qat", "int8"):
        made = og.build_training(graph_of(text, opset=21), loss="mse", optimizer=og.optim.SGD(0.1), quantization=mode)
        (parameter,) = (p for p in made.manifest.parameters if p.shape == (2, 2))
        gradients[mode] = run(made.gradients, {"x": x, "target": target})[parameter.gradient]
    np.testing.assert_allclose(gradients["int8"], gradients["qat"], rtol=1e-5)


@pytest.mark.parametrize("options", [{"wrt": ["c1.bias"]}, {"precision": "float16"}, {"ema": 0.9}])
def test_what_does_not_go_together_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(og.errors.ArgumentError, match=r"updates all 8-bit weights.*use quantization='qat'"):
        program(og.optim.SGD(0.1), **options)


def test_the_step_draws_its_numbers_from_its_inputs() -> None:
    operators = Counter(node.op_type for node in program(og.optim.SGD(0.1)).step.graph.node)
    assert not [name for name in operators if name.startswith("Random")]


def test_no_dequantizer_of_a_parameter_is_left() -> None:
    """ONNX Runtime refuses some graphs with a DequantizeLinear of int8 before a Transpose: see quirks.INT8_LEVELS."""
    made = program(og.optim.SGD(0.1))
    for graph in (made.step.graph, made.gradients.graph, made.update.graph, made.evaluate.graph):
        read = {node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"}
        assert not read & {p.name for p in made.manifest.parameters}
