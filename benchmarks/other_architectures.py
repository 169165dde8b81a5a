"""More networks in plain torch.nn, after their papers: what the lowerings were not made for.

As in `benchmarks.architectures`, nothing random happens in a step.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.architectures import (
    Activation,
    Permute,
    Residual,
    basic_block,
    conv_norm,
    head,
    residual_stages,
)


class Parallel(nn.Module):
    """The channels of several branches one after the other."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


# -- plain stacks: AlexNet (Krizhevsky 2014), VGG (Simonyan and Zisserman 2015), DQN (Mnih et al. 2015) -----------------


def alexnet(classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    layers += [nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)]
    for cin, cout in pairwise((192, 384, 256, 256)):
        layers += [nn.Conv2d(cin, cout, 3, padding=1), nn.ReLU()]
    layers += [nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(256 * 36, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(4096, classes))


def vgg11(classes: int = 1000) -> nn.Module:
    """With batch normalization, and one linear layer after a mean instead of three."""
    layers: list[nn.Module] = []
    cin = 3
    for width, count in ((64, 1), (128, 1), (256, 2), (512, 2), (512, 2)):
        for _ in range(count):
            layers.append(conv_norm(cin, width, 3))
            cin = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, head(512, classes))


def dqn(actions: int = 18) -> nn.Module:
    layers = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, actions))


# -- branches: SqueezeNet 1.1 (Iandola et al. 2016), GoogLeNet (Szegedy et al. 2015) ------------------------------------


def fire(cin: int, squeeze: int, expand: int) -> nn.Module:
    small = nn.Sequential(nn.Conv2d(squeeze, expand, 1), nn.ReLU())
    large = nn.Sequential(nn.Conv2d(squeeze, expand, 3, padding=1), nn.ReLU())
    return nn.Sequential(nn.Conv2d(cin, squeeze, 1), nn.ReLU(), Parallel(small, large))


def squeezenet(classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True)]
    layers += [fire(64, 16, 64), fire(128, 16, 64), nn.MaxPool2d(3, 2, ceil_mode=True)]
    layers += [fire(128, 32, 128), fire(256, 32, 128), nn.MaxPool2d(3, 2, ceil_mode=True)]
    layers += [fire(256, 48, 192), fire(384, 48, 192), fire(384, 64, 256), fire(512, 64, 256)]
    return nn.Sequential(*layers, nn.Conv2d(512, classes, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def inception(cin: int, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int) -> nn.Module:
    return Parallel(
        conv_norm(cin, one),
        nn.Sequential(conv_norm(cin, three[0]), conv_norm(*three, 3)),
        nn.Sequential(conv_norm(cin, five[0]), conv_norm(*five, 3)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), conv_norm(cin, pooled)),
    )


def googlenet(classes: int = 1000) -> nn.Module:
    """With batch normalization and 3x3 in place of 5x5, without the auxiliary outputs."""
    layers: list[nn.Module] = [conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), conv_norm(64, 64), conv_norm(64, 192, 3)]
    layers += [nn.MaxPool2d(3, 2, 1)]
    layers += [inception(192, 64, (96, 128), (16, 32), 32), inception(256, 128, (128, 192), (32, 96), 64)]
    layers += [nn.MaxPool2d(3, 2, 1), inception(480, 192, (96, 208), (16, 48), 64)]
    layers += [inception(512, 160, (112, 224), (24, 64), 64), inception(512, 128, (128, 256), (24, 64), 64)]
    layers += [inception(512, 112, (144, 288), (32, 64), 64), inception(528, 256, (160, 320), (32, 128), 128)]
    layers += [nn.MaxPool2d(2), inception(832, 256, (160, 320), (32, 128), 128)]
    return nn.Sequential(*layers, inception(832, 384, (192, 384), (48, 128), 128), head(1024, classes))


# -- groups: ResNeXt (Xie et al. 2017), ShuffleNet V2 (Ma et al. 2018), ConvMixer (Trockman and Kolter 2023) ------------


def grouped_bottleneck(cin: int, width: int, stride: int, _dims: int = 2) -> nn.Module:
    inner, cout = 2 * width, 4 * width
    body = [conv_norm(cin, inner), conv_norm(inner, inner, 3, stride, groups=32), conv_norm(inner, cout, act=None)]
    plain = cin == cout and stride == 1
    return Residual(nn.Sequential(*body), None if plain else conv_norm(cin, cout, 1, stride, act=None), nn.ReLU())


