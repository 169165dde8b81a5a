"""All parameters as one vector and back, in the order of the manifest: what federated training exchanges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.training.program.manifest import Manifest, Parameter, State

__all__ = ["entries", "flatten", "unflatten"]

Entries = Sequence[Parameter | State]


def entries(manifest: Manifest, *, statistics: bool = False) -> tuple[Parameter | State, ...]:
    """What the vector is made of: the parameters, and with `statistics` the running statistics."""
    return manifest.stored() if statistics else manifest.parameters


def flatten(order: Entries, values: Mapping[str, np.ndarray]) -> np.ndarray:
    """The values one after the other, in the widest of their dtypes."""
    return np.concatenate([values[entry.name].reshape(-1) for entry in order])


def unflatten(order: Entries, vector: np.ndarray) -> dict[str, np.ndarray]:
    """The values that a vector is made of, by name, in their own shapes and dtypes.

    Raises:
        ArgumentError: The vector has another length.
    """
    shapes = [tuple(d for d in entry.shape or () if isinstance(d, int)) for entry in order]
    sizes = [math.prod(shape) for shape in shapes]
    vector = np.asarray(vector)
    if vector.shape != (sum(sizes),):
        raise ArgumentError(
            f"The vector has shape {vector.shape}; {len(sizes)} values of together {sum(sizes)} numbers are needed."
        )
    pieces = np.split(vector, np.cumsum(sizes)[:-1])
    return {
        entry.name: piece.reshape(shape).astype(entry.dtype)
        for entry, piece, shape in zip(order, pieces, shapes, strict=True)
    }
