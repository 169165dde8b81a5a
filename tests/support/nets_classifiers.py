"""Miniature convolutional classifiers: residual, dense, inverted, shuffled and parallel blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --------------------------------------------------------------------------------------------------------------------
# Shared pieces


class ConvNormAct(nn.Sequential):
    """Convolution without bias, batch normalisation, activation: a bias here would have a zero training gradient."""

    def __init__(
        self,
        cin: int,
        cout: int,
        kernel: int | tuple[int, int] = 1,
        stride: int = 1,
        *,
        groups: int = 1,
        dilation: int = 1,
        act: Callable[[], nn.Module] | None = nn.ReLU,
        eps: float = 1e-5,
        padded: bool = True,
    ) -> None:
        kh, kw = (kernel, kernel) if isinstance(kernel, int) else kernel
        pad = (dilation * (kh - 1) // 2, dilation * (kw - 1) // 2) if padded else (0, 0)
        conv = nn.Conv2d(cin, cout, (kh, kw), stride, pad, dilation=dilation, groups=groups, bias=False)
        layers: list[nn.Module] = [conv, nn.BatchNorm2d(cout, eps=eps)]
        if act is not None:
            layers.append(act())
        super().__init__(*layers)


class Classifier(nn.Module):
    """Global average pooling and a linear layer."""

    def __init__(self, channels: int, classes: int = 5) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(x), 1))


# --------------------------------------------------------------------------------------------------------------------
# Residual networks


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, cin: int, cout: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None if cin == cout and stride == 1 else ConvNormAct(cin, cout, 1, stride, act=None)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + shortcut)


class Bottleneck(nn.Module):
    """1x1, (grouped) 3x3, 1x1 and a shortcut; the stride sits on the 3x3."""

    def __init__(self, cin: int, width: int, cout: int, stride: int = 1, groups: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.reduce = ConvNormAct(cin, width)
        self.spatial = ConvNormAct(width, width, 3, stride, groups=groups, dilation=dilation)
        self.expand = ConvNormAct(width, cout, act=None)
        self.downsample = None if cin == cout and stride == 1 else ConvNormAct(cin, cout, 1, stride, act=None)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.expand(self.spatial(self.reduce(x))) + shortcut)


class ResNet(nn.Module):
    """7x7 stem, overlapping max pooling, the given stages, classifier."""

    def __init__(self, stages: list[nn.Module], channels: int, stem: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, stem, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(stem)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(*stages)
        self.head = Classifier(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.maxpool(F.relu(self.bn1(self.conv1(x))))))


def resnet_basic() -> nn.Module:
    return ResNet([BasicBlock(8, 8), BasicBlock(8, 16, 2)], 16)


def resnet_bottleneck() -> nn.Module:
    return ResNet([Bottleneck(8, 8, 24), Bottleneck(24, 8, 24), Bottleneck(24, 12, 32, 2)], 32)


def resnext() -> nn.Module:
    return ResNet([Bottleneck(8, 16, 24, groups=4), Bottleneck(24, 16, 32, 2, groups=8)], 32)


# --------------------------------------------------------------------------------------------------------------------
# Dense concatenation


class DenseLayer(nn.Module):
    """Pre-activation bottleneck whose output is appended to everything before it."""

    def __init__(self, cin: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(cin)
        self.conv1 = nn.Conv2d(cin, 2 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * growth)
        self.conv2 = nn.Conv2d(2 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(F.relu(self.norm1(torch.cat(features, 1))))
        return self.conv2(F.relu(self.norm2(x)))


class DenseBlock(nn.Module):
    """Keeps the list of features, so a late tensor is concatenated several times."""

    def __init__(self, cin: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DenseLayer(cin + i * growth, growth) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """Two dense blocks around an average-pooling transition."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNormAct(3, 8, 7, 2)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.block1 = DenseBlock(8, 4, 3)
        self.transition = nn.Sequential(
            nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 10, 1, bias=False), nn.AvgPool2d(2, 2)
        )
        self.block2 = DenseBlock(10, 4, 2)
        self.norm = nn.BatchNorm2d(18)
        self.head = Classifier(18)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block1(self.pool(self.stem(x)))
        return self.head(F.relu(self.norm(self.block2(self.transition(x)))))


# --------------------------------------------------------------------------------------------------------------------
# Inverted bottlenecks


class SqueezeExcite(nn.Module):
    """Channel gate from the globally pooled features."""

    def __init__(self, channels: int, squeeze: int, act: type[nn.Module], gate: type[nn.Module]) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeeze, 1)
        self.fc2 = nn.Conv2d(squeeze, channels, 1)
        self.act = act()
        self.gate = gate()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.fc2(self.act(self.fc1(self.avgpool(x)))))


class InvertedResidual(nn.Module):
    """Expand, depthwise, gate, linear projection."""

    def __init__(
        self,
        cin: int,
        hidden: int,
        cout: int,
        kernel: int,
        stride: int,
        *,
        act: type[nn.Module],
        se_act: type[nn.Module],
        gate: type[nn.Module],
    ) -> None:
        super().__init__()
        self.expand = ConvNormAct(cin, hidden, act=act)
        self.depthwise = ConvNormAct(hidden, hidden, kernel, stride, groups=hidden, act=act)
        self.se = SqueezeExcite(hidden, 8, se_act, gate)
        self.project = ConvNormAct(hidden, cout, act=None)
        self.residual = stride == 1 and cin == cout

    def forward(self, x: Tensor) -> Tensor:
        out = self.project(self.se(self.depthwise(self.expand(x))))
        return x + out if self.residual else out


