"""The axis of the samples in the results of a node, by the factors of its operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.factors import Factors
from onnx_convgrad.autodiff.facts import Passage, passage
from onnx_convgrad.autodiff.per_sample.sample_axis import Label, NoAxis, Product, Samples, mixes, reshaped
from onnx_convgrad.autodiff.per_sample.shape_vectors import entries
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import at_sizes
from onnx_convgrad.ir.shape_hints import input_shape_option

if TYPE_CHECKING:
    from onnx_convgrad.autodiff.per_sample.tracker import Tracker


def labels_of_results(t: Tracker, call: Call, factors: Factors, labels: Sequence[Label]) -> list[Label]:
    """The label of every result: that of the operands, on the axis with the same factor."""
    held = {i: label for i, label in enumerate(labels) if isinstance(label, Samples) and i not in factors.unread}
    if not held:
        return [None] * len(call.node.outputs)
    label = next(iter(held.values()))
    if factors.flat:
        return [_reordered(t, call, label, None if factors.sizes is None else call.inputs[factors.sizes])]
    by_index = _by_index(t, call, factors, labels)
    if by_index is not None:
        return [by_index]
    way = passage(call, factors, {i: own.axis for i, own in held.items()})
    if way is None:
        raise mixes("its operands hold them on different axes, and it combines samples with one another")
    if len({own.at(0) for own in held.values()}) > 1:
        raise mixes("its operands hold different numbers of rows per sample")
    if way.work.kind == "unknown":
        raise UnsupportedCase(f"{way.work.reason}, so it may mix the samples.")
    _agree(t, way, label, broadcasts=factors.broadcasts)
    if way.totals:
        return [NoAxis.TOTAL] * len(call.node.outputs)
    if not way.goes_on:
        raise mixes(way.stop("the samples"), hint=way.work.hint)
    return [None if axis is None else label.at(axis) for axis in way.results]


def _agree(t: Tracker, way: Passage, label: Samples, *, broadcasts: bool) -> None:
    """Check that operands without samples have no rows of their own along their axis, if they are differentiated."""
    for value, axis in way.others:
        if value not in t.varied:
            continue
        t.constant_along(value, label.at(axis - t.rank(value)))
        if t[value] is None and not broadcasts:
            raise UnsupportedCase(f"its operand {value.name!r} has a single row, where one per sample is needed.")


def _by_index(t: Tracker, call: Call, factors: Factors, labels: Sequence[Label]) -> Samples | None:
    """The label of a result whose rows are picked, or written, at indices 0, 1, 2, ... along the samples."""
    inputs, names = list(t.e.graph.inputs), factors.operands
    for position, label in enumerate(labels):
        factor = (names[position] or ())[label.axis] if isinstance(label, Samples) and names[position] else ""
        if factor not in factors.indices:
            continue
        where, component = factors.indices[factor]
        indices = call.inputs[where]
        if labels[where] is not None or indices is None or not isinstance(label, Samples):
            continue
        axis = _axis_of_samples(inputs, t.size, label, indices, component)
        found = "" if axis is None else (names[where] or ())[axis]
        result = factors.results[0] or ()
        if found in result:
            return Samples(result.index(found))
        others = [i for i, axes in enumerate(names) if found and axes is not None and found in axes and i != where]
        if found and all(_has_rows(t, call.inputs[i], labels[i], names[i] or (), found) for i in others):
            return label
    return None


def _has_rows(t: Tracker, value: ir.Value | None, label: Label, axes: Sequence[str], factor: str) -> bool:
    """Whether an operand has one row per sample along a factor, or is not differentiated."""
    return label == Samples(axes.index(factor)) or (label is None and value not in t.varied)


def _reordered(t: Tracker, call: Call, label: Samples, asked: ir.Value | None) -> Samples:
    """The label after a change of the axes, derived from the sizes before and after, see `sample_axis.reshaped`.

    `asked` is the operand with the sizes of the result.
    """
    x = call.node.inputs[0]
    assert x is not None
    rank = t.rank(x)
    target = _target(t, call, x, asked)
    if call.y.shape is None and target is not None:
        call.y.shape, call.y.type = ir.Shape(target), call.y.type or x.type
    if call.node.op_type == "Flatten" and label.axis == 0 and call.int("axis", 1) % (rank + 1) == 1:
        return label
    result = None if target is None else reshaped(label, t.sizes(x), target)
    if result is None:
        raise UnsupportedCase(
            f"the axis of the samples cannot be determined after the change from shape {x.shape} to {call.y.shape}.",
            hint=f"Give the sizes of the inputs, as in {input_shape_option(t.e.graph.inputs)}.",
        )
    return result


def _target(t: Tracker, call: Call, x: ir.Value, asked: ir.Value | None) -> list[Any] | None:
    """The sizes of the result; those that inference did not find are taken from the operand `asked`."""
    inferred = None if call.y.shape is None else list(call.y.shape)
    wanted = entries(asked, t.sizes)
    if wanted is None or len(inferred or wanted) != len(wanted):
        return inferred
    copied = [] if call.int("allowzero", 0) else t.sizes(x)
    wanted = [copied[i] if d == 0 and i < len(copied) else None if d == -1 else d for i, d in enumerate(wanted)]
    pairs = zip(inferred or wanted, wanted, strict=True)
    return [d if isinstance(d, int) or size is None else size for d, size in pairs]


# -- indices that the graph computes from sizes, such as `arange(batch)`, found by trial sizes -------------------------


_TRIALS = ((3, (5, 7, 11, 13)), (4, (6, 9, 10, 17)))
"""Trial sizes, all different: of the batch, and of other symbols."""


def _axis_of_samples(
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
