"""Networks with one result per pixel: segmentation, super-resolution, diffusion."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo.layers import ConvNormAct, Residual, convs, stages
from tests.support.zoo.residual import BasicBlock, Bottleneck

# -- U-Nets (Ronneberger et al. 2015) ----------------------------------------------------------------------------------


def _double(cin: int, cout: int) -> nn.Module:
    return convs(cin, (cout, 3), (cout, 3))


class SkewUNet(nn.Module):
    """A miniature for an even height and an odd width.

    The last transposed convolution needs padding and output padding that differ between the two axes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enc1 = _double(3, 8)
        self.enc2 = _double(8, 12)
        self.mid = _double(12, 16)
        self.pool = nn.MaxPool2d(2)
        self.up2 = nn.ConvTranspose2d(16, 12, 2, stride=2)
        self.dec2 = _double(24, 12)
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


class UNet(nn.Module):
    """Blocks down, and up again on the concatenation with what the way down computed at that size."""

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


def unet(classes: int = 21, width: int = 32, depth: int = 4) -> nn.Module:
    """Padded and with batch normalization, as it is used today; up by transposed convolutions."""
    widths = [width << i for i in range(depth + 1)]
    down = [_double(3, width), *(nn.Sequential(nn.MaxPool2d(2), _double(a, b)) for a, b in pairwise(widths))]
    up: list[nn.Module] = [nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths)]
    merge = [_double(2 * a, a) for a in widths[:-1]]
    return UNet(down, up[::-1], merge[::-1], nn.Conv2d(width, classes, 1))


def nnunet_3d(classes: int = 3, width: int = 16, depth: int = 3) -> nn.Module:
    """Isensee et al. 2021: InstanceNorm and LeakyReLU, strided convolutions down, transposed ones up."""
    widths = [width << i for i in range(depth + 1)]

    def double(cin: int, cout: int, stride: int = 1) -> nn.Module:
        layers: list[nn.Module] = []
        for a, s in ((cin, stride), (cout, 1)):
            layers += [nn.Conv3d(a, cout, 3, s, 1), nn.InstanceNorm3d(cout, affine=True), nn.LeakyReLU(0.01)]
        return nn.Sequential(*layers)

    down = [double(1, width), *(double(a, b, 2) for a, b in pairwise(widths))]
    up: list[nn.Module] = [nn.ConvTranspose3d(b, a, 2, 2) for a, b in pairwise(widths)]
    merge = [double(2 * a, a) for a in widths[:-1]]
    return UNet(down, up[::-1], merge[::-1], nn.Conv3d(width, classes, 1))


def diffusion_unet(classes: int = 8, width: int = 64, depth: int = 2) -> nn.Module:
    """The blocks of Ho et al. 2020 (GroupNorm, SiLU, nearest upsampling), without attention and time."""
    widths = [width << i for i in range(depth + 1)]

    def double(cin: int, cout: int) -> nn.Module:
        body = [nn.GroupNorm(min(32, cin // 4), cin), nn.SiLU(), nn.Conv2d(cin, cout, 3, 1, 1)]
        body += [nn.GroupNorm(32, cout), nn.SiLU(), nn.Conv2d(cout, cout, 3, 1, 1)]
        return Residual(nn.Sequential(*body), None if cin == cout else nn.Conv2d(cin, cout, 1))

    down: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), double(width, width))]
    down += [nn.Sequential(nn.Conv2d(a, a, 3, 2, 1), double(a, b)) for a, b in pairwise(widths)]
    up = [nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(b, a, 3, 1, 1)) for a, b in pairwise(widths)]
    merge = [double(2 * a, a) for a in widths[:-1]]
    last = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, classes, 3, 1, 1))
    return UNet(down, up[::-1], merge[::-1], last)


# -- DeepLab V3 (Chen et al. 2017) -------------------------------------------------------------------------------------


class ASPP(nn.Module):
    """Dilated branches and, optionally, an image-level branch that is resized back to the grid.

    The image-level branch has no batch normalization: over a 1x1 grid and two samples it saturates at plus or minus
    one, and its gradient is only rounding.
    """

    def __init__(self, cin: int, cout: int, rates: tuple[int, ...], *, image: bool) -> None:
        super().__init__()
        self.convs = nn.ModuleList([ConvNormAct(cin, cout)])
        self.convs.extend(ConvNormAct(cin, cout, 3, dilation=rate) for rate in rates)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.pool_conv = nn.Conv2d(cin, cout, 1) if image else None
        self.project = ConvNormAct(cout * (1 + len(rates) + image), cout)

    def forward(self, x: Tensor) -> Tensor:
        branches = []
        if self.pool_conv is not None:
            image = F.relu(self.pool_conv(self.pool(x)))
            branches = [F.interpolate(image, size=x.shape[-2:], mode="bilinear", align_corners=False)]
        return self.project(torch.cat([conv(x) for conv in self.convs] + branches, 1))