class InvertedNet(nn.Module):
    """Stem, one striding block, residual blocks, and a head without normalisation.

    The usual last 1x1 convolution with batch normalisation is left out: it would cancel the shift of every linear
    projection in training mode and leave those biases without a gradient to check.
    """

    def __init__(self, blocks: list[nn.Module], stem: int, channels: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.stem = ConvNormAct(3, stem, 3, 2, act=act)
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Linear(channels, 16), act(), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


def mobilenet_v3() -> nn.Module:
    block = partial(InvertedResidual, se_act=nn.ReLU, gate=nn.Hardsigmoid)
    blocks: list[nn.Module] = [
        block(8, 16, 12, 3, 2, act=nn.ReLU),
        block(12, 24, 12, 5, 1, act=nn.Hardswish),
        block(12, 32, 12, 3, 1, act=nn.Hardswish),
    ]
    return InvertedNet(blocks, 8, 12, nn.Hardswish)


def efficientnet() -> nn.Module:
    block = partial(InvertedResidual, act=nn.SiLU, se_act=nn.SiLU, gate=nn.Sigmoid)
    return InvertedNet([block(8, 24, 12, 5, 2), block(12, 32, 12, 5, 1), block(12, 24, 12, 3, 1)], 8, 12, nn.SiLU)


# --------------------------------------------------------------------------------------------------------------------
# Channel shuffle


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, groups, c // groups, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


class ShuffleUnit(nn.Module):
    """Splits the channels (stride 1) or transforms both copies (stride 2), then interleaves."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        half = cout // 2
        self.stride = stride
        self.branch1 = nn.Sequential()
        if stride > 1:
            self.branch1 = nn.Sequential(
                ConvNormAct(cin, cin, 3, stride, groups=cin, act=None),
                ConvNormAct(cin, half),
            )
        self.branch2 = nn.Sequential(
            ConvNormAct(cin if stride > 1 else half, half),
            ConvNormAct(half, half, 3, stride, groups=half, act=None),
            ConvNormAct(half, half),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            kept, changed = x.chunk(2, dim=1)
            out = torch.cat((kept, self.branch2(changed)), 1)
        else:
            out = torch.cat((self.branch1(x), self.branch2(x)), 1)
        return channel_shuffle(out, 2)


class ShuffleNetV2(nn.Module):
    """Stem, one striding and two splitting units, 1x1 head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNormAct(3, 8, 3, 2)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.stage = nn.Sequential(ShuffleUnit(8, 24, 2), ShuffleUnit(24, 24, 1), ShuffleUnit(24, 24, 1))
        self.conv5 = ConvNormAct(24, 32)
        self.fc = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv5(self.stage(self.pool(self.stem(x))))
        return self.fc(x.mean([2, 3]))


# --------------------------------------------------------------------------------------------------------------------
# Parallel branches


_InceptionConv = partial(ConvNormAct, eps=1e-3)


class InceptionA(nn.Module):
    """1x1, 5x5, double 3x3 and average-pooling branches."""

    def __init__(self, cin: int, pool: int) -> None:
        super().__init__()
        self.b1 = _InceptionConv(cin, 8)
        self.b5 = nn.Sequential(_InceptionConv(cin, 6), _InceptionConv(6, 8, 5))
        self.b3 = nn.Sequential(_InceptionConv(cin, 8), _InceptionConv(8, 10, 3), _InceptionConv(10, 10, 3))
        self.bp = nn.Sequential(
            nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False), _InceptionConv(cin, pool)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.b1(x), self.b5(x), self.b3(x), self.bp(x)], 1)


class InceptionB(nn.Module):
    """Grid reduction: unpadded strided convolutions next to a max pooling of the same grid."""

    def __init__(self, cin: int) -> None:
        super().__init__()
        self.b3 = _InceptionConv(cin, 12, 3, 2, padded=False)
        self.bd = nn.Sequential(
            _InceptionConv(cin, 8), _InceptionConv(8, 8, 3), _InceptionConv(8, 8, 3, 2, padded=False)
        )
        self.pool = nn.MaxPool2d(3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.b3(x), self.bd(x), self.pool(x)], 1)


class InceptionC(nn.Module):
    """Factorised 7x7 convolutions."""

    def __init__(self, cin: int) -> None:
        super().__init__()
        self.b1 = _InceptionConv(cin, 8)
        self.b7 = nn.Sequential(_InceptionConv(cin, 6), _InceptionConv(6, 6, (1, 7)), _InceptionConv(6, 8, (7, 1)))
        self.bd = nn.Sequential(_InceptionConv(cin, 6), _InceptionConv(6, 7, (7, 1)), _InceptionConv(7, 8, (1, 7)))
        self.bp = _InceptionConv(cin, 8)

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.avg_pool2d(x, kernel_size=3, stride=1, padding=1, count_include_pad=False)
        return torch.cat([self.b1(x), self.b7(x), self.bd(x), self.bp(pooled)], 1)


class Inception(nn.Module):
    """One block of each kind after a strided stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _InceptionConv(3, 8, 3, 2, padded=False)
        self.a = InceptionA(8, 6)
        self.b = InceptionB(32)
        self.c = InceptionC(52)
        self.head = Classifier(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.c(self.b(self.a(self.stem(x)))))