def resnext50() -> nn.Module:
    stem = [conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, residual_stages(grouped_bottleneck, [3, 4, 6, 3], 4, 2), head(2048, 1000))


class ShuffleUnit(nn.Module):
    """Half of the channels pass (or, with a stride, both halves are made); then the halves take turns."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        half, taken = cout // 2, cin if stride > 1 else cout // 2
        middle = conv_norm(half, half, 3, stride, groups=half, act=None)
        self.body = nn.Sequential(conv_norm(taken, half), middle, conv_norm(half, half))
        down = nn.Sequential(conv_norm(cin, cin, 3, stride, groups=cin, act=None), conv_norm(cin, half))
        self.down = down if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.down(x), x) if self.down else x.chunk(2, 1)
        both = torch.stack([first, self.body(second)], 2)
        return both.flatten(1, 2)


def shufflenet(classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [conv_norm(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    cin = 24
    for width, count in ((116, 4), (232, 8), (464, 4)):
        for index in range(count):
            layers.append(ShuffleUnit(cin, width, 1 if index else 2))
            cin = width
    return nn.Sequential(*layers, conv_norm(464, 1024), head(1024, classes))


def convmixer(classes: int = 1000, width: int = 256, depth: int = 8, kernel: int = 9, patch: int = 7) -> nn.Module:
    def mixed(conv: nn.Module) -> nn.Module:
        return nn.Sequential(conv, nn.GELU(), nn.BatchNorm2d(width))

    layers = [mixed(nn.Conv2d(3, width, patch, patch))]
    for _ in range(depth):
        layers.append(Residual(mixed(nn.Conv2d(width, width, kernel, padding="same", groups=width))))
        layers.append(mixed(nn.Conv2d(width, width, 1)))
    return nn.Sequential(*layers, head(width, classes))


# -- small images: a wide ResNet (Zagoruyko and Komodakis 2016) ---------------------------------------------------------


def preactivated(cin: int, cout: int, stride: int) -> nn.Module:
    body = [nn.BatchNorm2d(cin), nn.ReLU(), nn.Conv2d(cin, cout, 3, stride, 1, bias=False)]
    body += [nn.BatchNorm2d(cout), nn.ReLU(), nn.Conv2d(cout, cout, 3, 1, 1, bias=False)]
    return Residual(nn.Sequential(*body), None if cin == cout else nn.Conv2d(cin, cout, 1, stride, bias=False))


def wide_resnet(widen: int = 4, classes: int = 10) -> nn.Module:
    """WRN-16-4."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    cin = 16
    for stage in range(3):
        for index in range(2):
            layers.append(preactivated(cin, 16 * widen << stage, 2 if stage and not index else 1))
            cin = 16 * widen << stage
    return nn.Sequential(*layers, nn.BatchNorm2d(cin), nn.ReLU(), head(cin, classes))


# -- one value per pixel: DeepLab V3 (Chen et al. 2017), EDSR (Lim et al. 2017), nnU-Net (Isensee et al. 2021), diffusion


def dilated_block(cin: int, width: int, dilation: int) -> nn.Module:
    def conv(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(a, b, 3, 1, dilation, dilation, bias=False), nn.BatchNorm2d(b))

    body = nn.Sequential(conv(cin, width), nn.ReLU(), conv(width, width))
    return Residual(body, None if cin == width else conv_norm(cin, width, act=None), nn.ReLU())


def deeplab(classes: int = 21) -> nn.Module:
    """On a ResNet-18 whose last two stages dilate instead of striding."""
    layers: list[nn.Module] = [conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    layers += [basic_block(64, 64, 1), basic_block(64, 64, 1), basic_block(64, 128, 2), basic_block(128, 128, 1)]
    for cin, width, dilation in ((128, 256, 2), (256, 256, 2), (256, 512, 4), (512, 512, 4)):
        layers.append(dilated_block(cin, width, dilation))
    wide = [
        nn.Sequential(nn.Conv2d(512, 256, 3, 1, d, d, bias=False), nn.BatchNorm2d(256), nn.ReLU()) for d in (6, 12, 18)
    ]
    layers += [Parallel(conv_norm(512, 256), *wide), conv_norm(1024, 256), conv_norm(256, 256, 3)]
    return nn.Sequential(*layers, nn.Conv2d(256, classes, 1), nn.Upsample(scale_factor=8, mode="bilinear"))


def edsr(classes: int = 21, width: int = 64, depth: int = 8) -> nn.Module:
    """Twice the size by a pixel shuffle; without normalization."""

    def block() -> nn.Module:
        return Residual(nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 1, 1)))

    body = Residual(nn.Sequential(*(block() for _ in range(depth)), nn.Conv2d(width, width, 3, 1, 1)))
    up = [nn.Conv2d(width, 4 * width, 3, 1, 1), nn.PixelShuffle(2), nn.Conv2d(width, classes, 3, 1, 1)]
    return nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), body, *up)


