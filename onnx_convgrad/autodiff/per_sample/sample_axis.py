"""The axis of a value that holds the samples of a batch, how a change of shape moves it, and indices that count along it.

The axis has `before * N * after` rows: `before` copies of the whole batch, with `after` rows per sample. A batch of images
has one row per sample, a batch of their patches several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.constants import at_sizes
from onnx_convgrad.ir.dims import dims_equal


@dataclass(frozen=True, slots=True)
class Product:
    """A product of sizes: a number times named symbols, which are sorted, and repeated for a power."""

    number: int = 1
    symbols: tuple[str, ...] = ()

    def times(self, other: Product) -> Product:
        return Product(self.number * other.number, tuple(sorted(self.symbols + other.symbols)))

    def over(self, other: Product) -> Product | None:
        """The quotient, or `None` if it may not be a whole number."""
        rest, taken = Counter(self.symbols), Counter(other.symbols)
        if other.number == 0 or self.number % other.number or taken - rest:
            return None
        return Product(self.number // other.number, tuple(sorted((rest - taken).elements())))

    @property
    def known(self) -> int | None:
        return None if self.symbols else self.number


ONE = Product()


def product(dims: Iterable[object]) -> Product | None:
    """The product of dimensions; `None` if one of them has neither a number nor a name."""
    number, symbols = 1, []
    for d in dims:
        if isinstance(d, int):
            number *= d
        elif isinstance(d, ir.SymbolicDim) and d.value is not None and d.value.isdecimal():
            number *= int(d.value)  # shape inference writes computed sizes as expressions
        elif isinstance(d, ir.SymbolicDim) and d.value is not None:
            symbols.append(d.value)
        else:
            return None
    return Product(number, tuple(sorted(symbols)))


@dataclass(frozen=True, slots=True)
class Samples:
    """The axis of a value that holds the samples, as `before * N * after` rows."""

    axis: int
    before: Product = ONE
    after: Product = ONE

    def at(self, axis: int) -> Samples:
        """The label of these rows on another axis."""
        return Samples(axis, self.before, self.after)

    @property
    def plain(self) -> bool:
        """Whether the axis holds one row per sample."""
        return self.before == ONE == self.after

    def axis_in(
        self, indices: ir.Value, inputs: list[ir.Value], size: object, component: int | None = None
    ) -> int | None:
        """The axis of `indices` along which rows of samples 0, 1, 2, ... are selected; `None` if there is none.

        Args:
            indices: Indices of rows along this axis of the samples, or along their last axis the coordinates of entries.
            inputs: The graph's inputs, whose shapes contain the symbols of sizes.
            size: The number of samples: a number or a symbol.
            component: The coordinate that belongs to the axis of the samples.
        """
        results: set[int | None] = set()
        for sizes in _sizes(inputs, size):
            rows = at_sizes(indices, sizes)
            count = size if isinstance(size, int) else sizes.get(str(size))
            before, after = (_number(p, sizes) for p in (self.before, self.after))
            if rows is None or count is None or before is None or after is None:
                return None
            if component is not None:
                rows = rows[..., component]
            samples = rows % (before * count * after) // after % count
            axes = [axis for axis in range(rows.ndim) if _counts(samples, axis, count)]
            results.add(axes[0] if len(axes) == 1 else None)
        return results.pop() if len(results) == 1 else None


class NoAxis(Enum):
    """The label of a value that depends on the samples but has no axis of samples."""

    TOTAL = "a sum over the samples"
    UNKNOWN = "computed by an operator that was refused"


Label = Samples | NoAxis | None
"""The place of the samples in a value; `None`: it does not depend on them."""


def mixes(reason: str, hint: str = "") -> UnsupportedCase:
    """The error for an operator whose result for one sample depends on other samples."""
    hint = hint or "Gradients per sample need a network that treats each sample by itself."
    return UnsupportedCase(f"it mixes samples: {reason}.", hint=hint)


def reshaped(samples: Samples, source: Sequence[object], target: Sequence[object]) -> Samples | None:
    """The axis of the samples after a Reshape; `None` if it cannot be determined.

    In row-major order the elements are [outer, N, inner]. An axis of the target holds the samples if the axes before it
    divide `outer` and those after it divide `inner`; of several such axes, the result is the one with the fewest rows.
    """
    outer, inner = product(source[: samples.axis]), product(source[samples.axis + 1 :])
    possible: list[Samples] = []
    for axis in range(len(target)):
        first, last = product(target[:axis]), product(target[axis + 1 :])
        if outer is None or inner is None or first is None or last is None:
            continue
        before, after = samples.before.times(outer).over(first), samples.after.times(inner).over(last)
        if before is not None and after is not None:
            possible.append(Samples(axis, before, after))
    if possible:
        return min(possible, key=lambda s: (len(s.before.symbols + s.after.symbols), s.before.number * s.after.number))
    upto = samples.axis + 1  # unknown sizes after the samples may change among themselves
    return samples if len(target) >= upto and all(map(same_size, source[:upto], target[:upto])) else None


def same_size(a: object, b: object) -> bool:
    """Whether two dimensions are certainly equal; `None` stands for one that is not known."""
    return a is not None and b is not None and dims_equal(a, b)


# -- indices that the graph computes from sizes, such as `arange(batch)`, found by trial sizes -------------------------


_TRIALS = ((3, (5, 7, 11, 13)), (4, (6, 9, 10, 17)))
"""Trial sizes, all different: of the batch, and of other symbols."""


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
