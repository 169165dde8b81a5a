"""Losses: values and gradients equal those of PyTorch in float64, for every option, layout and kind of shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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

WEIGHT = np.array([0.5, 1.5, 2.0, 0.0, 1.0])


def emitted(
    loss: Callable[..., ir.Value], y: np.ndarray, target: np.ndarray, *, shapes: str = "static", machine: str = "cpu"
) -> dict[str, np.ndarray]:
    """Loss and gradient, computed by a graph of the loss alone."""
    m = empty_model("loss")
    for name, array in (("y", y), ("target", target)):
        symbols = [f"{name[0] if axis == 1 else 'd'}{axis}" for axis in range(array.ndim)]
        dims = array.shape if shapes == "static" else symbols
        dtype = ir.DataType.from_numpy(array.dtype)
        m.graph.inputs.append(ir.Value(name=name, shape=ir.Shape(dims), type=ir.TensorType(dtype)))
    value = loss(Emitter(m.graph, target=TARGETS[machine]), *m.graph.inputs)
    value.name = "loss"
    m.graph.outputs.append(value)
    model = og.augment(ir.to_proto(m), wrt=["y"], of="loss", cotangents="ones", target=machine)
    return run(model, {"y": y, "target": target})


@dataclass(frozen=True)
class Case:
    name: str
    ours: losses.Loss
    theirs: Callable[..., torch.Tensor]
    y: np.ndarray
    target: np.ndarray

    def __str__(self) -> str:
        return f"{self.name}-{'x'.join(map(str, self.y.shape))}-{self.ours.reduction}"


def case(name: str, y: tuple[int, ...], **options: Any) -> list[Case]:
    """The loss `name` with each reduction."""
    generator = np.random.default_rng(len(str(y)) + len(str(options)))
    output = (3 * generator.standard_normal(y)).astype(np.float32)
    shape = y[:1] + y[2:] if len(y) > 1 else ()
    kind, theirs = LOSSES[name], getattr(F, THEIRS[name])
    torch_options = dict(options)
    if torch_options.pop("probabilities", False):
        target = generator.dirichlet(np.ones(y[1] if len(y) > 1 else y[0]), shape).astype(np.float32)
        target = np.moveaxis(target, -1, 1 if len(y) > 1 else 0)
    elif name in ("cross_entropy", "nll"):
        target = np.asarray(generator.integers(0, 5, shape) if shape else 1)  # class 3 weighs nothing
        if options.get("ignore_index", -100) < 0 and target.size > 2:
            target.reshape(-1)[[0, 2]] = options.get("ignore_index", -100)
    else:
        target = generator.uniform(0, 1, y).astype(np.float32)
    for key in ("weight", "pos_weight"):
        if key in options:
            torch_options[key] = torch.tensor(options[key], dtype=torch.float64)
    if name == "nll":
        output = -np.abs(output)
    if name == "bce":
        output = 1 / (1 + np.exp(-output))

    def reference(a: torch.Tensor, b: torch.Tensor, reduction: str) -> torch.Tensor:
        return theirs(a, b, reduction=reduction, **torch_options)

    reductions = ("mean", "sum", "none")
    label = f"{name}({','.join(options)})"
    return [
        Case(label, kind(**options, reduction=r), reference, output, np.array(target, order="C")) for r in reductions
    ]


THEIRS = {
    "mse": "mse_loss",
    "l1": "l1_loss",
    "huber": "huber_loss",
    "cross_entropy": "cross_entropy",
    "nll": "nll_loss",
    "bce_with_logits": "binary_cross_entropy_with_logits",
    "bce": "binary_cross_entropy",
}

LAYOUTS = [(4, 5), (3, 5, 7), (2, 5, 3, 4), (2, 5, 2, 3, 2), (5,)]

CASES = [
    *(c for name in ("mse", "l1", "huber", "bce_with_logits") for y in ((4, 5), (2, 3, 4, 2)) for c in case(name, y)),
    *case("huber", (4, 5), delta=0.3),
    *case("bce_with_logits", (4, 5), weight=WEIGHT),
    *case("bce_with_logits", (4, 5), pos_weight=WEIGHT),
    *case("bce_with_logits", (2, 5, 3, 4), pos_weight=WEIGHT[:, None, None], weight=np.full((2, 1, 1, 1), 0.3)),
    *(c for y in ((4, 5), (2, 3, 4, 2)) for c in case("bce", y)),
    *case("bce", (4, 5), weight=WEIGHT),
    *(c for y in LAYOUTS for c in case("cross_entropy", y)),
    *(c for y in LAYOUTS for c in case("cross_entropy", y, weight=WEIGHT)),
    *(c for y in LAYOUTS for c in case("cross_entropy", y, label_smoothing=0.2)),
    *(c for y in LAYOUTS for c in case("cross_entropy", y, weight=WEIGHT, label_smoothing=0.2)),
    *(c for y in LAYOUTS[:3] for c in case("cross_entropy", y, ignore_index=255)),
    *(c for y in LAYOUTS[:3] for c in case("cross_entropy", y, ignore_index=2, weight=WEIGHT, label_smoothing=0.1)),
    *(c for y in LAYOUTS[:3] for c in case("cross_entropy", y, ignore_index=-1)),
    *(c for y in LAYOUTS for c in case("cross_entropy", y, probabilities=True)),
    *(c for y in LAYOUTS for c in case("cross_entropy", y, probabilities=True, weight=WEIGHT, label_smoothing=0.2)),
    *(c for y in LAYOUTS for c in case("nll", y)),
    *(c for y in LAYOUTS for c in case("nll", y, weight=WEIGHT)),
    *(c for y in LAYOUTS[:3] for c in case("nll", y, ignore_index=2)),
]


def expected(case: Case, dtype: torch.dtype = torch.float64) -> tuple[np.ndarray, np.ndarray]:
    y = torch.tensor(case.y, dtype=dtype, requires_grad=True)
    target = torch.tensor(case.target)
    loss = case.theirs(y, target.to(dtype) if target.is_floating_point() else target, case.ours.reduction)
    loss.backward(torch.ones_like(loss))
    return loss.detach().numpy(), y.grad.numpy()


def close(got: np.ndarray, want: np.ndarray, limit: float = 2e-6) -> None:
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= limit * max(float(np.linalg.norm(want)), 1e-3)


def check(
    case: Case, loss: Callable[..., ir.Value] | None = None, gradient_limit: float = 2e-6, **options: str
) -> None:
    """Compare the values and gradients of the case's loss, or of another that should equal its reference."""
    value, gradient = expected(case)
    got = emitted(loss or case.ours, case.y, case.target, **options)
    assert (got["loss"].dtype, got["y_grad"].dtype) == (np.float32, case.y.dtype)
    close(got["loss"], value)
    close(got["y_grad"], gradient, gradient_limit)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_and_gradient(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", [c for c in CASES if c.ours.reduction == "mean" and c.y.ndim > 1], ids=str)
def test_symbolic_shapes(case: Case) -> None:
    check(case, shapes="symbolic")


@pytest.mark.parametrize("case", [c for c in CASES if c.ours.reduction == "mean" and "nll" not in c.name], ids=str)
def test_without_scatter(case: Case) -> None:
    """WebGPU has no ScatterElements."""
    check(case, machine="web")


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_half_precision_is_widened(name: str) -> None:
    (mean, _, _) = case(name, (4, 5))
    target = mean.target.astype(np.float16) if mean.target.dtype == np.float32 else mean.target
    check(replace(mean, y=mean.y.astype(np.float16), target=target), gradient_limit=1e-3)


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 2)], ids=str)
def test_cross_entropy_of_extreme_logits(shape: tuple[int, ...]) -> None:
    """Large logits lose no digits, and a class of probability zero may occur if it is not the target."""
    y = np.zeros(shape, np.float32)
    y[0, 0], y[1, 2], y[2, 3] = 1e4, -np.inf, 12
    target = np.zeros((shape[0], *shape[2:]), np.int64)
    target[2] = 3
    ours = losses.CrossEntropy(reduction="none")
    loss, gradient = expected(Case("", ours, lambda a, b, r: F.cross_entropy(a, b, reduction=r), y, target))
    got = emitted(ours, y, target)
    np.testing.assert_allclose(got["loss"], loss, rtol=2e-3, atol=1e-7)
    np.testing.assert_allclose(got["y_grad"], gradient, rtol=1e-5, atol=1e-7)


