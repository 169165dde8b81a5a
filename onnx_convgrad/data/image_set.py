"""Sets of images in files: what turns pixels into numbers, and what reads them in threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from typing import Any, Self

import numpy as np

from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import factors, positive, whole
from onnx_convgrad.data.datasets import Dataset, Rows
from onnx_convgrad.data.pictures import ImageReader, check_pillow, image_port
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.metadata import NAMED, Preprocessing
from onnx_convgrad.lowering.cost.calibration import cores
from onnx_convgrad.programs.manifest import Manifest, Port

IMAGE = "image"
"""Name of the array with the images."""


class ImageSet(Dataset):
    """Samples with an image each.

    Args:
        workers: Number of threads that read images; by default the number of cores.
        preprocessing: A preprocessing instead of that in the model's file, or the name of one.
        given: The values of `given_preprocessing` that win over it.

    Attributes:
        files: What each image is read from.
        reader: Reads an image, once the set is bound to a program.
    """

    slow = True
    files: list[Any]

    def __init__(
        self, workers: int | None = None, preprocessing: Preprocessing | str | None = None, **given: Any
    ) -> None:
        check_pillow()
        self.workers = cores() if workers is None else whole(workers, "workers")
        self._wanted, named = wanted_preprocessing(preprocessing)
        self._given = named | given_preprocessing(**given)
        self.reader: ImageReader | None = None

    def __len__(self) -> int:
        return len(self.files)

    def bound(self, manifest: Manifest) -> Self:
        """The set with layout, channels and size of the program's image input.

        Raises:
            ArgumentError: No input takes images, or its size is unknown or contradicts `size`.
        """
        port, bound = image_port(manifest.data), copy(self)
        bound.reader = ImageReader.of(port, overridden(self._wanted or manifest.preprocessing, self._given))
        bound.preprocessing = bound.reader.preprocessing
        bound.assumed = is_assumed(port, self._wanted or manifest.preprocessing, self._given)
        check_size(port, bound.preprocessing, self._given.get("size"))
        return bound

    def _images(self, rows: Rows) -> tuple[Sequence[int], np.ndarray]:
        """The numbers of samples, and their images."""
        if self.reader is None:
            raise ArgumentError("The image format is not known yet.", hint="Call bound(program.manifest) first.")
        numbers = range(len(self))[rows] if isinstance(rows, slice) else [int(i) for i in rows]
        images = np.empty((len(numbers), *self.reader.shape), self.reader.dtype)

        def read(place: int) -> None:
            images[place] = self._read(numbers[place])

        with ThreadPoolExecutor(self.workers) as pool:  # Pillow decodes and resizes without holding the interpreter
            for _ in pool.map(read, range(len(numbers))):  # raises what a thread has raised
                pass
        return numbers, images

    def _read(self, number: int) -> np.ndarray:
        """Read the image of a sample."""
        assert self.reader is not None
        return self.reader(self.files[number])

    def _described(self, kind: str, *names: str) -> dict[str, Any]:
        """Kind and sizes of the set, and the named members of its preprocessing, as far as it is known."""
        settled = self.preprocessing or overridden(self._wanted, self._given)
        values = ((name, getattr(settled, name)) for name in names)
        options = {name: list(value) if isinstance(value, tuple) else value for name, value in values}
        return {"kind": kind, "samples": len(self), "classes": list(self.classes), **options}


def overridden(base: Preprocessing | None, given: dict[str, Any]) -> Preprocessing:
    """The preprocessing with some of its values replaced; a new size makes an old `resize` meaningless."""
    base = base or Preprocessing()
    if given.get("size", base.size) != base.size:
        base = replace(base, resize=None)
    return replace(base, **given)


def given_preprocessing(
    size: Any = None, resize: Any = None, mean: Any = None, std: Any = None, scale: Any = None
) -> dict[str, Any]:
    """The options that were given, checked."""
    given: dict[str, Any] = {}
    if size is not None:
        given["size"] = _pair(size)
    if resize is not None:
        given["resize"] = whole(resize, "resize")
    for name, numbers in (("mean", mean), ("std", std)):
        if numbers is not None:
            given[name] = tuple(factors(numbers, name).reshape(-1).tolist())
    if not all(number > 0 for number in given.get("std", ())):
        raise ArgumentError(f"std must be above 0, not {std!r}.")
    if scale is not None:
        positive(scale, "scale", zero=False)
        given["scale"] = float(scale)
    return given


def wanted_preprocessing(given: object) -> tuple[Preprocessing | None, dict[str, Any]]:
    """A preprocessing that replaces that of the model's file, or a named one as the values that it replaces there."""
    if isinstance(given, str):
        check_names([given], list(NAMED), "preprocessing")
        return None, {name: getattr(NAMED[given], name) for name in _NUMBERS}
    if given is None or isinstance(given, Preprocessing):
        return given, {}
    raise ArgumentError(
        f"preprocessing takes an onnx_convgrad.data.Preprocessing or a name ({', '.join(NAMED)}), not {given!r}.",
        hint="Or give size, resize, mean, std and scale one by one.",
    )


def is_assumed(port: Port, known: Preprocessing | None, given: Mapping[str, Any]) -> bool:
    """Whether the pixels of an input of floats become numbers in a way that nobody gave."""
    return known is None and not set(given).intersection(_NUMBERS) and np.dtype(port.dtype).kind not in "iu"


_NUMBERS = ("mean", "std", "scale")
"""Options that say how pixels become numbers."""


def _pair(size: Any) -> tuple[int, int]:
    """Height and width from one number or two."""
    sizes = list(size) if isinstance(size, Sequence) and not isinstance(size, str) else [size, size]
    if len(sizes) != 2:
        raise ArgumentError(f"size must be a number, or height and width, not {size!r}.")
    height, width = (whole(number, "size") for number in sizes)
    return height, width


def check_size(port: Port, p: Preprocessing, wanted: tuple[int, int] | None) -> None:
    """Refuse a size that is not known, or not that of the input."""
    if p.size is None:
        axes = (port.shape or ())[2:] if p.layout == "NCHW" else (port.shape or ())[1:3]
        axis = next(name for name, size in zip(("height", "width"), axes, strict=True) if not isinstance(size, int))
        raise ArgumentError(
            f"The input {port.name!r} takes images of any {axis}.", hint="Give size=(H, W) or --image-size HxW."
        )
    for axis, fixed, size in zip(("height", "width"), p.size, wanted or p.size, strict=True):
        if fixed != size:
            raise ArgumentError(
                f"The input {port.name!r} takes images of {axis} {fixed}, not {size}.",
                hint="Leave the size out (size=, --image-size), or build for another one (input_shapes=, --input-shape).",
            )
