"""Losses of gradients in PyTorch's exporters, and their remedies: the table in `docs/how_to/export_from_pytorch.md`.

Each case compares the gradients of an exported file with those of PyTorch, for the newer exporter and the older one.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.training_nets import Formula

pytestmark = pytest.mark.slow

SETTINGS: dict[str, dict[str, Any]] = {
    "newer": {"dynamo": True, "optimize": False, "verbose": False},
    "optimized": {"dynamo": True, "optimize": True, "verbose": False},
    "older": {"dynamo": False, "training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False},
}
EVERY = tuple(SETTINGS)
Function = Callable[[Any, Tensor], Tensor]


def export(module: nn.Module, x: Tensor, exporter: str) -> onnx.ModelProto:
    file = io.BytesIO()
    before = copy.deepcopy(module.state_dict())  # the exporters run the module, which may update its buffers
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(module, (x,), file, input_names=["x"], output_names=["y"], **SETTINGS[exporter])
    finally:
        logging.disable(logging.NOTSET)
        module.load_state_dict(before)
    return onnx.load_from_string(file.getvalue())


def from_torch(module: nn.Module, x: Tensor, seed: Tensor) -> dict[str, np.ndarray]:
    """The gradients of the parameters that have one, and of a floating input."""
    module.zero_grad()
    x = x.clone().requires_grad_(x.is_floating_point())
    module(x).backward(seed)
    found = {**dict(module.named_parameters()), "x": x}
    return {name: value.grad.numpy() for name, value in found.items() if value.grad is not None}


def from_file(model: onnx.ModelProto, x: Tensor, seed: Tensor) -> dict[str, np.ndarray]:
    wrt = ["parameters", *(["x"] if x.is_floating_point() else [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tests below look at each warning
        built = og.vjp(model, wrt=wrt)
    names = json.loads({p.key: p.value for p in built.metadata_props}["onnx_convgrad.gradients"])
    results = run(built, {"x": x.numpy(), "y_grad": seed.numpy()})
    return {name: results[output] for name, output in names.items()}


def same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> bool:
    """Whether all gradients of PyTorch are there, and those beyond them are zero."""
    zero = {name for name, g in got.items() if name not in want and not g.any()}
    return got.keys() - zero == want.keys() and all(
        np.allclose(got[name], want[name], rtol=1e-4, atol=1e-6, equal_nan=True) for name in want
    )


def network(function: Function, **members: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return Formula(function, a=nn.Linear(4, 3), b=nn.Linear(3, 2), **members).eval()


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 2, generator=generator)


def is_kept(function: Function, exporter: str, **members: nn.Module) -> bool:
    x, seed = example()
    module = network(function, **members)
    return same(from_file(export(module, x, exporter), x, seed), from_torch(module, x, seed))


# -- functions of the table --------------------------------------------------------------------------------------------


def detached(m: Any, x: Tensor) -> Tensor:
    z = m.a(x)
    return m.b(z * torch.sigmoid(z).detach())


def straight_through(m: Any, x: Tensor) -> Tensor:
    """A layer of vector quantization."""
    z = m.a(x)
    nearest = ((z[:, None] - m.book.weight[None]) ** 2).sum(-1).argmin(1)
    return m.b(z + (m.book(nearest) - z).detach())


def in_place(m: Any, x: Tensor) -> Tensor:
    z = m.a(x)
    return m.b(z * torch.sigmoid(z).detach_())


def without_grad(m: Any, x: Tensor) -> Tensor:
    z = m.a(x)
    with torch.no_grad():
        gate = torch.sigmoid(z)
    return m.b(z * gate)


class Sign(torch.autograd.Function):
    """The sign, whose backward pass is that of a clip."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * (ctx.saved_tensors[0].abs() <= 1)


def own_backward(m: Any, x: Tensor) -> Tensor:
    return m.b(Sign.apply(m.a(x)))


def own_backward_by_detach(m: Any, x: Tensor) -> Tensor:
    z = m.a(x)
    backward = z.clamp(-1, 1)
    return m.b(backward + (torch.sign(z) - backward).detach())


def hooked(m: Any, x: Tensor) -> Tensor:
    z = m.a(x)
    if z.requires_grad:
        z.register_hook(lambda g: 0.1 * g)
    return m.b(z)


def scaled_by_detach(m: Any, x: Tensor) -> Tensor:
    z = m.a(x)
    return m.b(0.1 * z + (0.9 * z).detach())


def checkpointed(m: Any, x: Tensor) -> Tensor:
    return m.b(checkpoint(lambda z: torch.relu(m.a(z)), x, use_reentrant=False))


def without_number(m: Any, x: Tensor) -> Tensor:
    """The gradient is not a number where `sqrt` is infinitely steep, in PyTorch too."""
    z = m.a(x)
    return m.b(torch.where(z > 0, torch.sqrt(z), torch.zeros_like(z)))


