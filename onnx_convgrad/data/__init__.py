"""Data for training: arrays, files and folders of images as batches, in an order that depends on seed and epoch.

`Trainer.fit` takes arrays and paths directly; use this module for options, splits and custom data sets.
"""

from __future__ import annotations

from onnx_convgrad.data.batches import Batches, Loader, Stream, as_batches, as_dataset
from onnx_convgrad.data.class_weights import class_weights
from onnx_convgrad.data.datasets import Arrays, Dataset, Part, read_arrays
from onnx_convgrad.data.images import ImageFolder
from onnx_convgrad.data.ragged import pad_sequences
from onnx_convgrad.data.sequences import Sequences
from onnx_convgrad.data.teacher import with_teacher
from onnx_convgrad.data.texts import TextImages
from onnx_convgrad.frontend.metadata import Preprocessing

__all__ = [
    "Arrays",
    "Batches",
    "Dataset",
    "ImageFolder",
    "Loader",
    "Part",
    "Preprocessing",
    "Sequences",
    "Stream",
    "TextImages",
    "as_batches",
    "as_dataset",
    "class_weights",
    "pad_sequences",
    "read_arrays",
    "with_teacher",
]
