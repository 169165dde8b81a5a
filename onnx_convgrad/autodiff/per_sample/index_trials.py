"""Axes of samples in indices that the graph computes from sizes, such as `arange(batch)`, found by trial sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.per_sample.sample_axis import Product, Samples
from onnx_convgrad.ir.constants import at_sizes

_TRIALS = ((3, (5, 7, 11, 13)), (4, (6, 9, 10, 17)))
"""Trial sizes, all different: of the batch, and of other symbols."""


def axis_of_samples(
    inputs: list[ir.Value], size: object, label: Samples, indices: ir.Value, component: int | None = None
) -> int | None:
    """The axis of `indices` along which the selected rows belong to samples 0, 1, 2, ...; `None` if there is none.

    Args:
        inputs: The graph's inputs, whose shapes contain the symbols of sizes.
        size: The number of samples: a number or a symbol.
        label: The axis of the samples, from which rows are selected.
        indices: Indices of rows, or along their last axis the coordinates of entries.
        component: The coordinate that belongs to the axis of the samples.
    """
    results: set[int | None] = set()
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
        results.add(axes[0] if len(axes) == 1 else None)
    return results.pop() if len(results) == 1 else None


def _counts(samples: np.ndarray, axis: int, count: int) -> bool:
    """Whether `samples` is 0, 1, 2, ... along an axis."""
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
    factors = [ir.SymbolicDim(symbol).evaluate(sizes) for symbol in product.symbols]
    numbers = [d for d in factors if isinstance(d, int)]
    return product.number * int(np.prod(numbers)) if len(numbers) == len(factors) else None
