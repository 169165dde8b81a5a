"""Run a model over data in batches of any size: the last batch is padded where the model takes a fixed number of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from onnx_convgrad.base.numbers import whole
from onnx_convgrad.data.batches import BATCH_SIZE, Batches, DataLike, Loader, as_batches, as_dataset, data_only
from onnx_convgrad.data.datasets import Dataset
from onnx_convgrad.data.inputs import Batch, ProgramInputs
from onnx_convgrad.data.sequences import Sequences
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.metrics.batch_weights import concatenate, samples
from onnx_convgrad.programs.manifest import Manifest, Port

_FREE = "samples"
"""Name of the first axis in place of a fixed number of samples."""


def predict(
    manifest: Manifest, data: DataLike, run: Callable[[Batch], Mapping[str, Any]], batch_size: int | None = None
) -> dict[str, np.ndarray]:
    """Concatenate the outputs over data, whose labels are left out if there are any.

    Args:
        manifest: Names the inputs.
        data: As for `Trainer.fit`.
        run: Computes the outputs of a batch.
        batch_size: Samples at a time; by default those that the model takes, or 32.

    Raises:
        ArgumentError: The data do not fit the inputs, or there are none.
    """
    parts = [results for _, results, _ in batch_results(manifest, data, run, batch_size, targets=False)]
    if not parts:
        raise ArgumentError("The data to predict on give no batches.", hint="Give at least one sample.")
    axes = manifest.batch_axes
    found = {name: concatenate(name, [part[name] for part in parts], axes.get(name, 0)) for name in parts[0]}
    return found if not isinstance(data, Sequences) else _in_order(found, data, manifest, batch_size)


def _in_order(
    outputs: dict[str, np.ndarray], data: Sequences, manifest: Manifest, batch_size: int | None
) -> dict[str, np.ndarray]:
    """Outputs of streams in the order of the parts."""
    batches = data.streams(_size(manifest, batch_size), np.arange(data.count))
    order, axes = np.argsort(np.concatenate([rows for rows, _ in batches])), manifest.batch_axes
    return {n: y.take(order, a) if y.ndim > (a := axes.get(n, 0)) else y for n, y in outputs.items()}


def _size(manifest: Manifest, batch_size: int | None) -> int:
    """The number of samples at a time."""
    fixed = ProgramInputs(manifest).batch_size()
    return fixed or (BATCH_SIZE if batch_size is None else whole(batch_size, "batch_size"))


def batch_results(
    manifest: Manifest,
    data: DataLike,
    run: Callable[[Batch], Mapping[str, Any]],
    batch_size: int | None = None,
    *,
    targets: bool = True,
    names: Mapping[str, str] | None = None,
) -> Iterator[tuple[Batch, dict[str, Any], bool]]:
    """Yield every batch with its results and whether it is whole; what was padded is cut off from both."""
    fixed = ProgramInputs(manifest).batch_size()
    size = _size(manifest, batch_size)
    if batch_size not in (None, size):
        raise ArgumentError(f"The model takes batches of {size}, not of {batch_size}.", hint="Leave batch_size out.")
    free, axes = _free_of_batch(manifest, fixed), manifest.batch_axes
    chosen = (fixed or batch_size) is not None
    for batch in _batches(free, data, size, names, targets=targets, chosen=chosen).epoch_iterator(0):
        count = samples(manifest, batch)
        if count > size and fixed is not None:
            raise ArgumentError(f"The model takes batches of {size}, not of {count}.", hint=f"Give batches of {size}.")
        padded = batch
        if fixed not in (None, count):
            padded = {name: _padded(a, count, size, axes.get(name, 0)) for name, a in batch.items()}
        results = {name: _cut(value, count, size, axes.get(name, 0)) for name, value in run(padded).items()}
        yield batch, results, padded is batch


def _batches(
    manifest: Manifest, data: DataLike, size: int, names: Mapping[str, str] | None, *, targets: bool, chosen: bool
) -> Batches:
    if isinstance(data, Batches):
        return data
    dataset = as_dataset(data)
    full, manifest = manifest, manifest if targets else replace(manifest, targets=())
    if dataset is not None:
        dataset = dataset.bound(manifest) if targets else dataset.bound(manifest).of_one_length()
        names = names if targets else _data_names(full, dataset)
        size = size if chosen else min(size, _at_once(dataset))
        return Loader(dataset, manifest, batch_size=size, shuffle=False, drop_last=False, names=names)
    if targets or not (hasattr(data, "__iter__") or callable(data)):
        return as_batches(data, manifest)
    count, whole = len(full.data), len(full.data) + len(full.targets)
    several = {whole, whole - (full.sample_weight is not None)}  # weights of samples may be missing
    return as_batches(lambda epoch: data_only(data, epoch, count, several), manifest)


def _at_once(dataset: Dataset) -> int:
    """The number of samples that fit into `_BYTES`, where images are made larger than their files."""
    reader: Any = getattr(dataset, "reader", None)
    if reader is None or reader.preprocessing.size is None:
        return BATCH_SIZE
    height, width = reader.preprocessing.size
    return int(max(1, _BYTES // (height * width * reader.channels * np.dtype(reader.dtype).itemsize)))


_BYTES = 2**29
"""Most bytes of the images of a batch whose number of samples nobody has chosen."""


def _data_names(manifest: Manifest, dataset: Dataset) -> dict[str, str] | None:
    """The array of each data input, if inputs and labels together can be matched; labels may be missing."""
    try:
        matches = ProgramInputs(manifest).match(list(dataset.take(slice(0, 1))))
    except ArgumentError:
        return None
    return {port.name: matches[port.name] for port in manifest.data if port.name in matches}


def _free_of_batch(manifest: Manifest, fixed: int | None) -> Manifest:
    """The manifest with a free number of samples."""
    axes = manifest.batch_axes

    def free(port: Port) -> Port:
        axis, shape = axes.get(port.name, 0), list(port.shape or ())
        if shape and shape[axis] == fixed:
            shape[axis] = _FREE
        return replace(port, shape=None if port.shape is None else tuple(shape))

    if fixed is None:
        return manifest
    return replace(manifest, data=tuple(map(free, manifest.data)), targets=tuple(map(free, manifest.targets)))


def _padded(array: np.ndarray, count: int, size: int, axis: int) -> np.ndarray:
    """Repeat the last sample."""
    if array.ndim <= axis or array.shape[axis] != count:
        return array
    return np.concatenate([array, np.repeat(array.take([-1], axis), size - count, axis)], axis)


def _cut(value: Any, count: int, size: int, axis: int) -> Any:
    along = np.ndim(value) > axis and np.shape(value)[axis] == size
    return value[(*[slice(None)] * axis, slice(count))] if along else value
