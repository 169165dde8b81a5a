"""Networks in plain torch.nn, after their papers: full size, without dropout or stochastic depth.

Nothing random happens in a step, so that every side of a comparison computes the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

CONV: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORM: dict[int, type[nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
MEAN_POOL: dict[int, type[nn.Module]] = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}

Activation = Callable[[], nn.Module]


def conv_norm(
    cin: int,
    cout: int,
    kernel: int | tuple[int, ...] = 1,
    stride: int | tuple[int, ...] = 1,
    *,
    groups: int = 1,
    act: Activation | None = nn.ReLU,
    dims: int = 2,
    pad: int | None = None,
) -> nn.Sequential:
    """Convolution without bias, batch normalization and, unless `act` is None, an activation; padded by half the kernel."""
    half = kernel // 2 if isinstance(kernel, int) else tuple(k // 2 for k in kernel)
    conv = CONV[dims](cin, cout, kernel, stride, half if pad is None else pad, groups=groups, bias=False)
    return nn.Sequential(conv, NORM[dims](cout), *([act()] if act else []))


def head(channels: int, classes: int, dims: int = 2) -> nn.Sequential:
    return nn.Sequential(MEAN_POOL[dims](1), nn.Flatten(), nn.Linear(channels, classes))


class Residual(nn.Module):
    """`act(body(x) + shortcut(x))`."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None, act: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.shortcut, self.act = body, shortcut or nn.Identity(), act or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.body(x) + self.shortcut(x))


# -- ResNet (He et al. 2016), in one, two and three dimensions ----------------------------------------------------------


def basic_block(cin: int, width: int, stride: int, dims: int = 2) -> nn.Module:
    body = nn.Sequential(conv_norm(cin, width, 3, stride, dims=dims), conv_norm(width, width, 3, act=None, dims=dims))
    plain = cin == width and stride == 1
    return Residual(body, None if plain else conv_norm(cin, width, 1, stride, act=None, dims=dims), nn.ReLU())


def bottleneck(cin: int, width: int, stride: int, dims: int = 2) -> nn.Module:
    cout = 4 * width
    body = nn.Sequential(
        conv_norm(cin, width, dims=dims),
        conv_norm(width, width, 3, stride, dims=dims),
        conv_norm(width, cout, act=None, dims=dims),
    )
    plain = cin == cout and stride == 1
    return Residual(body, None if plain else conv_norm(cin, cout, 1, stride, act=None, dims=dims), nn.ReLU())


def residual_stages(
    block: Callable[[int, int, int, int], nn.Module], counts: Sequence[int], expansion: int, dims: int, first: int = 64
) -> nn.Sequential:
    layers, cin = [], first
    for stage, count in enumerate(counts):
        width = first << stage
        for index in range(count):
            layers.append(block(cin, width, 2 if stage and not index else 1, dims))
            cin = expansion * width
    return nn.Sequential(*layers)


def resnet(block: Callable[[int, int, int, int], nn.Module], counts: Sequence[int], expansion: int) -> nn.Module:
    stem = [conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, residual_stages(block, counts, expansion, 2), head(512 * expansion, 1000))


def resnet20() -> nn.Module:
    """For images of 32x32 (section 4.2)."""
    return nn.Sequential(conv_norm(3, 16, 3), residual_stages(basic_block, [3, 3, 3], 1, 2, 16), head(64, 10))


def resnet18_3d(classes: int = 400) -> nn.Module:
    """R3D-18 of Tran et al. 2018: a 3x7x7 stem that strides in space alone, no pooling after it."""
    stem = conv_norm(3, 64, (3, 7, 7), (1, 2, 2), dims=3)
    return nn.Sequential(stem, residual_stages(basic_block, [2, 2, 2, 2], 1, 3), head(512, classes, 3))


def ecg_block(cin: int, cout: int, shrink: int, kernel: int) -> nn.Module:
    body = nn.Sequential(conv_norm(cin, cout, kernel, dims=1), conv_norm(cout, cout, kernel, shrink, act=None, dims=1))
    return Residual(body, nn.Sequential(nn.MaxPool1d(shrink), nn.Conv1d(cin, cout, 1, bias=False)), nn.ReLU())


