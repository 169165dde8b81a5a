"""Weights for classes of different sizes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.numbers import whole
from onnx_convgrad.data.batches import as_dataset
from onnx_convgrad.data.datasets import Dataset
from onnx_convgrad.data.inputs import USUAL_TARGETS, as_array
from onnx_convgrad.data.sample_weights import balanced
from onnx_convgrad.errors import ArgumentError


@typed_errors
def class_weights(
    data: Dataset | Mapping[str, ArrayLike] | str | os.PathLike[str] | ArrayLike, *, classes: int | None = None
) -> tuple[float, ...]:
    """The weight of each class with which all classes count equally, for `losses.CrossEntropy(weight=...)`.

    That is the number of samples, divided by the number of classes and by the samples of the class: scikit-learn's
    `compute_class_weight("balanced", ...)`. A class without samples has the weight 1, and is not counted.

    Args:
        data: The labels, integers from 0; or a data set, arrays by name, a file, or a folder of images.
        classes: Number of classes; by default that of the folders, or one more than the largest label. Negative labels,
            such as those that losses ignore, do not count.

    Raises:
        ArgumentError: The labels are not classes, or it is not known which array holds them.
    """
    names: tuple[str, ...] = ()
    given: Any = data
    dataset = as_dataset(given)
    if dataset is not None:
        names, labels = dataset.classes, dataset.class_numbers()
        if labels is None:
            raise ArgumentError(
                "It is not known which array holds the class of each sample.",
                hint=f"Give it alone, as class_weights(labels), or call it one of: {', '.join(sorted(USUAL_TARGETS))}.",
            )
    else:
        labels = as_array(given)
    if labels.dtype.kind not in "biu":
        raise ArgumentError(
            f"Labels of classes are integers, not {labels.dtype}.", hint="Give the number of each class."
        )
    labels = labels[labels >= 0].reshape(-1).astype(np.int64)
    count = max(len(names), int(labels.max(initial=-1)) + 1) if classes is None else whole(classes, "classes")
    if not labels.size or labels.max() >= count:
        raise ArgumentError(
            f"The labels are up to {labels.max(initial=-1)}, which does not fit {count} classes.",
            hint="Labels count from 0; give classes= their number.",
        )
    return tuple(balanced(labels, count).tolist())
