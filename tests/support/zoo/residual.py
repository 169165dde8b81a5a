"""Residual networks for images, volumes and electrocardiograms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo.layers import CONV, NORM, Classifier, ConvNormAct, Residual, Size, chain, stages


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut (He et al. 2016)."""

    def __init__(
        self, cin: int, cout: int, stride: int = 1, *, dilation: int = 1, rank: int = 2, second: Size = 3
    ) -> None:
        super().__init__()
        pad = dilation if isinstance(second, int) else tuple(k // 2 for k in second)
        self.conv1 = CONV[rank](cin, cout, 3, stride, dilation, dilation, bias=False)
        self.bn1 = NORM[rank](cout)
        self.conv2 = CONV[rank](cout, cout, second, 1, pad, dilation, bias=False)
        self.bn2 = NORM[rank](cout)
        self.relu = nn.ReLU(inplace=True)
        plain = cin == cout and stride == 1
        self.downsample = None if plain else ConvNormAct(cin, cout, 1, stride, act=None, rank=rank)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + shortcut)


class Bottleneck(nn.Module):
    """1x1, (grouped) 3x3, 1x1 and a shortcut; the 3x3 has the stride."""

    def __init__(self, cin: int, width: int, cout: int, stride: int = 1, groups: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.reduce = ConvNormAct(cin, width)
        self.spatial = ConvNormAct(width, width, 3, stride, groups=groups, dilation=dilation)
        self.expand = ConvNormAct(width, cout, act=None)
        self.downsample = None if cin == cout and stride == 1 else ConvNormAct(cin, cout, 1, stride, act=None)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.expand(self.spatial(self.reduce(x))) + shortcut)


def residual_network(blocks: Sequence[nn.Module], channels: int, stem: int = 8, classes: int = 5) -> nn.Module:
    """7x7 stem, overlapping max pooling, the blocks, classifier."""
    return chain(
        conv1=nn.Conv2d(3, stem, 7, 2, 3, bias=False),
        bn1=nn.BatchNorm2d(stem),
        relu=nn.ReLU(),
        maxpool=nn.MaxPool2d(3, 2, 1),
        layers=nn.Sequential(*blocks),
        head=Classifier(channels, classes),
    )


def resnet_basic_mini() -> nn.Module:
    return residual_network([BasicBlock(8, 8), BasicBlock(8, 16, 2)], 16)


def resnet_bottleneck_mini() -> nn.Module:
    return residual_network([Bottleneck(8, 8, 24), Bottleneck(24, 8, 24), Bottleneck(24, 12, 32, 2)], 32)


def resnext_mini() -> nn.Module:
    return residual_network([Bottleneck(8, 16, 24, groups=4), Bottleneck(24, 16, 32, 2, groups=8)], 32)


def _widths(counts: Sequence[int], first: int) -> list[tuple[int, int, int]]:
    """Stages that double the width and, except the first, halve the size."""
    return [(first << stage, count, 2 if stage else 1) for stage, count in enumerate(counts)]


def resnet(*counts: int) -> nn.Module:
    """ResNet-18 and -34, by the number of blocks in each stage."""
    return residual_network(stages(64, _widths(counts, 64), BasicBlock), 512, 64, 1000)


