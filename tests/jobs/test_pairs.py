"""Jobs whose loss compares several outputs: siamese networks, CLIP, heads that agree, an inner penalty."""

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


def _normal(step: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, step]).standard_normal(shape, dtype=np.float32)


class Encoder(nn.Sequential):
    """A small convolutional encoder to 8 numbers."""

    def __init__(self, channels: int = 1) -> None:
        super().__init__(
            nn.Conv2d(channels, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 8)
        )


# -- siamese -----------------------------------------------------------------------------------------------------------


class Siamese(nn.Module):
    """One encoder for both images of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(left), self.encoder(right)


def contrastive(e: Emitter, a: ir.Value, b: ir.Value, alike: ir.Value) -> ir.Value:
    """Hadsell et al. 2006: pairs that are alike are drawn together, others pushed apart up to a margin of 1."""
    distance = e.op("Sqrt", e.add(e.reduce_sum(e.square(e.sub(a, b)), [1], keepdims=False), 1e-6))
    apart = e.op("Relu", e.sub(1, distance))
    return e.add(e.mul(alike, e.square(distance)), e.mul(e.sub(1, alike), e.square(apart)))


def torch_contrastive(a: Tensor, b: Tensor, target: Tensor, **_: Tensor) -> Tensor:
    distance = ((a - b).square().sum(1) + 1e-6).sqrt()
    return (target * distance.square() + (1 - target) * (1 - distance).relu().square()).mean()


def pairs(step: int) -> Batch:
    left, right = (_normal(step, 6, 1, 8, 8, seed=seed) for seed in (0, 1))
    return {"left": left, "right": right, "target": (np.arange(6) % 2).astype(np.float32)}


SIAMESE = Job(
    Siamese,
    ("left", "right"),
    ("a", "b"),
    pairs,
    og.losses.Custom(contrastive, reads=["a", "b"], shape=["N"]),
    torch_contrastive,
)

# -- CLIP --------------------------------------------------------------------------------------------------------------


class Clip(nn.Module):
    """An encoder of images, one of words, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.words = Encoder(3), nn.Embedding(20, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        text = self.words(words).mean(1)
        return F.normalize(self.image(image)), F.normalize(text), self.scale.exp()


def clip(e: Emitter, image: ir.Value, text: ir.Value, scale: ir.Value) -> ir.Value:
    """Radford et al. 2021: each image has its text, and each text its image."""
    logits = e.mul(e.op("MatMul", image, e.transpose(text, [1, 0])), scale)
    count = e.dim(image, 0)
    own = e.op("EyeLike", logits)
    both = [e.mul(e.op("LogSoftmax", logits, axis=axis), own) for axis in (0, 1)]
    total = e.sum([e.op("ReduceSum", log, keepdims=0) for log in both])
    return e.mul(e.averaged(total, count), -0.5)


def torch_clip(image: Tensor, text: Tensor, scale: Tensor, /, **_: Tensor) -> Tensor:
    logits, own = image @ text.T * scale, torch.arange(len(image))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def captions(step: int) -> Batch:
    words = np.random.default_rng(step).integers(0, 20, (5, 4))
    return {"image": _normal(step, 5, 3, 8, 8), "words": words}


CLIP = Job(
    Clip,
    ("image", "words"),
    ("image_embedding", "text_embedding", "temperature"),
    captions,
    og.losses.Custom(clip, reads=["image_embedding", "text_embedding", "temperature"]),
    torch_clip,
    {"wrt": ["parameters", "scale"]},  # one number may be a constant: it is named
)

# -- heads that agree, and a penalty on an inner value -------------------------------------------------------------------


class TwoHeads(nn.Module):
    """Two classifiers on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = Encoder(), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.trunk(x)
        return self.one(h), self.two(h), h


def agreement(e: Emitter, one: ir.Value, two: ir.Value) -> ir.Value:
    return e.op("ReduceMean", e.square(e.sub(e.op("Softmax", one, axis=1), e.op("Softmax", two, axis=1))), keepdims=0)


def torch_heads(one: Tensor, two: Tensor, h: Tensor, one_target: Tensor, two_target: Tensor, **_: Tensor) -> Tensor:
    classes = F.cross_entropy(one, one_target) + F.cross_entropy(two, two_target)
    return classes + (one.softmax(1) - two.softmax(1)).square().mean() + 0.1 * h.abs().mean()


def classes(step: int) -> Batch:
    labels = np.random.default_rng(step).integers(0, 4, (2, 6))
    return {"x": _normal(step, 6, 1, 8, 8), "one_target": labels[0], "two_target": labels[1]}


HEADS = Job(
    TwoHeads,
    ("x",),
    ("one", "two", "h"),
    classes,
    [
        og.losses.Term(og.losses.CrossEntropy(), "one"),
        og.losses.Term(og.losses.CrossEntropy(), "two"),
        og.losses.Custom(agreement, reads=["one", "two"]),
        (0.1, og.losses.Custom(lambda e, h: e.op("ReduceMean", e.op("Abs", h), keepdims=0), reads=["h"])),
    ],
    torch_heads,
)


@pytest.mark.parametrize("job", [SIAMESE, CLIP, HEADS], ids=["siamese", "CLIP", "heads that agree"])
def test_losses_of_twenty_steps_equal_those_of_pytorch(job: Job) -> None:
    ours, theirs = losses(job)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert theirs[-1] != theirs[0]
