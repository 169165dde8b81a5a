"""Folders of pictures, one subfolder per class."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from onnx_convgrad.errors import ArgumentError, ExecutionError
from onnx_convgrad.lowering.cost.calibration import cores
from onnx_convgrad.training.data.datasets import Dataset, Rows
from onnx_convgrad.training.program.manifest import Manifest, Port

__all__ = ["ImageFolder", "is_image_folder"]

_SUFFIXES = frozenset(".bmp .gif .jpeg .jpg .pgm .png .ppm .tif .tiff .webp".split())

IMAGE, LABEL = "image", "label"
"""Names of the two arrays."""


@dataclass(frozen=True, slots=True)
class Form:
    """What an input takes for a picture; `whole` for the numbers 0 to 255."""

    size: tuple[int, int]
    channels: int
    channels_first: bool
    whole: bool


class ImageFolder(Dataset):
    """Pictures in `folder/<class>/`, resized, cropped in the middle, scaled to [0, 1] and normalized.

    Classes are numbered in the order of their names. What is not given comes from the program's input: the layout, gray or
    colour, and the size where it is fixed. Its numbers stay 0 to 255 if it takes integers.

    Args:
        folder: Holds one folder of pictures per class, at any depth.
        size: Height and width.
        resize: Length of the shorter side before the crop; by default just enough for the crop.
        mean: Subtracted from each channel, after scaling to [0, 1].
        std: Divides each channel then.
        classes: Names of the classes in their order, where that of another folder must be kept.
        workers: Threads that read pictures; by default one for each core.
    """

    slow = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        size: tuple[int, int] | int | None = None,
        resize: int | None = None,
        mean: Sequence[float] | float = 0.0,
        std: Sequence[float] | float = 1.0,
        classes: Sequence[str] | None = None,
        workers: int | None = None,
    ) -> None:
        if find_spec("PIL") is None:
            raise ExecutionError("Folders of images need Pillow.", hint="Install `onnx-convgrad[train]`.")
        self.folder = Path(folder)
        found = {d.name: _pictures(d) for d in _folders(self.folder)}
        found = {name: files for name, files in sorted(found.items()) if files}
        if not found:
            raise ArgumentError(f"The folder {str(folder)!r} holds no folders with images.")
        self.classes = tuple(found if classes is None else classes)
        unknown = [name for name in found if name not in self.classes]
        if unknown:
            raise ArgumentError(f"{str(folder)!r} has the class {unknown[0]!r}, which is not among {self.classes}.")
        self.files = [(file, self.classes.index(name)) for name, files in found.items() for file in files]
        self.size = (size, size) if isinstance(size, int) else size
        self.resize, self.workers = resize, workers or cores()
        self.mean, self.std = np.asarray(mean, np.float32), np.asarray(std, np.float32)
        if not (self.std > 0).all():
            raise ArgumentError(f"std must be above 0, not {std!r}.")
        self.form: Form | None = None

    def __len__(self) -> int:
        return len(self.files)

    def bound(self, manifest: Manifest) -> ImageFolder:
        """Layout, channels and size as the program's picture input has them.

        Raises:
            ArgumentError: No input takes pictures, or its size is not the one that was given.
        """
        port = next((p for p in manifest.data if p.shape is not None and len(p.shape) == 4), None)
        if port is None or port.shape is None:
            raise ArgumentError("No input of the program takes a batch of images (4 axes).")
        own = copy(self)
        first, channels = _layout(port)
        height, width = port.shape[2:] if first else port.shape[1:3]
        sizes = [s if isinstance(s, int) else None for s in (height, width)]
        given = self.size or (None, None)
        for what, fixed, wanted in zip(("height", "width"), sizes, given, strict=True):
            if fixed is not None and wanted not in (None, fixed):
                raise ArgumentError(f"The input {port.name!r} takes images of {what} {fixed}, not {wanted}.")
            if fixed is None and wanted is None:
                raise ArgumentError(f"The input {port.name!r} takes images of any {what}.", hint="Give size=(H, W).")
        size = (sizes[0] or given[0] or 0, sizes[1] or given[1] or 0)
        for name in ("mean", "std"):
            numbers = getattr(self, name)
            if numbers.size not in (1, channels):
                raise ArgumentError(f"{name} has {numbers.size} numbers for {channels} channels.")
        own.form = Form(size, channels, first, np.dtype(port.dtype).kind in "iu")
        return own

    def take(self, rows: Rows) -> dict[str, np.ndarray]:
        chosen = self.files[rows] if isinstance(rows, slice) else [self.files[i] for i in rows]
        paths = [path for path, _ in chosen]
        with ThreadPoolExecutor(self.workers) as pool:  # Pillow decodes and resizes without holding the interpreter
            images = np.stack(list(pool.map(self._read, paths)))
        return {IMAGE: images, LABEL: np.array([number for _, number in chosen], np.int64)}

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "images",
            "samples": len(self),
            "classes": list(self.classes),
            "size": list(self.form.size) if self.form else self.size,
            "resize": self.resize,
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
        }

    def _read(self, path: Path) -> np.ndarray:
        from PIL import Image, ImageOps

        form = self.form
        if form is None:
            raise ArgumentError("What the images are for is not known.", hint="Call bound(program.manifest) first.")
        try:
            with Image.open(path) as opened:
                picture = _in_bytes(ImageOps.exif_transpose(opened)).convert("L" if form.channels == 1 else "RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as problem:
            raise ArgumentError(f"The image {str(path)!r} could not be read: {problem}.") from problem
        pixels = np.asarray(_cropped(picture, form.size, self.resize))
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        if not form.whole:
            pixels = (pixels.astype(np.float32) / np.float32(255) - self.mean) / self.std
        return np.moveaxis(pixels, -1, 0) if form.channels_first else pixels


def is_image_folder(path: Path) -> bool:
    """Whether there are folders with pictures in it."""
    return path.is_dir() and any(_pictures(folder) for folder in _folders(path))


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(d for d in path.iterdir() if d.is_dir() and not d.name.startswith("."))
    except OSError as problem:
        raise ArgumentError(f"The folder {str(path)!r} could not be read: {problem.strerror or problem}.") from problem


def _pictures(folder: Path) -> list[Path]:
    """The pictures in a folder and those in it, but for what is hidden."""
    found = (f for f in folder.rglob("*") if f.suffix.lower() in _SUFFIXES)
    return sorted(f for f in found if not any(part.startswith(".") for part in f.relative_to(folder).parts))


def _in_bytes(picture: Any) -> Any:
    """A picture of 16 bits a pixel in 8, which Pillow would cut off instead of scaling it."""
    from PIL import Image

    if picture.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(picture).astype(np.float32) / 257).round().astype(np.uint8))
    if picture.mode in ("I", "F"):
        raise ValueError(f"its pixels are of mode {picture.mode!r}, of which the largest value is not known")
    return picture


def _layout(port: Port) -> tuple[bool, int]:
    """Whether the channels come before the sizes, and their number."""
    axes = port.shape or ()
    if axes[1] in (1, 3):
        return True, int(axes[1])
    if axes[3] in (1, 3):
        return False, int(axes[3])
    raise ArgumentError(f"The input {port.name!r} has shape {axes}, which has no axis of 1 or 3 channels.")


def _cropped(picture: Any, size: tuple[int, int], resize: int | None) -> Any:
    """The middle of the picture, after a resize that keeps its proportions and covers the crop."""
    from PIL import Image

    height, width = size
    scale = max(height / picture.height, width / picture.width, (resize or 0) / min(picture.height, picture.width))
    wide, high = max(width, round(picture.width * scale)), max(height, round(picture.height * scale))
    if (wide, high) != picture.size:
        picture = picture.resize((wide, high), Image.Resampling.BILINEAR)
    left, top = (wide - width) // 2, (high - height) // 2
    return picture.crop((left, top, left + width, top + height))