def deep_resnet(*counts: int) -> nn.Module:
    """ResNet-50 and deeper."""
    blocks = stages(64, _widths(counts, 256), lambda cin, cout, s: Bottleneck(cin, cout // 4, cout, s))
    return residual_network(blocks, 2048, 64, 1000)


def resnet101() -> nn.Module:
    """With the random weights of torchvision's definition."""
    module = deep_resnet(3, 4, 23, 3)
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return module


def resnext50() -> nn.Module:
    """32x4d (Xie et al. 2017)."""
    rows = _widths((3, 4, 6, 3), 256)
    blocks = stages(64, rows, lambda cin, cout, s: Bottleneck(cin, cout // 2, cout, s, groups=32))
    return residual_network(blocks, 2048, 64, 1000)


def resnet20() -> nn.Module:
    """For images of 32x32 (He et al. 2016, section 4.2)."""
    blocks = stages(16, _widths((3, 3, 3), 16), BasicBlock)
    return nn.Sequential(ConvNormAct(3, 16, 3), *blocks, Classifier(64, 10))


def wide_resnet(widen: int = 4, classes: int = 10) -> nn.Module:
    """WRN-16-4 (Zagoruyko and Komodakis 2016)."""

    def preactivated(cin: int, cout: int, stride: int) -> nn.Module:
        body = [nn.BatchNorm2d(cin), nn.ReLU(), nn.Conv2d(cin, cout, 3, stride, 1, bias=False)]
        body += [nn.BatchNorm2d(cout), nn.ReLU(), nn.Conv2d(cout, cout, 3, 1, 1, bias=False)]
        return Residual(nn.Sequential(*body), None if cin == cout else nn.Conv2d(cin, cout, 1, stride, bias=False))

    blocks, last = stages(16, _widths((2, 2, 2), 16 * widen), preactivated), 64 * widen
    stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    return nn.Sequential(stem, *blocks, nn.BatchNorm2d(last), nn.ReLU(), Classifier(last, classes))


def regnet_x(classes: int = 1000) -> nn.Module:
    """RegNetX-400MF (Radosavovic et al. 2020)."""
    rows = ((32, 1, 2), (64, 2, 2), (160, 7, 2), (384, 12, 2))
    blocks = stages(32, rows, lambda cin, width, s: Bottleneck(cin, width, width, s, groups=width // 16))
    return nn.Sequential(ConvNormAct(3, 32, 3, 2), *blocks, Classifier(384, classes))


# -- volumes -----------------------------------------------------------------------------------------------------------


class Block3d(BasicBlock):
    """Over volumes; by default the second convolution reaches along one axis only."""

    def __init__(self, cin: int, cout: int, stride: int = 1, second: Size = (3, 1, 1)) -> None:
        super().__init__(cin, cout, stride, rank=3, second=second)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


def _residual_network_3d(
    blocks: Iterable[nn.Module], channels: int, stem: int, classes: int, pool: nn.Module
) -> nn.Module:
    """A 3x7x7 stem that strides in space only, `pool`, the blocks, and a classifier."""
    return chain(
        conv1=nn.Conv3d(3, stem, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False),
        bn1=nn.BatchNorm3d(stem),
        relu=nn.ReLU(),
        pool=pool,
        layers=nn.Sequential(*blocks),
        avgpool=nn.AdaptiveAvgPool3d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(channels, classes),
    )


def resnet3d_mini() -> nn.Module:
    blocks = (Block3d(*sizes) for sizes in ((8, 8), (8, 16, 2)))  # made after the stem, which draws its weights first
    return _residual_network_3d(blocks, 16, 8, 5, nn.MaxPool3d(3, (1, 2, 2), 1))


def resnet18_3d() -> nn.Module:
    """R3D-18 (Tran et al. 2018), which does not pool after the stem."""
    blocks = stages(64, _widths((2, 2, 2, 2), 64), lambda cin, cout, s: Block3d(cin, cout, s, 3))
    return _residual_network_3d(blocks, 512, 64, 400, nn.Identity())


def r2plus1d(classes: int = 400) -> nn.Module:
    """R(2+1)D (Tran et al. 2018): convolutions in space, then in time."""

    def pair(cin: int, cout: int, stride: int = 1) -> list[nn.Module]:
        middle = cin * cout * 27 // (cin * 9 + 3 * cout)
        return [
            ConvNormAct(cin, middle, (1, 3, 3), (1, stride, stride), rank=3),
            ConvNormAct(middle, cout, (3, 1, 1), (stride, 1, 1), rank=3),
        ]

    layers: list[nn.Module] = [ConvNormAct(3, 45, (1, 7, 7), (1, 2, 2), rank=3), ConvNormAct(45, 64, (3, 1, 1), rank=3)]
    cin = 64
    for width, stride in ((64, 1), (128, 2), (256, 2)):
        body = nn.Sequential(*pair(cin, width, stride), *pair(width, width))
        layers.append(Residual(body, ConvNormAct(cin, width, 1, stride, act=None, rank=3)))
        layers.append(Residual(nn.Sequential(*pair(width, width), *pair(width, width))))
        cin = width
    return nn.Sequential(*layers, Classifier(cin, classes, 3))


# -- electrocardiograms ------------------------------------------------------------------------------------------------


def ecg_resnet(classes: int = 6, kernel: int = 17) -> nn.Module:
    """Ribeiro et al. 2020: 12 leads of 4096 samples, kernels of 17; each block divides the length by 4."""

    def block(cin: int, cout: int) -> nn.Module:
        body = [ConvNormAct(cin, cout, kernel, rank=1), ConvNormAct(cout, cout, kernel, 4, act=None, rank=1)]
        shortcut = nn.Sequential(nn.MaxPool1d(4), nn.Conv1d(cin, cout, 1, bias=False))
        return Residual(nn.Sequential(*body), shortcut, nn.ReLU())

    widths = [64, 128, 196, 256, 320]
    blocks = [block(cin, cout) for cin, cout in pairwise(widths)]
    stem = ConvNormAct(12, 64, kernel, rank=1)
    return nn.Sequential(stem, *blocks, nn.Flatten(), nn.Linear(widths[-1] * 16, classes))
