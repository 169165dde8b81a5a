"""Tiny transformers, written as in the library transformers, so that ONNX Runtime's optimizer fuses them; and a decoder."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from tests.support.one_input import graph_of

WORDS, WIDTH, HEADS, LAYERS, LONGEST = 50, 32, 4, 2, 12


def heads(x: Tensor) -> Tensor:
    """`[B, S, N H]` as `[B, N, S, H]`."""
    return x.view((*x.size()[:-1], HEADS, WIDTH // HEADS)).permute(0, 2, 1, 3)


def joined(x: Tensor) -> Tensor:
    """`[B, N, S, H]` as `[B, S, N H]`."""
    x = x.permute(0, 2, 1, 3).contiguous()
    return x.view((*x.size()[:-2], WIDTH))


class Attention(nn.Module):
    """Attention with separate projections, as of BERT and ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / (WIDTH // HEADS) ** 0.5
        shares = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        return self.out(joined(torch.matmul(shares, v)))


class CausalAttention(nn.Module):
    """Attention with one projection and a causal mask, as of GPT-2."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = Product(3 * WIDTH), Product(WIDTH)
        self.register_buffer("bias", torch.ones(LONGEST, LONGEST).tril().bool()[None, None])

    def forward(self, x: Tensor, _: Tensor | None) -> Tensor:
        q, k, v = (heads(part) for part in self.project(x).split(WIDTH, dim=2))
        scores = torch.matmul(q, k.transpose(-1, -2)) / (WIDTH // HEADS) ** 0.5
        rows, columns = scores.size(-2), scores.size(-1)
        mask = self.bias[:, :, columns - rows : columns, :columns]
        scores = torch.where(mask, scores, torch.full([], -10000.0))
        return self.out(joined(torch.matmul(torch.softmax(scores, dim=-1), v)))


class Product(nn.Module):
    """x W + b, with W `[inputs, outputs]`."""

    def __init__(self, width: int, inputs: int = WIDTH) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(inputs, width)), nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view((*x.size()[:-1], self.weight.shape[1]))


class Block(nn.Module):
    """Attention and two layers, each beside a skip connection, with the normalizations behind (BERT) or before them."""

    def __init__(self, attention: nn.Module, *, after: bool, approximate: str = "none") -> None:
        super().__init__()
        self.attention, self.after = attention, after
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        products = approximate == "tanh"
        self.up = Product(48) if products else nn.Linear(WIDTH, 48)
        self.down = Product(WIDTH, 48) if products else nn.Linear(48, WIDTH)
        self.activation = GeluNew() if products else nn.GELU()

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.after:
            x = self.first(self.attention(x, mask) + x)
            return self.second(self.down(self.activation(self.up(x))) + x)
        x = self.attention(self.first(x), mask) + x
        return self.down(self.activation(self.up(self.second(x)))) + x


class GeluNew(nn.Module):
    """The approximation of Gelu by tanh, written out as in GPT-2."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh((2.0 / torch.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))))


class Bert(nn.Module):
    """Words, segments and a mask of words, each `[B, S]`, to `[B, S, width]`."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.position, self.segment = (nn.Embedding(n, WIDTH) for n in (WORDS, LONGEST, 2))
        self.norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(Attention(), after=True) for _ in range(LAYERS))
        self.register_buffer("places", torch.arange(LONGEST)[None])

    def forward(self, ids: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids) + self.segment(segments)
        x = self.norm(x + self.position(self.places[:, : ids.size(1)]))
        hidden = (1.0 - mask[:, None, None, :].to(torch.float32)) * -10000.0
        for block in self.blocks:
            x = block(x, hidden)
        return x


class Gpt(nn.Module):
    """Words `[B, S]` to `[B, S, width]`."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block(CausalAttention(), after=False, approximate="tanh") for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.position(torch.arange(ids.size(1))[None])
        for block in self.blocks:
            x = block(x, None)
        return self.norm(x)


class Vit(nn.Module):
    """Pictures `[B, 3, 16, 16]` to `[B, 5, width]`."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, 8)
        self.token, self.position = nn.Parameter(torch.empty(1, 1, WIDTH)), nn.Parameter(torch.empty(1, 5, WIDTH))
        self.blocks = nn.ModuleList(Block(Attention(), after=False) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, pictures: Tensor) -> Tensor:
        patches = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(pictures.size(0), -1, -1), patches], 1) + self.position
        for block in self.blocks:
            x = block(x, None)
        return self.norm(x)


DECODER = """(int64[B,S] ids, int64[B,T] mask, float[B,2,P,16] past_k, float[B,2,P,16] past_v)
    => (logits, present_k, present_v) {
        count = ReduceSum (mask, last)  fewer = Sub (count, one)  flat = Squeeze (fewer, last)
        ends = Cast <to = 6> (flat)  shape = Shape (mask)  total = Gather (shape, second)  length = Cast <to = 6> (total)
        x = Gather (words, ids)
        n = SimplifiedLayerNormalization <epsilon = 1e-5, axis = -1> (x, g1)
        qkv = MatMul (n, w_qkv)
        a, present_k, present_v = com.microsoft.GroupQueryAttention
            <num_heads = 4, kv_num_heads = 2, do_rotary = 1> (qkv, , , past_k, past_v, ends, length, cos, sin)
        o = MatMul (a, w_o)
        m, , , sum = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-5> (x, o, g2)
        gate = MatMul (m, w_gate)  up = MatMul (m, w_up)  s = Sigmoid (gate)  swish = Mul (gate, s)
        inner = Mul (swish, up)  down = MatMul (inner, w_down)
        r, , , rest = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-5> (sum, down, g3)
        logits = MatMul (r, head) }"""


def decoder() -> onnx.ModelProto:
    """A language model as ONNX Runtime GenAI builds it: no size or type behind the first fused operator is declared."""
    draw, sizes = np.random.default_rng(0), {"words": (WORDS, 32), "w_qkv": (32, 128), "w_o": (64, 32)}
    sizes |= {"w_gate": (32, 48), "w_up": (32, 48), "w_down": (48, 32), "head": (32, WORDS), "g1": (32,), "g2": (32,)}
    stored = {
        name: (draw.standard_normal(size) / 4).astype(np.float32) for name, size in (sizes | {"g3": (32,)}).items()
    }
    angles = np.outer(np.arange(16), 0.5 ** np.arange(8)).astype(np.float32)
    integers = {"last": np.array([1]), "one": np.array([1]), "second": np.array(1)}
    return graph_of(
        DECODER, domains=', "com.microsoft": 1', **stored, cos=np.cos(angles), sin=np.sin(angles), **integers
    )