def test_binary_cross_entropy_of_extreme_logits() -> None:
    y = np.array([-200, -30, 0, 30, 200], np.float32)
    got = emitted(losses.BCEWithLogits(reduction="none"), y, np.array([0, 1, 0.5, 0, 1], np.float32))
    np.testing.assert_allclose(got["loss"], [0, 30, np.log(2), 30, 0], rtol=1e-6)
    np.testing.assert_allclose(got["y_grad"], [0, -1, 0, 1, 0], atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 2)], ids=str)
@pytest.mark.parametrize("label", [-1, 5, 255])
def test_an_invalid_label_makes_the_loss_nan(shape: tuple[int, ...], label: int) -> None:
    target = np.zeros((shape[0], *shape[2:]), np.int64)
    target.reshape(-1)[1] = label
    assert np.isnan(emitted(losses.CrossEntropy(), np.zeros(shape, np.float32), target)["loss"])


def test_a_loss_without_counted_targets_is_nan_as_in_pytorch() -> None:
    assert np.isnan(emitted(losses.CrossEntropy(), np.zeros((2, 3), np.float32), np.full(2, -100))["loss"])


def test_the_gradient_of_cross_entropy_is_softmax_minus_target() -> None:
    """Only the operators of softmax(y) s - q pass over the logits."""
    m = empty_model("loss")
    m.graph.inputs.extend([
        ir.Value(name="y", shape=ir.Shape([64, 1000]), type=ir.TensorType(ir.DataType.FLOAT)),
        ir.Value(name="target", shape=ir.Shape([64]), type=ir.TensorType(ir.DataType.INT64)),
    ])  # fmt: skip
    value = losses.CrossEntropy()(Emitter(m.graph), *m.graph.inputs)
    value.name = "loss"
    m.graph.outputs.append(value)
    gradient = og.grad(m, wrt=["y"], of="loss")
    big = [n.op_type for n in gradient.graph for v in n.outputs if v.shape is not None and list(v.shape) == [64, 1000]]
    assert big == ["LogSoftmax", "Exp", "Mul", "ScatterElements"]


