"""Random changes of training images, by Pillow's operations; the numbers drawn depend on seed, epoch and sample alone.

Pillow, because the maintained libraries are PyTorch's (torchvision), which would have to be installed, or under the AGPL
(AlbumentationsX). The ranges are torchvision's usual ones.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from onnx_convgrad.base.boundary import CallersCode
from onnx_convgrad.base.names import as_names
from onnx_convgrad.errors import ArgumentError

Transform = Callable[..., Any]
"""A function of a `PIL.Image.Image`, and perhaps of `rng`, to another one, or to an array of pixels."""

_AREA, _ASPECT = (0.35, 1.0), (3 / 4, 4 / 3)
"""Shares of the area, and ratios of width and height, of a random crop."""

_COLOR, _DEGREES = 0.3, 15.0
"""Largest change of brightness, contrast and saturation, and largest rotation."""


class Augmentation:
    """Random changes of an image, in a fixed order, then those of the caller's function.

    Args:
        names: Of `flip` (left and right), `crop` (a random part, resized), `color` (brightness, contrast, saturation) and
            `rotate` (up to 15 degrees).
        transform: A function of an image, and of `rng` if it has such a parameter, that returns an image or its pixels.
    """

    def __init__(self, names: Iterable[str] | str = (), transform: Transform | None = None) -> None:
        self.names = as_names(names, "augment")
        if transform is not None and not callable(transform):
            raise ArgumentError(f"transform takes a function of an image, not {transform!r}.")
        self.transform = transform
        self._takes_rng = transform is not None and "rng" in _parameters(transform)

    def __bool__(self) -> bool:
        return bool(self.names) or self.transform is not None

    def __call__(self, image: Any, rng: np.random.Generator) -> Any:
        """Change an image."""
        for name, change in _CHANGES.items():
            if name in self.names:
                image = change(image, rng)
        if self.transform is not None:
            with CallersCode(self.transform):
                image = self.transform(image, rng=rng) if self._takes_rng else self.transform(image)
        return image if not isinstance(image, np.ndarray) else _from_pixels(image)

    def describe(self) -> dict[str, Any]:
        """The changes as JSON values, for checkpoints."""
        own = {} if self.transform is None else {"transform": getattr(self.transform, "__qualname__", "?")}
        return {"augment": list(self.names)} | own if self else {}


def _parameters(function: Any) -> Iterable[str]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


def _from_pixels(pixels: np.ndarray) -> Any:
    from PIL import Image

    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3):
        raise ArgumentError(
            f"transform returned an array of {pixels.dtype} with {pixels.ndim} axes.",
            hint="Return an image, or its pixels: uint8 of shape (height, width) or (height, width, 3).",
        )
    return Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)


def _flip(image: Any, rng: np.random.Generator) -> Any:
    from PIL import ImageOps

    return ImageOps.mirror(image) if rng.random() < 0.5 else image


def _crop(image: Any, rng: np.random.Generator) -> Any:
    """Cut out a random part of a random shape."""
    area = image.width * image.height * rng.uniform(*_AREA)
    aspect = math.exp(rng.uniform(*np.log(_ASPECT)))
    wide, high = math.sqrt(area * aspect), math.sqrt(area / aspect)
    width, height = (max(1, min(round(size), most)) for size, most in ((wide, image.width), (high, image.height)))
    left, top = (int(rng.integers(0, rest + 1)) for rest in (image.width - width, image.height - height))
    return image.crop((left, top, left + width, top + height))


def _color(image: Any, rng: np.random.Generator) -> Any:
    from PIL import ImageEnhance

    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = change(image).enhance(rng.uniform(1 - _COLOR, 1 + _COLOR))
    return image


def _rotate(image: Any, rng: np.random.Generator) -> Any:
    from PIL import Image

    return image.rotate(rng.uniform(-_DEGREES, _DEGREES), Image.Resampling.BILINEAR)


_CHANGES: dict[str, Callable[[Any, np.random.Generator], Any]] = {
    "rotate": _rotate, "crop": _crop, "flip": _flip, "color": _color
}  # fmt: skip

AUGMENTATIONS = tuple(_CHANGES)
