"""Data for training: arrays, files and folders of images as batches, shuffled the same for the same seed and epoch.

`Trainer.fit` takes any of it as it is; what is here is for options, splits and data sets of one's own.
"""

from __future__ import annotations

from onnx_convgrad.training.data.datasets import Arrays, Dataset, Part, read_arrays
from onnx_convgrad.training.data.images import ImageFolder
from onnx_convgrad.training.data.sources import Batches, Loader, Stream, as_batches, as_dataset

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
