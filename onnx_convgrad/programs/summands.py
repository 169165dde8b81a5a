"""The summands of a loss, each with the number that its batches are joined by.

The loss of the union of several batches follows from their own losses only if each is weighted by the denominator of its
own mean: the samples, the entries, or the weights of the labels that count. So a loss is divided into summands, which are
read off the nodes that compute it: a sum over entries, a mean over them, or a total divided by a count. A loss function
may also return the pair `(total, count)` itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Literal

import onnx_ir as ir

from onnx_convgrad.autodiff.facts import arranges
from onnx_convgrad.base.boundary import CallersCode
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import number_of
from onnx_convgrad.ir.dims import dims_equal, known, static_product
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import captured_values, is_op
from onnx_convgrad.programs.losses.elementwise import Loss, reduce

Joining = Literal["sum", "samples", "count"]

_SUMS = ("ReduceSum", "ReduceSumSquare", "ReduceL1")


@dataclass(frozen=True, slots=True)
class Summand:
    """A summand of a loss.

    Attributes:
        value: The summand without its factor.
        factor: Its factor in the loss.
        joining: `"sum"`: batches are added up; `"samples"`: weighted by their samples; `"count"`: by a count of their own.
        count: The value of the graph that counts; for a mean over entries, the entries.
        division: The node that divides by the count, if there is one.
    """

    value: ir.Value
    factor: float
    joining: Joining
    count: ir.Value | None = None
    division: ir.Node | None = None


Summands = tuple[Summand, ...]

COUNTS, SHARE = "counts", "share"
"""Names of the output of the graph `counts`, and of the input with the shares of a batch in the summands of a union."""


def emitted(
    e: Emitter, loss: Loss, y: ir.Value, targets: Sequence[ir.Value], facts: Facts
) -> tuple[ir.Value, Summands]:
    """Emit a loss of the value `y`; return it and its summands.

    Raises:
        ArgumentError: The loss returns something else than values of the graph, or a count that depends on parameters.
    """
    with CallersCode(loss):
        result: Any = loss(e, y, *targets)
    total, count = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(total, ir.Value) or not isinstance(count, (ir.Value, NoneType)):
        raise ArgumentError(
            f"The loss function returned {result!r:.80}, not a value of the graph.",
            hint="Compute with the methods of its first argument, an Emitter, and return the result: the loss, or the "
            "pair (total, count).",
        )
    if count is not None and depends(count, facts.own):
        raise ArgumentError(
            "The count that the loss function returns depends on the parameters, so batches cannot be joined by it.",
            hint="Count entries of the labels, or add up their weights.",
        )
    total = reduce(e, total, loss.reduction) if count is None else e.op("ReduceSum", total, keepdims=0)
    if loss.reduction in ("sum", "none"):
        return total, (Summand(total, 1.0, "sum"),)
    if count is None:
        return total, summands(total, facts.reading(y))
    summed = e.op("ReduceSum", e.cast_like(count, total), keepdims=0)
    value = e.op("Div", total, summed)
    one = count.shape is not None and static_product(list(count.shape)) == 1
    counted = _unguarded(count) if one else summed
    return value, (Summand(value, 1.0, "count", counted, value.producer()),)


@dataclass(frozen=True, slots=True)
class Facts:
    """Values of a graph that decide how batches are joined.

    Attributes:
        inputs: Data and labels.
        own: Parameters and statistics: no count may depend on them.
        read: Values with samples along their first axis: the first input and what the loss reads.
    """

    inputs: tuple[ir.Value, ...]
    own: frozenset[ir.Value]
    read: tuple[ir.Value, ...]

    def reading(self, y: ir.Value) -> Facts:
        """The facts for a loss of a value."""
        return replace(self, read=(*self.read, y))

    def have_samples(self, entries: ir.Value) -> bool:
        """Whether entries have the samples along their first axis; true where that is unknown."""
        if entries.shape is None:
            return True
        if not len(entries.shape):
            return False
        first = entries.shape[0]
        symbols = {d.value for v in self.inputs for d in v.shape or () if not isinstance(d, int)} - {None}
        unknown = not isinstance(first, int) and first.value not in symbols
        return unknown or not any(v.shape for v in self.read) or self._is_of_samples(first)

    def are_even(self, entries: ir.Value) -> bool:
        """Whether entries are certainly as many for each sample."""
        if entries.shape is None or not len(entries.shape) or static_product(list(entries.shape)[1:]) is None:
            return False
        return self._is_of_samples(entries.shape[0])

    def _is_of_samples(self, size: Any) -> bool:
        return any(dims_equal(size, v.shape[0]) for v in self.read if v.shape)

    def is_count(self, total: ir.Value, count: float) -> bool:
        """Whether a number is that of the entries of a sum, or of its samples, in batches of a fixed size."""
        node = _behind_sign(total).producer()
        if not is_op(node, *_SUMS) or node.inputs[0] is None or not node.inputs[0].shape:
            return False
        shape = node.inputs[0].shape
        return any(size not in (None, 1) and math.isclose(count, size, rel_tol=1e-5)
                   for size in (static_product(list(shape)), known(shape[0])))  # fmt: skip


def summands(value: ir.Value, facts: Facts) -> Summands:
    """Divide a loss that is one number into summands; what cannot be decided is joined by samples."""
    found = tuple(_summands(value, facts, 1.0))
    return found if len(found) > 1 else (replace(found[0], value=value, factor=1.0),)


def _summands(value: ir.Value, facts: Facts, factor: float) -> Iterator[Summand]:
    node = value.producer()
    operands = [] if node is None else [v for v in node.inputs if v is not None]
    if is_op(node, "Add", "Sub", "Sum"):
        for i, operand in enumerate(operands):
            yield from _summands(operand, facts, -factor if i and node.op_type == "Sub" else factor)
        return
    if node is not None and operands and _passes_one(node, operands[0], facts):
        yield from _summands(operands[0], facts, -factor if node.op_type == "Neg" else factor)
        return
    if is_op(node, "Mul", "Div"):
        first, second = operands if node.op_type == "Div" or number_of(operands[0]) is None else reversed(operands)
        number = number_of(second)
        if number:
            scale = float(number) if node.op_type == "Mul" else 1 / float(number)
            if not facts.is_count(first, 1 / scale):
                yield from _summands(first, facts, factor * scale)
                return
        elif not depends(second, facts.inputs, shapes=True):  # a trained weight of the loss
            yield replace(_scaled(value, first, facts), factor=factor)
            return
        elif node.op_type == "Mul" and not depends(first, facts.inputs, shapes=True):
            yield replace(_scaled(value, second, facts), factor=factor)
            return
    yield replace(_leaf(value, facts), factor=factor)


def _keeps_sum(node: ir.Node) -> bool:
    """Whether a node has each number of its operand once, perhaps with the other sign."""
    return arranges(node) or is_op(node, "Neg")


def _behind_sign(value: ir.Value) -> ir.Value:
    """The value before changes of layout, type and sign."""
    while (node := value.producer()) is not None and _keeps_sum(node) and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def _passes_one(node: ir.Node, operand: ir.Value, facts: Facts) -> bool:
    """Whether a node takes one number and gives it, as the mean of a loss of shape [1, 1] does."""
    if operand.shape is None or static_product(list(operand.shape)) != 1:
        return False
    return _keeps_sum(node) or (is_op(node, "ReduceMean", "ReduceSum") and not facts.have_samples(operand))


def _scaled(value: ir.Value, inner: ir.Value, facts: Facts) -> Summand:
    """The summand of a value that is another one times something that no sample has an effect on."""
    found = summands(inner, facts)
    return replace(found[0], value=value) if len(found) == 1 else Summand(value, 1.0, "samples")


def _leaf(value: ir.Value, facts: Facts) -> Summand:
    node, samples = value.producer(), Summand(value, 1.0, "samples")
    if is_op(node, "Div"):
        total, count = node.inputs
        if total is None or count is None or number_of(count) is not None or depends(count, facts.own):
            return samples
        if not _is_sum(total, facts) or _is_size(count, facts):
            return samples
        return Summand(value, 1.0, "count", _unguarded(count), node)
    entries = None if node is None or not node.inputs else node.inputs[0]
    if is_op(node, "ReduceMean") and entries is not None:
        if not _is_whole(node, value) or not facts.have_samples(entries):
            return samples
        return samples if facts.are_even(entries) else Summand(value, 1.0, "count", entries)
    counted = _is_sum(value, facts) and depends(value, facts.inputs)
    return Summand(value, 1.0, "sum") if counted else samples


def _unguarded(count: ir.Value) -> ir.Value:
    """The count in front of a Max or Clip that keeps it from 0, so that a batch in which nothing counts has the weight 0."""
    inner = count
    while (node := inner.producer()) is not None and arranges(node) and node.inputs[0] is not None:
        inner = node.inputs[0]
    operands = [v for v in node.inputs if v is not None] if is_op(node, "Max", "Clip") else []
    counted = [v for v in operands if number_of(v) is None]
    bounds = [number for number in map(number_of, operands) if number is not None]
    return counted[0] if len(counted) == 1 and bounds and max(bounds) <= 1 else count


def _is_size(count: ir.Value, facts: Facts) -> bool:
    """Whether a count is the number of entries of a value that has as many for each sample."""
    node = _behind_sign(count).producer()
    return is_op(node, "Size") and node.inputs[0] is not None and facts.are_even(node.inputs[0])


def _is_sum(value: ir.Value, facts: Facts) -> bool:
    """Whether a value adds up all entries of one that has samples."""
    node = value.producer()
    operands = [] if node is None else [v for v in node.inputs if v is not None]
    if is_op(node, *_SUMS):
        return _is_whole(node, value) and facts.have_samples(operands[0])
    if is_op(node, "Add", "Sub", "Sum"):
        return all(_is_sum(v, facts) for v in operands)
    if is_op(node, "Mul", "Div"):
        scaled = [v for v in operands if number_of(v) is None]
        return (
            len(scaled) == 1
            and scaled[0] is (operands[0] if node.op_type == "Div" else scaled[0])
            and _is_sum(scaled[0], facts)
        )
    return node is not None and _keeps_sum(node) and _is_sum(operands[0], facts)


def _is_whole(node: ir.Node, value: ir.Value) -> bool:
    """Whether a reduction leaves one number."""
    if value.shape is not None:
        return static_product(list(value.shape)) == 1
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    return axes is None and not Call(node).int("noop_with_empty_axes", 0)


def depends(value: ir.Value, others: Collection[ir.Value], *, shapes: bool = False) -> bool:
    """Whether a value depends on the numbers of some others or, with `shapes`, on their shapes."""
    return any(v in others for v in behind(value, shapes=shapes))


def behind(value: ir.Value, *, shapes: bool = False) -> list[ir.Value]:
    """A value and all whose numbers, or with `shapes` also shapes, it depends on, the last first."""
    found: dict[ir.Value, None] = {}
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if current in found:
            continue
        found[current] = None
        node = current.producer()
        if node is not None and (shapes or not is_op(node, "Shape", "Size")):
            waiting += [v for v in (*node.inputs, *captured_values(node)) if v is not None]
    return list(found)


def scaled(e: Emitter, summand: Summand) -> ir.Value:
    """A summand with its factor, one number without axes."""
    return reduce(e, e.mul(summand.value, summand.factor), "sum")


def share_of_union(e: Emitter, members: Summands, share: ir.Value, first: int) -> Summands:
    """The summands of a batch as shares of those of the union, one number each.

    Where nothing of a batch counts, its total is divided by 1: it is 0, and so are its gradients. `share` holds those of all
    summands of the loss, of which these begin with number `first`.
    """
    shared = []
    for number, summand in enumerate(members, first):
        own = e.squeeze(e.slice(share, [number], [number + 1], [0]), [0])
        if summand.division is not None:
            count = summand.division.inputs[1]
            assert count is not None
            e.anchor = summand.division
            e.repeat()
            own = e.squeeze(e.slice(share, [number], [number + 1], [0]), [0])
            safe = e.typed(e.where(e.compare("Equal", own, 0), 1, count), count)
            summand.division.replace_input_with(1, safe)
            e.anchor = None
        value = reduce(e, summand.value, "sum")
        value = e.typed(e.mul(value, e.cast_like(own, value)), value)
        shared.append(replace(summand, value=value))
    return tuple(shared)
