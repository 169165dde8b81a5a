"""Results of a trainer: flat vectors of parameters, and the exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnx_convgrad as og
from onnx_convgrad.programs.inference import export
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of
from tests.support.training_nets import A, Feeds, X, arrays, build, exported, same


def test_flat_parameters() -> None:
    trainer, other = og.Trainer(build()), og.Trainer(build(seed=1))
    trainer.step(arrays(0))
    vector = trainer.flat_parameters(statistics=True)
    other.load_flat(vector, statistics=True)
    same(other.parameters(), trainer.parameters())
    same(other.evaluate_batch(arrays(1)), trainer.evaluate_batch(arrays(1)))
    plain = trainer.flat_parameters()
    assert len(plain) == sum(v.size for v in trainer.parameters().values()) < len(vector)
    names = [p.name for p in trainer.manifest.parameters]
    np.testing.assert_array_equal(plain[: trainer.parameters()[names[0]].size], trainer.parameters()[names[0]].ravel())
    with pytest.raises(og.errors.ArgumentError, match=r"shape \(3,\); the \d+ values need \(\d+,\)"):
        other.load_flat(np.zeros(3))
    with pytest.raises(og.errors.ArgumentError, match="parameter or state"):
        other.load({"nothing": np.zeros(3)})
    with pytest.raises(og.errors.ArgumentError, match=r"has shape \(5,\), not \(4,\)"):
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
    np.testing.assert_allclose(got, want.evaluate_batch(arrays(9))["y"], rtol=1e-4, atol=1e-5)
    with pytest.raises(og.errors.ArgumentError, match="is a folder"):
        trainer.export(tmp_path)


def test_export_of_more_weights_than_fit_into_one_file(tmp_path: Path) -> None:
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


def test_export_of_weights_in_constants_and_of_a_model_with_functions(tmp_path: Path) -> None:
    weight = np.random.default_rng(2).standard_normal((3, 2)).astype(np.float32)
    stored = f"w = Constant <value = float[3,2] {{{', '.join(map(str, weight.reshape(-1)))}}}> ()"
    local = '<domain: "local", opset_import: ["": 17]> F (a, b) => (c) { c = MatMul (a, b) }'
    for domain in ("", "local"):  # a local function is inlined, so the canonical graph is exported
        text = f"""<ir_version: 8, opset_import: ["": 17{', "local": 1' * bool(domain)}]> g (float[N,3] x) => (float[N,2] y)
            {{ {stored}  y = {"local.F" if domain else "MatMul"} (x, w) }} {local * bool(domain)}"""
        model = onnx.parser.parse_model(text)
        trainer = og.Trainer(build(model, loss="mse"))
        trainer.step({"x": X, "target": A})
        trainer.export(tmp_path / "trained.onnx")
        got = onnx.load(tmp_path / "trained.onnx")
        assert [o.version for o in got.opset_import if not o.domain] == [21 if domain else 17]
        np.testing.assert_allclose(run(got, {"x": X})["y"], X @ trainer.parameters()["w"], rtol=1e-5, atol=1e-6)


def test_a_weight_that_an_identity_copies_is_stored_with_its_shape(tmp_path: Path) -> None:
    """PyTorch's older exporter stores equal weights once; a saved program checks the shapes of what it stores."""
    text = """(float[N,2] x) => (float[N,2] y) {
        c = Identity (b) h = Gemm (x, w, b) r = Relu (h) y = Gemm (r, w2, c) }"""
    w, w2 = (np.random.default_rng(i).standard_normal((2, 2)).astype(np.float32) for i in (0, 1))
    program = build(graph_of(text, w=w, w2=w2, b=np.zeros(2, np.float32)), loss="mse")
    program.save(tmp_path / "program")
    trainer = og.Trainer(tmp_path / "program")
    trainer.step({"x": X[:, :2], "target": A})
    trainer.export(tmp_path / "trained.onnx")
    got = run(str(tmp_path / "trained.onnx"), {"x": X[:, :2]})["y"]
    np.testing.assert_allclose(got, trainer.predict({"x": X[:, :2]})["y"], rtol=1e-5, atol=1e-6)


