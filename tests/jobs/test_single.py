"""Jobs with one network and labels: classes, masks, boxes, words, sequences, forecasts, noise, a teacher, a voice."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onnx_convgrad as og
from onnx_convgrad.ir.emit import Emitter
from tests.jobs.jobs import Batch, Job, losses

pytestmark = pytest.mark.slow


def normal(step: int, *shape: int) -> np.ndarray:
    return np.random.default_rng([7, step]).standard_normal(shape, dtype=np.float32)


def whole(step: int, below: int, *shape: int) -> np.ndarray:
    return np.random.default_rng([9, step]).integers(0, below, shape)


# -- classes and masks -------------------------------------------------------------------------------------------------


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, 5)
    )


CLASSIFIER = Job(
    classifier,
    ("x",),
    ("y",),
    lambda step: {"x": normal(step, 8, 1, 8, 8), "target": whole(step, 5, 8)},
    og.losses.CrossEntropy(label_smoothing=0.1),
    lambda y, target, **_: F.cross_entropy(y, target, label_smoothing=0.1),
)


class Segmenter(nn.Module):
    """A U-Net of one level."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x).relu()
        return self.out(torch.cat([skip, self.up(self.inner(F.max_pool2d(skip, 2)).relu())], 1))


def dice(y: Tensor, target: Tensor) -> Tensor:
    share, own = y.softmax(1), F.one_hot(target, 4).movedim(-1, 1)
    both, sizes = (share * own).sum((2, 3)), (share + own).sum((2, 3))
    return 1 - ((2 * both + 1) / (sizes + 1)).mean()


def entropy_and_dice(e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
    return e.add(og.losses.CrossEntropy()(e, y, target), og.losses.Dice()(e, y, target))


SEGMENTER = Job(
    Segmenter,
    ("x",),
    ("y",),
    lambda step: {"x": normal(step, 2, 3, 8, 8), "target": whole(step, 4, 2, 8, 8)},
    entropy_and_dice,
    lambda y, target, **_: F.cross_entropy(y, target) + dice(y, target),
)


class Detector(nn.Module):
    """A dense detector: for each cell whether an object is there, its class and its box."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.SiLU())
        self.there, self.kind, self.box = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 3, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.trunk(x)
        return self.there(h), self.kind(h), self.box(h)


def scene(step: int) -> Batch:
    there = (whole(step, 3, 2, 1, 4, 4) == 0).astype(np.float32)
    kind = np.where(there[:, 0] > 0, whole(step + 99, 3, 2, 4, 4), -100)
    return {
        "x": normal(step, 2, 3, 8, 8),
        "there_target": there,
        "kind_target": kind,
        "box_target": normal(step + 50, 2, 4, 4, 4),
    }


def detection(there: Tensor, kind: Tensor, box: Tensor, **labels: Tensor) -> Tensor:
    found = F.binary_cross_entropy_with_logits(there, labels["there_target"])
    return found + 0.5 * F.cross_entropy(kind, labels["kind_target"]) + 2 * F.huber_loss(box, labels["box_target"])


DETECTOR = Job(
    Detector,
    ("x",),
    ("there", "kind", "box"),
    scene,
    {
        "there": "bce_with_logits",
        "kind": (0.5, og.losses.CrossEntropy(ignore_index=-100)),
        "box": (2.0, og.losses.Huber()),
    },
    detection,
)

# -- words and sequences -----------------------------------------------------------------------------------------------


class Gpt(nn.Module):
    """A causal transformer of one block."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 16), nn.Parameter(0.1 * torch.randn(6, 16))
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 11, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        h = self.words(words) + self.places
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm1(h)).chunk(3, -1))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(h + self.mlp(self.norm2(h)))


GPT = Job(
    Gpt,
    ("words",),
    ("logits",),
    lambda step: {"words": whole(step, 11, 3, 6), "target": whole(step + 1, 11, 3, 6)},
    og.losses.CrossEntropy(axis=-1),
    lambda logits, target, **_: F.cross_entropy(logits.transpose(1, 2), target),
)


