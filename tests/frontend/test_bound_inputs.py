"""Inputs that are bound to constants: in every transformation, in training, in exported files and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnx_convgrad as og
from onnx_convgrad.evaluation.predictor import open_model
from onnx_convgrad.frontend.bound_inputs import BindInputs
from onnx_convgrad.frontend.files import read
from onnx_convgrad.pipeline import option_text
from tests.support.command_line import invoke
from tests.support.numeric import check
from tests.support.one_input import graph_of
from tests.support.operators import text_model

RNG = np.random.default_rng(0)
STORED = {"k": np.array(16000), "b": np.zeros(2, np.float32), "w": RNG.standard_normal((3, 2)).astype(np.float32)}


def speech(*, names: tuple[str, str] = ("fast", "slow"), sizes: tuple[int, int] = (4, 4)) -> onnx.ModelProto:
    """A network with a weight in each branch of an If on the sample rate; `sizes` of a sample at each rate."""
    size = "4" if sizes == (4, 4) else "L"
    text = """(float[N,SIZE] x, int64 sr) => (float[N,2] y) {
        c = Equal (sr, k)
        h = If (c) <then_branch = g () => (float[N,3] f) { f = MatMul (x, "FIRST") },
                    else_branch = g () => (float[N,3] s) { s = MatMul (x, "SECOND") }>
        y = Gemm (h, w, b) }"""
    weights = [f"{name}.w" for name in names]
    text = text.replace("SIZE", size).replace("FIRST", weights[0]).replace("SECOND", weights[1])
    model = graph_of(text, **STORED)
    for i, (attribute, name) in enumerate(zip(model.graph.node[1].attribute, weights, strict=True), 1):
        array = i * np.arange(3 * sizes[i - 1], dtype=np.float32).reshape(-1, 3) / 10
        attribute.g.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def run(model: onnx.ModelProto | Path, **feed: np.ndarray) -> list[np.ndarray]:
    data = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    return ort.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, feed)


X = RNG.standard_normal((5, 4)).astype(np.float32)


@pytest.mark.parametrize(("rate", "weight"), [(16000, "fast.w"), (8000, "slow.w")])
def test_the_branch_that_a_bound_input_chooses_is_static(rate: int, weight: str) -> None:
    assert "If" in {node.op_type for node in og.augment(speech(), wrt="x").graph.node}
    model = og.augment(og.load(speech(), input_values={"sr": rate}), wrt="x")
    assert [i.name for i in model.graph.input] == ["x", "y_grad"]
    assert "If" not in {node.op_type for node in model.graph.node}
    seed = np.ones((5, 2), np.float32)
    np.testing.assert_allclose(run(model, x=X, y_grad=seed)[0], run(speech(), x=X, sr=np.array(rate))[0], rtol=1e-6)
    assert f"{weight}_grad" in [o.name for o in og.augment(og.load(speech(), input_values={"sr": rate})).graph.output]
    assert check(og.load(speech(), input_values={"sr": rate})).passed
    for made in (og.vjp, og.jvp):
        assert "sr" not in [i.name for i in made(og.load(speech(), input_values={"sr": rate}), wrt="x").graph.input]
    assert "sr" not in [
        i.name for i in og.transforms.lower_gradient_ops(og.load(speech(), input_values={"sr": rate})).graph.input
    ]
    assert og.explain(og.load(speech(), input_values={"sr": rate})).choices == ()


def test_an_exported_model_keeps_the_inputs_that_were_bound(tmp_path: Path) -> None:
    path = tmp_path / "trained.onnx"
    program = og.build_training(og.load(speech(), input_values={"sr": 16000}), loss="mse", optimizer=og.optim.SGD(0.1))
    assert [p.name for p in program.manifest.data] == ["x"]
    assert {p.name for p in program.manifest.parameters} == {"fast.w", "w", "b"}
    assert json.loads(program.manifest.to_json())["options"]["input_values"] == {"sr": 16000}
    trainer = og.Trainer(program)
    batch = {"x": X, "target": np.ones((5, 2), np.float32)}
    trainer.step(batch)
    trainer.export(path)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["x", "sr"]
    fast, slow = (session.run(None, {"x": X, "sr": np.array(rate)})[0] for rate in (16000, 8000))
    np.testing.assert_allclose(fast, trainer.evaluate_batch(batch)["y"], rtol=1e-5)
    assert not np.allclose(fast, slow)


def test_the_branch_that_was_not_trained_keeps_its_sizes(tmp_path: Path) -> None:
    """As in Silero VAD, which takes 576 numbers at 16 kHz and 288 at 8 kHz."""
    loaded = og.load(speech(sizes=(4, 5)), input_values={"sr": 16000}, input_shapes={"x": ["N", 4]})
    trainer = og.Trainer(og.build_training(loaded, loss="mse", optimizer=og.optim.SGD(0.1)))
    batch = {"x": X, "target": np.ones((5, 2), np.float32)}
    trainer.step(batch)
    trainer.export(tmp_path / "trained.onnx")
    fast = run(tmp_path / "trained.onnx", x=X, sr=np.array(16000))[0]
    np.testing.assert_allclose(fast, trainer.evaluate_batch(batch)["y"], rtol=1e-5)
    assert run(tmp_path / "trained.onnx", x=np.ones((2, 5), np.float32), sr=np.array(8000))[0].shape == (2, 2)


def test_errors_name_the_input_that_decides_the_branch() -> None:
    with pytest.raises(
        og.errors.ModelError, match=r"failed on all random inputs.*'sr' decides.*--input-value sr=VALUE"
    ):
        check(speech(sizes=(4, 5)))
    text = """(float[N,1,L] x, int64 sr) => (float[] y) {
        c = Equal (sr, k)
        y = If (c) <then_branch = g () => (float[] f) { f = Relu (x) },
                    else_branch = g () => (float[] s) { q = Squeeze (x, one) s = Conv (q, three) }> }"""
    model = graph_of(text, k=STORED["k"], one=np.array([1]), three=np.zeros((1, 1, 3), np.float32))
    with pytest.raises(og.errors.ModelError, match=r"says if that branch runs. 'sr' decides(.|\n)*Conv, opset"):
        og.augment(model, wrt="x")
    assert check(og.load(model, input_values={"sr": 16000}), wrt="x").passed


def test_predict_and_evaluate_bind_inputs(tmp_path: Path) -> None:
    onnx.save(speech(), tmp_path / "speech.onnx")
    np.savez(tmp_path / "data.npz", x=X, target=np.ones((5, 2), np.float32))
    want = run(speech(), x=X, sr=np.array(16000))[0]
    got = og.predict(og.load(tmp_path / "speech.onnx", input_values={"sr": 16000}), {"x": X}, task="numbers")
    np.testing.assert_allclose(got.values, want, rtol=1e-6)
    options = ["--input-value", "sr=16000", "--task", "numbers", "--json"]
    shown = json.loads(invoke("predict", tmp_path / "speech.onnx", tmp_path / "data.npz", *options).stdout)
    np.testing.assert_allclose([row["values"] for row in shown["predictions"]], want, rtol=1e-6)
    mse = float(((want - 1) ** 2).mean())
    assert og.evaluate(og.load(tmp_path / "speech.onnx", input_values={"sr": 16000}), tmp_path / "data.npz").metrics[
        "mse"
    ] == pytest.approx(mse)
    shown = json.loads(invoke("evaluate", tmp_path / "speech.onnx", tmp_path / "data.npz", *options).stdout)
    assert shown["metrics"]["mse"] == pytest.approx(mse)
    with pytest.raises(og.errors.ArgumentError, match="Unknown input in input_values: 'rate'"):
        og.predict(og.load(tmp_path / "speech.onnx", input_values={"rate": 1}), {"x": X})
    with pytest.raises(og.errors.ArgumentError, match="it takes int64 numbers, not 1"):
        og.predict(og.load(tmp_path / "speech.onnx", input_values={"sr": 1.5}), {"x": X})
    with pytest.raises(og.errors.ArgumentError, match="input_values must map"):
        og.evaluate(og.load(tmp_path / "speech.onnx", input_values=[1]), {"x": X})  # type: ignore[arg-type]


def test_a_run_keeps_the_values_of_its_training(tmp_path: Path) -> None:
    onnx.save(speech(), tmp_path / "speech.onnx")
    data = {"x": X, "target": np.ones((5, 2), np.float32)}
    np.savez(tmp_path / "data.npz", **data)
    options = ["--loss", "mse", "--epochs", 1, "--input-value", "sr=16000", "-q"]
    invoke("train", tmp_path / "speech.onnx", "--data", tmp_path / "data.npz", *options)
    folder = tmp_path / "speech.train"
    fast, slow = (run(folder / "trained.onnx", x=X, sr=np.array(rate))[0] for rate in (16000, 8000))
    other = og.load(folder / "trained.onnx", input_values={"sr": 8000})
    for model, y in ((folder, fast), (folder / "trained.onnx", fast), (other, slow)):
        np.testing.assert_allclose(og.predict(model, data).values, y, rtol=1e-5)
        found = og.evaluate(model, data)
        assert found.metrics["mse"] == pytest.approx(float(((y - 1) ** 2).mean()), rel=1e-5)
        assert ("loss" in found.metrics) == (model is folder)
    out = invoke("predict", folder, tmp_path / "data.npz", "--input-value", "sr=8000", "--json").stdout
    np.testing.assert_allclose([row["values"] for row in json.loads(out)["predictions"]], slow, rtol=1e-4)
    for file in ("trained.onnx", "best.onnx"):
        (folder / file).unlink(missing_ok=True)
    with pytest.raises(og.errors.ArgumentError, match="holds only checkpoints"):
        open_model(folder, input_values={"sr": 8000})


def test_a_teacher_and_measured_statistics_take_bound_inputs(tmp_path: Path) -> None:
    text = """(float[N,3,4,4] x, float gain) => (float[N,2] y) { g = Mul (x, gain) h = Conv (g, w)
        p = GlobalAveragePool (h) y = Flatten (p) }"""
    model = graph_of(text, w=RNG.standard_normal((2, 3, 1, 1)).astype(np.float32))
    onnx.save(model, tmp_path / "model.onnx")
    x = RNG.standard_normal((6, 3, 4, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, target=np.array([0, 1] * 3))
    back = og.transforms.unfold_batchnorm(og.load(model, input_values={"gain": 2.0}), {"x": x})
    assert [i.name for i in back.graph.input] == ["x", "gain"]
    np.testing.assert_allclose(
        run(back, x=x, gain=np.array(2, np.float32))[0],
        run(model, x=x, gain=np.array(2, np.float32))[0],
        rtol=1e-4,
        atol=1e-5,
    )
    options = ["--loss", "cross_entropy", "--epochs", 1, "--input-value", "gain=2", "-q"]
    files = [tmp_path / "model.onnx", "--data", tmp_path / "data.npz"]
    invoke("train", *files, *options, "--teacher", tmp_path / "model.onnx", "--out", tmp_path / "taught")
    invoke("train", *files, *options, "--unfold-batchnorm", "--out", tmp_path / "unfolded")
    assert (tmp_path / "taught" / "trained.onnx").exists() and (tmp_path / "unfolded" / "trained.onnx").exists()
    with pytest.raises(og.errors.ArgumentError, match="Unknown input in input_values: 'volume'"):
        og.data.with_teacher({"x": x}, og.load(model, input_values={"volume": 1}))


def test_weights_of_one_name_in_both_branches(tmp_path: Path) -> None:
    program = og.build_training(
        og.load(speech(names=("same", "same")), input_values={"sr": 8000}), loss="mse", optimizer=og.optim.SGD(0.1)
    )
    trainer = og.Trainer(program)
    trainer.export(tmp_path / "trained.onnx")
    want = run(speech(), x=X, sr=np.array(8000))[0]
    np.testing.assert_allclose(run(tmp_path / "trained.onnx", x=X, sr=np.array(8000))[0], want, rtol=1e-5)
    np.testing.assert_allclose(trainer.predict({"x": X})["y"], want, rtol=1e-5)


def test_bound_numbers_are_no_parameters() -> None:
    text = "(float[N,4] x, float[3] scale) => (float[N,3] y) { h = MatMul (x, w) y = Mul (h, scale) }"
    model = graph_of(text, w=np.ones((4, 3), np.float32))
    made = og.augment(og.load(model, input_values={"scale": [1, 2, 3]}))
    assert [o.name for o in made.graph.output] == ["y", "w_grad"]
    np.testing.assert_allclose(
        run(made, x=X, y_grad=np.ones((5, 3), np.float32))[0], X.sum(1)[:, None] * [1, 2, 3], rtol=1e-5
    )


DECLARED = {
    "int64": ("int64", 3, np.array(3)),
    "int32[1]": ("int32[1]", 3, np.array([3], np.int32)),
    "float[2,3]": ("float[2,3]", 0.5, np.full((2, 3), 0.5, np.float32)),
    "float[2,2]": ("float[2,2]", [1, 2], np.array([[1, 2], [1, 2]], np.float32)),
    "float16": ("float16", 0.1, np.array(0.1, np.float16)),
    "bool": ("bool", True, np.array(True)),
    "bool of 0": ("bool[1]", 0, np.array([False])),
    "int64[N]": ("int64[N]", [4, 5], np.array([4, 5])),
    "whole float": ("uint8", 7.0, np.array(7, np.uint8)),
}


@pytest.mark.parametrize("case", DECLARED)
def test_dtypes_and_shapes(case: str) -> None:
    declared, given, expected = DECLARED[case]
    model = read(graph_of(f"({declared} v) => (y) {{ y = Identity (v) }}", opset=21))
    BindInputs({"v": given})(model)
    stored: Any = model.graph.initializers["v"].const_value
    assert not model.graph.inputs
    assert stored.numpy().dtype == expected.dtype
    np.testing.assert_array_equal(stored.numpy(), expected)


REFUSED = {
    "fraction": ("int64 v", {"v": 0.5}, "it takes int64 numbers, not 0.5"),
    "overflow": ("uint8 v", {"v": 300}, "it takes uint8 numbers, not 300"),
    "nan": ("int64 v", {"v": float("nan")}, "it takes int64 numbers, not nan"),
    "float16": ("float16 v", {"v": 1e9}, "it takes float16 numbers"),
    "bool for int": ("int64 v", {"v": True}, "it takes int64 numbers, not True"),
    "number for bool": ("bool v", {"v": 2}, "it takes true or false, not 2"),
    "text": ("int64 v", {"v": "16k"}, "'16k' is not made of numbers"),
    "string input": ("string v", {"v": 1}, "it is string, and only numbers and bools can be bound"),
    "ragged": ("float[N] v", {"v": [[1], [2, 3]]}, "is not an array"),
    "shape": ("float[2] v", {"v": [1, 2, 3]}, r"a value of shape \[3\] does not fit \[2\]"),
    "symbol": ("float[N] v", {"v": 1}, r"a value of shape \[\] does not fit \['N'\]. Give every number"),
    "name": ("int64 rate", {"rat": 1}, r"Unknown input in input_values: 'rat'. Did you mean 'rate'\? `python -m"),
    "no mapping": ("int64 v", [1], "input_values must map names of inputs to their values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_values(case: str) -> None:
    inputs, given, message = REFUSED[case]
    model = graph_of(f"({inputs}, float[2] x) => (y) {{ y = Relu (x) }}", opset=21)
    values: Any = given
    with pytest.raises(og.errors.ArgumentError, match=message):
        og.augment(og.load(model, input_values=values), wrt="x")


def test_values_and_shapes_of_one_input_exclude_each_other() -> None:
    with pytest.raises(og.errors.ArgumentError, match="'sr' is in input_values and in input_shapes"):
        og.augment(og.load(speech(), input_values={"sr": 1}, input_shapes={"sr": []}))


# -- the command line --------------------------------------------------------------------------------------------------


def test_values_on_the_command_line(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.arange(3))
    written = ["a=16000", "b=0.5", "c=true", "d=1,2,3", "e=1,", f"f=@{tmp_path / 'v.npy'}"]
    parsed = option_text.input_values(written)
    np.testing.assert_array_equal(parsed.pop("f"), np.arange(3))
    assert parsed == {"a": 16000, "b": 0.5, "c": True, "d": [1, 2, 3], "e": [1]}
    assert [type(v) for v in parsed.values()] == [int, float, bool, list, list]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (["sr"], "is not of the form NAME=VALUE"),
        (["=1"], "is not of the form NAME=VALUE"),
        (["sr=16k"], "'16k' is neither a number"),
        (["sr="], "is not of the form NAME=VALUE"),
        (["sr=1", "sr=2"], "gives 'sr' twice"),
        (["sr=@nowhere.npy"], "There is no file 'nowhere.npy'"),
        (["sr=@pyproject.toml"], "is not a readable .npy file"),
    ],
)
def test_refused_values_on_the_command_line(written: list[str], message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        option_text.input_values(written)


def test_every_command_binds_inputs(tmp_path: Path) -> None:
    model, out = tmp_path / "speech.onnx", tmp_path / "out"
    onnx.save(speech(), model)
    np.savez(tmp_path / "d.npz", x=X, target=np.ones((5, 2), np.float32))
    bound = ("--input-value", "sr=16000")
    invoke("augment", model, *bound, "-o", tmp_path / "g.onnx")
    invoke("check", model, *bound)
    invoke("explain", model, *bound)
    invoke("lower", model, *bound, "-o", tmp_path / "l.onnx")
    invoke("train", model, "--data", tmp_path / "d.npz", "--loss", "mse", "--epochs", 1, "--out", out, *bound, "-q")
    assert [i.name for i in onnx.load(out / "trained.onnx").graph.input] == ["x", "sr"]
    assert 'input-value = ["sr=16000"]' in (out / "train.toml").read_text()
    data = json.loads(invoke("inspect", model, "--json", *bound).stdout)
    assert [i["name"] for i in data["inputs"]] == ["x"]
    assert "fast.w" in [v["name"] for v in data["values"]]


def test_a_bound_branch_leaves_nothing_behind() -> None:
    """Neither the constants of the branch that is not taken, nor what only it read, in nested scopes too."""
    inner = (
        "b () => (float[2] t) <float[2] w = {1, 2}> { c = Constant <value: tensor = float[2] {3, 4}> () m = Mul (x, w)"
    )
    kept = "u = Mul (x, c) t = Add (m, u) }"
    lost = """d = Exp (a) e = If (p) <then_branch = i () => (float[2] n) { k = Constant <value: tensor = float[2] {5, 6}> ()
        n = Mul (k, d) }, else_branch = o () => (float[2] r) { r = Mul (b, d) }> t = Add (m, e) }"""
    text = f"""(float[2] x, bool p, int64 sr) => (float[2] y) <int64 r = {{16}}, float[2] b = {{7, 8}}>
        {{ a = Tanh (x) q = Equal (sr, r) y = If (q) <then_branch = {inner} {kept}, else_branch = {inner} {lost}> }}"""
    made = og.augment(og.load(text_model(text), input_values={"sr": 16}), wrt="x")
    assert "If" not in {node.op_type for node in made.graph.node}
    assert "Tanh" not in {node.op_type for node in made.graph.node}
    used = {name for node in made.graph.node for name in node.input} | {v.name for v in made.graph.output}
    assert {v.name for v in made.graph.initializer} <= used
    x = np.array([1, 2], np.float32)
    np.testing.assert_allclose(run(made, x=x, p=np.array(True), y_grad=x)[-1], [4, 12])


MASKED = """(float[N,S] x, int64[N,S] mask) => (float[N,T] y) <float[1] w = {2}>
    { a = Mul (x, w) f = Cast <to = 1> (mask) y = Concat <axis = 1> (a, f) }"""


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("given", [1, [1], [1, 0, 1], np.ones((2, 3))])
def test_one_number_stands_for_every_token_of_every_sample(opset: int, given: Any) -> None:
    """Free sizes are those of the other inputs, whatever the operators that read the mask."""
    made = og.augment(og.load(graph_of(MASKED, opset=opset), input_values={"mask": given}), wrt="x")
    assert [v.name for v in made.graph.input] == ["x", "y_grad"]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y, gradient = run(made, x=x, y_grad=np.ones((2, 6), np.float32))
    np.testing.assert_array_equal(y, np.hstack([2 * x, np.broadcast_to(np.float32(given), (2, 3))]))
    np.testing.assert_array_equal(gradient, np.full((2, 3), 2))


def test_a_mask_bound_to_one_number_is_bound_in_predictions_of_the_trained_model(tmp_path: Path) -> None:
    program = og.build_training(
        og.load(graph_of(MASKED, opset=17), input_values={"mask": 1}), loss="mse", optimizer="sgd", wrt="w"
    )
    assert [port.name for port in program.manifest.data] == ["x"]
    trainer = og.Trainer(program)
    x = np.ones((4, 3), np.float32)
    trainer.step({"x": x, "target": np.ones((4, 6), np.float32)})
    trainer.export(tmp_path / "trained.onnx")
    assert [v.name for v in onnx.load(tmp_path / "trained.onnx").graph.input] == ["x", "mask"]
    for batch in (1, 4):
        y = og.predict(tmp_path / "trained.onnx", {"x": x[:batch]}).outputs["y"]
        np.testing.assert_array_equal(y[:, 3:], np.ones((batch, 3)))
    y = og.predict(og.load(tmp_path / "trained.onnx", input_values={"mask": [0, 1, 0]}), {"x": x}).outputs["y"]
    np.testing.assert_array_equal(y[:, 3:], np.tile([0, 1, 0], (4, 1)))


CACHED = """(int64[N,S] x, float[N,2,P,H] "past.0.key", float[N,2,P,H] "past.0.value", float gain)
    => (float[N,2,K,3] y, rest) { g = Gather (table, x)  t = Transpose <perm = [0, 2, 1, 3]> (g)  m = Mul (t, gain)
    y = Concat <axis = 2> ("past.0.key", m)  rest = Identity ("past.0.value") }"""


def cached() -> onnx.ModelProto:
    """A cache whose sizes no other input has, but for the number of samples."""
    return graph_of(CACHED, table=np.ones((9, 2, 3), np.float32))


TOKENS = np.array([[1, 2, 3, 4]] * 5)


def test_globs_bind_an_empty_cache_for_every_sample(tmp_path: Path) -> None:
    """Trained, exported and opened again: the cache is an input of the file, and empty where nothing else is fed."""
    values = {"past.*": np.zeros((2, 0, 3)), "gain": 3}
    loaded = og.load(cached(), input_values=values)
    assert loaded.inputs == ("x",) and set(loaded.input_values or ()) == {"past.0.key", "past.0.value", "gain"}
    program = og.build_training(loaded, loss={"y": "mse"}, optimizer="sgd", wrt="table")
    program.save(tmp_path / "program")
    trainer = og.Trainer(og.TrainingProgram.load(tmp_path / "program"))
    batch = {"x": TOKENS, "target": np.ones((5, 2, 4, 3), np.float32)}
    assert trainer.step(batch)["loss"] == pytest.approx(4.0)
    trainer.export(tmp_path / "trained.onnx")
    want = trainer.predict({"x": TOKENS})["y"]
    cache = {f"past.0.{name}": np.zeros((5, 2, 1, 3), np.float32) for name in ("key", "value")}
    long = run(tmp_path / "trained.onnx", x=TOKENS, gain=np.array(3, np.float32), **cache)[0]
    np.testing.assert_allclose(long[:, :, 1:], want, rtol=1e-6)
    found = og.predict(tmp_path / "trained.onnx", {"x": TOKENS}, task="numbers").outputs
    np.testing.assert_allclose(found["y"], want, rtol=1e-6)
    other = og.predict(og.load(tmp_path / "trained.onnx", input_values={**values, "gain": 6}), {"x": TOKENS})
    np.testing.assert_allclose(other.outputs["y"], 2 * want, rtol=1e-6)


def test_a_name_in_full_counts_before_a_glob() -> None:
    loaded = og.load(
        cached(), input_values={"past.0.key": np.ones((2, 2, 3)), "past.*": np.zeros((2, 0, 3)), "gain": 1}
    )
    assert {name: np.shape(value) for name, value in (loaded.input_values or {}).items()} == {
        "past.0.key": (2, 2, 3),
        "past.0.value": (2, 0, 3),
        "gain": (),
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"passed.*": 0}, "Unknown input in input_values: 'passed.\\*', a glob that matches nothing. Did you mean"),
        ({"past.*": 0}, r"a value of shape \[\] does not fit \['N', 2, 'P', 'H'\]"),
        ({"past.*": np.zeros((3, 0, 3))}, r"a value of shape \[3, 0, 3\] does not fit"),
        ({"past.*": np.zeros((0, 3)), "x": TOKENS}, r"a value of shape \[0, 3\] does not fit"),
    ],
)
def test_refused_values_of_globs(values: dict[str, Any], message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        og.load(cached(), input_values=values)