def ecg_resnet(classes: int = 6, kernel: int = 17) -> nn.Module:
    """Ribeiro et al. 2020: 12-lead electrocardiograms of 4096 samples, kernels of 17, the length cut by 4 per block."""
    widths = [64, 128, 196, 256, 320]
    blocks = [ecg_block(cin, cout, 4, kernel) for cin, cout in pairwise(widths)]
    return nn.Sequential(conv_norm(12, 64, kernel, dims=1), *blocks, nn.Flatten(), nn.Linear(widths[-1] * 16, classes))


# -- MobileNet V2 and V3 (Sandler et al. 2018, Howard et al. 2019), EfficientNet (Tan and Le 2019) ------------------------


class SqueezeExcite(nn.Module):
    """Channels scaled by what a two-layer net makes of their means."""

    def __init__(self, channels: int, hidden: int, act: Activation, gate: Activation) -> None:
        super().__init__()
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, hidden, 1), act(), nn.Conv2d(hidden, channels, 1), gate()
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(x)


def inverted_residual(
    cin: int,
    hidden: int,
    cout: int,
    kernel: int,
    stride: int,
    act: Activation,
    squeeze: Callable[[int], nn.Module] | None = None,
) -> nn.Module:
    """1x1 up, depthwise, squeeze and excitation where there is one, 1x1 down."""
    layers = [conv_norm(cin, hidden, act=act)] if hidden != cin else []
    layers.append(conv_norm(hidden, hidden, kernel, stride, groups=hidden, act=act))
    if squeeze:
        layers.append(squeeze(hidden))
    body = nn.Sequential(*layers, conv_norm(hidden, cout, act=None))
    return Residual(body) if stride == 1 and cin == cout else body


def mobilenet_v2(classes: int = 1000) -> nn.Module:
    layers, cin = [conv_norm(3, 32, 3, 2, act=nn.ReLU6)], 32
    for expand, cout, count, stride in (
        *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
        *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
    ):
        for index in range(count):
            layers.append(inverted_residual(cin, expand * cin, cout, 3, 1 if index else stride, nn.ReLU6))
            cin = cout
    return nn.Sequential(*layers, conv_norm(cin, 1280, act=nn.ReLU6), head(1280, classes))


def divisible(channels: float, by: int = 8) -> int:
    """The nearest multiple of `by`, at most a tenth smaller."""
    near = max(by, int(channels + by / 2) // by * by)
    return near + by if near < 0.9 * channels else near


def mobilenet_v3(classes: int = 1000) -> nn.Module:
    """The large one."""
    layers, cin = [conv_norm(3, 16, 3, 2, act=nn.Hardswish)], 16

    def squeeze(hidden: int) -> nn.Module:
        return SqueezeExcite(hidden, divisible(hidden / 4), nn.ReLU, nn.Hardsigmoid)

    for kernel, hidden, cout, squeezed, act, stride in (
        (3, 16, 16, False, nn.ReLU, 1),
        (3, 64, 24, False, nn.ReLU, 2),
        (3, 72, 24, False, nn.ReLU, 1),
        *[(5, hidden, 40, True, nn.ReLU, stride) for hidden, stride in ((72, 2), (120, 1), (120, 1))],
        *[(3, hidden, 80, False, nn.Hardswish, stride) for hidden, stride in ((240, 2), (200, 1), (184, 1), (184, 1))],
        *[(3, hidden, 112, True, nn.Hardswish, 1) for hidden in (480, 672)],
        *[(5, hidden, 160, True, nn.Hardswish, stride) for hidden, stride in ((672, 2), (960, 1), (960, 1))],
    ):
        layers.append(inverted_residual(cin, hidden, cout, kernel, stride, act, squeeze if squeezed else None))
        cin = cout
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(960, 1280), nn.Hardswish(), nn.Linear(1280, classes)]
    return nn.Sequential(*layers, conv_norm(cin, 960, act=nn.Hardswish), *tail)


