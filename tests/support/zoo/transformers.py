"""Transformers for images, text and sound, with PyTorch's fused attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo.layers import Apply, Classifier, chain, mean, permute


class Attention(nn.Module):
    """Several heads, each `softmax(q k' / sqrt(width)) v`; `causal`: no token sees a later one."""

    def __init__(self, dim: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        n, length, dim = x.shape
        parts = self.qkv(x).reshape(n, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=self.causal)
        return self.proj(y.transpose(1, 2).reshape(n, length, dim))


class Block(nn.Module):
    """Attention and MLP, each normalized first and with a shortcut."""

    def __init__(self, dim: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), attention
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Positions(nn.Module):
    """A learned vector for each position, added to the tokens."""

    def __init__(self, length: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(length, dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


# -- images: Dosovitskiy et al. 2021 -----------------------------------------------------------------------------------


class ClassToken(nn.Module):
    """A learned token in front of the others."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(1, 1, dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.weight.expand(len(x), -1, -1), x], 1)


def vit(
    classes: int = 1000, dim: int = 384, depth: int = 12, heads: int = 6, size: int = 224, patch: int = 16
) -> nn.Module:
    """ViT-S/16."""
    return chain(
        patches=nn.Sequential(nn.Conv2d(3, dim, patch, patch), nn.Flatten(2), permute(0, 2, 1)),
        token=ClassToken(dim),
        positions=Positions(1 + (size // patch) ** 2, dim),
        blocks=nn.Sequential(*(Block(dim, Attention(dim, heads)) for _ in range(depth))),
        norm=nn.LayerNorm(dim),
        first=Apply(lambda x: x[:, 0]),
        head=nn.Linear(dim, classes),
    )


# -- images in windows: Liu et al. 2021 --------------------------------------------------------------------------------


class WindowAttention(nn.Module):
    """Attention inside square windows of an NHWC image, with a bias for each offset; every second layer shifts them."""

    def __init__(self, dim: int, heads: int, size: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.shift = shift if size > window else 0
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.table = nn.Parameter(0.02 * torch.randn((2 * window - 1) ** 2, heads))
        at = torch.stack(torch.meshgrid(*2 * [torch.arange(window)], indexing="ij")).flatten(1)
        offset = at[:, :, None] - at[:, None] + window - 1
        self.register_buffer("index", (offset[0] * (2 * window - 1) + offset[1]).flatten(), persistent=False)
        self.register_buffer("mask", self._mask(size) if self.shift else None, persistent=False)

    def _mask(self, size: int) -> Tensor:
        """-100 between pixels of a window that were not neighbors before the shift, [windows, 1, pixels, pixels]."""
        line = torch.zeros(size)
        line[-self.window : -self.shift], line[-self.shift :] = 1, 2
        regions = self._windows((3 * line[:, None] + line)[None, :, :, None]).squeeze(-1)
        return (regions[:, None, :] != regions[:, :, None]).float().mul(-100).unsqueeze(1)

    def _windows(self, x: Tensor) -> Tensor:
        """[N, H, W, C] -> [windows, pixels, C]."""
        n, h, w, c = x.shape
        p = self.window
        return x.reshape(n, h // p, p, w // p, p, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, p * p, c)

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, dim = x.shape
        p, back = self.window, (self.shift, self.shift)
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2)) if self.shift else x
        x = self._windows(x)
        count, pixels, _ = x.shape
        q, k, v = self.qkv(x).reshape(count, pixels, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * (dim // self.heads) ** -0.5) @ k.transpose(-2, -1)
        scores = scores + self.table[self.index].view(pixels, pixels, -1).permute(2, 0, 1)
        if self.mask is not None:
            scores = (scores.view(n, -1, self.heads, pixels, pixels) + self.mask).view(
                count, self.heads, pixels, pixels
            )
        y = self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(count, pixels, dim))
        y = y.reshape(n, h // p, w // p, p, p, dim).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, dim)
        return torch.roll(y, back, (1, 2)) if self.shift else y


def _merge(dim: int) -> nn.Module:
    """Each 2 x 2 pixels become one, of twice the width."""
    corners = Apply(lambda x: torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1))
    return nn.Sequential(corners, nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False))


def swin(
    classes: int = 1000, dim: int = 96, depths: tuple[int, ...] = (2, 2, 6, 2), size: int = 224, window: int = 7
) -> nn.Module:
    """Swin-T."""
    layers: list[nn.Module] = [nn.Conv2d(3, dim, 4, 4), permute(0, 2, 3, 1), nn.LayerNorm(dim)]
    size //= 4
    for stage, depth in enumerate(depths):
        if stage:
            layers.append(_merge(dim))
            dim, size = 2 * dim, size // 2
        shifts = [i % 2 * (window // 2) for i in range(depth)]
        layers += [Block(dim, WindowAttention(dim, dim // 32, size, window, shift)) for shift in shifts]
    return nn.Sequential(*layers, nn.LayerNorm(dim), mean(1, 2), nn.Linear(dim, classes))


# -- text: Radford et al. 2019 -----------------------------------------------------------------------------------------


class Gpt(nn.Module):
    """Token numbers [N, T] to logits [N T, words]; the table of words is also the matrix of the logits."""

    def __init__(self, words: int = 5000, dim: int = 384, depth: int = 6, heads: int = 6, length: int = 256) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, dim), Positions(length, dim)
        self.blocks = nn.Sequential(*(Block(dim, Attention(dim, heads, causal=True)) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.positions(self.words(tokens))))
        return F.linear(x, self.words.weight).flatten(0, 1)


# -- sound: Radford et al. 2023 ----------------------------------------------------------------------------------------


def whisper_encoder(
    classes: int = 100, dim: int = 384, depth: int = 4, heads: int = 6, bands: int = 80, frames: int = 1000
) -> nn.Module:
    """The encoder of Whisper tiny, with a head that names the language."""
    return chain(
        stem=nn.Sequential(
            nn.Conv1d(bands, dim, 3, 1, 1), nn.GELU(), nn.Conv1d(dim, dim, 3, 2, 1), nn.GELU(), permute(0, 2, 1)
        ),
        positions=Positions(frames // 2, dim),
        blocks=nn.Sequential(*(Block(dim, Attention(dim, heads)) for _ in range(depth))),
        norm=nn.LayerNorm(dim),
        last=permute(0, 2, 1),
        head=Classifier(dim, classes, 1),
    )
