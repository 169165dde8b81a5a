"""Miniature vision, audio and attention networks used as export fixtures.

Each network keeps the operators and the topology that make its family distinctive (grouping, dense concatenation,
squeeze-excitation, channel shuffle, dilation, transposed convolution and so on) at a size where the float64 reference
gradient costs milliseconds.  Parameters are randomised so that no two tensors are equal and nothing sits at a neutral
value such as scale one, which would hide a missing term.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor, nn


@dataclass(frozen=True)
class Family:
    """One network and the input it takes.

    ``null_in_training`` lists the parameters whose gradient is zero by algebra when batch statistics are used: a shift
    that only reaches another batch normalisation through a pointwise convolution is subtracted again.
    """

    name: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    null_in_training: tuple[str, ...] = ()

    def example(self, seed: int = 0) -> Tensor:
        """A standard normal input; does not disturb the global generator."""
        return torch.randn(self.input_shape, generator=torch.Generator().manual_seed(seed))


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


# --------------------------------------------------------------------------------------------------------------------
# ConvNeXt


class LayerNorm2d(nn.LayerNorm):
    """Normalises the channels of an NCHW tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, then a channels-last MLP scaled per channel."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 2 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(2 * dim, dim)
        self.layer_scale = nn.Parameter(torch.ones(dim, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        out = self.pwconv2(self.act(self.pwconv1(out)))
        return x + self.layer_scale * out.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Patchify stem, a downsampling layer, three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 4, 4), LayerNorm2d(12, eps=1e-6))
        self.stage1 = nn.Sequential(ConvNeXtBlock(12), ConvNeXtBlock(12))
        self.down = nn.Sequential(LayerNorm2d(12, eps=1e-6), nn.Conv2d(12, 16, 2, 2))
        self.stage2 = ConvNeXtBlock(16)
        self.norm = nn.LayerNorm(16, eps=1e-6)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage2(self.down(self.stage1(self.stem(x))))
        return self.fc(self.norm(x.mean([-2, -1])))


# --------------------------------------------------------------------------------------------------------------------
# Dense prediction


def _double_conv(cin: int, cout: int) -> nn.Module:
    return nn.Sequential(ConvNormAct(cin, cout, 3), ConvNormAct(cout, cout, 3))


class UNet(nn.Module):
    """Encoder and decoder joined by concatenated skips.

    Made for an even height and an odd width, so the last transposed convolution needs padding and output padding
    that differ between the two axes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enc1 = _double_conv(3, 8)
        self.enc2 = _double_conv(8, 12)
        self.mid = _double_conv(12, 16)
        self.pool = nn.MaxPool2d(2)
        self.up2 = nn.ConvTranspose2d(16, 12, 2, stride=2)
        self.dec2 = _double_conv(24, 12)
        self.up1 = nn.ConvTranspose2d(12, 8, 3, stride=2, padding=(1, 0), output_padding=(1, 0), bias=False)
        self.dec1 = ConvNormAct(16, 8, 3)
        self.out = nn.ConvTranspose2d(8, 4, 3, padding=1, groups=2)
        self.up_norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        e1 = self.enc1(x)
        e2 = self.enc2(self.pool(e1))
        mid = F.leaky_relu(self.up2(self.mid(self.pool(e2))), 0.1)
        d2 = self.dec2(torch.cat([mid, e2], 1))
        d1 = F.relu(self.up_norm(self.up1(d2)))
        return self.out(self.dec1(torch.cat([d1, e1], 1)))


class ASPP(nn.Module):
    """Dilated branches and an image-level branch that is resized back to the grid.

    The image-level branch has no batch normalisation: over a 1x1 grid and two samples it saturates at plus or minus
    one and its gradient is only rounding.
    """

    def __init__(self, cin: int, cout: int, rates: tuple[int, ...]) -> None:
        super().__init__()
        self.convs = nn.ModuleList([ConvNormAct(cin, cout)])
        self.convs.extend(ConvNormAct(cin, cout, 3, dilation=rate) for rate in rates)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.pool_conv = nn.Conv2d(cin, cout, 1)
        self.project = ConvNormAct(cout * (2 + len(rates)), cout)

    def forward(self, x: Tensor) -> Tensor:
        image = F.relu(self.pool_conv(self.pool(x)))
        image = F.interpolate(image, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return self.project(torch.cat([conv(x) for conv in self.convs] + [image], 1))


class DeepLab(nn.Module):
    """Dilated residual trunk, ASPP, and bilinear upsampling to the input size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNormAct(3, 8, 3, 2)
        self.trunk = nn.Sequential(Bottleneck(8, 8, 16, 2), Bottleneck(16, 8, 16, dilation=2))
        self.aspp = ASPP(16, 8, (2, 3))
        self.conv = ConvNormAct(8, 8, 3)
        self.classifier = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.classifier(self.conv(self.aspp(self.trunk(self.stem(x)))))
        return F.interpolate(out, size=x.shape[-2:], mode="bilinear", align_corners=False)


