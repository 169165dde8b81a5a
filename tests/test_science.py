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
