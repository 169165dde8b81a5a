"""Files in which PyTorch's newer exporter stores equal tensors once and leaves out biases that are zero."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.families import export
from tests.support.training_nets import Formula, ProgramRun, TorchRun, check_losses, off

pytestmark = pytest.mark.slow


class Block(nn.Module):
    """A copy of it has equal weights, scales, slopes, and biases of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.Linear, self.act = nn.LayerNorm(8), nn.Linear(8, 8), nn.PReLU(6)
        self.gamma = nn.Parameter(torch.full((8,), 0.1))
        nn.init.zeros_(self.Linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gamma * self.act(self.Linear(self.norm(x)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.stem, self.up = nn.Conv1d(4, 6, 3, padding=1), nn.ConvTranspose1d(6, 6, 2, groups=2)
        self.blocks = nn.ModuleList([block, copy.deepcopy(block)])
        self.first, self.second = nn.GroupNorm(2, 6), nn.GroupNorm(2, 6)
        self.place, self.other = nn.Parameter(torch.zeros(6, 8)), nn.Parameter(torch.zeros(6, 8))
        for conv in (self.stem, self.up):
            assert conv.bias is not None
            nn.init.zeros_(conv.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.stem(x) + self.place) + self.other
        for block in self.blocks:
            y = block(y)
        return self.second(torch.tanh(self.first(self.up(y))))


def fresh_export(build: Callable[[], nn.Module], *shape: int) -> tuple[nn.Module, onnx.ModelProto, torch.Tensor]:
    torch.manual_seed(0)
    module, x = build().eval(), torch.randn(2, *shape)
    return module, export(module, x, dynamo=True, training=False), x


def trained_alike(
    program: og.TrainingProgram, module: nn.Module, x: torch.Tensor, *sizes: int
) -> dict[str, np.ndarray]:
    """Train both for five steps with equal losses; return the relative errors of parameters and statistics by name."""
    ours, theirs = ProgramRun(program), TorchRun(module, lambda p: torch.optim.SGD(p, 0.5), loss=nn.functional.mse_loss)
    check_losses(ours, theirs, [{"x": x, "target": torch.randn(len(x), *sizes)}] * 5, 1e-5)
    values = dict([*theirs.module.named_parameters(), *theirs.module.named_buffers()])
    return {name: off(value, values[name]) for name, value in ours.state.items() if name in values}


def program_of(model: onnx.ModelProto) -> og.TrainingProgram:
    return og.build_training(model, loss="mse", optimizer=og.optim.SGD(lr=0.5), unbiased_variance=True)


def _named(model: onnx.ModelProto) -> list[str]:
    return [t.name for t in model.graph.initializer]


def test_equal_parameters_are_trained_separately() -> None:
    """As in PyTorch; the exported file has all of them, and its results equal those of PyTorch."""
    module, model, x = fresh_export(Network, 4, 8)
    assert not {"other", "blocks.1.gamma", "blocks.1.norm.bias", "stem.bias", "up.bias"} & set(_named(model))
    program = program_of(model)
    parameters = {name for name, _ in module.named_parameters()}
    trained = [p.name for p in program.manifest.parameters]
    assert len(trained) == len(parameters)
    folded = {name for name in trained if name.startswith("val_")}  # transposed or reshaped by the exporter
    assert parameters - set(trained) == {
        *(f"blocks.{i}.{name}.weight" for i in range(2) for name in ("Linear", "act")),
        *(f"{norm}.{kind}" for norm in ("first", "second") for kind in ("weight", "bias")),
    }
    assert len(folded) == 8
    errors = trained_alike(program, module, x, 6, 9)
    assert errors.keys() == set(trained) - folded and max(errors.values()) < 1e-4, errors
    fresh, _, _ = fresh_export(Network, 4, 8)
    want = fresh(x).detach().numpy()
    np.testing.assert_allclose(run(program.inference, {"x": x.numpy()})["y"], want, rtol=1e-4, atol=1e-5)


def test_equal_parameters_have_gradients_of_their_own() -> None:
    """Each equals that of PyTorch, under the parameter's name, or in another layout under the exporter's."""
    module, model, x = fresh_export(Network, 4, 8)
    gradients = og.vjp(model, wrt="parameters")
    seed = torch.randn(2, 6, 9)
    got = run(gradients, {"x": x.numpy(), "y_grad": seed.numpy()})
    module.double()(x.double()).backward(seed.double())
    want = {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}
    assert len(got) == len(want) == len(list(module.parameters()))
    named = {name for name in want if f"{name}_grad" in got}
    assert {"other", "place", "blocks.1.gamma", "blocks.0.norm.bias", "stem.bias", "up.bias"} <= named
    for name in named:
        assert off(got.pop(f"{name}_grad"), torch.from_numpy(want.pop(name))) < 1e-5, name
    for name, gradient in got.items():  # transposed or reshaped
        numbers = np.sort(gradient, axis=None)
        errors = {key: abs(numbers - np.sort(g, axis=None)).max() for key, g in want.items() if g.size == gradient.size}
        nearest = min(errors, key=lambda key: errors[key])
        assert errors[nearest] < 1e-5, name
        del want[nearest]
    assert not want


def test_gradients_of_inputs_leave_a_merged_file_as_it_is() -> None:
    _, model, _ = fresh_export(Network, 4, 8)
    assert set(_named(og.augment(model, wrt=["x"]))) >= set(_named(model))
    assert not {"other", "blocks.1.gamma", "stem.bias"} & set(_named(og.augment(model, wrt="inputs")))
    assert "stem.bias" in _named(og.augment(model, wrt=["stem.bias", "x"]))


def test_results_keep_the_parameters_that_were_separated() -> None:
    """Once they have numbers of their own, gradients of inputs merge them no more."""
    _, model, _ = fresh_export(Network, 4, 8)
    result = og.augment(ir.from_proto(model))
    other = result.graph.initializers["other"]
    other.const_value = ir.tensor(np.ones((6, 8), np.float32), name="other")
    assert "other" in og.vjp(result, wrt=["x"], of="y").graph.initializers


def test_statistics_that_equal_parameters_are_their_own() -> None:
    """The exporter keeps a BatchNormalization before a convolution, with equal shift and mean, scale and variance."""

    def build() -> Formula:
        norm, conv, last = nn.BatchNorm1d(4), nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)
        return Formula(lambda m, x: m.last(torch.tanh(m.conv(m.norm(x)))), norm=norm, conv=conv, last=last)

    module, model, x = fresh_export(build, 4, 8)
    assert not {"norm.running_mean", "last.weight"} & set(_named(model))
    program = program_of(model)
    errors = trained_alike(program, module, x, 4, 6)
    assert len(errors) == 10 and max(errors.values()) < 1e-5, errors


def test_layers_of_a_recurrent_operation_and_normalizations_without_parameters() -> None:
    """One operation has a node per layer; ones and zeros that replace missing parameters are not trained."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.plain = nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False)
            self.lstm = nn.LSTM(6, 6, 2, batch_first=True, bidirectional=True)
            self.gru = nn.GRU(12, 6, 2, batch_first=True)
            self.norms = nn.ModuleList([
                nn.LayerNorm(6), nn.LayerNorm(6, elementwise_affine=False), nn.LayerNorm(6, bias=False)
            ])  # fmt: skip
            for name, parameter in (*self.lstm.named_parameters(), *self.gru.named_parameters()):
                if "bias" in name:
                    nn.init.zeros_(parameter)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norms[0](self.plain(torch.tanh(self.first(x))))
            y = self.gru(self.lstm(y)[0])[0]
            return self.norms[2](torch.tanh(self.norms[1](y)))

    module, model, x = fresh_export(Recurrent, 4, 6)
    program = program_of(model)
    sizes = sum(int(np.prod([d for d in p.shape if isinstance(d, int)])) for p in program.manifest.parameters)
    assert sizes == sum(p.numel() for p in module.parameters())
    trained_alike(program, module, x, 4, 6)


def test_biases_of_linear_layers_that_are_zero_are_trained() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(m.last.bias, torch.tanh(m.first(x)), m.last.weight.T)

    def build() -> Formula:
        first, last = nn.Linear(8, 6), nn.Linear(6, 3)
        for layer in (first, last):
            nn.init.zeros_(layer.bias)
        return Formula(forward, first=first, last=last)

    module, model, x = fresh_export(build, 8)
    assert not {"first.bias", "last.bias"} & set(_named(model))
    program = program_of(model)
    assert {"first.bias", "last_bias"} < {p.name for p in program.manifest.parameters}  # no module computed the last
    trained_alike(program, module, x, 3)


@pytest.mark.parametrize(
    "options",
    [
        {"dynamo": True, "training": True},
        {"dynamo": True, "training": True, "fold": False},
        {"dynamo": False, "training": False, "fold": False},
        {"dynamo": False, "training": False, "fold": False, "dynamic_batch": True},
    ],
    ids=["optimized", "as it is", "TorchScript", "TorchScript of any size"],
)
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "trained"])
def test_a_normalization_that_is_used_twice(options: dict[str, bool], fresh: bool) -> None:
    """Exported in training mode, its second use reads the statistics that the first has updated."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(m.norm(m.conv(x)))
        return first - m.norm(m.conv(2 * torch.cos(x)))

    torch.manual_seed(0)
    conv, norm = nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)
    module, x = Formula(forward, conv=conv, norm=norm), torch.randn(3, 4, 9)
    if not fresh:
        for value in (*norm.parameters(), norm.running_mean, norm.running_var):
            nn.init.uniform_(value, 0.5, 1.5)
    model = export(module, x, **options)
    program = program_of(model)
    assert {p.name for p in program.manifest.parameters} == {name for name, _ in module.named_parameters()}
    errors = trained_alike(program, module, x, 4, 7)
    assert {f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")} < errors.keys()
    assert max(errors.values()) < 1e-4, errors


def test_statistics_without_notes_are_no_parameters() -> None:
    """A tool that drops the notes leaves a scale that is a variance, and a shift that is a mean."""

    def build() -> Formula:
        conv, norm = nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)
        return Formula(lambda m, x: torch.tanh(m.norm(torch.tanh(m.conv(x)))), conv=conv, norm=norm)

    module, model, x = fresh_export(build, 4, 8)
    for holder in (*model.graph.node, *model.graph.initializer, *model.graph.value_info):
        del holder.metadata_props[:]
    program = program_of(model)
    assert {p.name for p in program.manifest.state} == {"step", "norm.running_mean", "norm.running_var"}
    assert trained_alike(program, module, x, 4, 6)["norm.weight"] < 1e-4
