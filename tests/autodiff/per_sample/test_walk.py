"""Gradients per sample against `torch.func.vmap(torch.func.grad)`: networks, computed weights, arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import onnx_convgrad as og
from onnx_convgrad.cli.app import app
from onnx_convgrad.runtime import run
from tests.support.families import FAMILIES
from tests.support.per_sample import close, compare, looped, model, random, spread
from tests.support.zoo.signals import FourierUnit, SpectrogramNet

# -- networks ----------------------------------------------------------------------------------------------------------

SOME = ("resnet_basic", "convnext", "unet", "audio1d", "transformer")


@pytest.mark.parametrize("dynamic", [pytest.param(True, marks=pytest.mark.slow), False], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in SOME], ids=lambda f: f.name)
def test_families(family: Any, dynamic: bool) -> None:
    compare(family.build(), family.example(), dynamic=dynamic, least=15)


class Embedded(nn.Module):
    """A class token expanded to the batch, an embedding table, attention and a scale per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.position = nn.Parameter(torch.randn(1, 5, 16))
        self.block = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0, activation="gelu")
        self.scale = nn.Parameter(torch.randn(16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head((self.block(x) * self.scale)[:, 0])


class Factored(nn.Module):
    """A low-rank update of a weight, a matrix per head, and a table indexed by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = (nn.Parameter(torch.randn(s)) for s in ((6, 6), (2, 6), (6, 2)))
        self.heads = nn.Parameter(torch.randn(2, 3, 4))
        self.table = nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.base + self.up @ self.down)
        y = y.reshape(y.shape[0], y.shape[1], 2, 3).transpose(1, 2) @ self.heads
        return y + nn.functional.embedding((x[:, :, 0].abs() * 2).clamp(0, 4).long(), self.table).unsqueeze(1)


class Placed(nn.Module):
    """Features that replace others, and positions at constant indices. The older exporter also indexes the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.some = nn.Linear(4, 6), nn.Linear(4, 2)
        self.register_buffer("rows", torch.tensor([2, 0, 1]))
        self.register_buffer("columns", torch.tensor([0, 3, 5]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.all(x).clone()
        y[:, :, 1:3] = 2 * self.some(x)
        y[:, 0] = 1.5
        return torch.tanh(y)[:, self.rows, self.columns] + y.mean(1)[:, :3]


class Masked(nn.Module):
    """Attention with a mask indexed by samples and positions, and token types, as in the library transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.query = nn.Embedding(2, 4), nn.Linear(4, 4)
        self.key = nn.Linear(4, 4, bias=False)  # a bias has no gradient: the softmax is the same without
        self.register_buffer("kind", torch.zeros(1, 16, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, :, 0] > -1.0
        x = x + self.kinds(self.kind[:, : x.shape[1]].expand(x.shape[0], -1))
        of, at = torch.arange(x.shape[0])[:, None, None, None], torch.arange(x.shape[1])[None, None, None, :]
        scores = (self.query(x) @ self.key(x).transpose(1, 2))[:, None]
        return torch.softmax(torch.where(mask[of, at], scores, -1e4), -1)[:, 0] @ x


class Repeated(nn.Module):
    """Position scores that all samples share, repeated for each sample and head, as in DeBERTa."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(3000, 4, bias=False)  # too large for the exporter to fold
        self.register_buffer("positions", torch.randn(5, 3000) / 3000)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query(x).view(x.shape[0], 5, 2, 2).transpose(1, 2).flatten(0, 1)
        shared = torch.tanh(self.key(self.positions)).view(5, 2, 2).transpose(0, 1)
        return (heads @ shared.repeat(x.shape[0], 1, 1).transpose(1, 2)).view(x.shape[0], 2, 25)


class Stateful(nn.Module):
    """A recurrent network with an initial state of zeros, one row per sample."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cells, self.last = kind(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x)[0][:, -1])


class ConvolutionalState(nn.Module):
    """A recurrent layer of convolutions: for the initial state of zeros the convolution yields its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.kept = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.tanh(self.seen(x) + self.kept(x.new_zeros(x.shape[0], 4, *x.shape[2:])))
        return torch.tanh(self.seen(x) + self.kept(state))


class RunningMean(nn.Module):
    """A running mean with a learned decay, from zeros of the shape of the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.seen = nn.Parameter(torch.rand(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.seen(torch.cat([x[:, :1], x], 1)[:, 1:])  # renames the number of samples
        state = torch.zeros_like(x[:, 0])
        for i in range(x.shape[1]):
            state = torch.sigmoid(self.decay) * state + x[:, i]
        return state


def volumes() -> nn.Module:
    first = [nn.Conv3d(2, 4, 3, padding=1, bias=False), nn.InstanceNorm3d(4, affine=True), nn.SiLU()]
    second = [nn.ConvTranspose3d(4, 6, 2, 2, groups=2), nn.ReLU(), nn.Conv3d(6, 6, 3, groups=6)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(6 * 8 * 8 * 6, 3))


def norms() -> nn.Module:
    first = [nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.GroupNorm(2, 6), nn.PReLU(6)]
    second = [nn.Conv2d(6, 8, 3, 2, groups=2), nn.BatchNorm2d(8), nn.Flatten(2)]
    return nn.Sequential(*first, *second, nn.Linear(16, 6), nn.LayerNorm((8, 6)))


def signals() -> nn.Module:
    first = [nn.Conv1d(2, 4, 5, padding=4, dilation=2), nn.BatchNorm1d(4), nn.ELU()]
    return nn.Sequential(*first, nn.ConvTranspose1d(4, 6, 3, 2, 1, output_padding=1))


STATES = {kind.__name__: partial(Stateful, kind) for kind in (nn.RNN, nn.LSTM, nn.GRU)}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, str, int]] = {
    "embedded": (Embedded, (3, 3, 8, 8), "old new", "dynamic", 1),
    "factored": (Factored, (3, 5, 6), "old new", "dynamic", 1),
    "three axes": (volumes, (3, 2, 5, 5, 4), "old new", "dynamic", 1),
    "norms": (norms, (4, 3, 9, 9), "old new", "dynamic", 1),
    "one axis": (signals, (5, 2, 13), "old new", "dynamic", 1),
    "replaced features": (Placed, (3, 5, 4), "old new", "dynamic static", 4),
    "mask of samples": (Masked, (3, 5, 4), "old new", "dynamic", 3),
    "copies for each sample": (Repeated, (3, 5, 4), "new", "dynamic", 3),
    **{name: (build, (3, 5, 4), "old", "dynamic static", 6) for name, build in STATES.items()},
    "convolved state": (ConvolutionalState, (2, 3, 6, 5), "old new", "dynamic static", 2),
    "running mean": (RunningMean, (3, 5, 4), "old new", "dynamic static", 2),
    "spectrogram": (SpectrogramNet, (3, 1, 120), "new", "static", 1),
    "Fourier unit": (FourierUnit, (3, 3, 6, 8), "new", "static", 1),
}
"""Network, shape of its input, exporters, batch sizes, and the least number of parameters that keep their values."""

WAYS = [
    (name, exporter, batch)
    for name, (_, _, exporters, batches, _) in NETWORKS.items()
    for exporter in exporters.split()
    for batch in batches.split()
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "exporter", "batch"), WAYS)
def test_networks(name: str, exporter: str, batch: str) -> None:
    build, shape, _, _, least = NETWORKS[name]
    torch.manual_seed(0)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    compare(spread(build()), x, dynamo=exporter == "new", dynamic=batch == "dynamic", least=least)


# -- models in text form -----------------------------------------------------------------------------------------------


def test_a_mean_over_the_samples_is_a_target() -> None:
    """Each sample gets its contribution to the gradient."""
    body = "z = MatMul (x, w)  s = Softplus (z)  mean = ReduceMean <keepdims = 0> (s)  y = Mul (mean, two)"
    proto = model(f"g (float[N, 4] x) => (float y) {{ {body} }}", w=random(4, 3), two=2.0)
    feed = {"x": random(5, 4)}
    each = run(og.augment(proto, per_sample=True), feed)["w_grad"]
    alone = looped(proto, feed)["w_grad"]
    close(each, alone / 5, 0, "w")
    close(each.sum(0), run(og.augment(proto), feed)["w_grad"], 0, "w")


def test_inputs_keep_their_shape_and_unreached_parameters_get_zeros() -> None:
    proto = model("g (float[N, 4] x) => (float[N, 3] y, float[N, 4] u) { y = MatMul (x, w)  u = Mul (x, v) }",
                  w=random(4, 3), v=random(4))  # fmt: skip
    feed = {"x": random(2, 4), "y_grad": random(2, 3)}
    with pytest.warns(UserWarning, match="derivative is zero"):
        each = run(og.augment(proto, wrt=["x", "w", "v"], of="y", per_sample=True), feed)
    assert each["x_grad"].shape == (2, 4)
    assert each["v_grad"].shape == (2, 4) and not each["v_grad"].any()
    with pytest.warns(UserWarning, match="derivative is zero"):
        norms = run(og.augment(proto, wrt=["x", "w", "v"], of="y", per_sample="squared_norm"), feed)
    close(norms["x_grad_squared_norm"], (each["x_grad"] ** 2).sum(1), 0, "x")
    assert norms["v_grad_squared_norm"].shape == (2,) and not norms["v_grad_squared_norm"].any()


CHANGED: dict[str, tuple[str, Mapping[str, Any]]] = {
    "standardized": (
        "m = ReduceMean (w, along)  c = Sub (w, m)  s = Mul (c, c)  v = ReduceMean (s, along)  d = Sqrt (v)  u = Div (c, d)",
        {"w": random(4, 3), "along": np.array([0])},
    ),
    "of a length": (
        "n = ReduceL2 (w, along)  d = Div (w, n)  u = Mul (d, l)",
        {"w": random(4, 3), "l": random(1, 3), "along": np.array([0])},
    ),
    "cut and joined": (
        "a, b = Split <axis = 0, num_outputs = 2> (w)  s = Mul (a, b)  u = Concat <axis = 0> (b, s)", {"w": random(4, 3)},
    ),
    "sums": ("c = CumSum (w, first)  t = CastLike (c, w)  u = Relu (t)", {"w": random(4, 3), "first": np.array(0)}),
    "a product": ('u = Einsum <equation = "ij,jk->ik"> (w, v)', {"w": random(4, 2), "v": random(2, 3)}),
    "probabilities": ("u = Softmax <axis = 0> (w)", {"w": random(4, 3)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("batch", ["5", "N"])
def test_weights_that_are_computed(name: str, batch: str) -> None:
    """Functions of a weight, such as weight standardization, are differentiated for each sample."""
    body, weights = CHANGED[name]
    proto = model(f"g (float[{batch}, 4] x) => (float[{batch}, 3] y) {{ {body}  y = MatMul (x, u) }}", **weights)
    wrt = [key for key, value in weights.items() if value.dtype.kind == "f"]
    feed = {"x": random(5, 4), "y_grad": random(5, 3)}
    want = looped(
        model(f"g (float[1, 4] x) => (float[1, 3] y) {{ {body}  y = MatMul (x, u) }}", **weights), feed, wrt=wrt
    )
    each = run(og.vjp(proto, wrt=wrt, per_sample=True), feed)
    norms = run(og.vjp(proto, wrt=wrt, per_sample="squared_norm"), feed)
    for key in wrt:
        close(each[f"{key}_grad"], want[f"{key}_grad"], 0, key)
        close(norms[f"{key}_grad_squared_norm"], (want[f"{key}_grad"].reshape(5, -1) ** 2).sum(1), 0, key)
    if batch == "N":
        none = run(og.vjp(proto, wrt=wrt, per_sample=True), {k: v[:0] for k, v in feed.items()})
        assert {k: v.shape for k, v in none.items()} == {f"{k}_grad": (0, *weights[k].shape) for k in wrt}


def test_arguments() -> None:
    proto = model("g (float[N, 4] x) => (float[N, 4] y) { y = Mul (x, w) }", w=random(4))
    with pytest.raises(og.errors.ArgumentError, match="per_sample must be False, True or 'squared_norm', not 'norm'"):
        og.augment(proto, per_sample="norm")
    alone = model("g () => (float[4] y) { y = Mul (w, w) }", w=random(4))
    with pytest.raises(og.errors.ArgumentError, match="needs an input with a batch axis"):
        og.augment(alone, per_sample=True)


def test_command_line(tmp_path: Any) -> None:
    proto = model("g (float[N, 4] x) => (float[N, 3] y) { y = MatMul (x, w) }", w=random(4, 3))
    onnx.save(proto, tmp_path / "m.onnx")
    for flag, name, shape in (("--per-sample", "w_grad", (2, 4, 3)), ("--squared-norm", "w_grad_squared_norm", (2,))):
        done = CliRunner().invoke(
            app, ["augment", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "o.onnx"), flag, "-q"]
        )
        assert done.exit_code == 0, done.output
        got = run(onnx.load(tmp_path / "o.onnx"), {"x": random(2, 4), "y_grad": random(2, 3)})
        assert got[name].shape == shape
