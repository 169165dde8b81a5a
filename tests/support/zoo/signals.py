"""Networks for audio, electroencephalograms, time series and point clouds, and on Fourier transforms."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import torch
from torch import Tensor, nn

from tests.support.zoo.layers import Causal, Classifier, Parallel, Residual, chain


class GatedBlock(nn.Module):
    """A convolution with a tanh and a sigmoid half, and a residual projection (van den Oord et al. 2016)."""

    def __init__(self, channels: int, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv
        self.project = nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.conv(x).chunk(2, dim=1)
        return x + self.project(torch.tanh(value) * torch.sigmoid(gate))


def audio_mini() -> nn.Module:
    """Strided wave-form stem, dilated gated blocks, global average and maximum."""
    return chain(
        conv1=nn.Conv1d(1, 8, 16, stride=4, padding=6, bias=False),
        bn1=nn.BatchNorm1d(8),
        relu=nn.ReLU(),
        pool=nn.MaxPool1d(4, stride=2, padding=1),
        blocks=nn.Sequential(*(GatedBlock(8, nn.Conv1d(8, 16, 3, padding=d, dilation=d)) for d in (1, 2, 4))),
        conv2=nn.Conv1d(8, 16, 5, stride=2, padding=2, groups=2, bias=False),
        bn2=nn.BatchNorm1d(16),
        act=nn.ELU(),
        summary=Parallel(OrderedDict(avg=nn.AdaptiveAvgPool1d(1), max=nn.AdaptiveMaxPool1d(1))),
        flatten=nn.Flatten(),
        fc=nn.Linear(32, 5),
    )


def wavenet(classes: int = 64, width: int = 48) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv1d(1, width, 1)]
    layers += [GatedBlock(width, Causal(width, 2 * width, 2, 1 << i)) for _ in range(2) for i in range(8)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, classes, 1))


def tcn(classes: int = 10, width: int = 64, depth: int = 7, kernel: int = 3) -> nn.Module:
    """A temporal convolutional network (Bai et al. 2018)."""
    layers, cin = [], 8
    for level in range(depth):
        body = [Causal(cin, width, kernel, 1 << level), nn.ReLU(), Causal(width, width, kernel, 1 << level), nn.ReLU()]
        layers.append(Residual(nn.Sequential(*body), None if cin == width else nn.Conv1d(cin, width, 1), nn.ReLU()))
        cin = width
    return nn.Sequential(*layers, Classifier(width, classes, 1))


def m5(classes: int = 35, width: int = 128) -> nn.Module:
    """Raw audio (Dai et al. 2017): a kernel of 80 samples that strides by 4."""
    layers: list[nn.Module] = [nn.Conv1d(1, width, 80, 4), nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(4)]
    for cin, cout in pairwise((width, width, 2 * width, 4 * width)):
        layers += [nn.Conv1d(cin, cout, 3), nn.BatchNorm1d(cout), nn.ReLU(), nn.MaxPool1d(4)]
    return nn.Sequential(*layers, Classifier(4 * width, classes, 1))


def eegnet(classes: int = 4, electrodes: int = 64, first: int = 8, depth: int = 2) -> nn.Module:
    """Along time, then across the electrodes, then separable (Lawhern et al. 2018); for [N, 1, electrodes, 512]."""
    second = first * depth
    layers: list[nn.Module] = [nn.Conv2d(1, first, (1, 64), padding="same", bias=False), nn.BatchNorm2d(first)]
    layers += [nn.Conv2d(first, second, (electrodes, 1), groups=first, bias=False), nn.BatchNorm2d(second), nn.ELU()]
    layers += [nn.AvgPool2d((1, 4)), nn.Conv2d(second, second, (1, 16), padding="same", groups=second, bias=False)]
    layers += [nn.Conv2d(second, second, 1, bias=False), nn.BatchNorm2d(second), nn.ELU(), nn.AvgPool2d((1, 8))]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(second * 16, classes))


def tasnet(classes: int = 64, width: int = 128, inner: int = 256) -> nn.Module:
    """Conv-TasNet (Luo and Mesgarani 2019)."""

    def block(dilation: int) -> nn.Module:
        body = [nn.Conv1d(width, inner, 1), nn.PReLU(), nn.GroupNorm(1, inner)]
        body += [nn.Conv1d(inner, inner, 3, padding=dilation, dilation=dilation, groups=inner), nn.PReLU()]
        return Residual(nn.Sequential(*body, nn.GroupNorm(1, inner), nn.Conv1d(inner, width, 1)))

    layers: list[nn.Module] = [nn.Conv1d(1, 256, 16, 8, 4), nn.ReLU(), nn.GroupNorm(1, 256), nn.Conv1d(256, width, 1)]
    layers += [*(block(1 << i) for i in range(6)), nn.PReLU(), nn.Conv1d(width, 256, 1), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.ConvTranspose1d(256, classes, 16, 8, 4))


def pointnet(classes: int = 40) -> nn.Module:
    """Qi et al. 2017."""
    layers: list[nn.Module] = []
    for a, b in pairwise((3, 64, 64, 64, 128, 1024)):
        layers += [nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()]
    layers += [nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(1024, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, classes))


class SpectrogramNet(nn.Module):
    """A filter, a spectrogram, and an image classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(1, 1, 5, padding=2)
        self.image = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4, 3)
        self.register_buffer("window", torch.hann_window(32))

    def forward(self, x: Tensor) -> Tensor:
        signal = self.filter(x)[:, 0]
        spectrum = torch.stft(signal, 32, 8, window=self.window, center=True, return_complex=True)
        power = torch.view_as_real(spectrum).square().sum(-1)
        return self.head(self.image(torch.log1p(power)[:, None]).relu().mean((2, 3)))


class FourierUnit(nn.Module):
    """The spectral transform of Chi, Jiang and Mu, "Fast Fourier Convolution", NeurIPS 2020: 1x1 over frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.spectral = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        n, c, h, w = x.shape
        z = torch.view_as_real(torch.fft.rfftn(x, dim=(-2, -1), norm="ortho"))
        z = self.spectral(z.permute(0, 1, 4, 2, 3).reshape(n, 2 * c, h, w // 2 + 1)).relu()
        z = z.reshape(n, c, 2, h, w // 2 + 1).permute(0, 1, 3, 4, 2).contiguous()
        return x + torch.fft.irfftn(torch.view_as_complex(z), s=(h, w), dim=(-2, -1), norm="ortho")
