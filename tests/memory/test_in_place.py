"""WriteInPlace: ONNX Runtime writes next values over current ones and computes the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

import onnx_convgrad as og
from onnx_convgrad import optim
from onnx_convgrad.memory.in_place import WriteInPlace, written_over, written_safely
from onnx_convgrad.memory.timeline import timeline
from onnx_convgrad.training import sessions
from tests.support.one_input import graph_of
from tests.support.optimizer import optimized
from tests.support.training_nets import build, same
from tests.training.test_trainer import linear

# The update of v stands before the gradient b, which reads v through a transposed copy; that of w reads its last reader.
MODEL = """<ir_version: 10, opset_import: ["": 21]>
g (float[4,64] x, float[64,64] v, float[64,64] w) => (float[64,64] v2, float[64,64] w2, float[4,64] b) {
    a = MatMul (x, v)
    s = Transpose <perm = [1, 0]> (x)
    d = MatMul (s, a)
    v2 = Sub (v, d)
    t = Transpose <perm = [1, 0]> (v)
    b = MatMul (a, t)
    c = MatMul (s, b)
    e = Mul (w, c)
    w2 = Add (w, e)
}"""
FOLLOWING = {"v2": "v", "w2": "w"}


def model_of(text: str = MODEL) -> ir.Model:
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


def prepared(text: str = MODEL) -> ir.Model:
    model = model_of(text)
    assert WriteInPlace(FOLLOWING)(model).modified
    return model


def noted(model: ir.Model) -> dict[str, str]:
    return {v.name or "": held.name or "" for v, held in written_over(model.graph).items()}


def results(model: ir.Model, over: dict[str, str]) -> dict[str, np.ndarray]:
    """The outputs, those in `over` written into the memory of their inputs."""
    live = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    draw, value = np.random.default_rng(0), onnxruntime.OrtValue.ortvalue_from_numpy
    fed = {i.name: value(draw.standard_normal(i.shape).astype(np.float32)) for i in live.get_inputs()}
    binding = live.io_binding()
    for name, held in fed.items():
        binding.bind_ortvalue_input(name, held)
    made = {
        o.name: fed[over[o.name]] if o.name in over else value(np.zeros(o.shape, np.float32))
        for o in live.get_outputs()
    }
    for name, held in made.items():
        binding.bind_ortvalue_output(name, held)
    live.run_with_iobinding(binding)
    return {name: held.numpy().copy() for name, held in made.items()}


def test_updates_wait_for_the_last_reader() -> None:
    assert written_safely(model_of().graph, FOLLOWING) == {"w"}  # v is read by b, after v2
    model = prepared()
    assert noted(model) == FOLLOWING
    assert written_safely(model.graph, FOLLOWING) == {"v", "w"}
    expected, found = results(model_of(), {}), results(model, FOLLOWING)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def test_the_runtime_keeps_the_order(tmp_path: Path) -> None:
    rewritten = optimized(ir.to_proto(prepared()), tmp_path)
    assert "FusedMatMul" in {n.op_type for n in rewritten.graph.node}  # the copy of v is gone: b reads v
    assert written_safely(ir.from_proto(rewritten).graph, FOLLOWING) == {"v", "w"}


def test_outputs_written_over_inputs_take_no_memory() -> None:
    plain, model = prepared(), prepared()
    for output in plain.graph.outputs:
        output.metadata_props.clear()
    assert timeline(plain.graph).held[-1] - timeline(model.graph).held[-1] == 2 * 64 * 64 * 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("v2 = Sub (v, d)", "v2 = MatMul (v, d)", id="each number depends on several"),
        pytest.param("t = Transpose <perm = [1, 0]> (v)", "t = Mul (v, v2)", id="a reader that needs the next value"),
    ],
)
def test_what_cannot_be_written_in_place_is_left_alone(old: str, new: str) -> None:
    model = prepared(MODEL.replace(old, new))
    assert noted(model) == {"w2": "w"}


# -- training --------------------------------------------------------------------------------------------------------------


def batches(count: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield {"x": rng.standard_normal((4, 3)).astype(np.float32), "target": rng.integers(0, 4, 4)}


def deep(**options: Any) -> og.TrainingProgram:
    """Three layers; the gradient of the first needs the large weight of the second."""
    rng = np.random.default_rng(1)
    weights = {
        name: rng.standard_normal(shape).astype(np.float32) / 8
        for name, shape in {"v": (3, 64), "w": (64, 64), "u": (64, 4)}.items()
    }
    layers = "a = MatMul (x, v) b = Relu (a) c = MatMul (b, w) d = Relu (c) y = MatMul (d, u)"
    model = graph_of(f"(float[N,3] x) => (float[N,4] y) {{ {layers} }}", **weights)
    return build(model, **{"optimizer": optim.Adam(lr=0.1), **options})


def trained(trainer: og.Trainer) -> dict[str, np.ndarray]:
    for batch in batches(3):
        trainer.step(batch)
    trainer.step(*batches(2))  # two batches, by the graphs `gradients` and `update`
    return {**trainer.parameters(), **trainer.state()}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "rmsprop", "lamb", "muon"])
def test_training_in_place_is_the_same(optimizer: str) -> None:
    plain = trained(og.Trainer(deep(optimizer=optimizer)))
    trainer = og.Trainer(deep(optimizer=optimizer, memory="min"))
    found = trained(trainer)
    assert trainer.engine._buffers.shared >= {"v", "w"}
    assert any("late" in (node.name or "") for node in trainer.program.model("step").graph)
    same(found, plain)


def test_a_program_without_a_budget_has_two_buffers() -> None:
    trainer = og.Trainer(linear())
    trained(trainer)
    assert not trainer.engine._buffers.shared


def test_values_that_a_runtime_would_read_late_get_a_second_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained(og.Trainer(linear()))
    monkeypatch.setattr(sessions, "written_safely", lambda *_: set())
    trainer = og.Trainer(linear(memory="min"))
    same(trained(trainer), plain)
    assert not trainer.engine._buffers.shared


def test_a_loaded_program_is_updated_in_place(tmp_path: Path) -> None:
    linear(memory="min").save(tmp_path / "program")
    trainer = og.Trainer(tmp_path / "program")
    same(trained(trainer), trained(og.Trainer(linear())))
    assert trainer.engine._buffers.shared


def test_after_a_failed_step_only_a_checkpoint_helps(tmp_path: Path) -> None:
    trainer = og.Trainer(linear(memory="min"))
    (batch,) = batches(1)
    trainer.step(batch)
    trainer.save(tmp_path / "checkpoint")
    graph = trainer.engine._graphs["step"]
    bind = graph._run

    def fail(*arguments: Any) -> Any:
        bind(*arguments)
        raise KeyboardInterrupt

    graph._run = fail  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.step(batch)
    graph._run = bind  # type: ignore[method-assign]
    for call in (lambda: trainer.step(batch), lambda: trainer.evaluate_batch(batch), trainer.parameters):
        with pytest.raises(og.errors.ExecutionError, match=r"may have changed\. Restore the last checkpoint"):
            call()
    trainer.restore(tmp_path / "checkpoint")
    trainer.step(batch)
    expected = og.Trainer(linear())
    expected.step(batch)
    expected.step(batch)
    same(trainer.parameters(), expected.parameters())