@dataclass(frozen=True)
class Case:
    """A construct, the exporters that keep its gradient, and a function with this gradient that the newer one keeps."""

    name: str
    function: Function
    kept: tuple[str, ...] = ()
    remedy: Function | None = None
    book: bool = False

    def members(self) -> dict[str, nn.Module]:
        return {"book": nn.Embedding(5, 3)} if self.book else {}


CASES = [
    Case("x.detach()", detached, ("newer",)),
    Case("straight-through estimator", straight_through, ("newer",), book=True),
    Case("x.detach_()", in_place, (), detached),
    Case("torch.no_grad()", without_grad, (), detached),
    Case("autograd.Function with backward", own_backward, (), own_backward_by_detach),
    Case("hooks on gradients", hooked, (), scaled_by_detach),
    Case("checkpoint", checkpointed, EVERY),
    Case("torch.where", without_number, EVERY),
]


@pytest.mark.parametrize("exporter", EVERY)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.function.__name__)
def test_what_a_file_keeps(case: Case, exporter: str) -> None:
    assert is_kept(case.function, exporter, **case.members()) == (exporter in case.kept)


@pytest.mark.parametrize("case", [c for c in CASES if c.remedy], ids=lambda case: case.function.__name__)
def test_a_remedy_has_the_results_and_gradients_of_the_original(case: Case) -> None:
    x, seed = example()
    assert case.remedy is not None
    module, other = network(case.function), network(case.remedy)
    torch.testing.assert_close(other(x), module(x))
    assert same(from_file(export(other, x, "newer"), x, seed), from_torch(module, x, seed))


@pytest.mark.parametrize("function", [detached, straight_through], ids=lambda f: f.__name__)
def test_a_detach_that_the_optimizer_removed_is_told(function: Function) -> None:
    x, _ = example()
    model = export(network(function, book=nn.Embedding(5, 3)), x, "optimized")
    with pytest.warns(UserWarning, match=r"PyTorch detaches what 'node_\w+' reads.*optimize=False"):
        og.vjp(model, wrt="a.weight")
    assert not _warned(lambda: og.vjp(model, wrt="b.weight"))


def _warned(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in found if "detaches" in str(warning.message)]


# -- layers and attributes of modules ----------------------------------------------------------------------------------


BOTH = pytest.mark.parametrize("exporter", ["newer", "older"])


def texts() -> tuple[nn.Module, Tensor, Tensor]:
    """A network of words, of which 0 stands for none, its input, and a cotangent."""
    torch.manual_seed(0)
    embed = nn.Embedding(6, 3, padding_idx=0)
    module = Formula(lambda m, x: m.b(m.embed(x).mean(1)), embed=embed, b=nn.Linear(3, 2)).eval()
    return module, torch.tensor([[1, 0, 2], [3, 0, 0], [5, 4, 3]]), torch.randn(3, 2)


@BOTH
def test_padding_idx_is_lost_and_the_row_can_be_left_out(exporter: str) -> None:
    module, x, seed = texts()
    model, want = export(module, x, exporter), from_torch(module, x, seed)
    got = from_file(model, x, seed)
    np.testing.assert_allclose(got["embed.weight"][1:], want["embed.weight"][1:], atol=1e-6)
    assert not want["embed.weight"][0].any() and got["embed.weight"][0].any()
    chosen = {"parameters": slice(None), "embed.weight": slice(1, None)}
    program = og.build_training(model, loss="mse", optimizer=og.optim.SGD(0.5), wrt=chosen)
    trainer, optimizer = og.Trainer(program), torch.optim.SGD(module.parameters(), 0.5)
    for _ in range(3):
        trainer.step({"x": x.numpy(), "target": seed.numpy()})
        optimizer.zero_grad()
        F.mse_loss(module(x), seed).backward()
        optimizer.step()
    result = trainer.predict({"x": x.numpy()})["y"]
    np.testing.assert_allclose(result, module(x).detach().numpy(), rtol=1e-4, atol=1e-5)


@BOTH
def test_requires_grad_is_lost_and_freeze_replaces_it(exporter: str) -> None:
    x, _ = example()
    module = network(lambda m, x: m.b(torch.relu(m.a(x))))
    module.a.requires_grad_(False)
    model = export(module, x, exporter)
    trained = {p.name for p in og.build_training(model, loss="mse", optimizer="sgd").manifest.parameters}
    assert trained == {"a.weight", "a.bias", "b.weight", "b.bias"}
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    program = og.build_training(model, loss="mse", optimizer="sgd", freeze=frozen)
    assert {p.name for p in program.manifest.parameters} == {"b.weight", "b.bias"}


