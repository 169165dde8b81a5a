"""A third set of networks in plain torch.nn, after their papers: what neither lowerings nor rules were made for."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.architectures import (
    Permute,
    Residual,
    Scale,
    SqueezeExcite,
    channel_norm,
    conv_norm,
    head,
    inverted_residual,
)
from benchmarks.other_architectures import Causal, Parallel

# -- separable: MobileNet (Howard et al. 2017), GhostNet (Han et al. 2020) ----------------------------------------------


def mobilenet_v1(classes: int = 1000) -> nn.Module:
    layers, cin = [conv_norm(3, 32, 3, 2)], 32
    for cout, stride in (
        *((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)),
        *[(512, 1)] * 5,
        *((1024, 2), (1024, 1)),
    ):
        layers += [conv_norm(cin, cin, 3, stride, groups=cin), conv_norm(cin, cout)]
        cin = cout
    return nn.Sequential(*layers, head(cin, classes))


class Ghost(nn.Module):
    """Half of the channels by a 1x1 convolution, the others cheaply from those."""

    def __init__(self, cin: int, cout: int, *, act: bool = True) -> None:
        super().__init__()
        kind = nn.ReLU if act else None
        self.first = conv_norm(cin, cout // 2, act=kind)
        self.second = conv_norm(cout // 2, cout // 2, 3, groups=cout // 2, act=kind)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return torch.cat([first, self.second(first)], 1)


def ghostnet(classes: int = 1000) -> nn.Module:
    """Without its gates."""
    layers: list[nn.Module] = [conv_norm(3, 16, 3, 2)]
    cin = 16
    for inner, cout, stride in (
        (16, 16, 1), (48, 24, 2), (72, 24, 1), (72, 40, 2), (120, 40, 1), (240, 80, 2), (200, 80, 1), (480, 112, 1),
        (672, 160, 2), (960, 160, 1),
    ):  # fmt: skip
        body: list[nn.Module] = [Ghost(cin, inner)]
        if stride > 1:
            body.append(conv_norm(inner, inner, 3, stride, groups=inner, act=None))
        body.append(Ghost(inner, cout, act=False))
        plain = cin == cout and stride == 1
        short = nn.Sequential(conv_norm(cin, cin, 3, stride, groups=cin, act=None), conv_norm(cin, cout, act=None))
        layers.append(Residual(nn.Sequential(*body), None if plain else short))
        cin = cout
    return nn.Sequential(*layers, conv_norm(cin, 960), head(960, classes))


# -- factors: Inception V3 (Szegedy et al. 2016), R(2+1)D (Tran et al. 2018) --------------------------------------------


def factored(cin: int, width: int) -> nn.Module:
    """The blocks of 17x17, with kernels of 7x1 and 1x7."""
    one = conv_norm(cin, 192)
    two = nn.Sequential(conv_norm(cin, width), conv_norm(width, width, (1, 7)), conv_norm(width, 192, (7, 1)))
    three = [conv_norm(cin, width)]
    three += [conv_norm(width, width, (7, 1)), conv_norm(width, width, (1, 7))]
    three += [conv_norm(width, width, (7, 1)), conv_norm(width, 192, (1, 7))]
    return Parallel(one, two, nn.Sequential(*three), nn.Sequential(nn.AvgPool2d(3, 1, 1), conv_norm(cin, 192)))


def inception_v3(classes: int = 1000) -> nn.Module:
    """The stem, a block with 5x5, a reduction, and two blocks with 7x1 and 1x7."""
    layers: list[nn.Module] = [conv_norm(3, 32, 3, 2, pad=0), conv_norm(32, 32, 3, pad=0), conv_norm(32, 64, 3)]
    layers += [nn.MaxPool2d(3, 2), conv_norm(64, 80), conv_norm(80, 192, 3, pad=0)]
    a = Parallel(
        conv_norm(192, 64),
        nn.Sequential(conv_norm(192, 48), conv_norm(48, 64, 5)),
        nn.Sequential(conv_norm(192, 64), conv_norm(64, 96, 3), conv_norm(96, 96, 3)),
        nn.Sequential(nn.AvgPool2d(3, 1, 1), conv_norm(192, 32)),
    )
    b = Parallel(nn.Sequential(nn.Conv2d(256, 384, 3, 2), nn.ReLU()), nn.MaxPool2d(3, 2))
    return nn.Sequential(*layers, a, b, factored(640, 128), factored(768, 160), head(768, classes))


def r2plus1d(classes: int = 400) -> nn.Module:
    def pair(cin: int, cout: int, stride: int = 1) -> list[nn.Module]:
        middle = cin * cout * 27 // (cin * 9 + 3 * cout)
        return [
            conv_norm(cin, middle, (1, 3, 3), (1, stride, stride), dims=3),
            conv_norm(middle, cout, (3, 1, 1), (stride, 1, 1), dims=3),
        ]

    stem = [conv_norm(3, 45, (1, 7, 7), (1, 2, 2), dims=3), conv_norm(45, 64, (3, 1, 1), dims=3)]
    layers: list[nn.Module] = [*stem]
    cin = 64
    for width in (64, 128, 256):
        stride = 1 if width == 64 else 2
        body = nn.Sequential(*pair(cin, width, stride), *pair(width, width))
        short = conv_norm(cin, width, 1, stride, act=None, dims=3)
        layers += [Residual(body, short), Residual(nn.Sequential(*pair(width, width), *pair(width, width)))]
        cin = width
    return nn.Sequential(*layers, head(cin, classes, 3))


# -- RegNet (Radosavovic et al. 2020), EfficientNetV2 (Tan and Le 2021) -------------------------------------------------


def regnet_x(classes: int = 1000) -> nn.Module:
    """RegNetX-400MF."""
    layers, cin = [conv_norm(3, 32, 3, 2)], 32
    for width, count in ((32, 1), (64, 2), (160, 7), (384, 12)):
        for index in range(count):
            stride = 1 if index else 2
            body = nn.Sequential(
                conv_norm(cin, width),
                conv_norm(width, width, 3, stride, groups=width // 16),
                conv_norm(width, width, act=None),
            )
            layers.append(Residual(body, None if index else conv_norm(cin, width, 1, stride, act=None), nn.ReLU()))
            cin = width
    return nn.Sequential(*layers, head(cin, classes))


def efficientnet_v2(classes: int = 1000) -> nn.Module:
    """Two blocks of each stage of the small one."""

    def fused(cin: int, cout: int, times: int, stride: int) -> nn.Module:
        body = [conv_norm(cin, cin * times, 3, stride, act=nn.SiLU), conv_norm(cin * times, cout, act=None)]
        return Residual(nn.Sequential(*body)) if cin == cout and stride == 1 else nn.Sequential(*body)

    def separable(cin: int, cout: int, times: int, stride: int) -> nn.Module:
        def squeeze(channels: int) -> nn.Module:
            return SqueezeExcite(channels, cin // 4, nn.SiLU, nn.Sigmoid)

        return inverted_residual(cin, times * cin, cout, 3, stride, nn.SiLU, squeeze)

    layers: list[nn.Module] = [conv_norm(3, 24, 3, 2, act=nn.SiLU)]
    layers += [fused(24, 48, 4, 2), fused(48, 48, 4, 1), fused(48, 64, 4, 2), fused(64, 64, 4, 1)]
    layers += [separable(64, 128, 4, 2), separable(128, 128, 4, 1)]
    layers += [separable(128, 160, 6, 1), separable(160, 160, 6, 1)]
    layers += [separable(160, 256, 6, 2), separable(256, 256, 6, 1)]
    return nn.Sequential(*layers, conv_norm(256, 1280, act=nn.SiLU), head(1280, classes))


# -- PoolFormer (Yu et al. 2022), ConvNeXt V2 (Woo et al. 2023) ---------------------------------------------------------


class PoolMixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x) - x


def poolformer(classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 4, 2)]
    cin = 64
    for width, count in ((64, 2), (128, 2), (320, 3), (512, 1)):
        if width != cin:
            layers.append(nn.Conv2d(cin, width, 3, 2, 1))
        for _ in range(count):
            mixer = [nn.GroupNorm(1, width), PoolMixer(), Scale(width, 2)]
            mlp = [nn.GroupNorm(1, width), nn.Conv2d(width, 4 * width, 1), nn.GELU(), nn.Conv2d(4 * width, width, 1)]
            layers += [Residual(nn.Sequential(*mixer)), Residual(nn.Sequential(*mlp, Scale(width, 2)))]
        cin = width
    return nn.Sequential(*layers, nn.GroupNorm(1, cin), head(cin, classes))


class ResponseNorm(nn.Module):
    """Global response normalization, channels last."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.zeros(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        norm = (x * x).sum((1, 2), keepdim=True).add(1e-6).sqrt()
        return self.gamma * (x * (norm / (norm.mean(-1, keepdim=True) + 1e-6))) + self.beta + x


