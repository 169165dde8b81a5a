"""Refuse labels that are not classes, and numbers that would make every loss NaN, with the array's name and the sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onnx_convgrad.data.inputs import Checked, expression, takes
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.manifest import Manifest

Place = Callable[[int], str]


def _in_batch(number: int) -> str:
    return f"sample {number} of the batch, counted from 0"


def check_batch(batch: Mapping[str, np.ndarray], manifest: Manifest, place: Place = _in_batch) -> Checked:
    """Check all values of a batch; `place` names a sample by its number in the batch.

    Numbers may be minus infinity, which masks use.

    Raises:
        ArgumentError: A label is out of range, or a number is NaN or infinite.
    """
    taken, classes = takes(manifest), manifest.classes
    if isinstance(batch, Checked) and batch.takes == taken:
        return batch
    for name, array in batch.items():
        if array.dtype.kind == "f" and array.size:
            _check_numbers(name, array, place)
        elif name in classes:
            check_labels(name, array, *classes[name], place)
        elif name in manifest.characters and f"{name}_lengths" in batch:
            facts = manifest.characters[name]
            check_texts(name, batch, facts, _frames(facts, batch, manifest), place)
    return Checked(batch, taken)


def check_labels(name: str, labels: np.ndarray, count: int, ignored: int | None, place: Place = _in_batch) -> None:
    """Raise `ArgumentError` for a label that is neither a class, 0 to `count` - 1, nor `ignored`."""
    if not labels.size or (labels.min() >= 0 and labels.max() < count):
        return
    wrong = ((labels < 0) | (labels >= count)) & (True if ignored is None else labels != ignored)
    if not wrong.any():
        return
    known = labels[labels != ignored]
    if known.min() < 0:
        remedy = "leave these samples out"
        if ignored is not None:
            least = int(known.min())
            remedy = f"use {ignored} for what the loss shall ignore"
            remedy += f", or ignore_index={least} (--loss-option ignore_index={least})"
    elif (labels[wrong] == known.max()).all() and known.max() >= 2 * count:
        value = int(known.max())
        remedy = f"give ignore_index={value} (--loss-option ignore_index={value}) if the loss shall ignore them"
    else:
        remedy = f"give the model a head for {int(known.max()) + 1} classes (transforms.replace_head, --classes)"
    from_one = known.min() == 1 and known.max() == count
    raise ArgumentError(
        f"The label {labels[wrong].flat[0]} in {name!r} ({place(_first(wrong))}) is out of range: the model has {count} "
        f"classes, which are numbered 0 to {count - 1}.",
        hint="The labels seem to count from 1: subtract 1 from all."
        if from_one
        else f"Correct the labels, or {remedy}.",
    )


def check_texts(
    name: str, batch: Mapping[str, np.ndarray], facts: Mapping[str, Any], frames: int | None, place: Place = _in_batch
) -> None:
    """Raise `ArgumentError` for a text `[S]` with a label outside of the alphabet, or of a length that does not fit.

    Labels of this name and their lengths are in the batch, `facts` in the manifest; `frames` of the output may be unknown.
    """
    texts, lengths = batch[name], batch[f"{name}_lengths"].reshape(-1)
    own_frames = batch.get(f"{name}_input_lengths")
    for i, (row, length) in enumerate(zip(texts, lengths, strict=True)):
        own = row[: max(int(length), 0)]
        if not 0 <= length <= len(row):
            raise ArgumentError(
                f"The length {length} in '{name}_lengths' ({place(i)}) does not fit {name!r}, whose texts have {len(row)} "
                "labels.",
                hint="A length is the number of labels before the padding.",
            )
        wrong = own[(own < 0) | (own >= (np.inf if facts["classes"] is None else facts["classes"]))]
        if wrong.size:
            raise ArgumentError(
                f"The label {wrong[0]} in {name!r} ({place(i)}) is out of range: the model has {facts['classes']} classes, "
                "which are numbered from 0.",
                hint="Correct the labels, or give the model a larger last layer (transforms.replace_head, --labels).",
            )
        if (own == facts["blank"]).any():
            raise ArgumentError(
                f"The text in {name!r} ({place(i)}) has the label {facts['blank']}, which is the blank of the loss.",
                hint="Number the characters without it, or name another blank: og.losses.CTC(blank=), --loss-option blank=.",
            )
        present = frames if own_frames is None else int(own_frames.reshape(-1)[i])
        if (
            own_frames is not None
            and present is not None
            and not 1 <= present <= (present if frames is None else frames)
        ):
            raise ArgumentError(
                f"The number {present} in '{name}_input_lengths' ({place(i)}) is not a number of frames: the output has "
                f"{'at least 1' if frames is None else frames}.",
                hint="Count the frames of the output, which may be fewer than those of the data.",
            )
        has = "the model has" if own_frames is None else "the sample has"
        needed = len(own) + int((own[1:] == own[:-1]).sum())
        if present is not None and needed > present and not facts["zero_infinity"]:
            raise ArgumentError(
                f"The text of {len(own)} labels in {name!r} ({place(i)}) takes {needed} frames, and {has} {present}: "
                "its loss would be infinite.",
                hint="Leave it out, use wider images (--image-size), or the loss option zero_infinity=true.",
            )


def _frames(facts: Mapping[str, Any], batch: Mapping[str, np.ndarray], manifest: Manifest) -> int | None:
    """The number of frames of an output, if the sizes of the data say it."""
    frames: int | str | None = facts["frames"]
    if not isinstance(frames, str):
        return frames
    sizes = {
        dim: batch[port.name].shape[axis]
        for port in manifest.data
        for axis, dim in enumerate(port.shape or ())
        if isinstance(dim, str)
    }
    if frames in sizes:
        return int(sizes[frames])
    size = expression(frames)
    found: Any = size.evaluate(sizes) if size is not None and size.free_symbols() <= set(sizes) else None
    return int(found) if isinstance(found, int) else None


def _check_numbers(name: str, array: np.ndarray, place: Place) -> None:
    if math.isfinite(np.maximum.reduce(array, axis=None)):  # NaN if one is NaN
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
