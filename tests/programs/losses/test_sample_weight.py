"""Weights of samples: value and gradient of every loss beside PyTorch's formula, sum(w l) / N."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

import onnx_convgrad as og
from onnx_convgrad import losses
from onnx_convgrad.ir.emit import Emitter, empty_model
from onnx_convgrad.ir.targets import TARGETS
from onnx_convgrad.programs.terms import LOSSES
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

N, C, T = 6, 5, 4
RNG = np.random.default_rng(0)
W = RNG.uniform(0, 2, N).astype(np.float32)
CLASS = np.array([0.5, 1.5, 2.0, 0.0, 1.0])


def real(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def share(*shape: int) -> np.ndarray:
    return RNG.uniform(0.05, 0.95, shape).astype(np.float32)


def labels(*shape: int, ignored: bool = False) -> np.ndarray:
    found = RNG.integers(0, C, shape)
    if ignored:
        found[RNG.random(shape) < 0.3] = -100
    return found


def emitted(loss: Any, y: np.ndarray, *operands: np.ndarray, free: bool) -> dict[str, np.ndarray]:
    """Loss and gradient; with `free`, the number of samples is known only at run time."""
    m = empty_model("loss")
    feeds = {"y": y, **{f"t{i}": a for i, a in enumerate(operands)}}
    for name, array in feeds.items():
        shape = ["N", *array.shape[1:]] if free else array.shape
        kind = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        m.graph.inputs.append(ir.Value(name=name, shape=ir.Shape(shape), type=kind))
    value = loss(Emitter(m.graph, target=TARGETS["cpu"]), *m.graph.inputs)
    value.name = "loss"
    m.graph.outputs.append(value)
    return run(og.augment(ir.to_proto(m), wrt=["y"], of="loss", cotangents="ones"), feeds)


def mean_of_entries(f: Callable[..., torch.Tensor], **options: Any) -> Callable[..., torch.Tensor]:
    """sum(w l) over all entries, divided by their number."""

    def value(y: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        entries = f(y, t, reduction="none", **options)
        return (w.reshape(-1, *[1] * (entries.ndim - 1)) * entries).sum() / entries.numel()

    return value


def mean_of_labels(y: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The denominator is that of PyTorch's mean: the class weights of the labels that count."""
    c = torch.tensor(CLASS, dtype=y.dtype)
    entries = F.cross_entropy(y, t, c, reduction="none")
    counted = c[t.clamp(0)] * (t >= 0)
    return (w.reshape(-1, 1) * entries).sum() / counted.sum()


LENGTHS = np.array([3, 1, 2, 3, 2, 1])