class Hourglass(nn.Module):
    """Down, across and up, with the skipped ones beside what comes up."""

    def __init__(self, down: list[nn.Module], up: list[nn.Module], merge: list[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.down, self.up, self.merge = nn.ModuleList(down), nn.ModuleList(up), nn.ModuleList(merge)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
        skipped.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skipped.pop(), up(x)], 1))
        return self.last(x)


def nnunet_3d(classes: int = 3, width: int = 16, depth: int = 3) -> nn.Module:
    """Volumes; InstanceNorm and LeakyReLU, strided convolutions down, transposed ones up."""
    widths = [width << i for i in range(depth + 1)]

    def conv(cin: int, cout: int, stride: int = 1) -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(cin, cout, 3, stride, 1), nn.InstanceNorm3d(cout, affine=True), nn.LeakyReLU(0.01)
        )

    def double(cin: int, cout: int, stride: int = 1) -> nn.Module:
        return nn.Sequential(conv(cin, cout, stride), conv(cout, cout))

    down = [double(1, width), *(double(a, b, 2) for a, b in pairwise(widths))]
    up = [nn.ConvTranspose3d(b, a, 2, 2) for a, b in pairwise(widths)][::-1]
    merge = [double(2 * a, a) for a in widths[:-1]][::-1]
    return Hourglass(down, list(up), merge, nn.Conv3d(width, classes, 1))


def diffusion_unet(classes: int = 8, width: int = 64, depth: int = 2) -> nn.Module:
    """The blocks of Ho et al. 2020 (GroupNorm, SiLU, nearest upsampling), without attention and time."""
    widths = [width << i for i in range(depth + 1)]

    def double(cin: int, cout: int) -> nn.Module:
        body = [nn.GroupNorm(min(32, cin // 4), cin), nn.SiLU(), nn.Conv2d(cin, cout, 3, 1, 1)]
        body += [nn.GroupNorm(32, cout), nn.SiLU(), nn.Conv2d(cout, cout, 3, 1, 1)]
        return Residual(nn.Sequential(*body), None if cin == cout else nn.Conv2d(cin, cout, 1))

    def smaller(cin: int, cout: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(cin, cin, 3, 2, 1), double(cin, cout))

    def larger(cin: int, cout: int) -> nn.Module:
        return nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(cin, cout, 3, 1, 1))

    first = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), double(width, width))
    down = [first, *(smaller(a, b) for a, b in pairwise(widths))]
    up = [larger(b, a) for a, b in pairwise(widths)][::-1]
    merge = [double(2 * a, a) for a in widths[:-1]][::-1]
    last = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, classes, 3, 1, 1))
    return Hourglass(down, up, merge, last)


def autoencoder(classes: int = 16, width: int = 32) -> nn.Module:
    """Strided 4x4 convolutions down and transposed ones up, as in DCGAN (Radford et al. 2016)."""
    widths = [width << i for i in range(4)]
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    for a, b in pairwise(widths):
        layers += [nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)]
    for a, b in pairwise(widths[::-1]):
        layers += [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, classes, 4, 2, 1))


# -- detection: CSPDarknet of YOLO v5 -----------------------------------------------------------------------------------


