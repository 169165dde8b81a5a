"""Miniature networks of other kinds: ConvNeXt, segmentation, other spatial ranks, attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.nets_classifiers import Bottleneck, ConvNormAct

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