def convnext_v2(classes: int = 1000) -> nn.Module:
    """The atto one."""
    layers: list[nn.Module] = [nn.Conv2d(3, 40, 4, 4), *channel_norm(40)]
    cin = 40
    for width, count in ((40, 2), (80, 2), (160, 6), (320, 2)):
        if width != cin:
            layers += [*channel_norm(cin), nn.Conv2d(cin, width, 2, 2)]
        for _ in range(count):
            body: list[nn.Module] = [nn.Conv2d(width, width, 7, padding=3, groups=width), *channel_norm(width)[:2]]
            body += [nn.Linear(width, 4 * width), nn.GELU(), ResponseNorm(4 * width)]
            body += [nn.Linear(4 * width, width), Permute(0, 3, 1, 2)]
            layers.append(Residual(nn.Sequential(*body)))
        cin = width
    return nn.Sequential(*layers, head(cin, classes))


# -- images out: SRGAN's generator (Ledig et al. 2017), HRNet (Wang et al. 2020) -------------------------------------


def srgan(classes: int = 8, width: int = 64, depth: int = 6) -> nn.Module:
    def block() -> nn.Module:
        body = [nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.PReLU(), nn.Conv2d(width, width, 3, 1, 1)]
        return Residual(nn.Sequential(*body, nn.BatchNorm2d(width)))

    body = Residual(
        nn.Sequential(*(block() for _ in range(depth)), nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width))
    )
    up = [nn.Conv2d(width, 4 * width, 3, 1, 1), nn.PixelShuffle(2), nn.PReLU()]
    return nn.Sequential(nn.Conv2d(3, width, 9, 1, 4), nn.PReLU(), body, *up, nn.Conv2d(width, classes, 9, 1, 4))