# --------------------------------------------------------------------------------------------------------------------
# Other spatial ranks


class Block3d(nn.Module):
    """Residual block over volumes."""

    def __init__(self, cin: int, cout: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm3d(cout)
        self.conv2 = nn.Conv3d(cout, cout, (3, 1, 1), padding=(1, 0, 0), bias=False)
        self.bn2 = nn.BatchNorm3d(cout)
        self.downsample = nn.Sequential()
        if stride != 1 or cin != cout:
            self.downsample = nn.Sequential(nn.Conv3d(cin, cout, 1, stride, bias=False), nn.BatchNorm3d(cout))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.downsample(x))


class ResNet3d(nn.Module):
    """Stem that strides in space only, max pooling, two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(3, 8, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False)
        self.bn1 = nn.BatchNorm3d(8)
        self.pool = nn.MaxPool3d(3, (1, 2, 2), 1)
        self.layers = nn.Sequential(Block3d(8, 8), Block3d(8, 16, 2))
        self.avgpool = nn.AdaptiveAvgPool3d(1)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.pool(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(self.avgpool(x).flatten(1))


class GatedBlock1d(nn.Module):
    """Dilated convolution with a tanh and a sigmoid half, and a residual projection."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, 2 * channels, 3, padding=dilation, dilation=dilation)
        self.project = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.conv(x).chunk(2, dim=1)
        return x + self.project(torch.tanh(value) * torch.sigmoid(gate))


