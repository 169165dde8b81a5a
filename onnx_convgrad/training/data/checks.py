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
    from_one = known.min() == 1 and known.max() == count
    remedy = f"give the model a head for {max(int(known.max()) + 1, 1)} classes (onnx_convgrad.replace_head, --classes)"
    raise ArgumentError(
        f"The label {labels[wrong].flat[0]} in {name!r} ({place(_first(wrong))}) is out of range: the model has {count} "
        f"classes, which are numbered 0 to {count - 1}.",
        hint="The labels seem to count from 1: subtract 1 from all."
        if from_one
        else f"Correct the labels, or {remedy}.",
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
