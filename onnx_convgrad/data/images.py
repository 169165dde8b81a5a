"""Read folders of images, one subfolder per class."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path
from typing import Any, Self

import numpy as np

from onnx_convgrad.base.names import as_names, check_names
from onnx_convgrad.base.paths import as_path
from onnx_convgrad.base.warn import warn
from onnx_convgrad.data.augmentation import AUGMENTATIONS, Augmentation, Transform
from onnx_convgrad.data.datasets import Rows, seed_sequence
from onnx_convgrad.data.image_set import IMAGE, ImageSet
from onnx_convgrad.data.mixing import MIXINGS, Mixing
from onnx_convgrad.data.pictures import image_port, unreadable
from onnx_convgrad.errors import ArgumentError, first_few
from onnx_convgrad.frontend.metadata import Preprocessing
from onnx_convgrad.programs.manifest import Manifest

SUFFIXES = frozenset(".bmp .gif .jpeg .jpg .pgm .png .ppm .tif .tiff .webp".split())

LABEL = "label"
"""Name of the array with the classes."""


class ImageFolder(ImageSet):
    """Images in `folder/<class>/`, resized, center-cropped, scaled to [0, 1] and normalized.

    Classes are numbered as the model's file numbers them if it names all of them, else in alphabetical order. The program's
    input decides the layout, gray or color, and the size if it is fixed; what is not given here is taken from the
    preprocessing in the model's file. Pixels stay in 0 to 255 for an input of integers.

    Args:
        folder: Contains one folder of images per class, which may be nested.
        size: Height and width.
        resize: Length of the shorter side before the crop; by default just enough for the crop.
        mean: Subtracted from each channel after scaling to [0, 1].
        std: Divisor of each channel after the subtraction.
        scale: Factor of the pixels, by default 1/255.
        preprocessing: All of these in one value, instead of what the model's file says; the arguments above win. Or the name
            of usual numbers: `"imagenet"`, `"clip"`, `"inception"` ([-1, 1]), `"unit"` ([0, 1]), `"raw"` (pixels).
        classes: Names of the classes by number, to use the numbering of another folder.
        workers: Number of threads that read images; by default the number of cores.
        augment: Random changes of training images: `"flip"`, `"crop"`, `"color"`, `"rotate"`, `"mixup"`, `"cutmix"`. One, or
            several of them; the last two mix the images of a batch, for labels that are probabilities.
        transform: A further change: a function of a `PIL.Image.Image`, and of the keyword `rng` (a NumPy generator) if it
            has one, that returns an image or its pixels. All numbers drawn depend on seed, epoch and sample alone.
        on_broken: `"skip"`: files that are not images are left out, with a warning, and in place of one that turns out to be
            damaged the next image of its class is read. `"error"`: both are errors.

    Attributes:
        empty: Folders without images, which are not classes.
        preprocessing: The way from the images to numbers, once the set is bound to a program; `None` before.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        size: tuple[int, int] | int | None = None,
        resize: int | None = None,
        mean: Sequence[float] | float | None = None,
        std: Sequence[float] | float | None = None,
        scale: float | None = None,
        preprocessing: Preprocessing | str | None = None,
        classes: Sequence[str] | None = None,
        workers: int | None = None,
        augment: Sequence[str] | str = (),
        transform: Transform | None = None,
        on_broken: str = "skip",
    ) -> None:
        super().__init__(workers, preprocessing, size=size, resize=resize, mean=mean, std=std, scale=scale)
        names = as_names(augment, "augment")
        check_names(names, [*AUGMENTATIONS, *MIXINGS], "augmentation")
        self.augmentation = Augmentation([name for name in names if name not in MIXINGS], transform)
        self.mixing = Mixing.named([name for name in names if name in MIXINGS])
        check_names([on_broken], ["skip", "error"], "value of on_broken:")
        self._broken: dict[str, str] = {}
        self.folder = as_path(folder, "The folder of images")
        by_class = {d.name: images_in(d) for d in _folders(self.folder)}
        if on_broken == "skip":
            by_class = self._usable(by_class)
        self._by_class = {name: files for name, files in sorted(by_class.items()) if files}
        self.empty = tuple(name for name, files in by_class.items() if not files)
        _check_depth(self.folder, tuple(self._by_class))
        if stray := images_directly_in(self.folder):
            warn(
                f"{len(stray)} images are in {str(self.folder)!r} itself, and not in the folder of a class: "
                f"{first_few([repr(file.name) for file in stray])}. They are left out; move them to use them."
            )
        if not self._by_class:
            raise ArgumentError(
                f"The folder {str(folder)!r} contains no folders with images.",
                hint="Make one folder of images per class.",
            )
        self._skips, self._numbered = on_broken == "skip", classes is not None
        self._number(tuple(self._by_class if classes is None else classes))
        self.drawn: tuple[int, int] | None = None

    @property
    def broken(self) -> Mapping[str, str]:
        return self._broken

    def bound(self, manifest: Manifest) -> Self:
        """The set with layout, channels and size of the program's image input, and the numbers of its classes."""
        port, bound = image_port(manifest.data), super().bound(manifest)
        if set(self._given).intersection(("mean", "std", "scale")) and np.dtype(port.dtype).kind in "iu":
            raise ArgumentError(
                f"The input {port.name!r} takes {port.dtype}, the pixels as they are: mean, std and scale do not apply.",
                hint="Leave them out.",
            )
        labels = manifest.labels
        if not self._numbered and labels and set(self.classes) <= set(labels):
            bound._number(labels)  # noqa: SLF001 - a copy of this set
        return bound

    def take(self, rows: Rows) -> dict[str, np.ndarray]:
        numbers, images = self._images(rows)
        return {IMAGE: images, LABEL: np.array([self.files[i][1] for i in numbers], np.int64)}

    def class_numbers(self) -> np.ndarray:
        return np.array([number for _, number in self.files], np.int64)

    def describe(self) -> dict[str, Any]:
        changes = self.augmentation.describe()
        if self.mixing:
            changes["augment"] = [*changes.get("augment", ()), *self.mixing.names]
        return self._described("images", "size", "resize", "mean", "std", "scale") | changes

    def augmented(self, seed: int, epoch: int) -> ImageFolder:
        changed = copy(self)
        changed.drawn, changed.mixing = (seed, epoch), self.mixing.drawing(seed, epoch)
        return changed

    def _read(self, number: int) -> np.ndarray:
        """Read a sample; in place of an image that cannot be decoded, the next one of its class that can."""
        assert self.reader is not None
        image = self._opened(number)
        if self.drawn is not None and self.augmentation:
            rng = np.random.Generator(np.random.PCG64(seed_sequence(*self.drawn, number)))
            changed = self.augmentation(image, rng)
            image = changed if changed.mode == image.mode else changed.convert(image.mode)
        return self.reader.numbers(self.reader.cropped(image))

    def _opened(self, number: int) -> Any:
        """The image of a sample, or the next one of its class that can be decoded."""
        assert self.reader is not None
        file, label = self.files[number]
        try:
            return self.reader.opened(file)
        except ArgumentError as problem:
            if not self._skips:
                raise
            self._report(file, problem)
        for other, own in self.files[number + 1 :] + self.files[:number]:
            if own == label:
                try:
                    return self.reader.opened(other)
                except ArgumentError as problem:
                    self._report(other, problem)
        raise ArgumentError(
            f"No image of the class {self.classes[label]!r} can be read.",
            hint="Replace the files that the warnings name, or remove the folder of this class.",
        )

    def _report(self, file: Path, problem: ArgumentError) -> None:
        if str(file) not in self._broken:
            self._broken[str(file)] = problem.message
            warn(f"{problem.message} Another image of its class takes its place.")

    def _usable(self, by_class: dict[str, list[Path]]) -> dict[str, list[Path]]:
        """Leave out files whose first bytes are not those of an image."""
        files = [file for several in by_class.values() for file in several]
        with ThreadPoolExecutor(self.workers) as pool:
            reasons = dict(zip(files, pool.map(unreadable, files), strict=True))
        self._broken.update({str(file): reason for file, reason in reasons.items() if reason})
        if self.broken:
            warn(
                f"{len(self.broken)} of {len(files)} images in {str(self.folder)!r} cannot be read and are left out: "
                f"{first_few(list(map(repr, self.broken)))}. The first: {next(iter(self.broken.values()))}."
            )
        return {name: [file for file in several if not reasons[file]] for name, several in by_class.items()}

    def _number(self, classes: tuple[str, ...]) -> None:
        """Number the classes."""
        numbers = {name: number for number, name in enumerate(classes)}
        for name in self._by_class:
            if name not in numbers:
                raise ArgumentError(
                    f"{str(self.folder)!r} has the class {name!r}, which is not among {classes}.",
                    hint="Rename or remove this folder, or name all classes (classes=, --labels).",
                )
        self.classes = classes
        self.files = [(file, numbers[name]) for name, files in self._by_class.items() for file in files]


