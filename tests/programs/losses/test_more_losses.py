"""Focal, Dice, CTC, KL divergence, triplet and contrastive losses: values and gradients of PyTorch or of the papers."""

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
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import Emitter, empty_model
from onnx_convgrad.runtime import run

RNG = np.random.default_rng(0)


def emitted(loss: losses.Loss, y: np.ndarray, *targets: np.ndarray, static: bool = True) -> dict[str, np.ndarray]:
    m = empty_model("loss")
    for i, array in enumerate((y, *targets)):
        dims = array.shape if static else [f"{'yabc'[i]}{axis}" if axis else "N" for axis in range(array.ndim)]
        kind = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        m.graph.inputs.append(ir.Value(name=f"x{i}", shape=ir.Shape(dims), type=kind))
    value = loss(Emitter(m.graph), *m.graph.inputs)
    value.name = "loss"
    m.graph.outputs.append(value)
    model = og.augment(ir.to_proto(m), wrt=["x0"], of="loss", cotangents="ones")
    return run(model, {f"x{i}": array for i, array in enumerate((y, *targets))})


def check(loss: losses.Loss, reference: Callable[..., torch.Tensor], y: np.ndarray, *targets: np.ndarray) -> None:
    """Compare value and gradient with static and with symbolic shapes."""
    t = torch.tensor(y, dtype=torch.float64, requires_grad=True)
    doubles = [torch.tensor(a.astype(np.float64) if a.dtype == np.float32 else a) for a in targets]
    want = reference(t, *doubles)
    want.sum().backward()
    for static in (True, False):
        got = emitted(loss, y, *targets, static=static)
        np.testing.assert_allclose(got["loss"], want.detach().numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got["x0_grad"], t.grad.numpy(), rtol=1e-5, atol=1e-6)


def rand(*shape: int) -> np.ndarray:
    return (2 * RNG.standard_normal(shape)).astype(np.float32)


REDUCTIONS = ["mean", "sum", "none"]


def focal(y: torch.Tensor, t: torch.Tensor, gamma: float, reduction: str) -> torch.Tensor:
    entropy = F.cross_entropy(y, t, reduction="none")
    loss = (1 - torch.exp(-entropy)) ** gamma * entropy
    counted = t != -100
    return {"mean": loss.sum() / counted.sum(), "sum": loss.sum(), "none": loss}[reduction]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("gamma", [2.0, 0.0, 1.5])
def test_focal(gamma: float, reduction: Any) -> None:
    target = RNG.integers(0, 5, (4, 3))
    target[0, 1] = -100
    loss = losses.Focal(gamma=gamma, reduction=reduction)
    check(loss, lambda y, t: focal(y, t, gamma, reduction), rand(4, 5, 3), target)


def sigmoid_focal(y: torch.Tensor, t: torch.Tensor, alpha: float | None, gamma: float, reduction: str) -> torch.Tensor:
    p = torch.sigmoid(y)
    right = torch.where(t == 1, p, 1 - p)
    weight = 1.0 if alpha is None else torch.where(t == 1, alpha, 1 - alpha)
    loss = -weight * (1 - right) ** gamma * torch.log(right)
    return {"mean": loss.mean(), "sum": loss.sum(), "none": loss}[reduction]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("options", [{}, {"alpha": 0.7, "gamma": 1.0}, {"alpha": None, "gamma": 3.0}], ids=str)
def test_sigmoid_focal(options: dict[str, Any], reduction: Any) -> None:
    theirs = {"alpha": 0.25, "gamma": 2.0, **options}
    loss = losses.SigmoidFocal(**options, reduction=reduction)
    target = RNG.integers(0, 2, (4, 5)).astype(np.float32)
    check(loss, lambda y, t: sigmoid_focal(y, t, reduction=reduction, **theirs), rand(4, 5), target)


def dice(p: torch.Tensor, t: torch.Tensor, axes: tuple[int, ...], smooth: float) -> torch.Tensor:
    return 1 - (2 * (p * t).sum(axes) + smooth) / (p.sum(axes) + t.sum(axes) + smooth)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (6, 4)])