class PooledPyramid(nn.Module):
    """A map beside its maxima over 5, 9 and 13 points (SPPF)."""

    def __init__(self, channels: int, act: Activation) -> None:
        super().__init__()
        self.first, self.last = conv_norm(channels, channels // 2, act=act), conv_norm(2 * channels, channels, act=act)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.first(x)]
        for _ in range(3):
            maps.append(self.pool(maps[-1]))
        return self.last(torch.cat(maps, 1))


def csp_darknet(classes: int = 1000) -> nn.Module:
    """The small one, as a classifier."""

    def residual(width: int) -> nn.Module:
        return Residual(nn.Sequential(conv_norm(width, width, act=nn.SiLU), conv_norm(width, width, 3, act=nn.SiLU)))

    def stage(width: int, count: int) -> nn.Module:
        half = width // 2
        deep = nn.Sequential(conv_norm(width, half, act=nn.SiLU), *(residual(half) for _ in range(count)))
        return nn.Sequential(Parallel(deep, conv_norm(width, half, act=nn.SiLU)), conv_norm(width, width, act=nn.SiLU))

    layers: list[nn.Module] = [nn.Conv2d(3, 32, 6, 2, 2, bias=False), nn.BatchNorm2d(32), nn.SiLU()]
    for (a, b), count in zip(pairwise((32, 64, 128, 256, 512)), (1, 2, 3, 1), strict=True):
        layers += [conv_norm(a, b, 3, 2, act=nn.SiLU), stage(b, count)]
    return nn.Sequential(*layers, PooledPyramid(512, nn.SiLU), head(512, classes))


# -- signals: a temporal convolutional network (Bai et al. 2018), M5 (Dai et al. 2017), EEGNet (Lawhern et al. 2018) ----


class Causal(nn.Module):
    """A dilated convolution that sees the past alone: padded at both ends and cut."""

    def __init__(self, cin: int, cout: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.extra = (kernel - 1) * dilation
        self.conv = nn.Conv1d(cin, cout, kernel, 1, self.extra, dilation)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)[..., : -self.extra]


def tcn(classes: int = 10, width: int = 64, depth: int = 7, kernel: int = 3) -> nn.Module:
    layers, cin = [], 8
    for level in range(depth):
        body = [Causal(cin, width, kernel, 1 << level), nn.ReLU(), Causal(width, width, kernel, 1 << level), nn.ReLU()]
        layers.append(Residual(nn.Sequential(*body), None if cin == width else nn.Conv1d(cin, width, 1), nn.ReLU()))
        cin = width
    return nn.Sequential(*layers, head(width, classes, 1))


def m5(classes: int = 35, width: int = 128) -> nn.Module:
    """Raw audio: a kernel of 80 samples that strides by 4."""
    layers: list[nn.Module] = [nn.Conv1d(1, width, 80, 4), nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(4)]
    for cin, cout in pairwise((width, width, 2 * width, 4 * width)):
        layers += [nn.Conv1d(cin, cout, 3), nn.BatchNorm1d(cout), nn.ReLU(), nn.MaxPool1d(4)]
    return nn.Sequential(*layers, head(4 * width, classes, 1))


def eegnet(classes: int = 4, electrodes: int = 64, first: int = 8, depth: int = 2) -> nn.Module:
    """Along time, then across the electrodes, then separable; for [N, 1, electrodes, 512]."""
    second = first * depth
    layers: list[nn.Module] = [nn.Conv2d(1, first, (1, 64), padding="same", bias=False), nn.BatchNorm2d(first)]
    layers += [nn.Conv2d(first, second, (electrodes, 1), groups=first, bias=False), nn.BatchNorm2d(second), nn.ELU()]
    layers += [nn.AvgPool2d((1, 4)), nn.Conv2d(second, second, (1, 16), padding="same", groups=second, bias=False)]
    layers += [nn.Conv2d(second, second, 1, bias=False), nn.BatchNorm2d(second), nn.ELU(), nn.AvgPool2d((1, 8))]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(second * 16, classes))


# -- tokens: a small vision transformer (Dosovitskiy et al. 2021) with a stem of convolutions (Xiao et al. 2021) --------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        size = self.width // self.heads
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, size)).permute(2, 0, 3, 1, 4).unbind()
        weights = (q @ k.transpose(-2, -1) * size**-0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def conv_vit(classes: int = 1000, width: int = 192, depth: int = 6, heads: int = 3) -> nn.Module:
    stem = [conv_norm(3, 24, 3, 2), conv_norm(24, 48, 3, 2), conv_norm(48, 96, 3, 2), conv_norm(96, width, 3, 2)]
    layers: list[nn.Module] = [*stem, nn.Flatten(2), Permute(0, 2, 1)]
    for _ in range(depth):
        mlp = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        layers.append(Residual(nn.Sequential(nn.LayerNorm(width), Attention(width, heads))))
        layers.append(Residual(nn.Sequential(*mlp)))
    return nn.Sequential(*layers, nn.LayerNorm(width), Permute(0, 2, 1), head(width, classes, 1))
