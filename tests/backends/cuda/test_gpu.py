"""ONNX Runtime's CUDA provider: results are right, all nodes run on the GPU, deterministic runs are equal.

`pytest -m gpu` needs `onnx-convgrad[cuda]` and an NVIDIA GPU; without one every test is skipped with the reason.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from benchmarks.gpu.correctness import LAYERS, check_family, check_lowering
from onnx_convgrad.cli.placement import placement
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.runtime import run, session
from onnx_convgrad.runtime.binding import Binding, device_of
from tests.support import training_nets
from tests.support.families import FAMILIES, exported
from tests.support.one_input import graph_of
from tests.support.training_nets import arrays, build

pytestmark = pytest.mark.gpu

NAMES = [family.name for family in FAMILIES]
LOWERINGS = [(op, name) for op in ("ConvInputGrad", "ConvWeightGrad") for name in lowerings()[op]]


@pytest.mark.parametrize(("operator", "name"), LOWERINGS)
def test_lowerings_equal_float64(operator: str, name: str) -> None:
    row = check_lowering(operator, name, LAYERS, "cuda", "cuda")
    assert not row.failed, row


@pytest.mark.parametrize("name", NAMES)
def test_networks_equal_float64(name: str) -> None:
    row = check_family(name, "cuda", "cuda")
    assert row.error is not None
    assert not row.failed, row


@pytest.mark.parametrize("name", NAMES)
def test_no_node_of_a_network_falls_back_to_the_cpu(name: str) -> None:
    family = next(f for f in FAMILIES if f.name == name)
    proto = exported(family, dynamo=False, training=True)
    found = placement(og.augment(proto, wrt="all", target="cuda", training=True), providers="cuda")
    assert found.fallen == ()
    program = og.build_training(proto, loss="mse", optimizer=og.optim.AdamW(1e-3), target="cuda")
    assert placement(program.step, providers="cuda").fallen == ()


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_training_lowers_the_loss_and_stays_on_the_gpu(precision: str) -> None:
    trainer = og.Trainer(build(target="cuda", precision=precision), providers=["cuda"])
    losses = [trainer.step(arrays(0))["loss"] for _ in range(40)]
    assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5])
    assert device_of(trainer.engine._graph("step").session) == ("cuda", 0)
    assert {trainer.engine._buffers.current(name).device_name() for name in trainer.engine._buffers.groups} == {"cuda"}


@pytest.mark.parametrize("captured", [False, True])
def test_steps_equal_those_of_the_cpu(captured: bool) -> None:
    program = build(og.load(training_nets.exported(), input_shapes={"x": arrays(0)["x"].shape}), target="cuda")
    there = og.Trainer(program, providers=["cuda"], options={"tf32": False, "cuda_graph": captured})
    here = og.Trainer(program, providers=["cpu"])
    for i in range(3):
        assert there.step(arrays(i))["loss"] == pytest.approx(here.step(arrays(i))["loss"], rel=1e-3)


def test_deterministic_runs_are_equal_bit_for_bit() -> None:
    model = og.augment(LAYERS[1].model(), wrt="inputs", target="cuda")
    options = {"deterministic": True, "tf32": False}
    first, *others = (run(model, LAYERS[1].feed, providers="cuda", options=options) for _ in range(20))
    for other in others:
        for name, value in first.items():
            np.testing.assert_array_equal(other[name], value)


def test_deterministic_training_is_equal_bit_for_bit() -> None:
    program = build(target="cuda", deterministic=True)
    runs = []
    for _ in range(20):
        trainer = og.Trainer(program, providers=["cuda"], options={"deterministic": True})
        runs.append([trainer.step(arrays(i))["loss"] for i in range(3)])
    assert runs == runs[:1] * 20


def test_captured_graphs_for_several_batches_and_outputs() -> None:
    program = build(
        og.load(training_nets.exported(), input_shapes={"x": arrays(0)["x"].shape}), outputs=["y"], target="cuda"
    )
    captured = og.Trainer(program, providers=["cuda"], options={"tf32": False, "cuda_graph": True})
    plain = og.Trainer(program, providers=["cuda"], options={"tf32": False})
    for i in range(4):
        names = ["loss", "y"] if i % 2 else ["loss"]
        got, want = (t.engine.step([arrays(i)], 0.05, names) for t in (captured, plain))
        for name in names:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-4)


def test_fixed_shapes_are_asked_for_to_capture() -> None:
    trainer = og.Trainer(build(target="cuda"), providers=["cuda"], options={"cuda_graph": True})
    with pytest.raises(og.errors.ExecutionError, match="input_shapes"):
        trainer.step(arrays(0))


@pytest.mark.parametrize(
    "options",
    [
        {"tf32": False},
        {"algorithm_search": "exhaustive"},
        {"algorithm_search": "default"},
        {"max_workspace": False},
        {"memory_limit": 2**30},
        {"prefer_nhwc": True},
        {"conv1d_pad_to_nc1d": True},
    ],
    ids=str,
)
def test_options_change_no_gradient(options: dict[str, Any]) -> None:
    layer = LAYERS[7] if "conv1d_pad_to_nc1d" in options else LAYERS[0]
    model = og.vjp(layer.model(), wrt="inputs", target="cuda")
    want = run(model, layer.feed)
    got = run(model, layer.feed, providers="cuda", options=options)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=5e-3 * np.abs(value).max())


def test_a_captured_graph_gives_what_a_run_gives() -> None:
    layer = LAYERS[0]
    model = og.vjp(layer.model(), wrt="inputs", target="cuda")
    want = run(model, layer.feed, providers="cuda")
    live = session(model, providers="cuda", options={"cuda_graph": True})
    binding = Binding(live)
    binding.bind({name: binding.put(array) for name, array in layer.feed.items()})
    binding.bind_results({name: binding.put(np.zeros_like(array)) for name, array in want.items()})
    for _ in range(3):
        binding.run()
    for name, value in binding.results().items():
        np.testing.assert_allclose(value.numpy(), want[name], rtol=0, atol=5e-3 * np.abs(want[name]).max())


def test_sessions_and_values_are_on_the_gpu() -> None:
    live = session(graph_of("(float[3] x) => (float[3] y) { y = Relu (x) }", opset=21), providers="cuda")
    assert device_of(live) == ("cuda", 0)
    binding = Binding(live)
    binding.bind({"x": np.array([-1, 0, 2], np.float32)})
    binding.bind_results()
    binding.run()
    (result,) = binding.results().values()
    assert result.device_name() == "cuda"
    np.testing.assert_array_equal(result.numpy(), [0, 0, 2])
