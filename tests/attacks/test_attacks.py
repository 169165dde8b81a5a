"""Attacks equal implementations in PyTorch that are written from the papers, and keep what they promise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.testing import assert_allclose
from torch.nn import functional as F

from onnx_convgrad import attacks
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.targets import TARGETS
from onnx_convgrad.runtime import run
from tests.support.classifiers import Classifier
from tests.support.one_input import graph_of

NET = Classifier().balanced()
for _parameter in NET.parameters():
    _parameter.requires_grad_(False)
TOL = {"rtol": 1e-3, "atol": 1e-4}


def images(count: int = 4) -> torch.Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def attacked(
    name: str, x: torch.Tensor, *arguments: Any, file: onnx.ModelProto | None = None, **options: Any
) -> dict[str, Any]:
    feed = options.pop("feed", {})
    made = getattr(attacks, name)(NET.file(end="Softmax") if file is None else file, *arguments, **options)
    onnx.checker.check_model(made, full_check=True)
    return run(made, {"image": x.numpy(), **feed})


def slope(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(F.cross_entropy(NET(x), label, reduction="sum"), x)[0]


def norms(x: torch.Tensor, order: float = 2) -> torch.Tensor:
    return torch.linalg.vector_norm(x.flatten(1), order, 1)[:, None, None, None].clamp(min=1e-12)


def check_success(found: dict[str, Any], label: torch.Tensor, *, targeted: bool = False) -> None:
    same = NET(torch.tensor(found["adversarial"])).argmax(1) == label
    assert found["success"].tolist() == (same if targeted else ~same).tolist()
    assert found["attacked_label"].tolist() == label.tolist()


# -- steps of a given length -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize("targeted", [False, True])
def test_fgsm(norm: str, targeted: bool) -> None:
    x, label = images(), torch.tensor([0, 1, 2, 3])
    found = attacked("fgsm", x, 0.1, norm=norm, targeted=targeted, label="input", feed={"label": label.numpy()})
    g = slope(x, label) * (-1 if targeted else 1)
    expected = (x + 0.1 * (g.sign() if norm == "inf" else g / norms(g))).clamp(0, 1)
    assert_allclose(found["adversarial"], expected, **TOL)
    check_success(found, label, targeted=targeted)


@pytest.mark.parametrize("norm", ["inf", "2"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_projected_gradient_descent(norm: str, momentum: float) -> None:
    x, epsilon, length = images(), 0.2, 0.07
    label = NET(x).argmax(1)
    point, velocity = x, torch.zeros_like(x)
    for _ in range(6):
        g = slope(point, label)
        if momentum:
            g = velocity = momentum * velocity + g / norms(g, 1)
        change = point + length * (g.sign() if norm == "inf" else g / norms(g)) - x
        share = (epsilon / norms(change)).clamp(max=1)
        change = change.clamp(-epsilon, epsilon) if norm == "inf" else change * share
        point = (x + change).clamp(0, 1)
    found = attacked("pgd", x, epsilon, steps=6, step=length, momentum=momentum, norm=norm)
    assert_allclose(found["adversarial"], point, **TOL)
    check_success(found, label)


@pytest.mark.parametrize("norm", ["inf", "2"])
def test_random_starts_lie_in_the_ball(norm: str) -> None:
    x = images(20) * 0 + 0.5
    start = attacked("pgd", x, 0.3, norm=norm, steps=1, step=0.0, random_start=True)["adversarial"] - x.numpy()
    size = np.abs(start).max((1, 2, 3)) if norm == "inf" else np.sqrt((start**2).sum((1, 2, 3)))
    assert (size <= 0.3 + 1e-6).all() and size.min() > 0.2 and len(np.unique(start[:, 0, 0, 0])) == 20


def test_bounds_of_normalized_images() -> None:
    mean, std = (np.array(v, "f").reshape(3, 1, 1) for v in ([0.4, 0.5, 0.6], [0.2, 0.3, 0.1]))
    x = torch.tensor((images().numpy() - mean) / std)
    found = attacked("pgd", x, 30.0, bounds=((0 - mean) / std, (1 - mean) / std))["adversarial"]
    pixels = found * std + mean
    assert pixels.min() == pytest.approx(0, abs=1e-6) and pixels.max() == pytest.approx(1, abs=1e-6)


def test_channels_last_and_a_fixed_batch() -> None:
    x = images(1)
    expected = attacked("pgd", x, 0.1, steps=5)["adversarial"]
    file = NET.file(batch="1", layout="NHWC")
    found = attacked("pgd", x.permute(0, 2, 3, 1), 0.1, steps=5, file=file)["adversarial"]
    assert_allclose(found.transpose(0, 3, 1, 2), expected, **TOL)


# -- least changes -----------------------------------------------------------------------------------------------------


def _deepfool(x: torch.Tensor, steps: int, candidates: int, overshoot: float) -> torch.Tensor:
    """Algorithm 2 of the paper, with foolbox's numbers for stability; each sample by itself."""
    results = []
    for one in x[:, None]:
        logits = NET(one)[0]
        label, *rest = logits.argsort(descending=True)[:candidates].tolist()
        point, total = one, torch.zeros_like(one)
        for _ in range(steps):
            leaf = point.clone().requires_grad_()
            y = NET(leaf)[0]
            if y.argmax() != label:
                break
            pairs = [(y[k] - y[label], torch.autograd.grad(y[k] - y[label], leaf, retain_graph=True)[0]) for k in rest]
            gap, w = min(pairs, key=lambda pair: float(pair[0].detach().abs() / (pair[1].norm() + 1e-8)))
            distance = gap.detach().abs() / (w.norm() + 1e-8)
            total = total + (distance + 1e-4) / (w.norm() + 1e-8) * w
            point = (one + (1 + overshoot) * total).clamp(0, 1)
        results.append(point)
    return torch.cat(results)


