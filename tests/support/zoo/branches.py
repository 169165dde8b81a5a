"""Networks whose blocks concatenate: dense layers, parallel branches, partial stages."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo.layers import Classifier, ConvNormAct, Parallel, Residual, Size, chain, convs

# -- DenseNet (Huang et al. 2017) --------------------------------------------------------------------------------------


class DenseLayer(nn.Module):
    """A bottleneck, normalized before each convolution, on the concatenation of everything before it."""

    def __init__(self, cin: int, growth: int, times: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(cin)
        self.conv1 = nn.Conv2d(cin, times * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(times * growth)
        self.conv2 = nn.Conv2d(times * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(F.relu(self.norm1(torch.cat(features, 1))))
        return self.conv2(F.relu(self.norm2(x)))


class DenseBlock(nn.Module):
    """Keeps the list of features, so a late tensor is concatenated several times."""

    def __init__(self, cin: int, growth: int, layers: int, times: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(cin + i * growth, growth, times) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


def _dense(stem: int, growth: int, counts: tuple[int, ...], times: int, classes: int) -> nn.Module:
    """Dense blocks with average-pooling transitions between them; a bottleneck is `times` as wide as the growth."""
    parts: dict[str, nn.Module] = {"stem": ConvNormAct(3, stem, 7, 2), "pool": nn.MaxPool2d(3, 2, 1)}
    channels = stem
    for i, count in enumerate(counts, 1):
        if i > 1:
            conv = nn.Conv2d(channels, channels // 2, 1, bias=False)
            name = f"transition{'' if len(counts) == 2 else i - 1}"
            parts[name] = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), conv, nn.AvgPool2d(2, 2))
            channels //= 2
        parts[f"block{i}"] = DenseBlock(channels, growth, count, times)
        channels += count * growth
    return chain(**parts, norm=nn.BatchNorm2d(channels), act=nn.ReLU(), head=Classifier(channels, classes))


def densenet_mini() -> nn.Module:
    return _dense(8, 4, (3, 2), 2, 5)


def densenet121() -> nn.Module:
    return _dense(64, 32, (6, 12, 24, 16), 4, 1000)


# -- Inception: GoogLeNet (Szegedy et al. 2015), V3 (Szegedy et al. 2016) ----------------------------------------------

_NORM = partial(nn.BatchNorm2d, eps=1e-3)


def _inception_a(cin: int, one: int, five: tuple[int, int], three: tuple[int, int, int], pool: int) -> nn.Module:
    """1x1, 5x5, double 3x3 and average-pooling branches."""
    return Parallel(
        OrderedDict(
            b1=ConvNormAct(cin, one, norm=_NORM),
            b5=convs(cin, (five[0], 1), (five[1], 5), norm=_NORM),
            b3=convs(cin, (three[0], 1), (three[1], 3), (three[2], 3), norm=_NORM),
            bp=nn.Sequential(
                nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False), ConvNormAct(cin, pool, norm=_NORM)
            ),
        )
    )


class _LastPooled(Parallel):
    """Parallel branches of which the last sees the average-pooled input."""

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.avg_pool2d(x, kernel_size=3, stride=1, padding=1, count_include_pad=False)
        *branches, last = self
        return torch.cat([*(branch(x) for branch in branches), last(pooled)], 1)


def _inception_c(cin: int, one: int, double: tuple[int, ...], fourfold: tuple[int, ...]) -> nn.Module:
    """7x7 convolutions factored into columns and rows; the widths of two branches begin with a 1x1 convolution."""

    def branch(widths: tuple[int, ...], *kernels: Size) -> nn.Module:
        sizes = [1, *(kernels[i % 2] for i in range(len(widths) - 1))]
        return convs(cin, *zip(widths, sizes, strict=True), norm=_NORM)

    return _LastPooled(
        OrderedDict(
            b1=ConvNormAct(cin, one, norm=_NORM),
            b7=branch(double, (1, 7), (7, 1)),
            bd=branch(fourfold, (7, 1), (1, 7)),
            bp=ConvNormAct(cin, one, norm=_NORM),
        )
    )


def inception_mini() -> nn.Module:
    """One block of each kind after a strided stem; the second reduces the grid, unpadded."""
    unpadded = partial(ConvNormAct, kernel=3, stride=2, norm=_NORM, padded=False)

    def reduction() -> nn.Module:
        b3 = unpadded(32, 12)
        deep = [ConvNormAct(32, 8, norm=_NORM), ConvNormAct(8, 8, 3, norm=_NORM), unpadded(8, 8)]
        return Parallel(OrderedDict(b3=b3, bd=nn.Sequential(*deep), pool=nn.MaxPool2d(3, stride=2)))

    return chain(
        stem=unpadded(3, 8),
        a=_inception_a(8, 8, (6, 8), (8, 10, 10), 6),
        b=reduction(),
        c=_inception_c(52, 8, (6, 6, 8), (6, 7, 8)),
        head=Classifier(32),
    )


def inception_v3(classes: int = 1000) -> nn.Module:
    """The stem, a block with 5x5, a reduction, and two blocks with 7x1 and 1x7."""
    stem: list[nn.Module] = [ConvNormAct(3, 32, 3, 2, padded=False), ConvNormAct(32, 32, 3, padded=False)]
    stem += [ConvNormAct(32, 64, 3), nn.MaxPool2d(3, 2), ConvNormAct(64, 80), ConvNormAct(80, 192, 3, padded=False)]
    blocks = [_inception_a(192, 64, (48, 64), (64, 96, 96), 32)]
    blocks.append(Parallel(nn.Sequential(nn.Conv2d(256, 384, 3, 2), nn.ReLU()), nn.MaxPool2d(3, 2)))
    for cin, width in ((640, 128), (768, 160)):
        blocks.append(_inception_c(cin, 192, (width, width, 192), (width, width, width, width, 192)))
    return nn.Sequential(*stem, *blocks, Classifier(768, classes))


def googlenet(classes: int = 1000) -> nn.Module:
    """With batch normalization and 3x3 in place of 5x5, without the auxiliary outputs."""

    def block(cin: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> nn.Module:
        first, second = (convs(cin, (narrow, 1), (wide, 3)) for narrow, wide in (three, five))
        pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), ConvNormAct(cin, pool))
        return Parallel(ConvNormAct(cin, one), first, second, pooled)

    layers: list[nn.Module] = [ConvNormAct(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), ConvNormAct(64, 64)]
    layers += [ConvNormAct(64, 192, 3), nn.MaxPool2d(3, 2, 1)]
    layers += [block(192, 64, (96, 128), (16, 32), 32), block(256, 128, (128, 192), (32, 96), 64)]
    layers += [nn.MaxPool2d(3, 2, 1), block(480, 192, (96, 208), (16, 48), 64)]
    layers += [block(512, 160, (112, 224), (24, 64), 64), block(512, 128, (128, 256), (24, 64), 64)]
    layers += [block(512, 112, (144, 288), (32, 64), 64), block(528, 256, (160, 320), (32, 128), 128)]
    layers += [nn.MaxPool2d(2), block(832, 256, (160, 320), (32, 128), 128)]
    return nn.Sequential(*layers, block(832, 384, (192, 384), (48, 128), 128), Classifier(1024, classes))


# -- SqueezeNet 1.1 (Iandola et al. 2016) ------------------------------------------------------------------------------


def squeezenet(classes: int = 1000) -> nn.Module:
    def fire(cin: int, squeeze: int, expand: int) -> nn.Module:
        small = nn.Sequential(nn.Conv2d(squeeze, expand, 1), nn.ReLU())
        large = nn.Sequential(nn.Conv2d(squeeze, expand, 3, padding=1), nn.ReLU())
        return nn.Sequential(nn.Conv2d(cin, squeeze, 1), nn.ReLU(), Parallel(small, large))

    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)]
    layers += [fire(64, 16, 64), fire(128, 16, 64), nn.MaxPool2d(3, 2, ceil_mode=True)]
    layers += [fire(128, 32, 128), fire(256, 32, 128), nn.MaxPool2d(3, 2, ceil_mode=True)]
    layers += [fire(256, 48, 192), fire(384, 48, 192), fire(384, 64, 256), fire(512, 64, 256)]
    return nn.Sequential(*layers, nn.Conv2d(512, classes, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


# -- CSPDarknet of YOLO v5 ---------------------------------------------------------------------------------------------


class PooledPyramid(nn.Module):
    """A map and its maxima over 5, 9 and 13 points (SPPF)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = ConvNormAct(channels, channels // 2, act=nn.SiLU)
        self.last = ConvNormAct(2 * channels, channels, act=nn.SiLU)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.first(x)]
        for _ in range(3):
            maps.append(self.pool(maps[-1]))
        return self.last(torch.cat(maps, 1))


def csp_darknet(classes: int = 1000) -> nn.Module:
    """The small one, as a classifier."""
    conv = partial(ConvNormAct, act=nn.SiLU)

    def stage(width: int, count: int) -> nn.Module:
        half = width // 2
        residual = [Residual(nn.Sequential(conv(half, half), conv(half, half, 3))) for _ in range(count)]
        return nn.Sequential(
            Parallel(nn.Sequential(conv(width, half), *residual), conv(width, half)), conv(width, width)
        )

    layers: list[nn.Module] = [nn.Conv2d(3, 32, 6, 2, 2, bias=False), nn.BatchNorm2d(32), nn.SiLU()]
    for (a, b), count in zip(pairwise((32, 64, 128, 256, 512)), (1, 2, 3, 1), strict=True):
        layers += [conv(a, b, 3, 2), stage(b, count)]
    return nn.Sequential(*layers, PooledPyramid(512), Classifier(512, classes))
