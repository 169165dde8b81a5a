"""Predictions of a trainer, and the file that it exports: sizes, and the check after writing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from onnx_convgrad.training import export_check
from tests.support.one_input import graph_of
from tests.support.training_nets import arrays, build, same, two_outputs

RNG = np.random.default_rng(0)
X = RNG.standard_normal((11, 3, 8, 8)).astype("f")


def pooled(sizes: str, *, tail: str = "GlobalAveragePool (h)", width: int = 4) -> onnx.ModelProto:
    """A small classifier of images."""
    w = {"w": RNG.standard_normal((4, 3, 3, 3)).astype("f"), "v": RNG.standard_normal((width, 5)).astype("f")}
    text = f"p = {tail} f = Flatten (p) y = MatMul (f, v)"
    return graph_of(
        f"(float[{sizes}] x) => (float[{sizes[0]},5] y) {{ h = Conv <pads = [1, 1, 1, 1]> (x, w) {text} }}", **w
    )


def test_predict_equals_evaluate_and_needs_no_targets() -> None:
    trainer = og.Trainer(build())
    trainer.step(arrays(0))
    want = trainer.evaluate_batch({"x": X, "target": np.zeros(11, int)})["y"]
    batches = [(X[:4], np.zeros(4)), (X[4:], np.zeros(7))]
    for data in ({"x": X}, {"image": X, "label": np.zeros(11)}, batches, [b[0] for b in batches], lambda _: batches):
        got = trainer.predict(data, batch_size=4)
        assert list(got) == ["y"]
        np.testing.assert_allclose(got["y"], want, rtol=1e-4, atol=1e-5)
    trainer.step(arrays(1))
    assert np.abs(trainer.predict({"x": X})["y"] - want).max() > 1e-3  # the values of now
    with pytest.raises(og.errors.ArgumentError, match="Unknown output 'z'"):
        trainer.predict({"x": X}, outputs=["z"])
    with pytest.raises(og.errors.ArgumentError, match="There is no array for 'x'"):
        trainer.predict([{}])


def test_errors_of_the_callers_data_arrive_as_they_are() -> None:
    def broken() -> Any:
        yield X
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        og.Trainer(build()).predict(broken())


def test_predict_pads_the_last_batch_of_a_fixed_size() -> None:
    whole = og.Trainer(build(pooled("N,3,8,8")))
    want = whole.predict({"x": X})["y"]
    for size in (1, 4):
        trainer = og.Trainer(build(pooled(f"{size},3,8,8")))
        trainer.load(whole.parameters())
        np.testing.assert_allclose(trainer.predict({"x": X})["y"], want, rtol=1e-4, atol=1e-5)
        with pytest.raises(og.errors.ArgumentError, match=f"takes batches of {size}, not of 3"):
            trainer.predict({"x": X}, batch_size=3)


def test_predict_returns_outputs_without_a_loss() -> None:
    trainer = og.Trainer(build(two_outputs(), loss={"a": "mse"}, outputs=["a"], wrt="a.*"))
    got = trainer.predict({"x": X[:, :, 0, 0]})
    assert {name: value.shape for name, value in got.items()} == {
        "a": (11, 2), "b": (11, 2), "distance": (1,), "best": (1, 2)
    }  # fmt: skip


@pytest.mark.parametrize("loaded", [False, True])
def test_the_exported_file_takes_the_size_of_the_training(tmp_path: Path, loaded: bool) -> None:
    program: Any = build(og.load(pooled("1,3,16,16"), input_shapes={"x": ["N", 3, 8, 8]}))
    if loaded:
        program.save(tmp_path / "program")
        program = tmp_path / "program"
    trainer = og.Trainer(program)
    trainer.step({"x": X, "target": np.zeros(11, int)})
    trainer.export(tmp_path / "trained.onnx")
    model = onnx.load(tmp_path / "trained.onnx")
    onnx.checker.check_model(model, full_check=True)
    (given,) = model.graph.input
    sizes = [d.dim_param or d.dim_value for d in given.type.tensor_type.shape.dim]
    assert sizes == ["N", 3, 8, 8]
    np.testing.assert_allclose(run(model, {"x": X})["y"], trainer.predict({"x": X})["y"], rtol=1e-4, atol=1e-5)


def test_a_size_that_the_model_does_not_take_is_refused() -> None:
    model = pooled("N,3,16,16", tail="Reshape (h, s)", width=1024)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 1024]), "s"))
    with pytest.raises(og.errors.ArgumentError, match=r"does not take inputs of the given shapes: .*Reshape\) makes"):
        build(og.load(model, input_shapes={"x": [1, 3, 8, 8]}))


def test_export_compares_the_file_with_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = og.Trainer(build())
    trainer.export(tmp_path / "drawn.onnx")  # before any step, without known sizes or with them
    trainer.step(arrays(0))
    trainer.export(tmp_path / "good.onnx")
    other = og.Trainer(build(seed=1))
    other.step(arrays(3))
    want = trainer.engine.evaluate
    monkeypatch.setattr(trainer.engine, "evaluate", lambda *a: {k: v + 0.1 for k, v in want(*a).items()})
    with pytest.raises(
        og.errors.ModelError, match=r"other numbers than the trainer: 'y' of shape \(2, 5\) differs by 0\.\d+"
    ):
        trainer.export(tmp_path / "bad.onnx")
    trainer.export(tmp_path / "bad.onnx", check=False)
    same(run(str(tmp_path / "bad.onnx"), {"x": X}), run(str(tmp_path / "good.onnx"), {"x": X}))
    with pytest.raises(og.errors.ArgumentError, match="check must be True or False"):
        trainer.export(tmp_path / "bad.onnx", check="no")  # type: ignore[arg-type]


def test_quantized_results_are_compared_by_their_norms() -> None:
    """A single level more or less moves single numbers far."""
    wanted = np.ones(1000, np.float32)
    moved = wanted.copy()
    moved[0] = 2
    export_check._compare("a.onnx", "y", moved, wanted, 5e-2, norms=True)
    with pytest.raises(og.errors.ModelError, match="differs by 1 of its largest value"):
        export_check._compare("a.onnx", "y", moved, wanted, 5e-2, norms=False)
    with pytest.raises(og.errors.ModelError, match=r"differs by 0\.1 of its norm"):
        export_check._compare("a.onnx", "y", 1.1 * wanted, wanted, 5e-2, norms=True)


def test_small_probabilities_are_compared_with_the_precision_of_the_runtime(tmp_path: Path) -> None:
    """Its Sigmoid is off by 0.6 % at -12, where vectors of other lengths take other kernels."""

    def exported(logit: float, activation: str) -> Path:
        text = f"(float[N,1] x) => (float[N,1] y) {{ a = Gemm (x, w, b) y = {activation} (a) }}"
        stored = {"w": np.zeros((1, 1), np.float32), "b": np.float32([logit])}
        trainer = og.Trainer(og.build_training(graph_of(text, **stored), loss="mse", optimizer=og.optim.SGD(0.0)))
        trainer.export(tmp_path / f"{activation}{logit}.onnx")
        model = ir.load(tmp_path / f"{activation}{logit}.onnx")
        export_check.check_export(
            tmp_path / f"{activation}-12.0.onnx", model, trainer.engine, {"x": np.ones((2, 1), "f")}
        )
        return tmp_path

    exported(-12.0, "Sigmoid")
    exported(-12.006, "Sigmoid")
    with pytest.raises(og.errors.ModelError, match="computes other numbers"):
        exported(-9.0, "Sigmoid")
    exported(-12.0, "Exp")
    with pytest.raises(og.errors.ModelError, match="computes other numbers"):
        exported(-12.006, "Exp")


def test_drawn_batches_need_known_sizes() -> None:
    assert export_check.drawn(build(pooled("N,3,H,8")).manifest) is None
    drawn = export_check.drawn(build(pooled("4,3,8,8")).manifest)
    assert drawn is not None and drawn["x"].shape == (4, 3, 8, 8) and drawn["x"].dtype == np.float32


def test_sizes_of_the_data_are_not_classes() -> None:
    frames = graph_of("(float[N,T,3] x) => (float[N,T,1] y) { y = MatMul (x, w) }", w=np.ones((3, 1), "f"))
    x = np.ones((2, 5, 3), "f")
    found = og.predict(frames, {"x": x})
    assert found.task == "numbers" and found.values.shape == (2, 5, 1)
    assert og.predict(frames, {"x": x}, task="labels").values.shape == (2, 5)