@pytest.mark.parametrize(("steps", "candidates"), [(1, 3), (50, 10)])
def test_deepfool(steps: int, candidates: int) -> None:
    x = images()
    found = attacked("deepfool", x, steps=steps, candidates=candidates, overshoot=0.02)
    assert_allclose(found["adversarial"], _deepfool(x, steps, candidates, 0.02), **TOL)
    check_success(found, NET(x).argmax(1))
    assert steps == 1 or found["success"].all()


def _carlini_wagner(x: torch.Tensor, label: torch.Tensor, *, confidence: float, targeted: bool) -> torch.Tensor:
    """Section VI.A of the paper with a bisection of the constant for each sample, by autograd and PyTorch's Adam."""
    w, count = torch.atanh((2 * x - 1) * 0.999999), len(x)
    rebuilt = (torch.tanh(w) + 1) / 2
    weight, lower, upper = torch.full((count,), 0.1), torch.zeros(count), torch.full((count,), np.inf)
    best, length, own = x.clone(), torch.full((count,), np.inf), F.one_hot(label, 5).bool()
    for _ in range(4):
        delta = torch.zeros_like(w, requires_grad=True)
        adam, found = torch.optim.Adam([delta], 0.05), torch.zeros(count, dtype=torch.bool)
        for _ in range(20):
            point = (torch.tanh(w + delta) + 1) / 2
            z = NET(point)
            margin = z[own] - z.masked_fill(own, -np.inf).max(1).values
            margin = (-margin if targeted else margin) + confidence
            loss = (weight * margin.clamp(min=0)).sum() + (point - rebuilt).square().sum()
            adam.zero_grad()
            loss.backward()
            adam.step()
            shifted = z.detach() + own * (-confidence if targeted else confidence)
            success = (shifted.argmax(1) == label) == targeted
            change = norms(point.detach() - x)[:, 0, 0, 0]
            closer = success & (change < length)
            best[closer], length[closer] = point.detach()[closer], change[closer]
            found |= success
        upper, lower = torch.where(found, weight, upper), torch.where(found, lower, weight)
        weight = torch.where(upper.isinf(), weight * 10, (lower + upper) / 2)
    return best


