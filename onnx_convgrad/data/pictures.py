"""Turn image files, or arrays of pixels, into the numbers of a model's input, wherever the files are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onnx_convgrad.base.optional import imported
from onnx_convgrad.base.paths import Folder, opened
from onnx_convgrad.errors import ArgumentError, LimitError
from onnx_convgrad.frontend.metadata import Preprocessing
from onnx_convgrad.programs.manifest import Port

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are read: Pillow by itself would judge by the content alone, and run other programs for some."""

_MUCH = 4
"""Growth at which an image is cropped before it is enlarged, in multiples of its pixels and those of the result."""

_MOST = 2**25
"""Most pixels of an image that is made: a model of a few bytes can name any size."""

_RAW = Preprocessing(scale=1.0)
"""Pixels from 0 to 255, for inputs of integers."""


@dataclass(frozen=True, slots=True)
class ImageReader:
    """Reads images for an input: decodes, resizes, crops the center, scales and normalizes.

    Attributes:
        preprocessing: The steps to take. Without a size, images keep theirs.
        channels: 1 for gray, 3 for color.
        dtype: numpy's name of the input's dtype. An input of integers takes pixels from 0 to 255.
        folder: Where files must be once links are followed, if their names are from another file; by default anywhere.
    """

    preprocessing: Preprocessing
    channels: int = 3
    dtype: str = "float32"
    folder: Folder | None = None

    @classmethod
    def of(cls, port: Port, wanted: Preprocessing | None = None) -> ImageReader:
        """The reader for an input, whose layout, channels and fixed sizes win over those of `wanted`.

        Raises:
            ArgumentError: The input does not take images, or `mean` or `std` do not fit its channels.
            LimitError: The images have too many pixels.
        """
        check_pillow()
        p = wanted or Preprocessing()
        layout, channels = layout_of(port, p.layout)
        sizes = (port.shape or ())[2:] if layout == "NCHW" else (port.shape or ())[1:3]
        fixed = [size if isinstance(size, int) else None for size in sizes]
        height, width = (f or w for f, w in zip(fixed, p.size or (None, None), strict=True))
        size = None if height is None or width is None else (height, width)
        if size is not None and size[0] * size[1] > _MOST:
            raise LimitError(
                f"The input {port.name!r} takes images of {size[0]} x {size[1]} pixels, and at most {_MOST:,} are allowed.",
                hint="Give a smaller size, or arrays of numbers instead of images.",
            )
        for name in ("mean", "std"):
            count = len(getattr(p, name))
            if count not in (1, channels):
                raise ArgumentError(
                    f"{name} has {count} numbers for {channels} channels.",
                    hint="Give one number for all channels, or one for each.",
                )
        p = replace(p, size=size, layout=layout, resize=p.resize if size == p.size or p.size is None else None)
        if np.dtype(port.dtype).kind in "iu":
            p = replace(p, mean=_RAW.mean, std=_RAW.std, scale=_RAW.scale)
        return cls(p, channels, port.dtype)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of an image, whose size is known."""
        assert self.preprocessing.size is not None
        height, width = self.preprocessing.size
        channels_first = self.preprocessing.layout == "NCHW"
        return (self.channels, height, width) if channels_first else (height, width, self.channels)

    def __call__(self, path: Path) -> np.ndarray:
        """Read one image, without an axis for the batch.

        Raises:
            ArgumentError: The file is missing, or holds no image that can be used.
        """
        return self.numbers(self.cropped(self.opened(path)))

    def opened(self, path: Path) -> Any:  # a `PIL.Image.Image`; Pillow may not be installed
        """Decode a file as a gray or a color image."""
        from PIL import Image, ImageOps

        with opened(path, self.folder) as file:
            try:
                with Image.open(file, formats=_FORMATS) as image, _turn(image, self.preprocessing.size):
                    image.load()
                    ImageOps.exif_transpose(image, in_place=True)
                    mode = "L" if self.channels == 1 else "RGB"
                    return image if image.mode == mode else _in_bytes(image).convert(mode)
            except Exception as problem:  # whatever the library says of foreign bytes
                raise ArgumentError(
                    f"The image {str(path)!r} could not be read: {_reason(problem, path)}.",
                    hint="Replace the file, or leave it out.",
                ) from problem

    def cropped(self, image: Any) -> Any:
        """Resize an image and crop its center, or pad it on the right."""
        size = self.preprocessing.size
        if size is not None and self.preprocessing.fit == "pad":
            return padded(image, size)
        return image if size is None else cropped(image, size, self.preprocessing.resize)

    def numbers(self, image: Any) -> np.ndarray:
        """The numbers of the input for an image of the right size."""
        pixels = np.asarray(image)
        return scaled(pixels[..., None] if pixels.ndim == 2 else pixels, self.preprocessing, self.dtype)


def scaled(pixels: np.ndarray, preprocessing: Preprocessing, dtype: str = "float32") -> np.ndarray:
    """Convert pixels, uint8 of shape (..., H, W, C), to the numbers of an input: `(pixel * scale - mean) / std`."""
    p = preprocessing
    if p.layout == "NCHW":  # while an entry has one byte
        pixels = np.ascontiguousarray(np.moveaxis(pixels, -1, -3))
    if (p.scale, p.mean, p.std) == (_RAW.scale, _RAW.mean, _RAW.std):
        return pixels.astype(dtype)
    axes = (-1, 1, 1) if p.layout == "NCHW" else (-1,)
    result = pixels.astype(np.float32)
    result *= np.float32(p.scale)
    result -= np.asarray(p.mean, np.float32).reshape(axes)
    result /= np.asarray(p.std, np.float32).reshape(axes)
    return result.astype(dtype, copy=False)


def pixels_of(numbers: np.ndarray, port: Port, preprocessing: Preprocessing | None) -> np.ndarray:
    """The pixels, uint8 `[N, H, W, C]`, of which an input has these numbers; without preprocessing, black to white.

    Raises:
        ArgumentError: The input takes no images.
    """
    p = preprocessing or _RAW
    image = np.moveaxis(numbers, 1, -1) if layout_of(port, p.layout)[0] == "NCHW" else numbers
    if preprocessing is None and image.dtype.kind == "f":
        low, high = float(image.min()), float(image.max())
        image = (image - low) * (255 / max(high - low, 1e-12))
    elif image.dtype.kind == "f":
        image = (image * np.asarray(p.std) + np.asarray(p.mean)) / p.scale
    pixels: np.ndarray = np.clip(np.rint(image), 0, 255).astype(np.uint8)
    return pixels


def unreadable(path: Path) -> str:
    """The fault of the first bytes of a file, which are read alone; nothing if they are those of an image."""
    from PIL import Image

    try:
        with opened(path) as file, Image.open(file, formats=_FORMATS) as image:
            _check_pixels(image)
    except Exception as problem:  # noqa: BLE001 - whatever the library says of foreign bytes
        return _reason(problem, path)
    return ""


def _reason(problem: Exception, path: Path) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(problem, UnidentifiedImageError):
        return f"cannot identify image file {str(path)!r}"
    return f"{problem}".rstrip(".") or type(problem).__name__


@contextlib.contextmanager
def _turn(image: Any, size: tuple[int, int] | None) -> Iterator[None]:
    """Check an image before it is decoded and brought to a size; large ones, of few bytes in a file, take turns."""
    _check_pixels(image)
    if size is None and image.width * image.height > _MOST:
        raise ValueError(f"it has {image.width} x {image.height} pixels; give a smaller size")
    with _large if image.width * image.height > _LARGE else contextlib.nullcontext():
        yield


_LARGE = 2**24
"""Most pixels of images that several threads decode at once; larger ones are decoded one by one, to bound the memory."""

_large = threading.Lock()


def check_pillow() -> None:
    """Raise `ExecutionError` unless Pillow is installed."""
    imported("PIL.Image", "Images need Pillow")


def image_port(ports: Iterable[Port]) -> Port:
    """The first input with four axes; raises `ArgumentError` if there is none."""
    port = next((p for p in ports if p.shape is not None and len(p.shape) == 4), None)
    if port is None:
        raise ArgumentError(
            "No input of the program takes a batch of images (4 axes).",
            hint="Give arrays (.npy, .npz) of what the inputs take, instead of images.",
        )
    return port


def layout_of(port: Port, preferred: str = "NCHW") -> tuple[Any, int]:
    """Layout and number of channels of an input, which must have an axis of 1 or 3; `preferred` decides between two."""
    axes = port.shape or ()
    for layout in (preferred, *{"NCHW", "NHWC"}.difference({preferred})):
        channels = axes[1 if layout == "NCHW" else 3]
        if channels in (1, 3):
            return layout, int(channels)
    raise ArgumentError(
        f"The input {port.name!r} has shape {axes}, which has no axis of 1 or 3 channels.",
        hint="Give arrays (.npy, .npz) of what this input takes, instead of images.",
    )


def _check_pixels(image: Any) -> None:
    """Raise ValueError for an image that Pillow takes for a decompression bomb, where it would only warn."""
    from PIL import Image

    pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS
    if most is not None and pixels > most:
        raise ValueError(
            f"it has {pixels:,} pixels, and PIL.Image.MAX_IMAGE_PIXELS allows {most:,}; make it smaller, or set that number"
        )


def _in_bytes(image: Any) -> Any:
    """Scale an image of 16 bits per pixel to 8 bits, where Pillow would clip."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image).astype(np.float32) / 257).round().astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels have the mode {image.mode!r}, whose largest value is not known")
    return image


def padded(image: Any, size: tuple[int, int]) -> Any:
    """Resize an image to a height, keeping its proportions if it is not too wide then, and repeat its last column."""
    from PIL import Image

    height, width = size
    wide = max(1, min(width, round(image.width * height / image.height)))
    image = image.resize((wide, height), Image.Resampling.BILINEAR)
    if wide == width:
        return image
    result = Image.new(image.mode, (width, height))
    result.paste(image)
    result.paste(image.crop((wide - 1, 0, wide, height)).resize((width - wide, height)), (wide, 0))
    return result


def cropped(image: Any, size: tuple[int, int], resize: int | None) -> Any:
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
