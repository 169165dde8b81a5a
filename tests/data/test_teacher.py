"""Distillation: the loss against PyTorch's, and data to which a teacher adds its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F

import onnx_convgrad as og
from onnx_convgrad import losses, optim
from tests.support.one_input import graph_of
from tests.support.training_nets import same

RNG = np.random.default_rng(0)
W, V = (RNG.standard_normal((3, 4)).astype(np.float32) for _ in range(2))
DATA = {"x": RNG.standard_normal((10, 3)).astype(np.float32), "label": RNG.integers(0, 4, 10)}


def linear(w: np.ndarray, batch: str = "N", end: str = "") -> onnx.ModelProto:
    text = f"(float[{batch},3] x) => (float[{batch},4] y) {{ z = MatMul (x, w) y = {end or 'Identity'} (z) }}"
    return graph_of(text, opset=21, w=w)


def program(**options: Any) -> og.TrainingProgram:
    loss = losses.distillation("cross_entropy", **options)
    return og.build_training(linear(W), loss=loss, optimizer=optim.SGD(0.1))


@pytest.mark.parametrize(("weight", "temperature"), [(0.5, 4.0), (0.9, 1.0), (1.0, 2.5)])
def test_the_loss_and_its_gradient_are_those_of_pytorch(weight: float, temperature: float) -> None:
    """The teacher's logits are the target of a divergence of softened predictions, times T^2."""
    trainer = og.Trainer(program(weight=weight, temperature=temperature))
    taught: dict[str, Any] = og.data.with_teacher(DATA, linear(V)).bound(trainer.manifest).take(slice(0, 10))
    np.testing.assert_allclose(taught["teacher"], DATA["x"] @ V, rtol=1e-5)
    w = torch.tensor(W).double().requires_grad_()
    x, label, t = (torch.tensor(taught[name]) for name in ("x", "target", "teacher"))
    y = x.double() @ w
    soft = F.kl_div(
        F.log_softmax(y / temperature, 1),
        F.log_softmax(t.double() / temperature, 1),
        reduction="batchmean",
        log_target=True,
    )
    want = (1 - weight) * F.cross_entropy(y, label) + weight * temperature**2 * soft
    want.backward()
    got = trainer.step(taught)
    assert float(got["loss"]) == pytest.approx(want.item(), rel=1e-5)
    assert w.grad is not None
    np.testing.assert_allclose((W - trainer.parameters()["w"]) / 0.1, w.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_a_part_keeps_the_numbers_of_its_samples() -> None:
    """Messages name a sample by its number in the whole set."""
    manifest, (part, _) = program().manifest, og.data.Arrays(DATA).split(0.3)
    loader = og.data.Loader(og.data.with_teacher(part, linear(V)), manifest, batch_size=3, shuffle=False)
    rows = loader.rows(0, 1)
    np.testing.assert_array_equal(next(loader.epoch_iterator(0, 1))["teacher"], (DATA["x"] @ V)[rows])


@pytest.mark.parametrize("end", ["", "Softmax"])
@pytest.mark.parametrize("batch", ["N", "1", "4"])
def test_a_softmax_is_left_out_and_fixed_batches_are_kept(batch: str, end: str) -> None:
    manifest = program().manifest
    taught = og.data.with_teacher(DATA, linear(V, batch, end)).bound(manifest)
    for rows in (slice(0, 10), np.array([7, 2, 5])):
        np.testing.assert_allclose(taught.take(rows)["teacher"], DATA["x"][rows] @ V, rtol=1e-5, atol=1e-6)


def test_a_softmax_further_inside_is_undone() -> None:
    text = "(float[N,3] x) => (float[N,4] y) { a = MatMul (x, w) b = Softmax (a) y = Reshape (b, sizes) }"
    model = graph_of(text, opset=21, w=V, sizes=np.array([-1, 4]))
    got = og.data.with_teacher(DATA, model).bound(program().manifest).take(slice(0, 10))["teacher"]
    np.testing.assert_allclose(got, F.log_softmax(torch.tensor(DATA["x"] @ V), 1), rtol=1e-5, atol=1e-6)


def test_averaged_probabilities_are_undone() -> None:
    text = (
        "(float[N,3] x) => (float[N,4] y)"
        "{ a = MatMul (x, w) p = Softmax (a) n = Neg (a) q = Softmax (n) y = Mean (p, q) }"
    )
    got = (
        og.data.with_teacher(DATA, graph_of(text, opset=21, w=V))
        .bound(program().manifest)
        .take(slice(0, 10))["teacher"]
    )
    logits = torch.tensor(DATA["x"] @ V)
    np.testing.assert_allclose(got, ((logits.softmax(1) + (-logits).softmax(1)) / 2).log(), rtol=1e-5, atol=1e-6)


def test_the_loss_reads_the_value_before_the_softmax_of_a_student() -> None:
    """Both losses of a model that ends in Softmax are those of the same model without."""
    teacher = {"teacher": DATA["x"] @ V, "target": DATA["label"], "x": DATA["x"]}
    loss = losses.distillation("cross_entropy")
    with pytest.warns(UserWarning, match="ends in Softmax"):
        built = og.build_training(linear(W, end="Softmax"), loss=loss, optimizer="sgd")
    got, want = (og.Trainer(p).step(teacher)["loss"] for p in (built, program()))
    assert float(got) == pytest.approx(float(want), rel=1e-5)


def test_a_run_is_resumed_with_its_teacher(tmp_path: Path) -> None:
    """The student comes close to the teacher; a resumed run ends as one that was not interrupted."""
    onnx.save(linear(V), tmp_path / "teacher.onnx")
    data = og.data.with_teacher(DATA, tmp_path / "teacher.onnx", options={"threads": 1})
    built = program(weight=1.0, temperature=2.0)
    whole = og.Trainer(built)
    rows = whole.fit(data, epochs=4, batch_size=4, validation=data, metrics="accuracy", progress="none")
    assert rows[-1]["val_loss"] < 0.7 * rows[0]["loss"]
    first, second = og.Trainer(built), og.Trainer(built)
    first.fit(data, epochs=2, batch_size=4, progress="none")
    second.restore(first.save(tmp_path / "a.safetensors"))
    second.fit(data, epochs=4, batch_size=4, progress="none")
    same(second.parameters(), whole.parameters())
    assert second.progress.data is not None and second.progress.data["teacher"] == "teacher.onnx"


def test_the_teacher_runs_in_inference_mode() -> None:
    text = """(float[N,3] x) => (float[N,4] y) {
        z = MatMul (x, w)
        y = Dropout <seed = 1> (z, share, on)
    }"""
    model = graph_of(text, opset=21, w=V, share=np.float32(0.5), on=np.array(True))
    taught = og.data.with_teacher(DATA, model).bound(program().manifest)
    np.testing.assert_allclose(taught.take(slice(0, 10))["teacher"], DATA["x"] @ V, rtol=1e-5)


def test_refusals(tmp_path: Path) -> None:
    two = graph_of("(float[N,3] x) => (float[N,4] a, float[N,4] b) { a = MatMul (x, w) b = Tanh (a) }", w=W)
    wide = graph_of("(float[N,5] x) => (float[N,4] y) { y = MatMul (x, w) }", w=np.ones((5, 4), np.float32))
    cases: list[tuple[Any, str]] = [
        (lambda: og.data.with_teacher([DATA], linear(V)), "needs arrays, a file or a folder of images, not list"),
        (lambda: og.data.with_teacher(DATA, two), "has 2 floating outputs"),
        (lambda: og.data.with_teacher(DATA, linear(V, end="Sigmoid")), "The teacher ends in Sigmoid"),
        (lambda: og.data.with_teacher(DATA, two, output="c"), "Unknown output of the teacher: 'c'"),
        (lambda: og.data.with_teacher(DATA, tmp_path / "none.onnx"), "none.onnx"),
        (lambda: og.data.with_teacher(DATA, linear(V)).take(slice(0, 1)), "are read by a program"),
        (lambda: og.data.with_teacher(DATA, linear(V), name="tutor").bound(program().manifest), "no input 'tutor'"),
        (lambda: og.data.with_teacher(DATA, wide).bound(program().manifest).take(slice(0, 2)), "of the teacher"),
        (lambda: losses.distillation("cross_entropy", weight=2), "weight must be between 0 and 1"),
        (lambda: losses.distillation("cross_entropy", temperature=0), "temperature must be above 0"),
        (lambda: losses.distillation("crossentropy"), "Unknown loss 'crossentropy'"),
        (lambda: losses.distillation(3), "by name or a member of onnx_convgrad.losses"),  # type: ignore[arg-type]
        (lambda: program(axis=2), "axes"),
    ]
    for call, message in cases:
        with pytest.raises(og.ConvGradError, match=message):
            call()
