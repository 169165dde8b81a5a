"""Data for training: arrays, files and folders of images as batches, shuffled the same for the same seed and epoch.

`Trainer.fit` takes any of it as it is; what is here is for options, splits and data sets of one's own.
"""

from __future__ import annotations

from onnx_convgrad.training.data import Batches, Loader, Stream, as_batches, as_dataset
from onnx_convgrad.training.datasets import Arrays, Dataset, Part, read_arrays
from onnx_convgrad.training.images import ImageFolder

__all__ = [
    "Arrays",
    "Batches",
    "Dataset",
    "ImageFolder",
    "Loader",
    "Part",
    "Stream",
    "as_batches",
    "as_dataset",
    "read_arrays",
]
