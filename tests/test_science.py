"""The graphs that the scientific examples build equal PyTorch's derivatives."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
import torch
from numpy.testing import assert_allclose

import onnx_convgrad as og
from onnx_convgrad.runtime import run

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    """The module of an example."""
    pytest.importorskip("matplotlib", reason="the examples draw")
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def store(graph: onnx.GraphProto, values: dict[str, np.ndarray]) -> None:
    graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in values.items())


# -- energies, forces and stress ---------------------------------------------------------------------------------------


def squared_distances(place: torch.Tensor, strain: torch.Tensor, cell: float) -> torch.Tensor:
    """Of all pairs of one structure with periodic images; 1 of a particle with itself."""
    way = place[:, None] - place[None]
    off = (way - cell * torch.round(way.detach() / cell)) @ (torch.eye(2) + strain)
    return (off**2).sum(2) + torch.eye(len(place))


def lennard_jones(place: torch.Tensor, strain: torch.Tensor) -> torch.Tensor:
    near = 1 / squared_distances(place, strain, 3.36)
    return 2 * (near**6 - near**3).sum()


def structures() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(3)
    lattice = np.mgrid[:3, :3].reshape(2, 9).T * 1.12
    place = lattice + 0.03 * draw.standard_normal((2, 9, 2))
    return place.astype("f"), (0.02 * draw.standard_normal((2, 2, 2))).astype("f")


def test_forces_and_stress_of_an_energy() -> None:
    module, (place, strain) = example("force_matching"), structures()
    built = module.with_slopes(onnx.parser.parse_model(module.PAIRS + module.LENNARD_JONES))
    found = run(built, {"place": place, "strain": strain})
    assert list(found) == ["energy", "place_grad", "strain_grad"]
    for i in range(2):
        leaves = torch.tensor(place[i], requires_grad=True), torch.tensor(strain[i], requires_grad=True)
        energy = lennard_jones(*leaves)
        expected = energy.detach(), *torch.autograd.grad(energy, leaves)
        for value, want in zip(found.values(), expected, strict=True):
            assert_allclose(value[i], want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_gradients_of_a_loss_of_forces() -> None:
    """The gradients by the parameters, second derivatives of the energy, equal those of PyTorch's double backward."""
    module, (place, strain) = example("force_matching"), structures()
    draw = np.random.default_rng(0)
    values = {name: (0.3 * draw.standard_normal(size)).astype("f") for name, size in module.SIZES.items()}
    shells = np.linspace(0.6, 3.2, 16, dtype="f")
    energy = onnx.parser.parse_model(module.PAIRS + module.NETWORK)
    store(energy.graph, {**values, "shells": shells})
    loss = {"place_grad": "mse", "strain_grad": (0.01, "mse")}
    program = og.build_training(module.with_slopes(energy), loss=loss, optimizer=og.optim.SGD(1.0), wrt=[*values])
    targets = {
        f"{name}_target": draw.standard_normal(v.shape).astype("f")
        for name, v in zip(loss, (place, strain), strict=True)
    }
    found = run(program.gradients, {"place": place, "strain": strain, **targets, **values})

    w = {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}
    slopes: list[list[torch.Tensor]] = []
    for i in range(2):
        leaves = torch.tensor(place[i], requires_grad=True), torch.tensor(strain[i], requires_grad=True)
        far = squared_distances(*leaves, 3.36)[..., None] - torch.tensor(shells)
        around = torch.exp(-20 * far**2).sum(1)
        total = (torch.tanh(around @ w["w1"] + w["b1"]) @ w["w2"]).sum()
        slopes.append(list(torch.autograd.grad(total, leaves, create_graph=True)))
    ours = (torch.stack(column) for column in zip(*slopes, strict=True))
    errors = [((a - torch.tensor(b)) ** 2).mean() for a, b in zip(ours, targets.values(), strict=True)]
    value = errors[0] + 0.01 * errors[1]
    assert_allclose(found["loss"], value.detach(), rtol=1e-4)
    for name, want in zip(w, torch.autograd.grad(value, [*w.values()]), strict=True):
        assert_allclose(found[f"{name}_grad"], want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


# -- an equation, a Loop, and a chain ----------------------------------------------------------------------------------


def test_gradients_of_the_residual_of_an_equation() -> None:
    """The loss reads first and second derivatives by the inputs; its gradients are third derivatives."""
    module, draw = example("physics_informed"), np.random.default_rng(0)
    values = {name: (0.5 * draw.standard_normal(size)).astype("f") for name, size in module.SIZES.items()}
    model = module.equation(values)
    places = {name: draw.uniform(-1, 1, (16, 1)).astype("f") for name in "xt"}
    feed = {i.name: places.get(i.name, np.ones((16, 1), "f")) for i in model.graph.input}
    found = run(
        og.build_training(model, loss="loss", optimizer=og.optim.SGD(1.0), wrt=[*values]).gradients, feed | values
    )

    w = {name: torch.tensor(value, requires_grad=True) for name, value in values.items()}
    x, t = (torch.tensor(places[name], requires_grad=True) for name in "xt")
    h = torch.tanh(torch.cat([x, t], 1) @ w["w1"] + w["b1"])
    free = torch.tanh(h @ w["w2"] + w["b2"]) @ w["w3"]
    u = free * (1 - x * x) * t - torch.sin(torch.pi * x)
    by_x, by_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (by_xx,) = torch.autograd.grad(by_x.sum(), x, create_graph=True)
    loss = ((by_t + u * by_x - 0.1 * by_xx) ** 2).mean()
    assert_allclose(found["loss"], loss.detach(), rtol=1e-4)
    for name, want in zip(w, torch.autograd.grad(loss, [*w.values()]), strict=True):
        assert_allclose(found[f"{name}_grad"], want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


def test_control_and_sensitivity_of_a_pendulum() -> None:
    pytest.importorskip("scipy", reason="the example minimizes with scipy")
    module = example("swing_up")
    torque = torch.tensor(np.random.default_rng(0).standard_normal(12), requires_grad=True)
    rod = torch.tensor(1.2, dtype=torch.float64, requires_grad=True)
    angle, speed = torch.tensor(torch.pi, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    path = []
    for push in torque:
        speed = speed + 0.05 * (torch.sin(angle) * 9.81 / rod + push - 0.1 * speed)
        angle = angle + 0.05 * speed
        path.append(angle)
    cost = 50 * (1 - torch.cos(angle) + speed**2) + 0.002 * (torque**2).sum()
    expected = torch.autograd.grad(cost, [torque, rod], retain_graph=True)
    feed = {"torque": torque.detach().numpy(), "length": np.array(1.2)}
    found = run(og.augment(module.world(), wrt="inputs", of="cost"), feed)
    assert_allclose(found["cost"], cost.detach(), rtol=1e-10)
    for name, want in zip(("torque", "length"), expected, strict=True):
        assert_allclose(found[f"{name}_grad"], want, rtol=1e-9, atol=1e-11)
    moved = run(og.jvp(module.world(), wrt="length", of="path"), {**feed, "length_tangent": np.array(1.0)})
    slopes = [torch.autograd.grad(one, rod, retain_graph=True)[0] for one in path]
    assert_allclose(moved["path_tangent"], torch.stack(slopes), rtol=1e-9, atol=1e-11)


def test_steps_of_hamiltonian_monte_carlo() -> None:
    module, draw = example("sample_density"), np.random.default_rng(0)

    def energy(q: torch.Tensor) -> torch.Tensor:
        return q[:, 0] ** 2 / 2 + 2 * (q[:, 1] - q[:, 0] ** 2) ** 2

    feed = {"start": draw.standard_normal((30, 2)), "momenta": 1.5 * draw.standard_normal((4, 30, 2))}
    feed = {name: value.astype("f") for name, value in {**feed, "luck": draw.random((4, 30))}.items()}
    found = run(module.chain(onnx.parser.parse_model(module.ENERGY)), feed)
    start, momenta, luck = (torch.tensor(value) for value in feed.values())
    here, choices = start, []
    for p, chance in zip(momenta, luck, strict=True):
        q, push = here, p
        for _ in range(15):
            middle = (q + 0.05 * push).requires_grad_()
            push = push - 0.1 * torch.autograd.grad(energy(middle).sum(), middle)[0]
            q = middle.detach() + 0.05 * push
        change = energy(here) - energy(q) + ((p**2).sum(1) - (push**2).sum(1)) / 2
        taken = torch.log(chance) < change
        here = torch.where(taken[:, None], q, here)
        choices.append(taken)
    assert_allclose(found["samples"][-1], here, rtol=1e-3, atol=1e-3)
    assert np.array_equal(found["accepted"], torch.stack(choices))
    assert 0.5 < found["accepted"].mean() < 1