@BOTH
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_momentum_of_none_stops_running_statistics(exporter: str, momentum: float | None) -> None:
    torch.manual_seed(0)
    module = Formula(lambda m, x: m.b(m.norm(x).mean(-1)), norm=nn.BatchNorm1d(3, momentum=momentum), b=nn.Linear(3, 2))
    x = torch.randn(8, 3, 4) + 2
    model = export(module.eval(), x, exporter)

    def build() -> og.TrainingProgram:
        return og.build_training(model, loss="mse", optimizer=og.optim.SGD(0.0))

    if momentum is None:
        with pytest.warns(UserWarning, match=r"will not move, for their momentum in the file is 1"):
            program = build()
    else:
        program = build()
    trainer = og.Trainer(program)
    trainer.step({"x": x.numpy(), "target": np.zeros((8, 2), np.float32)})
    module.train()(x)
    got, want = trainer.state()["norm.running_mean"], module.norm.running_mean.numpy()
    assert np.allclose(got, want, atol=1e-5) == (momentum is not None)
    assert got.any() == (momentum is not None)


def test_the_iteration_of_spectral_norm_starts_anew_in_every_step() -> None:
    """The vectors stay those of the file; in training mode, the norm is right where the iterations suffice."""
    spectral = nn.utils.parametrizations.spectral_norm
    x, target = example()
    errors = {}
    for iterations, training in ((1, False), (10, True)):
        module = network(lambda m, x: m.b(m.a(x)))
        spectral(module.a, n_power_iterations=iterations)
        program = og.build_training(
            export(module.train(training), x, "newer"), loss="mse", optimizer=og.optim.SGD(0.1), outputs="y"
        )
        assert "a.parametrizations.weight.original" in {p.name for p in program.manifest.parameters}
        assert not {s.name for s in program.manifest.state if "weight.0" in s.name}
        trainer, optimizer = og.Trainer(program), torch.optim.SGD(module.train().parameters(), 0.1)
        for _ in range(5):
            loss = trainer.step({"x": x.numpy(), "target": target.numpy()})["loss"]
            optimizer.zero_grad()
            want = F.mse_loss(module(x), target)
            want.backward()
            optimizer.step()
        errors[training] = abs(float(loss) - want.item()) / want.item()
    assert errors[True] < 1e-3 and errors[False] > 3e-2, errors


@BOTH
def test_an_update_of_a_buffer_is_lost(exporter: str) -> None:
    """The newer exporter's notes tell the buffer from a parameter; with the older one it has to be frozen."""

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 2)
            self.register_buffer("center", torch.full((2,), 0.7))

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            self.center.mul_(0.9).add_(0.1 * y.detach().mean(0))
            return y - self.center

    x, _ = example()
    program = og.build_training(export(Centered().eval(), x, exporter), loss="mse", optimizer="sgd")
    trained = {p.name for p in program.manifest.parameters}
    assert trained == {"a.weight", "a.bias", *(["center"] if exporter == "older" else [])}
    assert not program.manifest.state or all(
        state.of != "center" or exporter == "older" for state in program.manifest.state
    )


@BOTH
def test_tied_weights_stay_tied_under_one_name(exporter: str) -> None:
    torch.manual_seed(0)
    module = Formula(
        lambda m, x: m.second(torch.relu(m.first(x))), first=nn.Linear(4, 4), second=nn.Linear(4, 4)
    ).eval()
    module.second.weight = module.first.weight
    x, seed = example()[0], torch.randn(5, 4)
    got, want = from_file(export(module, x, exporter), x, seed), from_torch(module, x, seed)
    kept = "first.weight" if exporter == "older" else "second.weight"
    assert len(got) == len(want) and kept in got
    np.testing.assert_allclose(got[kept], want["first.weight"], rtol=1e-4, atol=1e-6)


def test_data_is_refused_or_becomes_a_constant() -> None:
    x, _ = example()
    module = network(lambda m, x: m.b(m.a(x) * torch.sigmoid(m.a(x)).data))
    with pytest.raises(Exception, match=r"."):
        export(module, x, "newer")
    model = export(module, x, "older")
    assert "Sigmoid" not in {node.op_type for node in model.graph.node}


# -- the page ----------------------------------------------------------------------------------------------------------


OTHERS = {
    ".data",
    "Embedding(padding_idx)",
    "requires_grad=False",
    "BatchNorm(momentum=None)",
    "spectral_norm",
    "buffers that forward changes",
    "tied weights",
}
"""Rows of the table that have a test of their own above."""


def test_the_table_of_the_page_has_every_case(root: Path) -> None:
    page = (root / "docs" / "how_to" / "export_from_pytorch.md").read_text(encoding="utf-8")
    section = page.partition("## What exporters lose")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!construct|---)([^|]*[^| ]) +\|", section, re.MULTILINE)
    assert {row.replace("`", "") for row in rows} == OTHERS | {case.name for case in CASES}