def test_dice(shape: tuple[int, ...], reduction: Any) -> None:
    target = RNG.integers(0, 4, (shape[0], *shape[2:]))
    axes = tuple(range(2, len(shape))) or (0,)

    def classes(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        hot = F.one_hot(t, 4).movedim(-1, 1).to(y.dtype)
        return _reduced(dice(y.softmax(1), hot, axes, 0.5), reduction)

    check(losses.Dice(smooth=0.5, reduction=reduction), classes, rand(*shape), target)
    binary = RNG.integers(0, 2, shape).astype(np.float32)
    loss = losses.BinaryDice(reduction=reduction)
    check(loss, lambda y, t: _reduced(dice(y.sigmoid(), t, axes, 1.0), reduction), rand(*shape), binary)


def _reduced(value: torch.Tensor, reduction: str) -> torch.Tensor:
    return value if reduction == "none" else getattr(value, reduction)()


def test_dice_leaves_out_what_is_ignored() -> None:
    y, target = rand(1, 3, 4), np.array([[0, 255, 2, 1]])
    kept = [0, 2, 3]
    whole = emitted(losses.Dice(ignore_index=255), y, target)
    part = emitted(losses.Dice(), y[:, :, kept].copy(), target[:, kept].copy())
    np.testing.assert_allclose(whole["loss"], part["loss"], rtol=1e-6)
    assert not whole["x0_grad"][:, :, 1].any()


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", ["mean", "batchmean", "sum", "none"])
def test_kl_divergence(reduction: Any) -> None:
    y, p = F.log_softmax(torch.tensor(rand(4, 5)), 1).numpy(), RNG.dirichlet(np.ones(5), 4).astype(np.float32)
    p[0] = [0, 1, 0, 0, 0]
    check(losses.KLDiv(reduction=reduction), lambda a, b: F.kl_div(a, b, reduction=reduction), y, p)
    logs = losses.KLDiv(reduction=reduction, log_target=True)
    check(logs, lambda a, b: F.kl_div(a, b, reduction=reduction, log_target=True), y, np.log(p + 1e-3).astype("f"))

    def distilled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return 9 * F.kl_div(F.log_softmax(a / 3, 1), F.softmax(b / 3, 1), reduction=reduction)

    check(losses.KLDiv(reduction=reduction, temperature=3), distilled, rand(4, 5), rand(4, 5))


@pytest.mark.parametrize("loss", [{"temperature": 3.0}, {"log_target": True}, {}], ids=str)
def test_classes_that_minus_infinity_masks_have_no_share_in_the_kl_divergence(loss: dict[str, Any]) -> None:
    """PyTorch's loss is 0 (-inf) = NaN there, its gradient is that of the other classes."""
    y, target = (F.log_softmax(torch.tensor(rand(4, 3)), 1).numpy() for _ in range(2))
    masked = np.full((4, 1), -np.inf, np.float32)
    wide = [np.concatenate([a, masked], 1) for a in (y, target)]
    if not loss:
        target, wide[1] = np.exp(target), np.exp(wide[1])
    kept, found = (emitted(losses.KLDiv(reduction="sum", **loss), *arrays) for arrays in ((y, target), wide))
    np.testing.assert_allclose(found["loss"], kept["loss"], rtol=1e-5)
    np.testing.assert_allclose(found["x0_grad"][:, :3], kept["x0_grad"], rtol=1e-5, atol=1e-6)
    assert not found["x0_grad"][:, 3].any()


LABELS = np.array([0, 1, 0, 2, 1, 0, 3])


@pytest.mark.parametrize("options", [{}, {"swap": True}, {"margin": 0.3, "p": 3.0}], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_triplets(options: dict[str, Any], reduction: Any) -> None:
    n = range(len(LABELS))
    triplets = np.array([(a, p, x) for a in n for p in n for x in n
                         if a != p and LABELS[a] == LABELS[p] != LABELS[x]]).T  # fmt: skip

    def reference(y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return F.triplet_margin_loss(*(y[i] for i in triplets), reduction=reduction, **options)

    check(losses.Triplet(reduction=reduction, **options), reference, rand(7, 3) / 4, LABELS)
    alone = emitted(losses.Triplet(), rand(3, 2), np.arange(3))
    assert alone["loss"] == 0 and not alone["x0_grad"].any()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_supervised_contrastive(reduction: Any) -> None:
    def reference(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        z = F.normalize(y)
        similar = (z @ z.T / 0.2).masked_fill(torch.eye(len(t), dtype=torch.bool), -torch.inf)
        chances = similar.log_softmax(1)
        rows = []
        for i in range(len(t)):
            others = [j for j in range(len(t)) if j != i and t[j] == t[i]]
            rows.append(-chances[i, others].mean() if others else 0 * y.sum())
        counted = sum((t == label).sum() > 1 for label in t)
        value = torch.stack(rows)
        return value.sum() / counted if reduction == "mean" else _reduced(value, reduction)

    check(losses.Contrastive(temperature=0.2, reduction=reduction), reference, rand(7, 3), LABELS)


def test_pairs_give_nt_xent() -> None:
    def reference(y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        z = F.normalize(y)
        similar = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
        return F.cross_entropy(similar, torch.tensor([1, 0, 3, 2, 5, 4]))

    check(losses.Contrastive(temperature=0.5), reference, rand(6, 4), np.repeat(np.arange(3), 2))


# -- CTC ---------------------------------------------------------------------------------------------------------------

TARGETS, LENGTHS = np.array([[1, 2, 2, 3], [4, 4, -1, -1], [3, 0, 0, 0], [9, 9, 9, 9]]), np.array([4, 2, 1, 0])


def ctc(y: torch.Tensor, t: torch.Tensor, n: torch.Tensor, frames: torch.Tensor, **options: Any) -> torch.Tensor:
    t = torch.where(t < 0, 1, t).clamp(max=4)
    return F.ctc_loss(y.log_softmax(2).transpose(0, 1), t, frames, n, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ctc(reduction: Any) -> None:
    y, frames = rand(4, 7, 5), np.array([7, 6, 4, 5])
    loss = losses.CTC(reduction=reduction, input_lengths=True)
    check(loss, lambda *a: ctc(*a, reduction=reduction), y, TARGETS, LENGTHS, frames)
    full = torch.full((4,), 7)
    check(losses.CTC(reduction=reduction), lambda *a: ctc(*a, full, reduction=reduction), y, TARGETS, LENGTHS)
    first = losses.CTC(reduction=reduction, time_first=True)
    turned = y.transpose(1, 0, 2).copy()
    check(first, lambda a, *b: ctc(a.transpose(0, 1), *b, full, reduction=reduction), turned, TARGETS, LENGTHS)


def test_ctc_of_log_probabilities_and_another_blank() -> None:
    y = F.log_softmax(torch.tensor(rand(4, 9, 5)), 2).numpy()
    targets = np.array([[1, 2, 2, 3], [0, 0, -1, -1], [3, 0, 0, 0], [9, 9, 9, 9]])
    frames = torch.full((4,), 9)
    check(losses.CTC(blank=4), lambda *a: ctc(*a, frames, blank=4), y, np.where(targets == 9, 3, targets), LENGTHS)


def test_ctc_of_too_long_targets() -> None:
    y, targets, lengths = rand(2, 3, 5), np.array([[1, 1, 2], [1, 2, 0]]), np.array([3, 2])
    got = emitted(losses.CTC(reduction="none"), y, targets, lengths)
    assert np.isinf(got["loss"][0]) and np.isfinite(got["loss"][1])
    frames = torch.full((2,), 3)
    options = {"zero_infinity": True}
    check(losses.CTC(**options), lambda *a: ctc(*a, frames, **options), y, targets, lengths)


def test_ctc_of_many_frames_is_a_small_graph() -> None:
    y, targets = rand(2, 300, 8), RNG.integers(1, 8, (2, 20))
    frames = torch.full((2,), 300)

    def reference(a: torch.Tensor, t: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(a.log_softmax(2).transpose(0, 1), t, frames, n)

    check(losses.CTC(), reference, y, targets, np.array([20, 13]))


@pytest.mark.parametrize(("make", "message"), [
    (lambda: losses.Focal(gamma=-1), "gamma must be at least 0"),
    (lambda: losses.SigmoidFocal(alpha=2), "alpha must be between 0 and 1"),
    (lambda: losses.KLDiv(temperature=0), "temperature must be above 0"),
    (lambda: losses.KLDiv(temperature=2, log_target=True), "log_target is for labels of log-probabilities"),
    (lambda: losses.CTC(blank=-1), "blank must be at least 0"),
    (lambda: losses.CTC(reduction="batchmean"), "Unknown reduction 'batchmean'"),
    (lambda: losses.Triplet(margin=0), "margin must be above 0"),
    (lambda: losses.CrossEntropy(axis=1.5), "axis must be a whole number"),
])  # fmt: skip
def test_wrong_options(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'smoth'"):
        losses.Dice(smoth=1)
