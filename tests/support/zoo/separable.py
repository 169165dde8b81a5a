"""Networks of depthwise and grouped convolutions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.support.zoo.layers import (
    Activation,
    Classifier,
    ConvNormAct,
    Norm,
    Residual,
    SqueezeExcite,
    chain,
    mean,
    stages,
)

# -- MobileNet V2 and V3 (Sandler et al. 2018, Howard et al. 2019), EfficientNet V1 and V2 (Tan and Le 2019, 2021) -----


class InvertedResidual(nn.Sequential):
    """1x1 up unless the width stays, depthwise, a gate if `squeeze` makes one, linear 1x1 down."""

    def __init__(
        self,
        cin: int,
        hidden: int,
        cout: int,
        kernel: int,
        stride: int,
        act: Activation,
        squeeze: Callable[[int], nn.Module] | None = None,
    ) -> None:
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        if hidden != cin:
            parts["expand"] = ConvNormAct(cin, hidden, act=act)
        parts["depthwise"] = ConvNormAct(hidden, hidden, kernel, stride, groups=hidden, act=act)
        if squeeze:
            parts["se"] = squeeze(hidden)
        parts["project"] = ConvNormAct(hidden, cout, act=None)
        super().__init__(parts)
        self.residual = stride == 1 and cin == cout

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return x + out if self.residual else out


def _miniature(blocks: list[nn.Module], act: Activation) -> nn.Module:
    """Without the usual last 1x1 convolution with batch normalization.

    It would cancel the shift of every linear projection in training mode, and leave those biases without a gradient.
    """
    return chain(
        stem=ConvNormAct(3, 8, 3, 2, act=act),
        blocks=nn.Sequential(*blocks),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        classifier=nn.Sequential(nn.Linear(12, 16), act(), nn.Linear(16, 5)),
    )


def mobilenet_v3_mini() -> nn.Module:
    rows = ((8, 16, 12, 3, 2, nn.ReLU), (12, 24, 12, 5, 1, nn.Hardswish), (12, 32, 12, 3, 1, nn.Hardswish))
    blocks = [InvertedResidual(*row, lambda hidden: SqueezeExcite(hidden, 8, nn.ReLU, nn.Hardsigmoid)) for row in rows]
    return _miniature(blocks, nn.Hardswish)


def efficientnet_mini() -> nn.Module:
    rows = ((8, 24, 12, 5, 2, nn.SiLU), (12, 32, 12, 5, 1, nn.SiLU), (12, 24, 12, 3, 1, nn.SiLU))
    blocks = [InvertedResidual(*row, lambda hidden: SqueezeExcite(hidden, 8, nn.SiLU, nn.Sigmoid)) for row in rows]
    return _miniature(blocks, nn.SiLU)


def mobilenet_v2(classes: int = 1000) -> nn.Module:
    rows = ((16, 1, 1, 1), (24, 2, 2, 6), (32, 3, 2, 6), (64, 4, 2, 6), (96, 3, 1, 6), (160, 3, 2, 6), (320, 1, 1, 6))
    blocks = stages(32, rows, lambda cin, cout, s, times: InvertedResidual(cin, times * cin, cout, 3, s, nn.ReLU6))
    stem, last = ConvNormAct(3, 32, 3, 2, act=nn.ReLU6), ConvNormAct(320, 1280, act=nn.ReLU6)
    return nn.Sequential(stem, *blocks, last, Classifier(1280, classes))


def _divisible(channels: float, by: int = 8) -> int:
    """The nearest multiple of `by`, at most a tenth smaller."""
    near = max(by, int(channels + by / 2) // by * by)
    return near + by if near < 0.9 * channels else near


def mobilenet_v3(classes: int = 1000) -> nn.Module:
    """The large one."""

    def block(cin: int, cout: int, stride: int, kernel: int, hidden: int, gate: bool, act: Activation) -> nn.Module:
        def squeeze(channels: int) -> nn.Module:
            return SqueezeExcite(channels, _divisible(channels / 4), nn.ReLU, nn.Hardsigmoid)

        return InvertedResidual(cin, hidden, cout, kernel, stride, act, squeeze if gate else None)

    rows = (
        *((16, 1, 1, 3, 16, False, nn.ReLU), (24, 1, 2, 3, 64, False, nn.ReLU), (24, 1, 1, 3, 72, False, nn.ReLU)),
        *((40, 1, 2, 5, 72, True, nn.ReLU), (40, 2, 1, 5, 120, True, nn.ReLU)),
        *((80, 1, 2, 3, 240, False, nn.Hardswish), (80, 1, 1, 3, 200, False, nn.Hardswish)),
        *((80, 2, 1, 3, 184, False, nn.Hardswish), (112, 1, 1, 3, 480, True, nn.Hardswish)),
        *((112, 1, 1, 3, 672, True, nn.Hardswish), (160, 1, 2, 5, 672, True, nn.Hardswish)),
        (160, 2, 1, 5, 960, True, nn.Hardswish),
    )
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(960, 1280), nn.Hardswish(), nn.Linear(1280, classes)]
    stem, last = ConvNormAct(3, 16, 3, 2, act=nn.Hardswish), ConvNormAct(160, 960, act=nn.Hardswish)
    return nn.Sequential(stem, *stages(16, rows, block), last, *tail)


def _efficient(cin: int, cout: int, stride: int, times: int, kernel: int = 3) -> nn.Module:
    """The gate is a quarter of the block's input, not of what it expands to."""
    return InvertedResidual(
        cin, times * cin, cout, kernel, stride, nn.SiLU, lambda n: SqueezeExcite(n, cin // 4, nn.SiLU, nn.Sigmoid)
    )


def efficientnet_b0(classes: int = 1000) -> nn.Module:
    rows = (
        (16, 1, 1, 1, 3),
        (24, 2, 2, 6, 3),
        (40, 2, 2, 6, 5),
        (80, 3, 2, 6, 3),
        (112, 3, 1, 6, 5),
        (192, 4, 2, 6, 5),
    )
    blocks = stages(32, (*rows, (320, 1, 1, 6, 3)), _efficient)
    stem, last = ConvNormAct(3, 32, 3, 2, act=nn.SiLU), ConvNormAct(320, 1280, act=nn.SiLU)
    return nn.Sequential(stem, *blocks, last, Classifier(1280, classes))


def efficientnet_v2(classes: int = 1000) -> nn.Module:
    """Two blocks of each stage of the small one."""

    def fused(cin: int, cout: int, stride: int) -> nn.Module:
        body = nn.Sequential(ConvNormAct(cin, 4 * cin, 3, stride, act=nn.SiLU), ConvNormAct(4 * cin, cout, act=None))
        return Residual(body) if cin == cout and stride == 1 else body

    blocks = stages(24, ((48, 2, 2), (64, 2, 2)), fused)
    blocks += stages(64, ((128, 2, 2, 4), (160, 2, 1, 6), (256, 2, 2, 6)), _efficient)
    stem, last = ConvNormAct(3, 24, 3, 2, act=nn.SiLU), ConvNormAct(256, 1280, act=nn.SiLU)
    return nn.Sequential(stem, *blocks, last, Classifier(1280, classes))


# -- MobileNet (Howard et al. 2017), GhostNet (Han et al. 2020), ConvMixer (Trockman and Kolter 2023) ------------------

_MOBILENET = ((64, 1, 1), (128, 1, 2), (128, 1, 1), (256, 1, 2), (256, 1, 1), (512, 6, 2), (1024, 2, 2))


def mobilenet_v1(
    classes: int = 1000, rows: Sequence[tuple[int, int, int]] = _MOBILENET, norm: Norm | None = None
) -> nn.Module:
    """`rows`: width, number and first stride of the depthwise separable convolutions of a stage."""

    def block(cin: int, cout: int, stride: int) -> nn.Module:
        return nn.Sequential(ConvNormAct(cin, cin, 3, stride, groups=cin, norm=norm), ConvNormAct(cin, cout, norm=norm))

    stem = ConvNormAct(3, 32, 3, 2, norm=norm)
    return nn.Sequential(stem, *stages(32, rows, block), Classifier(rows[-1][0], classes))


class Ghost(nn.Module):
    """Half of the channels by a 1x1 convolution, the others from those by a depthwise one."""

    def __init__(self, cin: int, cout: int, act: Activation | None = nn.ReLU) -> None:
        super().__init__()
        self.first = ConvNormAct(cin, cout // 2, act=act)
        self.second = ConvNormAct(cout // 2, cout // 2, 3, groups=cout // 2, act=act)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return torch.cat([first, self.second(first)], 1)


def ghostnet(classes: int = 1000) -> nn.Module:
    """Without its gates."""

    def block(cin: int, cout: int, stride: int, inner: int) -> nn.Module:
        middle = [ConvNormAct(inner, inner, 3, stride, groups=inner, act=None)] if stride > 1 else []
        body = nn.Sequential(Ghost(cin, inner), *middle, Ghost(inner, cout, act=None))
        plain = cin == cout and stride == 1
        short = [ConvNormAct(cin, cin, 3, stride, groups=cin, act=None), ConvNormAct(cin, cout, act=None)]
        return Residual(body, None if plain else nn.Sequential(*short))

    rows = ((16, 1, 1, 16), (24, 1, 2, 48), (24, 1, 1, 72), (40, 1, 2, 72), (40, 1, 1, 120), (80, 1, 2, 240))
    rows += ((80, 1, 1, 200), (112, 1, 1, 480), (160, 1, 2, 672), (160, 1, 1, 960))
    return nn.Sequential(
        ConvNormAct(3, 16, 3, 2), *stages(16, rows, block), ConvNormAct(160, 960), Classifier(960, classes)
    )


def convmixer(classes: int = 1000, width: int = 256, depth: int = 8, kernel: int = 9, patch: int = 7) -> nn.Module:
    def mixed(conv: nn.Module) -> nn.Module:
        return nn.Sequential(conv, nn.GELU(), nn.BatchNorm2d(width))

    layers = [mixed(nn.Conv2d(3, width, patch, patch))]
    for _ in range(depth):
        layers.append(Residual(mixed(nn.Conv2d(width, width, kernel, padding="same", groups=width))))
        layers.append(mixed(nn.Conv2d(width, width, 1)))
    return nn.Sequential(*layers, Classifier(width, classes))


# -- ShuffleNet V2 (Ma et al. 2018) ------------------------------------------------------------------------------------


class ShuffleUnit(nn.Module):
    """Splits the channels (stride 1) or transforms both copies (stride 2), then interleaves."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        half = cout // 2
        self.stride = stride
        self.branch1 = nn.Sequential()
        if stride > 1:
            depthwise = ConvNormAct(cin, cin, 3, stride, groups=cin, act=None)
            self.branch1 = nn.Sequential(depthwise, ConvNormAct(cin, half))
        self.branch2 = nn.Sequential(
            ConvNormAct(cin if stride > 1 else half, half),
            ConvNormAct(half, half, 3, stride, groups=half, act=None),
            ConvNormAct(half, half),
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=1) if self.stride == 1 else (self.branch1(x), x)
        out = torch.cat((first, self.branch2(second)), 1)
        n, c, h, w = out.shape
        return out.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


def _shuffle(stem: int, rows: Sequence[tuple[int, int, int]], last: int, classes: int) -> nn.Module:
    return chain(
        stem=ConvNormAct(3, stem, 3, 2),
        pool=nn.MaxPool2d(3, 2, 1),
        stage=nn.Sequential(*stages(stem, rows, ShuffleUnit)),
        conv5=ConvNormAct(rows[-1][0], last),
        mean=mean(2, 3),
        fc=nn.Linear(last, classes),
    )


def shufflenet_mini() -> nn.Module:
    return _shuffle(8, [(24, 3, 2)], 32, 5)


def shufflenet() -> nn.Module:
    return _shuffle(24, [(116, 4, 2), (232, 8, 2), (464, 4, 2)], 1024, 1000)