class Listener(nn.Module):
    """A GRU over frames of sound, with letters as classes."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.letters = nn.GRU(5, 8, batch_first=True, bidirectional=True), nn.Linear(16, 6)

    def forward(self, sound: Tensor) -> Tensor:
        return self.letters(self.gru(sound)[0])


def ctc(y: Tensor, target: Tensor, target_lengths: Tensor, **_: Tensor) -> Tensor:
    frames = torch.full((len(y),), y.shape[1])
    return F.ctc_loss(y.log_softmax(2).transpose(0, 1), target, frames, target_lengths)


CTC = Job(
    Listener,
    ("sound",),
    ("letters",),
    lambda step: {
        "sound": normal(step, 3, 12, 5),
        "target": 1 + whole(step, 5, 3, 4),
        "target_lengths": 2 + whole(step + 3, 3, 3),
    },
    og.losses.CTC(),
    ctc,
)


class Forecaster(nn.Module):
    """The next days of a series from the last ones and from covariates that are known ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.known, self.out = nn.LSTM(2, 12, batch_first=True), nn.Linear(3, 12), nn.Linear(12, 1)

    def forward(self, past: Tensor, ahead: Tensor) -> Tensor:
        state = self.lstm(past)[0][:, -1:]
        return self.out((state + self.known(ahead)).tanh()).squeeze(-1)


def where_known(e: Emitter, y: ir.Value, target: ir.Value, measured: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The mean square over the days that were measured."""
    return e.mul(measured, e.square(e.sub(y, target))), measured


def masked(y: Tensor, target: Tensor, target_measured: Tensor, **_: Tensor) -> Tensor:
    return (target_measured * (y - target).square()).sum() / target_measured.sum()


FORECASTER = Job(
    Forecaster,
    ("past", "ahead"),
    ("y",),
    lambda step: {
        "past": normal(step, 4, 9, 2),
        "ahead": normal(step + 30, 4, 5, 3),
        "target": normal(step + 60, 4, 5),
        "target_measured": (whole(step, 3, 4, 5) > 0).astype(np.float32),
    },
    where_known,
    masked,
)

# -- noise and teachers ------------------------------------------------------------------------------------------------


class Vae(nn.Module):
    """A variational autoencoder whose noise is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + noise * (spread / 2).exp()), mean, spread


def divergence(e: Emitter, mean: ir.Value, spread: ir.Value) -> ir.Value:
    """Kullback-Leibler divergence from the normal distribution (Kingma and Welling 2014), a number per sample."""
    terms = e.sub(e.add(1, spread), e.add(e.square(mean), e.op("Exp", spread)))
    return e.mul(e.reduce_sum(terms, [1], keepdims=False), -0.5)


def evidence(logits: Tensor, mean: Tensor, spread: Tensor, logits_target: Tensor, **_: Tensor) -> Tensor:
    apart = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
    return F.binary_cross_entropy_with_logits(logits, logits_target) + 0.1 * apart


VAE = Job(
    Vae,
    ("x", "noise"),
    ("logits", "mean", "spread"),
    lambda step: {
        "x": normal(step, 6, 16),
        "noise": normal(step + 20, 6, 4),
        "logits_target": (normal(step, 6, 16) > 0).astype(np.float32),
    },
    [
        og.losses.Term(og.losses.BCEWithLogits(), "logits", target="logits_target"),
        (0.1, og.losses.Custom(divergence, reads=["mean", "spread"])),
    ],
    evidence,
)


