"""Refuse labels that are no class, and numbers that would make every loss NaN, with the array's name and the sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.training.data.inputs import Checked
from onnx_convgrad.training.program.manifest import Manifest

Place = Callable[[int], str]


def _in_batch(number: int) -> str:
    return f"sample {number} of the batch, counted from 0"


def check_batch(batch: Mapping[str, np.ndarray], manifest: Manifest, place: Place = _in_batch) -> Checked:
    """Check all values of a batch; `place` names a sample by its number in the batch.

    Numbers may be minus infinity, which masks use.

    Raises:
        ArgumentError: A label is out of range, or a number is NaN or infinite.
    """
    classes = manifest.classes
    if not isinstance(batch, Checked) or batch.classes != classes:
        for name, array in batch.items():
            if array.dtype.kind == "f" and array.size:
                _check_numbers(name, array, place)
            elif name in classes:
                check_labels(name, array, *classes[name], place)
            elif name in manifest.characters and f"{name}_lengths" in batch:
                check_texts(name, array, batch[f"{name}_lengths"], *manifest.characters[name], place)
    checked = Checked(batch)
    checked.classes = classes
    return checked


def check_labels(name: str, labels: np.ndarray, count: int, ignored: int | None, place: Place = _in_batch) -> None:
    """Raise `ArgumentError` for a label that is neither a class, 0 to `count` - 1, nor `ignored`."""
    if not labels.size or (labels.min() >= 0 and labels.max() < count):
        return
    wrong = ((labels < 0) | (labels >= count)) & (True if ignored is None else labels != ignored)
    if not wrong.any():
        return
    known = labels[labels != ignored]
    if known.min() < 0:
        remedy = f"use {ignored} for what the loss shall ignore" if ignored is not None else "leave these samples out"
    else:
        remedy = f"give the model a head for {int(known.max()) + 1} classes (onnx_convgrad.replace_head, --classes)"
    from_one = known.min() == 1 and known.max() == count
    raise ArgumentError(
        f"The label {labels[wrong].flat[0]} in {name!r} ({place(_first(wrong))}) is out of range: the model has {count} "
        f"classes, which are numbered 0 to {count - 1}.",
        hint="The labels seem to count from 1: subtract 1 from all."
        if from_one
        else f"Correct the labels, or {remedy}.",
    )


def check_texts(
    name: str, texts: np.ndarray, lengths: np.ndarray, count: int, frames: int | None, place: Place = _in_batch
) -> None:
    """Raise `ArgumentError` for a text `[S]` with a label that is no class, or of a length that does not fit."""
    for i, (row, length) in enumerate(zip(texts, lengths.reshape(-1), strict=True)):
        own = row[: max(int(length), 0)]
        if not 0 <= length <= len(row):
            raise ArgumentError(
                f"The length {length} in '{name}_lengths' ({place(i)}) does not fit {name!r}, whose texts have {len(row)} "
                "labels.",
                hint="A length is the number of labels before the padding.",
            )
        wrong = own[(own < 0) | (own >= count)]
        if wrong.size:
            raise ArgumentError(
                f"The label {wrong[0]} in {name!r} ({place(i)}) is out of range: the model has {count} classes, which are "
                f"numbered 0 to {count - 1}.",
                hint="Correct the labels, or give the model a larger last layer (onnx_convgrad.replace_head, --labels).",
            )
        needed = len(own) + int((own[1:] == own[:-1]).sum())
        if frames is not None and needed > frames:
            raise ArgumentError(
                f"The text of {len(own)} labels in {name!r} ({place(i)}) takes {needed} frames, and the model has {frames}: "
                "its loss would be infinite.",
                hint="Leave it out, use wider images (--image-size), or the loss option zero_infinity=true.",
            )


def _check_numbers(name: str, array: np.ndarray, place: Place) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        if math.isfinite(array.sum(dtype=np.float32 if array.itemsize < 8 else None)):
            return
    wrong = np.isnan(array) | np.isposinf(array)
    if wrong.any():
        raise ArgumentError(
            f"{name!r} holds {array[wrong].flat[0]} in {place(_first(wrong))}: every loss would become NaN.",
            hint="Correct the data, or leave this sample out.",
        )


def _first(wrong: np.ndarray) -> int:
    """The number of the first sample with a wrong value."""
    return int(np.nonzero(wrong.reshape(len(wrong), -1).any(axis=1))[0][0]) if wrong.ndim else 0