class Exchange(nn.Module):
    """Two resolutions side by side, each of which gets the sum of both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.high = nn.Sequential(*(Residual(conv_norm(width, width, 3)) for _ in range(2)))
        self.low = nn.Sequential(*(Residual(conv_norm(2 * width, 2 * width, 3)) for _ in range(2)))
        self.down = conv_norm(width, 2 * width, 3, 2, act=None)
        self.up = nn.Sequential(conv_norm(2 * width, width, act=None), nn.Upsample(scale_factor=2, mode="bilinear"))

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        high, low = self.high(pair[0]), self.low(pair[1])
        return torch.relu(high + self.up(low)), torch.relu(low + self.down(high))


class HRNet(nn.Module):
    def __init__(self, classes: int = 19, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 64, 3, 2), conv_norm(64, width, 3, 2))
        self.split = conv_norm(width, 2 * width, 3, 2)
        self.body = nn.Sequential(*(Exchange(width) for _ in range(depth)))
        self.last = nn.Sequential(conv_norm(3 * width, 3 * width), nn.Conv2d(3 * width, classes, 1))
        self.grow = nn.Upsample(scale_factor=2, mode="bilinear")
        self.whole = nn.Upsample(scale_factor=4, mode="bilinear")

    def forward(self, x: Tensor) -> Tensor:
        high = self.stem(x)
        high, low = self.body((high, self.split(high)))
        return self.whole(self.last(torch.cat([high, self.grow(low)], 1)))


# -- signals: WaveNet (van den Oord et al. 2016), Conv-TasNet (Luo and Mesgarani 2019), PointNet (Qi et al. 2017) -------


class Gated(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.conv = Causal(width, 2 * width, 2, dilation)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.conv(x).chunk(2, 1)
        return x + self.out(torch.tanh(a) * torch.sigmoid(b))


def wavenet(classes: int = 64, width: int = 48) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv1d(1, width, 1)]
    layers += [Gated(width, 1 << i) for _ in range(2) for i in range(8)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, classes, 1))


def tasnet(classes: int = 64, width: int = 128, inner: int = 256) -> nn.Module:
    def block(dilation: int) -> nn.Module:
        body = [nn.Conv1d(width, inner, 1), nn.PReLU(), nn.GroupNorm(1, inner)]
        body += [nn.Conv1d(inner, inner, 3, padding=dilation, dilation=dilation, groups=inner), nn.PReLU()]
        return Residual(nn.Sequential(*body, nn.GroupNorm(1, inner), nn.Conv1d(inner, width, 1)))

    layers: list[nn.Module] = [nn.Conv1d(1, 256, 16, 8, 4), nn.ReLU(), nn.GroupNorm(1, 256), nn.Conv1d(256, width, 1)]
    layers += [block(1 << i) for i in range(6)]
    return nn.Sequential(
        *layers, nn.PReLU(), nn.Conv1d(width, 256, 1), nn.Sigmoid(), nn.ConvTranspose1d(256, classes, 16, 8, 4)
    )


def pointnet(classes: int = 40) -> nn.Module:
    layers: list[nn.Module] = []
    for a, b in pairwise((3, 64, 64, 64, 128, 1024)):
        layers += [nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, classes)
    )


def lenet(classes: int = 10) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(1, 6, 5, padding=2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.Tanh(),
    ]
    layers += [nn.AvgPool2d(2), nn.Conv2d(16, 120, 5), nn.Tanh(), nn.Flatten(), nn.Linear(120, 84), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(84, classes))
