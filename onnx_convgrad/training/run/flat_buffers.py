"""Gradients that lie in one array, which several ranks add up without copying."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from onnx_convgrad.runtime import import_runtime

_ALIGNMENT = 64
"""Bytes: where ONNX Runtime's kernels want a tensor to begin."""


class FlatBuffers:
    """One array for each dtype, of which OrtValues on the CPU show the parts.

    Args:
        shapes: Name -> shape and dtype.

    Attributes:
        arrays: The arrays, with gaps of zeros between the parts.
        values: Name -> OrtValue of a part.
    """

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
        self.arrays: list[np.ndarray] = []
        self.values: dict[str, Any] = {}
        for dtype in dict.fromkeys(dtype for _, dtype in shapes.values()):
            self._add({name: shape for name, (shape, kind) in shapes.items() if kind == dtype}, np.dtype(dtype))

    def _add(self, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype[Any]) -> None:
        make, unit = import_runtime().OrtValue.ortvalue_from_numpy, _ALIGNMENT // dtype.itemsize
        starts = np.cumsum([0, *(-(-int(np.prod(shape)) // unit) * unit for shape in shapes.values())])
        flat = _aligned(int(starts[-1]), dtype)
        self.arrays.append(flat)
        for (name, shape), start in zip(shapes.items(), starts, strict=False):
            self.values[name] = make(flat[start : start + int(np.prod(shape))].reshape(shape))

    def clear(self) -> None:
        """Set everything to zero."""
        for array in self.arrays:
            array.fill(0)


def _aligned(size: int, dtype: np.dtype[Any]) -> np.ndarray:
    raw = np.zeros(size * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size * dtype.itemsize].view(dtype)


def shapes_of(entries: Iterable[Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shapes and dtypes of the gradients of parameters."""
    return {p.gradient: (p.static_shape(), p.slope.dtype) for p in entries}
