"""What comes out of a trainer: flat vectors of parameters, and the model as it came in with trained values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from onnx_convgrad.training.program.inference import export
from tests.support.training_nets import A, Feeds, X, arrays, build, exported
from tests.training.run.test_trainer import same


def test_flat_parameters() -> None:
    trainer, other = og.Trainer(build()), og.Trainer(build(seed=1))
    trainer.step(arrays(0))
    vector = trainer.flat_parameters(statistics=True)
    other.load_flat(vector, statistics=True)
    same(other.parameters(), trainer.parameters())
    same(other.evaluate(arrays(1)), trainer.evaluate(arrays(1)))
    plain = trainer.flat_parameters()
    assert len(plain) == sum(v.size for v in trainer.parameters().values()) < len(vector)
    names = [p.name for p in trainer.manifest.parameters]
    np.testing.assert_array_equal(plain[: trainer.parameters()[names[0]].size], trainer.parameters()[names[0]].ravel())
    with pytest.raises(og.ArgumentError, match=r"shape \(3,\); the \d+ values need \(\d+,\)"):
        other.load_flat(np.zeros(3))
    with pytest.raises(og.ArgumentError, match="parameter or state"):
        other.load({"nothing": np.zeros(3)})
    with pytest.raises(og.ArgumentError, match=r"has shape \(5,\), not \(4,\)"):
        other.load({"fc.bias": np.zeros(4)})


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("training_export", [False, True])
def test_export(tmp_path: Path, training_export: bool, loaded: bool) -> None:
    given = exported(training=training_export)
    program: Any = build(given, outputs=[])
    if loaded:
        program.save(tmp_path / "program", shared_weights=True)
        program = tmp_path / "program"
    trainer = og.Trainer(program)
    for step in range(3):
        trainer.step(arrays(step))
    trainer.export(tmp_path / "trained.onnx")
    model = onnx.load(tmp_path / "trained.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert list(model.graph.input) == list(given.graph.input) and list(model.graph.output) == list(given.graph.output)
    assert [o.version for o in model.opset_import] == [o.version for o in given.opset_import]
    want = og.Trainer(build(given))
    want.load({**trainer.parameters(), **trainer.state()})
    got = run(model, {"x": arrays(9)["x"]})["y"]
    np.testing.assert_allclose(got, want.evaluate(arrays(9))["y"], rtol=1e-4, atol=1e-5)
    with pytest.raises(og.ArgumentError, match="is a folder"):
        trainer.export(tmp_path)


def test_export_of_more_than_one_file_can_hold(tmp_path: Path) -> None:
    trainer = og.Trainer(build())
    trainer.step(arrays(0))
    path = tmp_path / "big.onnx"
    export(trainer.program.model("inference"), {**trainer.parameters(), **statistics(trainer)}, path, limit=1000)
    assert (tmp_path / "big.onnx.data").stat().st_size > 1000
    trainer.export(tmp_path / "small.onnx")
    feed = {"x": arrays(1)["x"]}
    same(run(str(path), feed), run(str(tmp_path / "small.onnx"), feed))


def statistics(trainer: og.Trainer) -> Feeds:
    kept = [s.name for s in trainer.manifest.state if s.kind == "statistic"]
    return {name: value for name, value in trainer.state().items() if name in kept}


def test_export_of_weights_in_constants_and_of_a_graph_that_had_to_change(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    weight = numpy_helper.from_array(rng.standard_normal((3, 2)).astype(np.float32), "value")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 2])
    nodes = [helper.make_node("Constant", [], ["w"], value=weight), helper.make_node("MatMul", ["x", "w"], ["y"])]
    for domain in ("", "local"):  # a local function is inlined, so what is trained is another graph
        body = [helper.make_node("F", ["x", "w"], ["y"], domain="local")] if domain else nodes[1:]
        opsets = [helper.make_opsetid("", 17), *([helper.make_opsetid("local", 1)] if domain else [])]
        graph = helper.make_graph([nodes[0], *body], "g", [x], [y])
        inner = helper.make_function("local", "F", ["a", "b"], ["c"], [helper.make_node("MatMul", ["a", "b"], ["c"])],
                                     [helper.make_opsetid("", 17)])  # fmt: skip
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=[inner] if domain else [])
        trainer = og.Trainer(build(model, loss="mse"))
        trainer.step({"x": X, "target": A})
        trainer.export(tmp_path / "trained.onnx")
        got = onnx.load(tmp_path / "trained.onnx")
        assert [o.version for o in got.opset_import if not o.domain] == [21 if domain else 17]
        np.testing.assert_allclose(run(got, {"x": X})["y"], X @ trainer.parameters()["w"], rtol=1e-5, atol=1e-6)