class AudioNet(nn.Module):
    """Strided wave-form stem, dilated gated blocks, global average and maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, 8, 16, stride=4, padding=6, bias=False)
        self.bn1 = nn.BatchNorm1d(8)
        self.pool = nn.MaxPool1d(4, stride=2, padding=1)
        self.blocks = nn.Sequential(*(GatedBlock1d(8, dilation) for dilation in (1, 2, 4)))
        self.conv2 = nn.Conv1d(8, 16, 5, stride=2, padding=2, groups=2, bias=False)
        self.bn2 = nn.BatchNorm1d(16)
        self.act = nn.ELU()
        self.avg = nn.AdaptiveAvgPool1d(1)
        self.max = nn.AdaptiveMaxPool1d(1)
        self.fc = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(x))))
        x = self.act(self.bn2(self.conv2(self.blocks(x))))
        return self.fc(torch.flatten(torch.cat([self.avg(x), self.max(x)], 1), 1))


# --------------------------------------------------------------------------------------------------------------------
# Attention


class SelfAttention(nn.Module):
    """Attention spelled out with matrix products and a softmax."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        n, length, dim = x.shape
        qkv = self.qkv(x).reshape(n, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weights = torch.softmax((q * self.scale) @ k.transpose(-2, -1), dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(n, length, dim))


class FusedAttention(nn.Module):
    """The library's own attention module, which reaches the exporters as one fused operator."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


class TransformerBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, dim: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ConvTransformer(nn.Module):
    """Convolutional stem, class token, positions, transformer blocks, head on the class token."""

    def __init__(self, attention: Callable[[int, int], nn.Module], depth: int = 2) -> None:
        super().__init__()
        dim = 16
        self.stem = nn.Sequential(ConvNormAct(3, 8, 3, 2), nn.Conv2d(8, dim, 3, 2, 1))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, 17, dim))
        self.blocks = nn.Sequential(*(TransformerBlock(dim, attention(dim, 4)) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), tokens], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(tokens))[:, 0])


# --------------------------------------------------------------------------------------------------------------------
# Assembly


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _randomise(module: nn.Module, example: Tensor) -> None:
    """Moves every parameter off its neutral value and gives batch normalisation plausible but inexact statistics.

    The statistics come from one batch, then get perturbed: activations keep a moderate size in evaluation mode, yet
    mixing up batch and running statistics changes the result visibly.
    """
    norms = [m for m in module.modules() if isinstance(m, _BATCH_NORMS)]
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.numel() == max(parameter.shape, default=1):
                centre = 1.0 if bool((parameter == 1).all()) else 0.0
                parameter.copy_(centre + torch.empty_like(parameter).uniform_(-0.4, 0.4))
            elif bool((parameter == parameter.flatten()[0]).all()):
                parameter.normal_(0.0, 0.4)
        for norm in norms:
            norm.momentum = 1.0
        module.train()(example)
        for norm in norms:
            norm.momentum = 0.1
            mean, var = norm.running_mean, norm.running_var
            assert mean is not None and var is not None
            mean.add_(var.sqrt() * torch.empty_like(mean).uniform_(-0.5, 0.5))
            var.mul_(torch.empty_like(var).uniform_(0.6, 1.6))
    module.eval()


def _family(
    name: str, make: Callable[[], nn.Module], input_shape: tuple[int, ...], null_in_training: tuple[str, ...] = ()
) -> Family:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(sum(map(ord, name)))
            module = make()
            _randomise(module, torch.randn(8, *input_shape[1:]))
        return module

    return Family(name, build, input_shape, null_in_training)


FAMILIES: tuple[Family, ...] = (
    _family("resnet_basic", resnet_basic, (2, 3, 33, 33)),
    _family("resnet_bottleneck", resnet_bottleneck, (2, 3, 32, 32)),
    _family("resnext", resnext, (2, 3, 33, 33)),
    _family("densenet", DenseNet, (2, 3, 33, 33)),
    _family("mobilenet_v3", mobilenet_v3, (2, 3, 24, 24)),
    _family("efficientnet", efficientnet, (2, 3, 24, 24)),
    _family(
        "shufflenet_v2",
        ShuffleNetV2,
        (2, 3, 32, 32),
        (
            "stage.0.branch1.0.1.bias",
            "stage.0.branch2.1.1.bias",
            "stage.1.branch2.1.1.bias",
            "stage.2.branch2.1.1.bias",
        ),
    ),
    _family("inception", Inception, (2, 3, 25, 25)),
    _family("convnext", ConvNeXt, (2, 3, 32, 32)),
    _family("unet", UNet, (2, 3, 24, 17)),
    _family("deeplab", DeepLab, (2, 3, 33, 25)),
    _family("resnet3d", ResNet3d, (2, 3, 8, 16, 16)),
    _family("audio1d", AudioNet, (2, 1, 400)),
    _family("transformer", partial(ConvTransformer, SelfAttention), (2, 3, 16, 16)),
    _family("transformer_mha", partial(ConvTransformer, FusedAttention), (2, 3, 16, 16)),
)


# --------------------------------------------------------------------------------------------------------------------
# Export


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporters warn about their own deprecations, print progress, and log; none of it is about the model."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def export(
    module: nn.Module,
    example: Tensor,
    *,
    dynamo: bool,
    training: bool,
    dynamic_batch: bool = False,
    dynamic_spatial: bool = False,
    opset: int = 18,
    fold: bool = True,
) -> onnx.ModelProto:
    """Exports a copy of the module in memory, with input ``x`` and output ``y``.

    ``fold=False`` asks the exporter to leave evaluation-mode batch normalisation and parameter names alone; training
    exports of the TorchScript exporter are never folded.  See ``keeps_mode`` for training exports of the other one.
    """
    module = copy.deepcopy(module).train(training)
    axes: dict[int, str] = {0: "N"} if dynamic_batch else {}
    if dynamic_spatial:
        letters = {3: "L", 4: "HW", 5: "DHW"}[example.dim()]
        axes.update(zip(range(2, example.dim()), letters, strict=True))
    if dynamo:
        with _quiet():
            program = torch.onnx.export(
                module,
                (example,),
                input_names=["x"],
                output_names=["y"],
                opset_version=opset,
                dynamic_shapes=(axes,) if axes else None,
                dynamo=True,
                optimize=fold,
                verbose=False,
            )
        assert program is not None
        return onnx.load_from_string(program.model_proto.SerializeToString())
    mode = torch.onnx.TrainingMode.TRAINING if training else torch.onnx.TrainingMode.EVAL
    if not training and not fold:
        mode = torch.onnx.TrainingMode.PRESERVE
    dynamic_axes: dict[str, dict[int, str]] = {}
    if axes:
        dynamic_axes["x"] = axes
        with torch.no_grad():
            rank = copy.deepcopy(module)(example).dim()
        dynamic_axes["y"] = {axis: name if axis == 0 else f"out_{name}" for axis, name in axes.items() if axis < rank}
    buffer = io.BytesIO()
    with _quiet():
        torch.onnx.export(
            module,
            (example,),
            buffer,  # type: ignore[arg-type]
            input_names=["x"],
            output_names=["y"],
            opset_version=opset,
            dynamic_axes=dynamic_axes or None,
            dynamo=False,
            training=mode,
            do_constant_folding=fold and not training,
        )
    return onnx.load_from_string(buffer.getvalue())


def keeps_mode(module: nn.Module, *, dynamo: bool, training: bool) -> bool:
    """Whether the exported graph computes what the module computes in that mode.

    The dynamo exporter's operator library writes batch normalisation in inference form even for a training module.
    """
    if not (dynamo and training):
        return True
    return not any(isinstance(m, _BATCH_NORMS) for m in module.modules())


# --------------------------------------------------------------------------------------------------------------------
# References


def _gradients(module: nn.Module, x: Any, seed: Any, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """Autograd on a copy, so neither the running statistics nor the parameters of the module change."""
    module = copy.deepcopy(module).to(dtype)
    data = torch.as_tensor(x).detach().to(dtype).clone().requires_grad_(True)
    parameters = dict(module.named_parameters())
    grads = torch.autograd.grad(
        module(data), [data, *parameters.values()], torch.as_tensor(seed).to(dtype), allow_unused=True
    )
    result: dict[str, np.ndarray] = {}
    for name, value, grad in zip(["x", *parameters], [data, *parameters.values()], grads, strict=True):
        result[name] = (torch.zeros_like(value) if grad is None else grad).detach().numpy()
    return result


def reference_gradients(module: nn.Module, x: Any, seed: Any) -> dict[str, np.ndarray]:
    """Float64 gradients of ``sum(seed * module(x))`` in the module's current mode, by torch name and ``"x"``."""
    return _gradients(module, x, seed, torch.float64)


def float32_gradients(module: nn.Module, x: Any, seed: Any) -> dict[str, np.ndarray]:
    """The same in float32; its distance to the reference says what precision the problem allows."""
    return _gradients(module, x, seed, torch.float32)


def match_parameters(proto: onnx.ModelProto, module: nn.Module) -> dict[str, tuple[str, str]]:
    """Maps initializers to ``(torch name, transform)``, where transform is ``"none"`` or ``"transpose"``.

    Values decide even when the name was kept, because an exporter that folds batch normalisation may reuse the name
    for changed weights.  Without a matching name an initializer is only mapped when a single parameter fits.
    """
    parameters = {name: value.detach().numpy() for name, value in module.named_parameters()}
    result: dict[str, tuple[str, str]] = {}
    for initializer in proto.graph.initializer:
        value = numpy_helper.to_array(initializer)
        if initializer.name in parameters and np.array_equal(parameters[initializer.name], value):
            result[initializer.name] = (initializer.name, "none")
            continue
        same = [name for name, parameter in parameters.items() if np.array_equal(parameter, value)]
        if len(same) == 1:
            result[initializer.name] = (same[0], "none")
        elif not same and value.ndim == 2:
            turned = [name for name, parameter in parameters.items() if np.array_equal(parameter.T, value)]
            if len(turned) == 1:
                result[initializer.name] = (turned[0], "transpose")
    return result