def test_losses_are_building_blocks() -> None:
    def both(e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        return e.add(losses.MSE()(e, y, target), e.mul(losses.L1(reduction="sum")(e, y, target), 0.5))

    generator = np.random.default_rng(0)
    y, target = (generator.standard_normal((3, 4)).astype(np.float32) for _ in range(2))

    def reference(a: torch.Tensor, b: torch.Tensor, _: str) -> torch.Tensor:
        return F.mse_loss(a, b) + 0.5 * F.l1_loss(a, b, reduction="sum")

    check(Case("", losses.MSE(), reference, y, target), both)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_certain_probabilities_cost_at_most_100_and_have_finite_gradients(dtype: Any) -> None:
    p = np.array([[0, 1, 0, 1, 0.5, 6e-8]], dtype)
    target = np.array([[1, 0, 0, 1, 0.5, 1]], dtype)
    kind = "float" if dtype is np.float32 else "float16"
    m = graph_of(f"({kind}[N,6] x) => ({kind}[N,6] y) {{ y = Mul (x, w) }}", w=np.ones(6, dtype))
    with pytest.warns(UserWarning, match="do not show that its numbers are between 0 and 1"):
        program = og.build_training(m, loss=losses.BCE(reduction="none"), optimizer=og.optim.SGD(1e-6))
    got = run(program.gradients, {"x": p, "target": target})
    want = F.binary_cross_entropy(torch.tensor(p).float(), torch.tensor(target).float(), reduction="none")
    np.testing.assert_allclose(got["loss"], want.numpy(), rtol=1e-5)
    assert np.isfinite(got["w_grad"]).all()
