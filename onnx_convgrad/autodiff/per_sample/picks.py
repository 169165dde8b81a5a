"""What goes to which sample, where sizes alone decide that.

Exporters pick masks of attention by the numbers of samples, and repeat what all samples share by their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.per_sample.layout import Product, Samples
from onnx_convgrad.ir.constants import at_sizes

__all__ = ["axis_of_repeats", "axis_of_samples"]

_TRIALS = ((3, (5, 7, 11, 13)), (4, (6, 9, 10, 17)))
"""Sizes that differ: of the batch, and of others."""


def axis_of_samples(
    inputs: list[ir.Value], size: object, label: Samples, indices: ir.Value, component: int | None = None
) -> int | None:
    """The axis of `indices` along which the rows that they pick go from one sample to the next; `None` if none is told.

    Args:
        inputs: The graph's inputs, whose shapes have the symbols of sizes.
        size: The number of samples: a number or a symbol.
        label: The axis from which rows are picked, that of the samples.
        indices: Numbers of rows, or along their last axis the coordinates of entries.
        component: Which of the coordinates is that of the samples.
    """
    found: set[int | None] = set()
    for sizes in _sizes(inputs, size):
        rows = at_sizes(indices, sizes)
        count = size if isinstance(size, int) else sizes.get(str(size))
        before, after = (_number(p, sizes) for p in (label.before, label.after))
        if rows is None or count is None or before is None or after is None:
            return None
        if component is not None:
            rows = rows[..., component]
        samples = rows % (before * count * after) // after % count
        axes = [axis for axis in range(rows.ndim) if _counts(samples, axis, count)]
        found.add(axes[0] if len(axes) == 1 else None)
    return found.pop() if len(found) == 1 else None


def axis_of_repeats(inputs: list[ir.Value], size: object, repeats: ir.Value | None) -> int | None:
    """The one axis that is repeated, as often as there are samples; `None` if that is not told."""
    found: set[int | None] = set()
    for sizes in _sizes(inputs, size):
        times = at_sizes(repeats, sizes)
        if times is None:
            return None
        axes = [axis for axis, number in enumerate(times.reshape(-1).tolist()) if number != 1]
        count = size if isinstance(size, int) else sizes.get(str(size))
        found.add(axes[0] if len(axes) == 1 and times.reshape(-1)[axes[0]] == count else None)
    return found.pop() if len(found) == 1 else None


def _counts(samples: np.ndarray, axis: int, count: int) -> bool:
    """Whether along an axis the samples come one after the other."""
    order = np.arange(count).reshape([-1 if a == axis else 1 for a in range(samples.ndim)])
    return samples.shape[axis] == count and bool((samples == order).all())


def _sizes(inputs: list[ir.Value], size: object) -> Iterator[dict[str, int]]:
    names = dict.fromkeys(str(d) for v in inputs for d in v.shape or () if isinstance(d, ir.SymbolicDim))
    others = [name for name in names if name != str(size)]
    for count, numbers in _TRIALS:
        yield {str(size): count} | {
            name: numbers[i % len(numbers)] + 20 * (i // len(numbers)) for i, name in enumerate(others)
        }


def _number(product: Product, sizes: Mapping[str, int]) -> int | None:
    found = [ir.SymbolicDim(symbol).evaluate(sizes) for symbol in product.symbols]
    numbers = [d for d in found if isinstance(d, int)]
    return product.number * int(np.prod(numbers)) if len(numbers) == len(found) else None