@pytest.mark.parametrize(
    ("confidence", "targeted"),
    [pytest.param(0.0, False, marks=pytest.mark.slow), pytest.param(0.5, False, marks=pytest.mark.slow), (0.5, True)],
)
def test_carlini_wagner(confidence: float, targeted: bool) -> None:
    x = images()
    label = torch.tensor([3, 3, 2, 2]) if targeted else NET(x).argmax(1)
    options = {"confidence": confidence, "targeted": targeted, "label": "input", "feed": {"label": label.numpy()}}
    found = attacked("carlini_wagner", x, steps=20, searches=4, step=0.05, constant=0.1, **options)
    expected = _carlini_wagner(x, label, confidence=confidence, targeted=targeted)
    assert_allclose(found["adversarial"], expected, rtol=1e-2, atol=1e-3)
    check_success(found, label, targeted=targeted)
    assert found["success"].any()


# -- other targets -----------------------------------------------------------------------------------------------------


def _operators(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _operators(attribute.g)


@pytest.mark.parametrize(("name", "arguments"), [("fgsm", (0.1,)), ("pgd", (0.1,)), ("deepfool", ())])
def test_portable_files_have_portable_operators_and_equal_numbers(name: str, arguments: tuple[float, ...]) -> None:
    made = getattr(attacks, name)(NET.file(), *arguments, target="portable")
    assert set(_operators(made.graph)).isdisjoint(TARGETS["portable"].missing)
    x = images()
    found, expected = run(made, {"image": x.numpy()}), attacked(name, x, *arguments)
    assert_allclose(found["adversarial"], expected["adversarial"], **TOL)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments"), [("fgsm", (0.1,)), ("pgd", (0.1,)), ("deepfool", ()), ("carlini_wagner", ())]
)
def test_float64(name: str, arguments: tuple[float, ...]) -> None:
    feed = {"x": np.random.default_rng(0).random((3, 4), np.float32)}
    weight = "{1, -2, 0.5, 3, -1, 1, 2, -0.5, 1, 1, -3, 0.25}"
    found = []
    for kind in ("float", "double"):
        file = graph_of(f"({kind}[N,4] x) => ({kind}[N,3] y) <{kind}[4,3] w = {weight}> {{ y = MatMul (x, w) }}")
        dtype = np.float32 if kind == "float" else np.float64
        found.append(run(getattr(attacks, name)(file, *arguments), {"x": feed["x"].astype(dtype)})["adversarial"])
    assert found[1].dtype == np.float64
    assert_allclose(*found, **TOL)


def test_errors() -> None:
    file = NET.file()
    with pytest.raises(ArgumentError, match="A targeted attack needs the class to reach"):
        attacks.fgsm(file, 0.1, targeted=True)
    with pytest.raises(ArgumentError, match="Unknown norm '1'"):
        attacks.pgd(file, 0.1, norm="1")
    with pytest.raises(ArgumentError, match="epsilon must be at least 0"):
        attacks.fgsm(file, -1)
    with pytest.raises(ArgumentError, match="The lower bound must be below the upper one"):
        attacks.fgsm(file, 0.1, bounds=(1, 0))
    with pytest.raises(ArgumentError, match="bounds must be the smallest and the largest number"):
        attacks.fgsm(file, 0.1, bounds=(0,))
    with pytest.raises(ArgumentError, match="candidates must be at least 2"):
        attacks.deepfool(file, candidates=1)
    with pytest.raises(ArgumentError, match="one score per sample"):
        attacks.fgsm(
            graph_of("(float[N,3] x) => (float[N,1] y) { y = ReduceSum <keepdims = 1> (x, a) }", a=np.array([1])), 1
        )
