"""Read folders of images, one subfolder per class."""

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

from onnx_convgrad.base.numbers import factors, whole
from onnx_convgrad.base.paths import as_path, check_regular
from onnx_convgrad.errors import ArgumentError, ExecutionError
from onnx_convgrad.lowering.cost.calibration import cores
from onnx_convgrad.training.data.datasets import Dataset, Rows
from onnx_convgrad.training.program.manifest import Manifest, Port

_SUFFIXES = frozenset(".bmp .gif .jpeg .jpg .pgm .png .ppm .tif .tiff .webp".split())

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow would judge by the content alone, and run other programs for some formats."""

_MUCH = 4
"""An image that grows to so many times the pixels of itself and of the result together is cropped before it is enlarged."""

IMAGE, LABEL = "image", "label"
"""Names of the two arrays."""


@dataclass(frozen=True, slots=True)
class Format:
    """The image format of an input; `integers` means pixels from 0 to 255."""

    size: tuple[int, int]
    channels: int
    channels_first: bool
    integers: bool


class ImageFolder(Dataset):
    """Images in `folder/<class>/`, resized, center-cropped, scaled to [0, 1] and normalized.

    Classes are numbered in alphabetical order. The program's input decides the layout, gray or color, and the size if it is
    fixed. Pixels stay in 0 to 255 for an input of integers.

    Args:
        folder: Contains one folder of images per class, which may be nested.
        size: Height and width.
        resize: Length of the shorter side before the crop; by default just enough for the crop.
        mean: Subtracted from each channel after scaling to [0, 1].
        std: Divisor of each channel after the subtraction.
        classes: Names of the classes by number, to use the numbering of another folder.
        workers: Number of threads that read images; by default the number of cores.
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
        self.folder = as_path(folder, "The folder of images")
        by_class = {d.name: _images(d) for d in _folders(self.folder)}
        by_class = {name: files for name, files in sorted(by_class.items()) if files}
        if not by_class:
            raise ArgumentError(
                f"The folder {str(folder)!r} contains no folders with images.",
                hint="Make one folder of images per class.",
            )
        self.classes = tuple(by_class if classes is None else classes)
        for name in by_class:
            if name not in self.classes:
                raise ArgumentError(f"{str(folder)!r} has the class {name!r}, which is not among {self.classes}.")
        self.files = [(file, self.classes.index(name)) for name, files in by_class.items() for file in files]
        self.size = None if size is None else _pair(size)
        self.resize = None if resize is None else whole(resize, "resize")
        self.workers = cores() if workers is None else whole(workers, "workers")
        self.mean, self.std = (factors(v, n).astype(np.float32) for v, n in ((mean, "mean"), (std, "std")))
        if not (self.std > 0).all():
            raise ArgumentError(f"std must be above 0, not {std!r}.")
        self.format: Format | None = None

    def __len__(self) -> int:
        return len(self.files)

    def bound(self, manifest: Manifest) -> ImageFolder:
        """The set with layout, channels and size of the program's image input.

        Raises:
            ArgumentError: No input takes images, or its size contradicts `size`.
        """
        port = next((p for p in manifest.data if p.shape is not None and len(p.shape) == 4), None)
        if port is None or port.shape is None:
            raise ArgumentError("No input of the program takes a batch of images (4 axes).")
        first, channels = _layout(port)
        height, width = (s if isinstance(s, int) else None for s in (port.shape[2:] if first else port.shape[1:3]))
        wanted = self.size or (None, None)
        size = (
            _image_size(port, "height", height, wanted[0]),
            _image_size(port, "width", width, wanted[1]),
        )
        for name in ("mean", "std"):
            numbers = getattr(self, name)
            if numbers.size not in (1, channels):
                raise ArgumentError(f"{name} has {numbers.size} numbers for {channels} channels.")
        bound = copy(self)
        bound.format = Format(size, channels, first, np.dtype(port.dtype).kind in "iu")
        return bound

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
            "size": list(self.format.size) if self.format else self.size,
            "resize": self.resize,
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
        }

    def _read(self, path: Path) -> np.ndarray:
        from PIL import Image, ImageOps

        form = self.format
        if form is None:
            raise ArgumentError("The image format is not known yet.", hint="Call bound(program.manifest) first.")
        check_regular(path)
        try:
            with Image.open(path, formats=_FORMATS) as opened:
                _check_pixels(opened)
                image = _in_bytes(ImageOps.exif_transpose(opened)).convert("L" if form.channels == 1 else "RGB")
        except Exception as problem:  # whatever the library says of foreign bytes
            reason = f"{problem}".rstrip(".") or type(problem).__name__
            raise ArgumentError(f"The image {str(path)!r} could not be read: {reason}.") from problem
        pixels = np.asarray(_cropped(image, form.size, self.resize))
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        if not form.integers:
            pixels = (pixels.astype(np.float32) / np.float32(255) - self.mean) / self.std
        return np.moveaxis(pixels, -1, 0) if form.channels_first else pixels


