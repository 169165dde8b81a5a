"""Mixup and CutMix: every batch is mixed with a random order of itself; labels are mixed like the samples.

Mixup (Zhang et al. 2018) adds samples i and j as lambda x[i] + (1 - lambda) x[j]. CutMix (Yun et al. 2019) pastes a
rectangle of x[j] with the share 1 - lambda of the area into x[i], where it is cut off at the border; lambda is then the
share of x[i] that is left. Lambda is drawn from Beta(a, a) once for a batch. With both, each batch gets one at random. The
numbers drawn depend on seed, epoch and the first sample of the batch alone, so that a resumed run repeats them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnx_convgrad.base.names import as_names, check_names
from onnx_convgrad.data.pictures import layout_of
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.manifest import Manifest, Port

_BETA = {"mixup": 0.2, "cutmix": 1.0}
"""Name -> a of Beta(a, a), as the papers have it for ImageNet."""

MIXINGS = tuple(_BETA)

_STREAM = 0x6D6978
"""Number mixed into the seed, so that these random numbers differ from those that change single images."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """Random mixtures of the samples of a batch.

    Attributes:
        names: Of `mixup` and `cutmix`.
        drawn: Seed and epoch; `None`: batches stay as they are.
    """

    names: tuple[str, ...] = ()
    drawn: tuple[int, int] | None = None

    @classmethod
    def named(cls, names: Iterable[str] | str) -> Mixing:
        """Mixing by names; raises `ArgumentError` for an unknown one."""
        given = as_names(names, "augment")
        check_names(given, MIXINGS, "augmentation of arrays:")
        return cls(tuple(dict.fromkeys(given)))

    def __bool__(self) -> bool:
        return bool(self.names)

    def drawing(self, seed: int, epoch: int) -> Mixing:
        """The mixtures of an epoch."""
        return replace(self, drawn=(seed, epoch))

    def check(self, manifest: Manifest) -> None:
        """Raise `ArgumentError` if the inputs of a program cannot be mixed."""
        if not self:
            return
        shown = " and ".join(self.names)
        for port in manifest.targets:
            if np.dtype(port.dtype).kind != "f":
                raise ArgumentError(
                    f"{shown} mixes labels, and those of the input {port.name!r} are {port.dtype}.",
                    hint="Build the program with onnx_convgrad.losses.CrossEntropy(probabilities=True), on the command line "
                    "--loss cross_entropy; numbers of classes are then converted.",
                )
        for port in manifest.data:
            if np.dtype(port.dtype).kind != "f":
                raise ArgumentError(
                    f"{shown} mixes numbers, and the input {port.name!r} takes {port.dtype}.",
                    hint="Leave --augment out, in Python augment=.",
                )
        if "cutmix" in self.names:
            _image(manifest)
            wide = next((p for p in manifest.targets if len(p.shape or ()) > 2), None)
            if wide is not None:
                raise ArgumentError(
                    f"cutmix gives one label to a sample, and those of {wide.name!r} have {len(wide.shape or ())} axes.",
                    hint="Use mixup.",
                )

    def __call__(self, batch: Mapping[str, np.ndarray], manifest: Manifest, first: int) -> dict[str, np.ndarray]:
        """Mix a batch, whose first sample has the number `first`."""
        if not self or self.drawn is None:
            return dict(batch)
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([*self.drawn, first, _STREAM])))
        name = self.names[int(rng.integers(len(self.names)))]
        kept = float(rng.beta(_BETA[name], _BETA[name]))
        order = rng.permutation(len(batch[manifest.data[0].name]))
        mixed = dict(batch)
        if name == "cutmix":
            port = _image(manifest)
            mixed[port.name], kept = _pasted(batch[port.name], order, kept, layout_of(port)[0], rng)
        else:
            mixed |= {port.name: _sum(batch[port.name], order, kept) for port in manifest.data}
        return mixed | {port.name: _sum(batch[port.name], order, kept) for port in manifest.targets}


def _image(manifest: Manifest) -> Port:
    """The only input, which takes images."""
    port = manifest.data[0]
    if len(manifest.data) > 1 or len(port.shape or ()) != 4:
        shown = ", ".join(f"{p.name!r} {p.shape}" for p in manifest.data)
        raise ArgumentError(f"cutmix pastes rectangles of images; the inputs are {shown}.", hint="Use mixup.")
    return port


def _sum(array: np.ndarray, order: np.ndarray, kept: float) -> np.ndarray:
    """kept x[i] + (1 - kept) x[j], in the dtype of x."""
    share = array.dtype.type(kept)
    result: np.ndarray = array * share + array[order] * (array.dtype.type(1) - share)
    return result


def _pasted(
    images: np.ndarray, order: np.ndarray, kept: float, layout: str, rng: np.random.Generator
) -> tuple[np.ndarray, float]:
    """Images with a rectangle of others, and the share of the area that they keep."""
    height, width = images.shape[2:] if layout == "NCHW" else images.shape[1:3]
    side = np.sqrt(1 - kept)
    spans = []
    for size in (height, width):
        middle, length = int(rng.integers(size)), int(size * side)
        spans.append(slice(max(middle - length // 2, 0), min(middle + length // 2, size)))
    box: Any = (slice(None), slice(None), *spans) if layout == "NCHW" else (slice(None), *spans)
    result = images.copy()
    result[box] = images[order][box]
    area = (spans[0].stop - spans[0].start) * (spans[1].stop - spans[1].start)
    return result, 1 - area / (height * width)