class Denoiser(nn.Module):
    """Predicts the noise in an image from the image and the time."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.time, self.leave = (
            nn.Conv2d(1, 8, 3, padding=1),
            nn.Linear(2, 8),
            nn.Conv2d(8, 1, 3, padding=1),
        )
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        clock = self.time(torch.stack([t.sin(), t.cos()], -1))
        return self.leave(F.silu(self.norm(self.enter(x)) + clock[:, :, None, None]))


DIFFUSION = Job(
    Denoiser,
    ("x", "t"),
    ("noise",),
    lambda step: {"x": normal(step, 4, 1, 8, 8), "t": normal(step, 4), "target": normal(step + 40, 4, 1, 8, 8)},
    "mse",
    lambda noise, target, **_: F.mse_loss(noise, target),
)


def distilled(y: Tensor, target: Tensor, **_: Tensor) -> Tensor:
    return 4 * F.kl_div((y / 2).log_softmax(1), (target / 2).softmax(1), reduction="batchmean")


DISTILLATION = Job(
    classifier,
    ("x",),
    ("y",),
    lambda step: {"x": normal(step, 8, 1, 8, 8), "target": normal(step + 70, 8, 5)},
    og.losses.KLDiv(temperature=2.0, reduction="batchmean"),
    distilled,
)

# -- voices ------------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Dilated convolutions, each added to what it takes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dilated = nn.ModuleList(nn.Conv1d(channels, channels, 3, dilation=d, padding=d) for d in (1, 3))

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.dilated:
            x = x + convolution(F.leaky_relu(x, 0.1))
        return x


class Vocoder(nn.Module):
    """HiFi-GAN's generator, and what two layers of a fixed discriminator compute of real sounds and of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv1d(6, 16, 7, padding=3), nn.Conv1d(4, 1, 7, padding=3)
        self.up = nn.ModuleList(nn.ConvTranspose1d(2 * c, c, 8, stride=4, padding=2) for c in (8, 4))
        self.residual = nn.ModuleList(map(Residual, (8, 4)))
        self.judge = nn.ModuleList([nn.Conv1d(1, 4, 15, stride=4, padding=7), nn.Conv1d(4, 8, 9, stride=4, groups=4)])
        self.judge.requires_grad_(requires_grad=False)

    def forward(self, latent: Tensor, real: Tensor) -> tuple[Tensor, ...]:
        x = self.enter(latent)
        for up, residual in zip(self.up, self.residual, strict=True):
            x = residual(up(F.leaky_relu(x, 0.1)))
        sound = self.leave(F.leaky_relu(x)).tanh()
        first = F.leaky_relu(self.judge[0](torch.cat([real, sound])), 0.1)
        return sound, first, F.leaky_relu(self.judge[1](first), 0.1)


WINDOW = np.hanning(65)[:-1].astype(np.float32)
BANDS = np.abs(np.random.default_rng(3).standard_normal((33, 8))).astype(np.float32)
"""Weights of frequencies in bands, in place of mel's."""


def bands_of(e: Emitter, sound: ir.Value) -> ir.Value:
    signal = e.op("Squeeze", sound, e.ints([1]))
    waves = e.op("STFT", signal, e.const(np.int64(16)), e.const(WINDOW), e.const(np.int64(64)))
    size = e.op("Sqrt", e.add(e.reduce_sum(e.square(waves), [3], keepdims=False), 1e-6))
    return e.op("Log", e.add(e.op("MatMul", size, e.const(BANDS)), 1e-3))


def apart(e: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    return e.op("ReduceMean", e.op("Abs", e.sub(a, b)), keepdims=0)


def spectral(e: Emitter, sound: ir.Value, real: ir.Value) -> ir.Value:
    return apart(e, bands_of(e, sound), bands_of(e, real))


def matching(e: Emitter, *layers: ir.Value) -> ir.Value:
    return e.sum([apart(e, *e.ops("Split", layer, outputs=2, axis=0, num_outputs=2)) for layer in layers])


def reconstruction(sound: Tensor, *layers: Tensor, real: Tensor, **_: Tensor) -> Tensor:
    def bands(x: Tensor) -> Tensor:
        window = torch.from_numpy(WINDOW).to(x)
        waves = torch.stft(x.squeeze(1), 64, 16, window=window, center=False, return_complex=True)
        size = (waves.real.square() + waves.imag.square() + 1e-6).sqrt()
        return (size.transpose(1, 2) @ torch.from_numpy(BANDS).to(x) + 1e-3).log()

    features = [F.l1_loss(*layer.chunk(2)) for layer in layers]
    return 45 * F.l1_loss(bands(sound), bands(real)) + 2 * sum(features, torch.zeros(()))


VOCODER = Job(
    Vocoder,
    ("latent", "real"),
    ("sound", "first", "second"),
    lambda step: {"latent": normal(step, 3, 6, 16), "real": np.tanh(normal(step + 80, 3, 1, 256))},
    [
        (45.0, og.losses.Custom(spectral, reads=["sound", "real"])),
        (2.0, og.losses.Custom(matching, reads=["first", "second"])),
    ],
    reconstruction,
    {"freeze": "judge.*"},
)

JOBS = {
    "classifier": CLASSIFIER,
    "segmenter": SEGMENTER,
    "detector": DETECTOR,
    "GPT": GPT,
    "CTC": CTC,
    "forecaster": FORECASTER,
    "VAE": VAE,
    "diffusion": DIFFUSION,
    "distillation": DISTILLATION,
    "vocoder": VOCODER,
}


@pytest.mark.parametrize("name", JOBS)
def test_losses_of_twenty_steps_equal_those_of_pytorch(name: str) -> None:
    ours, theirs = losses(JOBS[name])
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert theirs[-1] != theirs[0]