class DeepLab(nn.Module):
    """Dilated residual trunk, ASPP, and bilinear upsampling to the input size."""

    def __init__(
        self,
        stem: nn.Module,
        trunk: list[nn.Module],
        widths: tuple[int, int],
        rates: tuple[int, ...],
        classes: int,
        *,
        image: bool,
    ) -> None:
        super().__init__()
        self.stem = stem
        self.trunk = nn.Sequential(*trunk)
        self.aspp = ASPP(*widths, rates, image=image)
        self.conv = ConvNormAct(widths[1], widths[1], 3)
        self.classifier = nn.Conv2d(widths[1], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.classifier(self.conv(self.aspp(self.trunk(self.stem(x)))))
        return F.interpolate(out, size=x.shape[-2:], mode="bilinear", align_corners=False)


def deeplab_mini() -> nn.Module:
    stem = ConvNormAct(3, 8, 3, 2)
    trunk = [Bottleneck(8, 8, 16, 2), Bottleneck(16, 8, 16, dilation=2)]
    return DeepLab(stem, trunk, (16, 8), (2, 3), 4, image=True)


def deeplab(classes: int = 21) -> nn.Module:
    """On a ResNet-18 whose last two stages dilate instead of striding."""
    rows = ((64, 2, 1, 1), (128, 2, 2, 1), (256, 2, 1, 2), (512, 2, 1, 4))
    trunk = stages(64, rows, lambda cin, width, stride, d: BasicBlock(cin, width, stride, dilation=d))
    stem = nn.Sequential(ConvNormAct(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
    return DeepLab(stem, trunk, (512, 256), (6, 12, 18), classes, image=False)


# -- larger images: EDSR (Lim et al. 2017), SRGAN's generator (Ledig et al. 2017); DCGAN (Radford et al. 2016) ---------


def edsr(classes: int = 21, width: int = 64, depth: int = 8) -> nn.Module:
    """Twice the size by a pixel shuffle; without normalization."""

    def conv(cin: int, cout: int) -> nn.Module:
        return nn.Conv2d(cin, cout, 3, 1, 1)

    blocks = [Residual(nn.Sequential(conv(width, width), nn.ReLU(), conv(width, width))) for _ in range(depth)]
    body = Residual(nn.Sequential(*blocks, conv(width, width)))
    return nn.Sequential(conv(3, width), body, conv(width, 4 * width), nn.PixelShuffle(2), conv(width, classes))


def srgan(classes: int = 8, width: int = 64, depth: int = 6) -> nn.Module:
    def conv() -> list[nn.Module]:
        return [nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width)]

    body = Residual(
        nn.Sequential(*(Residual(nn.Sequential(*conv(), nn.PReLU(), *conv())) for _ in range(depth)), *conv())
    )
    up = [nn.Conv2d(width, 4 * width, 3, 1, 1), nn.PixelShuffle(2), nn.PReLU()]
    return nn.Sequential(nn.Conv2d(3, width, 9, 1, 4), nn.PReLU(), body, *up, nn.Conv2d(width, classes, 9, 1, 4))


def autoencoder(classes: int = 16, width: int = 32) -> nn.Module:
    """Strided 4x4 convolutions down and transposed ones up, as in DCGAN."""
    widths = [width << i for i in range(4)]
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
    for a, b in pairwise(widths):
        layers += [nn.Conv2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)]
    for a, b in pairwise(widths[::-1]):
        layers += [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, classes, 4, 2, 1))


# -- HRNet (Wang et al. 2020) ------------------------------------------------------------------------------------------


class Exchange(nn.Module):
    """Two resolutions side by side; each gets the sum of both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.high = nn.Sequential(*(Residual(ConvNormAct(width, width, 3)) for _ in range(2)))
        self.low = nn.Sequential(*(Residual(ConvNormAct(2 * width, 2 * width, 3)) for _ in range(2)))
        self.down = ConvNormAct(width, 2 * width, 3, 2, act=None)
        self.up = nn.Sequential(ConvNormAct(2 * width, width, act=None), nn.Upsample(scale_factor=2, mode="bilinear"))

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        high, low = self.high(pair[0]), self.low(pair[1])
        return torch.relu(high + self.up(low)), torch.relu(low + self.down(high))


class HRNet(nn.Module):
    def __init__(self, classes: int = 19, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNormAct(3, 64, 3, 2), ConvNormAct(64, width, 3, 2))
        self.split = ConvNormAct(width, 2 * width, 3, 2)
        self.body = nn.Sequential(*(Exchange(width) for _ in range(depth)))
        self.last = nn.Sequential(ConvNormAct(3 * width, 3 * width), nn.Conv2d(3 * width, classes, 1))
        self.grow = nn.Upsample(scale_factor=2, mode="bilinear")
        self.whole = nn.Upsample(scale_factor=4, mode="bilinear")

    def forward(self, x: Tensor) -> Tensor:
        high = self.stem(x)
        high, low = self.body((high, self.split(high)))
        return self.whole(self.last(torch.cat([high, self.grow(low)], 1)))