_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Usual names of the folders of parts of a data set."""


def _check_depth(folder: Path, names: tuple[str, ...]) -> None:
    """Refuse a folder whose "classes" are training and validation data with folders of classes in them."""
    parts = {_SPLITS[name.lower()]: folder / name for name in names if name.lower() in _SPLITS}
    if "train" not in parts or not is_image_folder(parts["train"]):
        return
    held = parts.get("validation", parts.get("test"))
    more = f" --validation {shlex.quote(str(held))}" if held else ""
    raise ArgumentError(
        f"The folder {str(folder)!r} holds no classes but parts of a data set: {', '.join(names)}.",
        hint=f"Give --data {shlex.quote(str(parts['train']))}{more} (in Python, these paths as data and validation).",
    )


def is_image_folder(path: Path) -> bool:
    """Whether a path is a folder that contains folders with images."""
    return path.is_dir() and any(images_in(folder) for folder in _folders(path))


def _folders(path: Path) -> list[Path]:
    """The folders in a folder, except hidden ones."""
    return [entry for entry in _entries(path) if entry.is_dir() and not entry.name.startswith(".")]


def images_in(folder: Path) -> list[Path]:
    """The images in a folder at any depth, except hidden ones; links to folders are followed."""
    return sorted(_walk(folder, frozenset()))


def images_directly_in(folder: Path) -> list[Path]:
    """The images in a folder itself, except hidden ones."""
    files = (f for f in _entries(folder) if f.suffix.lower() in SUFFIXES)
    return [file for file in files if not file.name.startswith(".") and not file.is_dir()]


def _walk(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    """The images in a folder, which is in the folders `above`: a link to one of them is not followed."""
    here = folder.resolve()
    if here in above:
        return
    yield from images_directly_in(folder)
    for inner in _folders(folder):
        yield from _walk(inner, above | {here})


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as problem:
        raise ArgumentError(
            f"The folder {str(folder)!r} could not be read: {problem.strerror or problem}.",
            hint="Give a folder that exists, and that you may read.",
        ) from problem
