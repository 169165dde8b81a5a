"""ResNet-18 and a MobileNetV2 at an eighth of their width train as in PyTorch.

Rounding decides the sign of a ReLU operand near zero, and BatchNorm over small batches amplifies that from step to step: at
larger learning rates PyTorch in float32 and float64 differ by up to 10% after 20 steps. Sizes and rates are chosen such
that the results are determined.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onnx_convgrad import optim
from tests.support.families import export
from tests.support.training_nets import ProgramRun, TorchRun, build
from tests.support.zoo.layers import Classifier, ConvNormAct
from tests.support.zoo.residual import BasicBlock, residual_network

STEPS, CLASSES = 20, 5


def resnet18() -> nn.Module:
    """Torchvision's layout: two basic blocks in each of four stages."""
    widths = [8, 8, 16, 32, 64]
    stages = list(itertools.pairwise(widths))
    blocks = [[BasicBlock(a, b, 1 if i == 0 else 2), BasicBlock(b, b)] for i, (a, b) in enumerate(stages)]
    return residual_network([block for stage in blocks for block in stage], widths[-1])


class LinearBottleneck(nn.Module):
    """MobileNetV2's block: 1x1 up, 3x3 per channel, 1x1 down without an activation, and a shortcut where it fits."""

    def __init__(self, cin: int, cout: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = expansion * cin
        up = [ConvNormAct(cin, hidden, act=nn.ReLU6)] if expansion > 1 else []
        depthwise = ConvNormAct(hidden, hidden, 3, stride, groups=hidden, act=nn.ReLU6)
        self.layers = nn.Sequential(*up, depthwise, ConvNormAct(hidden, cout, act=None))
        self.shortcut = stride == 1 and cin == cout

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.shortcut else self.layers(x)


def mobilenet_v2() -> nn.Module:
    """The first three rows of the paper's table 2 (expansion, channels, repetitions, stride), its stem and its head."""
    width, layers = 4, [ConvNormAct(3, 4, 3, 2, act=nn.ReLU6)]
    for expansion, channels, repetitions, stride in ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 2, 2)):
        for i in range(repetitions):
            layers.append(LinearBottleneck(width, channels // 8, stride if i == 0 else 1, expansion))
            width = channels // 8
    return nn.Sequential(*layers, ConvNormAct(width, 160, act=nn.ReLU6), Classifier(160, CLASSES))


def batches(count: int, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Noisy pictures of five smooth patterns."""
    generator = torch.Generator().manual_seed(seed)
    patterns = F.interpolate(torch.randn(CLASSES, 3, 4, 4, generator=generator), size=(size, size), mode="bilinear")
    for _ in range(STEPS):
        target = torch.randint(0, CLASSES, (count,), generator=generator)
        yield 0.1 * torch.randn(count, 3, size, size, generator=generator) + patterns[target], target


def together(values: list[Tensor | np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(v, np.float64).reshape(-1) for v in values])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize(("make", "count", "size", "seed"), [(resnet18, 16, 64, 1), (mobilenet_v2, 8, 32, 0)])
def test_twenty_steps_as_in_pytorch(
    make: Callable[[], nn.Module], count: int, size: int, seed: int, name: str, dtype: torch.dtype
) -> None:
    """Each loss within 1e-3, and all parameters and running statistics within 1e-3 (L2) of PyTorch's after the last step."""
    torch.manual_seed(seed)
    module = make()
    if name == "SGD":
        rate = 1e-4 if make is resnet18 else 3e-4  # at 1e-3 a rounding error makes runs of PyTorch diverge
        ours, theirs = optim.SGD(lr=rate, momentum=0.9), lambda p: torch.optim.SGD(p, rate, 0.9)
    else:
        rate = 3e-5 if make is resnet18 else 1e-4  # at 1e-4 float64 runs that start 1e-6 apart differ by 3e-3
        ours, theirs = optim.AdamW(lr=rate), lambda p: torch.optim.AdamW(p, rate)
    model = export(module, torch.zeros(count, 3, size, size), dynamo=False, training=False, fold=False)
    onnx_run, torch_run = ProgramRun(build(model, optimizer=ours)), TorchRun(module, theirs, dtype)
    for x, target in batches(count, size, seed):
        want = torch_run(x, target)
        assert float(onnx_run({"x": x.numpy(), "target": target.numpy()})["loss"]) == pytest.approx(want, rel=1e-3)
    trained = dict(torch_run.module.named_parameters())
    for values in (trained, {k: v for k, v in torch_run.module.named_buffers() if "running" in k}):
        want = together([v.detach() for v in values.values()])
        got = together([onnx_run.state[name] for name in values])
        assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)
    start = together([v.detach() for _, v in module.named_parameters()])
    moved = np.linalg.norm(together([v.detach() for v in trained.values()]) - start)
    assert moved > 1e-3 * np.linalg.norm(start)