def efficientnet_b0(classes: int = 1000) -> nn.Module:
    layers, cin = [conv_norm(3, 32, 3, 2, act=nn.SiLU)], 32
    for expand, kernel, stride, cout, count in (
        *((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)),
        *((6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)),
    ):
        for index in range(count):
            hidden = max(1, cin // 4)  # of the block's input, not of what it expands to

            def squeeze(channels: int, hidden: int = hidden) -> nn.Module:
                return SqueezeExcite(channels, hidden, nn.SiLU, nn.Sigmoid)

            layers.append(inverted_residual(cin, expand * cin, cout, kernel, 1 if index else stride, nn.SiLU, squeeze))
            cin = cout
    return nn.Sequential(*layers, conv_norm(cin, 1280, act=nn.SiLU), head(1280, classes))


# -- DenseNet (Huang et al. 2017) ----------------------------------------------------------------------------------------


def norm_conv(cin: int, cout: int, kernel: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(cin), nn.ReLU(), nn.Conv2d(cin, cout, kernel, 1, kernel // 2, bias=False))


class DenseLayer(nn.Module):
    """What came in, with `growth` more channels."""

    def __init__(self, cin: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(norm_conv(cin, 4 * growth), norm_conv(4 * growth, growth, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def densenet121(classes: int = 1000, growth: int = 32) -> nn.Module:
    layers, channels = [conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)], 64
    for stage, count in enumerate((6, 12, 24, 16)):
        if stage:
            layers += [norm_conv(channels, channels // 2), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(count):
            layers.append(DenseLayer(channels, growth))
            channels += growth
    return nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU(), head(channels, classes))


# -- ConvNeXt (Liu et al. 2022) -----------------------------------------------------------------------------------------


class Permute(nn.Module):
    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.order)


class Scale(nn.Module):
    """One learned factor per channel, which so many axes follow."""

    def __init__(self, channels: int, behind: int = 0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((channels, *[1] * behind), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def channel_norm(channels: int) -> list[nn.Module]:
    return [Permute(0, 2, 3, 1), nn.LayerNorm(channels, eps=1e-6), Permute(0, 3, 1, 2)]


def convnext_block(channels: int) -> nn.Module:
    body = [
        nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
        *channel_norm(channels)[:2],
        *(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)),
        *(Scale(channels), Permute(0, 3, 1, 2)),
    ]
    return Residual(nn.Sequential(*body))


def convnext_tiny(classes: int = 1000) -> nn.Module:
    widths = [96, 192, 384, 768]
    layers = [nn.Conv2d(3, widths[0], 4, 4), *channel_norm(widths[0])]
    for stage, count in enumerate((3, 3, 9, 3)):
        if stage:
            layers += [*channel_norm(widths[stage - 1]), nn.Conv2d(widths[stage - 1], widths[stage], 2, 2)]
        layers += [convnext_block(widths[stage]) for _ in range(count)]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(widths[-1], eps=1e-6), nn.Linear(widths[-1], classes)]
    return nn.Sequential(*layers, *tail)


# -- U-Net (Ronneberger et al. 2015) ------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Padded and with batch normalization, as it is used today; the way up is by transposed convolutions."""

    def __init__(self, channels: int = 3, classes: int = 21, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        widths = [width << i for i in range(depth + 1)]
        self.down = nn.ModuleList([self.double(channels, width), *(self.double(a, b) for a, b in pairwise(widths))])
        self.up = nn.ModuleList([nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths)][::-1])
        self.merge = nn.ModuleList([self.double(2 * a, a) for a in widths[:-1]][::-1])
        self.pool, self.last = nn.MaxPool2d(2), nn.Conv2d(width, classes, 1)

    @staticmethod
    def double(cin: int, cout: int) -> nn.Module:
        return nn.Sequential(conv_norm(cin, cout, 3), conv_norm(cout, cout, 3))

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skipped.append(x)
        skipped.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skipped.pop(), up(x)], 1))
        return self.last(x)


# -- for handwritten digits ----------------------------------------------------------------------------------------------


def mnist_cnn() -> nn.Module:
    """Two convolutions and two linear layers."""
    layers: list[nn.Module] = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10))
