"""Networks, batches and training runs shared by the tests of training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import nn

import onnx_convgrad as og
from onnx_convgrad import optim
from onnx_convgrad.runtime import run, session
from tests.support.families import export
from tests.support.one_input import graph_of

Feeds = dict[str, np.ndarray]
Batch = dict[str, torch.Tensor]


X, A, B = (np.random.default_rng(i).standard_normal((4, n)).astype(np.float32) for i, n in ((3, 3), (4, 2), (5, 2)))
"""Data and targets for `two_outputs`."""


class Net(nn.Module):
    """Convolutions with BatchNorm, one without, Dropout and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=2), nn.BatchNorm2d(12, momentum=0.3)
        self.conv3 = nn.Conv2d(12, 12, 3, padding=1)
        self.drop = nn.Dropout(0.25)
        self.fc = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        h = F.relu(self.conv3(self.drop(h)) + h)
        return self.fc(h.mean((2, 3)))


class Formula(nn.Module):
    """Parts and parameters by name, and a function of them and the input."""

    def __init__(
        self, function: Callable[[Any, torch.Tensor], torch.Tensor], **members: nn.Module | nn.Parameter
    ) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


@cache
def net() -> nn.Module:
    torch.manual_seed(0)
    module = Net()
    with torch.no_grad():
        for bn in (module.bn1, module.bn2):
            bn.weight.uniform_(0.5, 1.5), bn.bias.uniform_(-0.5, 0.5)
            bn.running_mean.uniform_(-0.2, 0.2), bn.running_var.uniform_(0.5, 1.5)
    return module


@cache
def exported(*, training: bool = False) -> onnx.ModelProto:
    """The network, exported for inference or for training."""
    module = copy.deepcopy(net()).train(training)
    model = export(module, batch(0)["x"], dynamo=False, training=training, fold=False, dynamic_batch=True)
    for tensor in model.graph.initializer:  # exporting in training mode moves the statistics of the module
        if "running" in tensor.name:
            tensor.CopyFrom(numpy_helper.from_array(net().get_buffer(tensor.name).numpy(), tensor.name))
    return model


def batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn((6, 3, 8, 8), generator=generator)
    return {"x": x, "target": torch.randint(0, 5, (6,), generator=generator)}


def arrays(step: int) -> Feeds:
    return {k: v.numpy() for k, v in batch(step).items()}


class ProgramRun:
    """Runs `step` or `update` of a program in ONNX Runtime and feeds the next values back."""

    def __init__(self, program: og.TrainingProgram, part: str = "step") -> None:
        self.program, self.session = program, session(getattr(program, part))
        self.names = [o.name for o in self.session.get_outputs()]
        self.next = {entry.name: entry.next for entry in program.manifest.moving() if entry.next in self.names}
        self.state: Feeds = {}

    def __call__(self, feeds: Feeds) -> Feeds:
        results = dict(zip(self.names, self.session.run(self.names, {**feeds, **self.state}), strict=True))
        self.state = {name: results[following] for name, following in self.next.items()}
        return results


class TorchRun:
    """Trains a copy of a module in PyTorch, without Dropout; a call is a step and returns the loss."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer],
        dtype: torch.dtype = torch.float64,
        loss: Callable[..., torch.Tensor] = F.cross_entropy,
    ) -> None:
        self.module, self.dtype, self.loss = copy.deepcopy(module).to(dtype).train(), dtype, loss
        for part in self.module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        self.optimizer = optimizer(self.module.parameters())

    def __call__(self, x: torch.Tensor, target: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(self.module(x.to(self.dtype)), target.to(self.dtype) if target.is_floating_point() else target)
        loss.backward()
        self.optimizer.step()
        return loss.item()


def check_losses(ours: Callable[[Feeds], Feeds], theirs: TorchRun, batches: Iterable[Batch], rel: float) -> None:
    """Train both on the batches and compare the losses."""
    for step, feeds in enumerate(batches):
        got = ours({name: value.numpy() for name, value in feeds.items()})["loss"]
        assert float(got) == pytest.approx(theirs(**feeds), rel=rel), step


def off(got: np.ndarray, want: np.ndarray | torch.Tensor) -> float:
    """The relative error of an array of the same shape."""
    want = np.asarray(want.detach().numpy() if isinstance(want, torch.Tensor) else want, np.float64)
    assert got.shape == want.shape
    return float(np.linalg.norm(got.astype(np.float64) - want) / max(float(np.linalg.norm(want)), 1e-12))


def check_values(state: Feeds, module: nn.Module, limit: float) -> None:
    """Compare parameters and running statistics with those of a module."""
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if "num_batches" not in name:
            assert off(state[name], value) < limit, name


def same(got: Feeds, want: Feeds, rtol: float = 0.0, atol: float | None = None) -> None:
    """Compare arrays by name; exactly by default."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=rtol, atol=rtol if atol is None else atol, err_msg=name)


def check_halves(program: og.TrainingProgram, feeds: Feeds, atol: float = 1e-7) -> Feeds:
    """Compare `gradients` followed by `update` with `step`; return the results of `gradients`."""
    whole, first = run(program.step, feeds), run(program.gradients, feeds)
    second = run(program.update, {p.gradient: first[p.gradient] for p in program.manifest.parameters})
    halves = {name: value for name, value in {**first, **second}.items() if not name.endswith("_grad")}
    same(halves, {name: whole[name] for name in halves}, 1e-6, atol)
    assert {name for name in whole if name.endswith("_next")} <= set(halves)
    return first


def build(model: Any = None, **options: Any) -> og.TrainingProgram:
    defaults: dict[str, Any] = {"loss": "cross_entropy", "optimizer": optim.SGD(lr=0.05, momentum=0.9)}
    return og.build_training(exported() if model is None else model, **{**defaults, **options})


def two_outputs() -> onnx.ModelProto:
    """Two linear heads on one input, an output that is a loss already, and an integer one."""
    generator = np.random.default_rng(0)
    shapes = {f"{head}.{kind}": shape for head in "ab" for kind, shape in (("weight", (3, 2)), ("bias", (2,)))}
    stored = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return graph_of(
        """(float[N,3] x) => (float[N,2] a, float[N,2] b, float distance, int64[1,2] best) {
        [head_a] a = Gemm (x, "a.weight", "a.bias")
        [head_b] b = Gemm (x, "b.weight", "b.bias")
        [difference] difference = Sub (a, b)
        [distance] distance = ReduceSumSquare <keepdims = 0> (difference)
        [best] best = ArgMax (a)
    }""",
        **stored,
    )


def untrained(path: Path, generator: np.random.Generator) -> onnx.ModelProto:
    """A network with new random weights, as before any training."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if len(tensor.dims) > 1:
            drawn = generator.standard_normal(tensor.dims) * np.sqrt(2 / np.prod(tensor.dims[1:]))
            tensor.CopyFrom(numpy_helper.from_array(drawn.astype(np.float32), tensor.name))
    return model
