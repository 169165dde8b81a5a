"""ConvNeXt, PoolFormer and transformers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo.layers import Apply, Classifier, ConvNormAct, Residual, chain, mean, permute

# -- ConvNeXt (Liu et al. 2022), ConvNeXt V2 (Woo et al. 2023) ---------------------------------------------------------


class LayerNorm2d(nn.LayerNorm):
    """Normalizes the channels of an NCHW tensor."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, then a channels-last MLP scaled per channel."""

    def __init__(self, dim: int, times: int = 2, scale: float = 1.0) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, times * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(times * dim, dim)
        self.layer_scale = nn.Parameter(torch.full((dim, 1, 1), scale))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        out = self.pwconv2(self.act(self.pwconv1(out)))
        return x + self.layer_scale * out.permute(0, 3, 1, 2)


class ResponseNorm(nn.Module):
    """Global response normalization, channels last."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.zeros(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        norm = (x * x).sum((1, 2), keepdim=True).add(1e-6).sqrt()
        return self.gamma * (x * (norm / (norm.mean(-1, keepdim=True) + 1e-6))) + self.beta + x


def _second_block(dim: int) -> nn.Module:
    first = [nn.Conv2d(dim, dim, 7, padding=3, groups=dim), permute(0, 2, 3, 1), nn.LayerNorm(dim, eps=1e-6)]
    mlp = [nn.Linear(dim, 4 * dim), nn.GELU(), ResponseNorm(4 * dim), nn.Linear(4 * dim, dim)]
    return Residual(nn.Sequential(*first, *mlp, permute(0, 3, 1, 2)))


def _stem(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, width, 4, 4), LayerNorm2d(width, eps=1e-6))


def _down(cin: int, cout: int) -> nn.Sequential:
    return nn.Sequential(LayerNorm2d(cin, eps=1e-6), nn.Conv2d(cin, cout, 2, 2))


def _convnext(block: Callable[[int], nn.Module], stages: tuple[tuple[int, int], ...]) -> list[nn.Module]:
    """`stages`: width and number of blocks of each."""
    cin = stages[0][0]
    layers: list[nn.Module] = [_stem(cin)]
    for width, count in stages:
        layers += [_down(cin, width)] if width != cin else []
        layers += [block(width) for _ in range(count)]
        cin = width
    return layers


def convnext_mini() -> nn.Module:
    return chain(
        stem=_stem(12),
        stage1=nn.Sequential(ConvNeXtBlock(12), ConvNeXtBlock(12)),
        down=_down(12, 16),
        stage2=ConvNeXtBlock(16),
        mean=mean(-2, -1),
        norm=nn.LayerNorm(16, eps=1e-6),
        fc=nn.Linear(16, 5),
    )


def convnext_tiny(classes: int = 1000) -> nn.Module:
    layers = _convnext(lambda dim: ConvNeXtBlock(dim, 4, 1e-6), ((96, 3), (192, 3), (384, 9), (768, 3)))
    return nn.Sequential(*layers, mean(-2, -1), nn.LayerNorm(768, eps=1e-6), nn.Linear(768, classes))


def convnext_v2(classes: int = 1000) -> nn.Module:
    """The atto one."""
    return nn.Sequential(*_convnext(_second_block, ((40, 2), (80, 2), (160, 6), (320, 2))), Classifier(320, classes))


# -- PoolFormer (Yu et al. 2022) ---------------------------------------------------------------------------------------


class Scale(nn.Module):
    """One learned factor per channel of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((channels, 1, 1), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def poolformer(classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 4, 2)]
    cin = 64
    for width, count in ((64, 2), (128, 2), (320, 3), (512, 1)):
        if width != cin:
            layers.append(nn.Conv2d(cin, width, 3, 2, 1))
        for _ in range(count):
            mixer = [nn.GroupNorm(1, width), Apply(lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False) - x)]
            mlp = [nn.GroupNorm(1, width), nn.Conv2d(width, 4 * width, 1), nn.GELU(), nn.Conv2d(4 * width, width, 1)]
            layers += [Residual(nn.Sequential(*mixer, Scale(width))), Residual(nn.Sequential(*mlp, Scale(width)))]
        cin = width
    return nn.Sequential(*layers, nn.GroupNorm(1, cin), Classifier(cin, classes))


# -- transformers (Dosovitskiy et al. 2021) with a stem of convolutions (Xiao et al. 2021) -----------------------------


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
    """PyTorch's own attention module, which reaches the exporters as one fused operator."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


class TransformerBlock(nn.Module):
    """Attention and MLP, each normalized first and with a shortcut."""

    def __init__(self, dim: int, attention: nn.Module, times: int = 2) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, times * dim), nn.GELU(), nn.Linear(times * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TransformerMini(nn.Module):
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


def conv_vit(classes: int = 1000, width: int = 192, depth: int = 6, heads: int = 3) -> nn.Module:
    """A small one that averages over the tokens."""
    stem = [ConvNormAct(a, b, 3, 2) for a, b in ((3, 24), (24, 48), (48, 96), (96, width))]
    blocks = [TransformerBlock(width, SelfAttention(width, heads), 4) for _ in range(depth)]
    tail = [nn.LayerNorm(width), permute(0, 2, 1), Classifier(width, classes, 1)]
    return nn.Sequential(*stem, nn.Flatten(2), permute(0, 2, 1), *blocks, *tail)