def ctc(y: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    lengths, frames = torch.tensor(LENGTHS), torch.full((N,), y.shape[1])
    entries = F.ctc_loss(y.log_softmax(2).transpose(0, 1), t, frames, lengths, reduction="none")
    return (w * entries / lengths).mean()


CASES: dict[str, tuple[losses.Loss, np.ndarray, tuple[np.ndarray, ...], Callable[..., torch.Tensor]]] = {
    "mse": (losses.MSE(sample_weight=True), real(N, 3, T), (real(N, 3, T),), mean_of_entries(F.mse_loss)),
    "l1": (losses.L1(sample_weight=True), real(N, 3), (real(N, 3),), mean_of_entries(F.l1_loss)),
    "huber": (
        losses.Huber(sample_weight=True, delta=0.5),
        real(N),
        (real(N),),
        mean_of_entries(F.huber_loss, delta=0.5),
    ),
    "cross_entropy": (
        losses.CrossEntropy(sample_weight=True),
        real(N, C),
        (labels(N),),
        mean_of_entries(F.cross_entropy),
    ),
    "class weights": (
        losses.CrossEntropy(sample_weight=True, weight=CLASS),
        real(N, C, T),
        (labels(N, T, ignored=True),),
        mean_of_labels,
    ),
    "probabilities": (
        losses.CrossEntropy(sample_weight=True, probabilities=True, label_smoothing=0.1),
        real(N, C),
        (share(N, C),),
        mean_of_entries(F.cross_entropy, label_smoothing=0.1),
    ),
    "nll": (losses.NLL(sample_weight=True), -share(N, C, T), (labels(N, T),), mean_of_entries(F.nll_loss)),
    "bce_with_logits": (
        losses.BCEWithLogits(sample_weight=True, pos_weight=3.0),
        real(N, 3),
        (share(N, 3),),
        mean_of_entries(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor(3.0)),
    ),
    "bce": (losses.BCE(sample_weight=True), share(N, 3), (share(N, 3),), mean_of_entries(F.binary_cross_entropy)),
    "kl_div": (losses.KLDiv(sample_weight=True), -share(N, C), (share(N, C),), mean_of_entries(F.kl_div)),
    "batchmean": (
        losses.KLDiv(sample_weight=True, reduction="batchmean"),
        -share(N, C),
        (share(N, C),),
        lambda y, t, w: (w * F.kl_div(y, t, reduction="none").sum(1)).sum() / N,
    ),
    "sum": (
        losses.MSE(sample_weight=True, reduction="sum"),
        real(N, 3),
        (real(N, 3),),
        lambda y, t, w: (w * ((y - t) ** 2).sum(1)).sum(),
    ),
    "ctc": (losses.CTC(sample_weight=True), real(N, 8, C), (RNG.integers(1, C, (N, 3)), LENGTHS), ctc),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_pytorch(name: str, free: bool) -> None:
    loss, y, targets, theirs = CASES[name]
    found = emitted(loss, y, *targets, W, free=free)
    point = torch.tensor(y, dtype=torch.float64, requires_grad=True)
    target = torch.tensor(targets[0])
    value = theirs(point, target.double() if target.is_floating_point() else target, torch.tensor(W).double())
    (gradient,) = torch.autograd.grad(value, point)
    np.testing.assert_allclose(found["loss"], value.item(), rtol=1e-5)
    np.testing.assert_allclose(found["y_grad"], gradient.numpy(), rtol=1e-4, atol=1e-6)


OTHERS = {
    "focal": (losses.Focal, real(N, C), (labels(N),)),
    "sigmoid_focal": (losses.SigmoidFocal, real(N, 3), (share(N, 3),)),
    "dice": (losses.Dice, real(N, C, T), (labels(N, T),)),
    "binary_dice": (losses.BinaryDice, real(N, 3, T), (share(N, 3, T),)),
    "triplet": (losses.Triplet, real(N, 3), (np.array([0, 1, 0, 1, 2, 2]),)),
    "contrastive": (losses.Contrastive, real(N, 3), (np.array([0, 1, 0, 1, 2, 2]),)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_each_sample_counts_as_much_as_it_weighs(name: str) -> None:
    """The loss is linear in the weights, and with weights of 1 it is that without them, which other tests compare."""
    kind, y, targets = OTHERS[name]
    plain = emitted(kind(), y, *targets, free=True)
    loss = kind(sample_weight=True)
    ones = emitted(loss, y, *targets, np.ones(N, np.float32), free=True)
    parts = [emitted(loss, y, *targets, row, free=True) for row in np.eye(N, dtype=np.float32)]
    mixed = emitted(loss, y, *targets, W, free=True)
    for key in plain:
        np.testing.assert_allclose(ones[key], plain[key], rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(
            mixed[key], sum(w * p[key] for w, p in zip(W, parts, strict=True)), rtol=1e-4, atol=1e-6
        )
    assert sum(float(p["loss"]) > 0 for p in parts) > 1


def test_every_loss_is_tested() -> None:
    assert {*LOSSES} <= {*CASES, *OTHERS}


def squares(e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
    return e.square(e.sub(y, target))


def half(e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
    return e.mul(e.add(losses.MSE()(e, y, target), losses.L1()(e, y, target)), 0.5)


def pair(e: Emitter, y: ir.Value, target: ir.Value) -> Any:
    known = e.compare("GreaterOrEqual", target, 0)
    return e.where(known, squares(e, y, target), 0), e.mask(known, y)


def unlabeled(e: Emitter, y: ir.Value) -> ir.Value:
    return e.square(y)


def largest(e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
    return e.op("ReduceMax", squares(e, y, target), keepdims=0)


def without_weights(e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
    return losses.MSE(sample_weight=True)(e, y, target)


NET = graph_of("(float[N,3] x) => (float[N,4] y) { y = MatMul (x, w) }", w=np.random.default_rng(1).random((3, 4), "f"))
X, TARGET = real(N, 3), real(N, 4)


def trained(function: Any) -> float:
    loss = losses.Custom(function, sample_weight=True)
    trainer = og.Trainer(og.build_training(NET, loss=loss, optimizer=og.optim.SGD(0.1)))
    batch = {"x": X, "sample_weight": W, **({} if function is unlabeled else {"target": TARGET})}
    whole = float(trainer.evaluate_batch(batch)["loss"])
    assert trainer.evaluate(batch, batch_size=4)["loss"] == pytest.approx(whole, rel=1e-5)
    return whole


def test_functions_of_callers() -> None:
    y = X @ np.random.default_rng(1).random((3, 4), "f")
    error, w = y - TARGET, W[:, None]
    assert trained(squares) == pytest.approx((w * error**2).mean(), rel=1e-5)
    assert trained(half) == pytest.approx((w * (error**2 + abs(error))).mean() / 2, rel=1e-5)
    assert trained(pair) == pytest.approx((w * error**2)[TARGET >= 0].sum() / (TARGET >= 0).sum(), rel=1e-5)
    assert trained(unlabeled) == pytest.approx((w * y**2).mean(), rel=1e-5)


class Doubled(losses.MSE):
    def __call__(self, e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        return e.mul(super().__call__(e, y, target), 2)


def test_subclasses_that_call_their_base() -> None:
    loss = Doubled(sample_weight=True)
    trainer = og.Trainer(og.build_training(NET, loss=loss, optimizer=og.optim.SGD(0.1)))
    y = X @ np.random.default_rng(1).random((3, 4), "f")
    found = trainer.evaluate_batch({"x": X, "target": TARGET, "sample_weight": W})["loss"]
    assert float(found) == pytest.approx(2 * (W[:, None] * (y - TARGET) ** 2).mean(), rel=1e-5)


def test_several_losses_share_the_weights() -> None:
    loss = [
        losses.Term(losses.MSE(sample_weight=True), "y", target="a"),
        (2.0, losses.Term(losses.L1(sample_weight=True), "y", target="b")),
    ]
    trainer = og.Trainer(og.build_training(NET, loss=loss, optimizer=og.optim.SGD(0.1)))
    assert [port.name for port in trainer.manifest.targets] == ["a", "sample_weight", "b"]
    y = X @ np.random.default_rng(1).random((3, 4), "f")
    wanted = (W[:, None] * ((y - TARGET) ** 2 + 2 * abs(y - 1))).mean()
    batch = {"x": X, "a": TARGET, "b": np.ones((N, 4), "f"), "sample_weight": W}
    assert float(trainer.evaluate_batch(batch)["loss"]) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (losses.Dice(sample_weight=True), r"Dice loss of an output \[N, classes\] is one of the whole batch"),
        (losses.Custom(largest, sample_weight=True), "does not show it"),
        (
            losses.Custom(without_weights),
            r"MSE has sample_weight=True, and gets no weights.*leave sample_weight out",
        ),
    ],
)
def test_losses_without_a_loss_of_each_sample_are_refused(loss: losses.Loss, message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        og.build_training(NET, loss=loss, optimizer="sgd")


def test_the_option_is_a_truth_value() -> None:
    with pytest.raises(og.errors.ArgumentError, match="sample_weight must be True or False"):
        losses.MSE(sample_weight="yes")  # type: ignore[arg-type]
