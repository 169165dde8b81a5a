"""Weights of samples: given ones, and those of their classes, as Keras' `fit(sample_weight=, class_weight=)` has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import factors
from onnx_convgrad.data.datasets import Dataset, Part
from onnx_convgrad.data.inputs import as_array
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.manifest import Manifest

ClassWeight: TypeAlias = str | Mapping[int, float] | Sequence[float]
"""`"balanced"`, or the weights by class: a mapping, whose missing classes weigh 1, or a sequence."""


def balanced(labels: np.ndarray, count: int) -> np.ndarray:
    """The weight of each of `count` classes with which all count equally; 1 for a class without samples."""
    sizes = np.bincount(labels, minlength=count)
    weights = len(labels) / (np.count_nonzero(sizes) * np.maximum(sizes, 1))
    return np.where(sizes == 0, 1.0, weights)


def weights_of_samples(
    dataset: Dataset, manifest: Manifest, sample_weight: ArrayLike | None, class_weight: ClassWeight | None
) -> np.ndarray | None:
    """The weight of each sample of a set, float32 `[samples]`: the product of both; `None` if neither is given.

    Raises:
        ArgumentError: They do not fit the set, or the program has no input for them.
    """
    if sample_weight is None and class_weight is None:
        return None
    given = "sample_weight" if class_weight is None else "class_weight"
    if manifest.sample_weight is None:
        raise ArgumentError(
            f"The program has no input for weights of samples, which {given} needs.",
            hint="Build it with a loss that takes them, such as og.losses.CrossEntropy(sample_weight=True)"
            f"{'' if class_weight is None else '; or with CrossEntropy(weight=og.data.class_weights(data))'}.",
        )
    weights = np.ones(len(dataset), np.float32)
    if sample_weight is not None:
        weights = weights * _of_samples(dataset, sample_weight)
    return weights if class_weight is None else weights * _of_classes(dataset, manifest, class_weight)


def _of_samples(dataset: Dataset, sample_weight: ArrayLike) -> np.ndarray:
    """The given weights of a set; those of a part are among those of the whole."""
    array = as_array(sample_weight)
    if isinstance(dataset, Part) and array.shape == (len(dataset.dataset),):
        array = array[dataset.rows]
    if array.shape != (len(dataset),) or array.dtype.kind not in "biuf":
        raise ArgumentError(
            f"sample_weight holds {array.dtype} of the shape {array.shape}, and there are {len(dataset)} samples.",
            hint="Give one number for each sample.",
        )
    return array.astype(np.float32)


def _of_classes(dataset: Dataset, manifest: Manifest, class_weight: ClassWeight) -> np.ndarray:
    """The weight of the class of each sample; 1 for labels that are not classes."""
    labels = dataset.class_numbers()
    if labels is None or labels.ndim != 1:
        raise ArgumentError(
            "class_weight needs one class for each sample, and it is not known which array holds it.",
            hint="Call the array target or y, or give sample_weight; of pixels and words, weigh classes in the loss: "
            "CrossEntropy(weight=og.data.class_weights(labels)).",
        )
    labels = labels.astype(np.int64)
    known = {count for count, _ in manifest.classes.values()}
    count = max(int(labels.max(initial=0)) + 1, *(known if len(known) == 1 else [1]))
    present = labels >= 0
    if isinstance(class_weight, str):
        check_names([class_weight], ["balanced"], "class_weight")
        table = balanced(labels[present], count)
    else:
        table = _table(class_weight, count)
    return np.where(present, table[np.maximum(labels, 0)], 1.0).astype(np.float32)


def _table(class_weight: Mapping[int, float] | Sequence[float], count: int) -> np.ndarray:
    """The weights by class as an array."""
    pairs: Any = class_weight if isinstance(class_weight, Mapping) else enumerate(class_weight)
    entries = dict(pairs)
    wrong = next((c for c in entries if not isinstance(c, (int, np.integer)) or not 0 <= c < count), None)
    if wrong is not None:
        raise ArgumentError(
            f"class_weight names the class {wrong!r}, and classes are numbered 0 to {count - 1}.",
            hint='Give {class: weight}, or "balanced".',
        )
    table = np.ones(count)
    table[list(map(int, entries))] = factors(list(entries.values()), "class_weight")
    return table
