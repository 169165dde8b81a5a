"""Building blocks that several architectures share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

CONV: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORM: dict[int, type[nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
MEAN_POOL: dict[int, type[nn.Module]] = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}

Size = int | tuple[int, ...]
Activation = Callable[[], nn.Module]
Norm = Callable[[int], nn.Module]


def chain(**layers: nn.Module) -> nn.Sequential:
    """A sequence of named layers."""
    return nn.Sequential(OrderedDict(layers))


class ConvNormAct(nn.Sequential):
    """Convolution, normalization, activation (if any); padded by half of the kernel.

    The convolution has no bias: before batch normalization its gradient would be zero in training.
    """

    def __init__(
        self,
        cin: int,
        cout: int,
        kernel: Size = 1,
        stride: Size = 1,
        *,
        groups: int = 1,
        dilation: int = 1,
        act: Activation | None = nn.ReLU,
        norm: Norm | None = None,
        padded: bool = True,
        rank: int = 2,
    ) -> None:
        sizes = (kernel,) * rank if isinstance(kernel, int) else kernel
        pad = tuple(dilation * (k - 1) // 2 if padded else 0 for k in sizes)
        conv = CONV[rank](cin, cout, sizes, stride, pad, dilation=dilation, groups=groups, bias=False)
        super().__init__(conv, (norm or NORM[rank])(cout), *([act()] if act else []))


def convs(cin: int, *steps: tuple[int, Size], norm: Norm | None = None) -> nn.Sequential:
    """Convolutions one after the other, each given by its width and kernel."""
    layers = []
    for width, kernel in steps:
        layers.append(ConvNormAct(cin, width, kernel, norm=norm))
        cin = width
    return nn.Sequential(*layers)


def stages(cin: int, rows: Iterable[tuple[Any, ...]], block: Callable[..., nn.Module]) -> list[nn.Module]:
    """Blocks of several stages: each row has width, number of blocks, stride of the first, and more for `block`.

    `block` makes a module of input channels, width, stride, and the rest of the row.
    """
    blocks = []
    for width, count, stride, *rest in rows:
        for index in range(count):
            blocks.append(block(cin, width, 1 if index else stride, *rest))
            cin = width
    return blocks


class Classifier(nn.Module):
    """Global average pooling and a linear layer."""

    def __init__(self, channels: int, classes: int = 5, rank: int = 2) -> None:
        super().__init__()
        self.pool = MEAN_POOL[rank](1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(x), 1))


class Residual(nn.Module):
    """`act(body(x) + shortcut(x))`."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None, act: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.shortcut, self.act = body, shortcut or nn.Identity(), act or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.body(x) + self.shortcut(x))


class Parallel(nn.Sequential):
    """Several branches on the same input, concatenated by channel."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


class SqueezeExcite(nn.Module):
    """Channel gate from the globally pooled features."""

    def __init__(self, channels: int, squeeze: int, act: Activation, gate: Activation) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeeze, 1)
        self.fc2 = nn.Conv2d(squeeze, channels, 1)
        self.act = act()
        self.gate = gate()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.fc2(self.act(self.fc1(self.avgpool(x)))))


class Apply(nn.Module):
    """A function without parameters as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def mean(*axes: int) -> nn.Module:
    return Apply(lambda x: x.mean(axes))


def permute(*order: int) -> nn.Module:
    return Apply(lambda x: x.permute(order))


class Causal(nn.Module):
    """A dilated convolution over the past only: padded at both ends, then cut."""

    def __init__(self, cin: int, cout: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.extra = (kernel - 1) * dilation
        self.conv = nn.Conv1d(cin, cout, kernel, 1, self.extra, dilation)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)[..., : -self.extra]