def loaded_without_a_word(path: Path, capfd: pytest.CaptureFixture[str]) -> onnx.ModelProto:
    """The model of a file, of which ONNX Runtime says nothing when it loads it."""
    capfd.readouterr()
    ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert capfd.readouterr().err == ""
    return onnx.load(path)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("training_export", [False, True])
def test_a_file_with_dropout_loads_without_warnings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], training_export: bool, loaded: bool
) -> None:
    given = exported(training=training_export)
    program: Any = build(given)
    program.save(tmp_path / "program")
    og.Trainer(tmp_path / "program" if loaded else program).export(tmp_path / "trained.onnx")
    loaded_without_a_word(tmp_path / "program" / "inference.onnx", capfd)
    model = loaded_without_a_word(tmp_path / "trained.onnx", capfd)
    kept = [node.name for node in given.graph.node if node.op_type != "Constant"]
    assert [node.name for node in model.graph.node if node.op_type != "Constant"] == kept


@pytest.mark.parametrize("ratio", ["constant", "initializer"])
def test_what_nothing_reads_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str], ratio: str) -> None:
    """Inputs stay, also those that nothing reads, with their defaults, of which ONNX Runtime warns as in the original."""
    w, share = np.eye(3, dtype=np.float32), np.float32(0.25)
    constant = "ratio = Constant <value_float = 0.25> ()" if ratio == "constant" else ""
    body = f"{constant} dead = Relu (other) on = Constant <value = bool {{1}}> () "
    body += "h = MatMul (x, w) y, mask = Dropout (h, ratio, on)"
    text = f"(float[N,3] x, float[3] spare) => (float[N,3] y) {{ {body} }}"
    stored = {"w": w, "other": w, "spare": w[0], **({} if constant else {"ratio": share})}
    model = graph_of(text, **stored)
    trainer = og.Trainer(og.build_training(model, loss="mse", optimizer="sgd"))
    trainer.export(tmp_path / "trained.onnx")
    run(written := onnx.load(tmp_path / "trained.onnx"), {"x": w})
    assert "It is not used by any node" not in capfd.readouterr().err
    assert [node.op_type for node in written.graph.node] == ["MatMul", "Dropout"]
    assert {i.name for i in written.graph.initializer} == {"w", "spare"}
    assert [v.name for v in written.graph.input] == ["x", "spare"]
    assert written.opset_import[0].version == 17


def test_an_exported_file_is_trained_on_with_the_ratio_of_the_original(tmp_path: Path) -> None:
    """Although its Dropout has no ratio, of which ONNX Runtime would warn."""
    text = "(float[N,3] x) => (float[N,3] y) { h = MatMul (x, w) y = Dropout (h, ratio) }"
    model = graph_of(text, w=np.eye(3, dtype=np.float32), ratio=np.float32(0.125))
    og.Trainer(og.build_training(model, loss="mse", optimizer="sgd")).export(tmp_path / "first.onnx")
    onnx.checker.check_model(tmp_path / "first.onnx", full_check=True)
    again = og.build_training(tmp_path / "first.onnx", loss="mse", optimizer="sgd")
    og.Trainer(again).export(tmp_path / "second.onnx")
    ones = {"x": np.ones((4096, 3), np.float32), "target": np.ones((4096, 3), np.float32)}
    for program in (again, og.build_training(tmp_path / "second.onnx", loss="mse", optimizer="sgd")):
        y = og.Trainer(program).step(ones)["y"]
        assert set(np.unique(y).tolist()) == {0.0, np.float32(1 / 0.875)}
        assert (y == 0).mean() == pytest.approx(0.125, abs=0.02)


@pytest.mark.parametrize("noted", ["much", "nan", "1.5"])
def test_a_noted_ratio_must_be_one(noted: str) -> None:
    model = graph_of("(float[N,3] x) => (float[N,3] y) { h = MatMul (x, w) y = Dropout (h) }", w=np.eye(3, dtype="f"))
    model.graph.node[1].metadata_props.add(key="onnx_convgrad.ratio", value=noted)
    with pytest.raises(og.errors.ModelError, match=r"has the ratio .*; in training it is a number from 0 to 1"):
        og.build_training(model, loss="mse", optimizer="sgd")
