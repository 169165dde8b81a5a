"""Gradients that lie in one array, which several ranks add up without copying."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

from onnx_convgrad.runtime import import_runtime

_ALIGNMENT = 256
"""Alignment of each tensor in bytes, as kernels want it; 64 would do on the CPU."""

Zeros = Callable[[int, np.dtype[Any]], Any]
"""Makes an array of so many zeros: of NumPy, or a tensor of PyTorch on any device."""


class FlatBuffers:
    """One array for each dtype, of which OrtValues show the parts.

    Args:
        shapes: Name -> shape and dtype; the parts lie in this order.
        zeros: Makes the arrays; NumPy's by default.

    Attributes:
        arrays: The arrays, with gaps of zeros between the parts.
        values: Name -> OrtValue of a part.
    """

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], str]], zeros: Zeros | None = None) -> None:
        self.arrays: list[Any] = []
        self.values: dict[str, Any] = {}
        self._places: dict[str, tuple[int, int, int]] = {}
        for dtype in dict.fromkeys(dtype for _, dtype in shapes.values()):
            parts = {name: shape for name, (shape, kind) in shapes.items() if kind == dtype}
            self._add(parts, np.dtype(dtype), zeros or _aligned)

    def _add(self, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype[Any], zeros: Zeros) -> None:
        unit = _ALIGNMENT // dtype.itemsize
        starts = np.cumsum([0, *(-(-int(np.prod(shape)) // unit) * unit for shape in shapes.values())]).tolist()
        flat = zeros(starts[-1], dtype)
        for (name, shape), start, end in zip(shapes.items(), starts, starts[1:], strict=False):
            self.values[name] = _ort_value(flat[start : start + int(np.prod(shape))].reshape(shape))
            self._places[name] = len(self.arrays), start, end
        self.arrays.append(flat)

    def pieces(self, names: Collection[str]) -> list[Any]:
        """The parts with these names, which lie one after another, as one piece of each array."""
        spans: dict[int, list[int]] = {}
        for name in names:
            number, start, end = self._places[name]
            spans.setdefault(number, []).extend((start, end))
        return [self.arrays[number][min(span) : max(span)] for number, span in spans.items()]

    def clear(self) -> None:
        """Set everything to zero."""
        for array in self.arrays:
            array[...] = 0


def _ort_value(part: Any) -> Any:
    """An OrtValue that shows an array or a tensor."""
    make = import_runtime().OrtValue
    return make.ortvalue_from_numpy(part) if isinstance(part, np.ndarray) else make.from_dlpack(part)


def _aligned(size: int, dtype: np.dtype[Any]) -> np.ndarray:
    raw = np.zeros(size * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size * dtype.itemsize].view(dtype)


def shapes_of(entries: Iterable[Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shapes and dtypes of the gradients of parameters."""
    return {p.gradient: (p.static_shape(), p.slope.dtype) for p in entries}