def _pair(size: Any) -> tuple[int, int]:
    """Height and width from one number or two."""
    sizes = list(size) if isinstance(size, Sequence) and not isinstance(size, str) else [size, size]
    if len(sizes) != 2:
        raise ArgumentError(f"size must be a number, or height and width, not {size!r}.")
    height, width = (whole(number, "size") for number in sizes)
    return height, width


def is_image_folder(path: Path) -> bool:
    """Whether a path is a folder that contains folders with images."""
    return path.is_dir() and any(_images(folder) for folder in _folders(path))


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(d for d in path.iterdir() if d.is_dir() and not d.name.startswith("."))
    except OSError as problem:
        raise ArgumentError(f"The folder {str(path)!r} could not be read: {problem.strerror or problem}.") from problem


def _images(folder: Path) -> list[Path]:
    """The images in a folder at any depth, except hidden ones."""
    files = (f for f in folder.rglob("*") if f.suffix.lower() in _SUFFIXES)
    return sorted(f for f in files if not any(part.startswith(".") for part in f.relative_to(folder).parts))


def _check_pixels(image: Any) -> None:
    """Raise ValueError for an image that Pillow takes for a decompression bomb, where it would only warn."""
    from PIL import Image

    pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS
    if most is not None and pixels > most:
        raise ValueError(
            f"it has {pixels:,} pixels, and PIL.Image.MAX_IMAGE_PIXELS allows {most:,}; make it smaller, or set that number"
        )


def _in_bytes(image: Any) -> Any:  # a `PIL.Image.Image`; Pillow may not be installed
    """Scale an image of 16 bits per pixel to 8 bits, where Pillow would clip."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image).astype(np.float32) / 257).round().astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels have the mode {image.mode!r}, whose largest value is not known")
    return image


def _image_size(port: Port, axis: str, fixed: int | None, wanted: int | None) -> int:
    """Height or width of the images: that of the input, which must be `wanted` if both are given."""
    if fixed is None and wanted is None:
        raise ArgumentError(f"The input {port.name!r} takes images of any {axis}.", hint="Give size=(H, W).")
    if fixed is not None and wanted not in (None, fixed):
        raise ArgumentError(f"The input {port.name!r} takes images of {axis} {fixed}, not {wanted}.")
    return fixed or wanted or 0


def _layout(port: Port) -> tuple[bool, int]:
    """Whether the channels precede height and width, and their number."""
    axes = port.shape or ()
    if axes[1] in (1, 3):
        return True, int(axes[1])
    if axes[3] in (1, 3):
        return False, int(axes[3])
    raise ArgumentError(f"The input {port.name!r} has shape {axes}, which has no axis of 1 or 3 channels.")


def _cropped(image: Any, size: tuple[int, int], resize: int | None) -> Any:  # a `PIL.Image.Image`
    """Resize an image, keeping its proportions, and crop its center.

    A long and narrow image, which would become very large, is cropped first: that is the same but for single bits.
    """
    from PIL import Image

    height, width = size
    scale = max(height / image.height, width / image.width, (resize or 0) / min(image.height, image.width))
    wide, high = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    left, top = (wide - width) // 2, (high - height) // 2
    if wide * high <= _MUCH * (width * height + image.width * image.height):
        whole = image if image.size == (wide, high) else image.resize((wide, high), Image.Resampling.BILINEAR)
        return whole.crop((left, top, left + width, top + height))
    across, down = image.width / wide, image.height / high
    box = (left * across, top * down, (left + width) * across, (top + height) * down)
    return image.resize((width, height), Image.Resampling.BILINEAR, box)
