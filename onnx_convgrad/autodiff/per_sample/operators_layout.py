"""How operators that move, join, cut and pick elements move the axis of the samples, or why they mix them."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.per_sample.layout import Label, Samples, reshaped
from onnx_convgrad.autodiff.per_sample.operators import Labels, apart, axes_of, constant, only
from onnx_convgrad.autodiff.per_sample.picks import axis_of_samples
from onnx_convgrad.autodiff.per_sample.sizes import entries
from onnx_convgrad.autodiff.per_sample.tracking import Tracker, handler, mixes
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import known
from onnx_convgrad.ir.shape_hints import input_shape_option

# -- layout ------------------------------------------------------------------------------------------------------------


@handler("Reshape", "Flatten")
def reshape(t: Tracker, n: Call, given: Labels) -> Label:
    x = n.node.inputs[0]
    assert x is not None
    label = only(n, given)
    t.rank(x)
    if n.node.op_type == "Flatten" and label.axis == 0 and n.int("axis", 1) % (t.rank(x) + 1) == 1:
        return label
    target = _target(t, n, x)
    found = None if target is None else reshaped(label, t.sizes(x), target)
    if found is None:
        raise UnsupportedCase(
            f"from shape {x.shape} to {n.y.shape}, where the samples are afterwards is not certain.",
            hint=f"Give the sizes of the inputs, as in {input_shape_option(t.e.graph.inputs)}.",
        )
    return found


def _target(t: Tracker, n: Call, x: ir.Value) -> list[Any] | None:
    """The sizes of the result, those that inference left open as the operand `shape` asks for them."""
    inferred = None if n.y.shape is None else list(n.y.shape)
    asked = entries(t.e, n.get("shape"), t.sizes) if n.node.op_type == "Reshape" else None
    if asked is None or len(inferred or asked) != len(asked):
        return inferred
    copied = [] if n.int("allowzero", 0) else t.sizes(x)
    asked = [copied[i] if d == 0 and i < len(copied) else None if d == -1 else d for i, d in enumerate(asked)]
    pairs = zip(inferred or asked, asked, strict=True)
    return [d if isinstance(d, int) or wanted is None else wanted for d, wanted in pairs]


@handler("Transpose")
def transpose(t: Tracker, n: Call, given: Labels) -> Label:
    label = only(n, given)
    perm = n.ints("perm") or tuple(reversed(range(t.rank(n["data"]))))
    return label.at(perm.index(label.axis))


@handler("Unsqueeze")
def unsqueeze(t: Tracker, n: Call, given: Labels) -> Label:
    label = only(n, given)
    added = constant(t, n["axes"], "axes")
    rank = t.rank(n["data"]) + len(added)
    new = {int(a) % rank for a in added}
    return label.at([axis for axis in range(rank) if axis not in new][label.axis])


@handler("Squeeze")
def squeeze(t: Tracker, n: Call, given: Labels) -> Label:
    label, x = only(n, given), n["data"]
    if n.get("axes") is not None:
        axes = axes_of(t, n, x)
    else:
        t.rank(x)
        axes = [i for i, d in enumerate(x.shape or ()) if known(d) == 1]
        if any(known(d) is None for i, d in enumerate(x.shape or ()) if i != label.axis):
            raise UnsupportedCase("which axes it removes is not known while building.")
    if label.axis in axes:
        raise UnsupportedCase(
            f"it removes axis {label.axis}, which holds the samples.", hint="Export the model with a larger batch."
        )
    return label.at(label.axis - sum(a < label.axis for a in axes))


@handler("Expand")
def expand(t: Tracker, n: Call, given: Labels) -> Label:
    label = only(n, given)
    return label.at(label.axis - t.rank(n["input"]) + t.rank(n.y))


@handler("Tile")
def tile(t: Tracker, n: Call, given: Labels) -> Label:
    label = only(n, given)
    if constant(t, n["repeats"], "repeats")[label.axis] != 1:
        raise mixes(f"it repeats axis {label.axis}, which holds the samples")
    return label


@handler("Trilu", "Det", "CastLike", "RandomNormalLike", "RandomUniformLike", "Bernoulli")
def first_operand(t: Tracker, n: Call, given: Labels) -> Label:
    """The leading axes of the first operand stay; the last two belong together."""
    label = given[0]
    if not isinstance(label, Samples):
        return None
    if n.node.op_type in ("Trilu", "Det") and label.axis >= t.rank(n.node.inputs[0] or n.y) - 2:
        raise mixes(f"it works on matrices along axis {label.axis}, which holds the samples")
    return label


# -- joining, cutting, picking -----------------------------------------------------------------------------------------


@handler("Concat")
def concat(t: Tracker, n: Call, given: Labels) -> Label:
    labels = {label for label in given if isinstance(label, Samples)}
    if len(labels) > 1:
        raise mixes("its operands hold the samples on different axes")
    (label,) = labels
    rank = t.rank(n.y)
    apart(label, n.int("axis", 0), rank, "joins along")
    for value, own in zip(n.inputs, given, strict=True):
        if own is None and value is not None and value in t.varied:
            t.constant_along(value, label.at(label.axis - rank))
            if t[value] is None:
                raise UnsupportedCase(f"its operand {value.name!r} has one row in place of one per sample.")
    return label


@handler("Split")
def split(t: Tracker, n: Call, given: Labels) -> Label:
    label = only(n, given)
    apart(label, n.int("axis", 0), t.rank(n["input"]), "splits")
    return label


@handler("Slice")
def cut(t: Tracker, n: Call, given: Labels) -> Label:
    label, x = only(n, given), n["data"]
    rank = t.rank(x)
    axes = None if n.get("axes") is None else [int(a) % rank for a in constant(t, n.get("axes"), "axes")]
    if axes is None:
        axes = list(range(len(constant(t, n["starts"], "starts"))))
    if label.axis in axes:
        at = axes.index(label.axis)
        start, end = (t.e.constant_of(n[name]) for name in ("starts", "ends"))
        steps = None if n.get("steps") is None else constant(t, n.get("steps"), "steps")
        whole = (
            start is not None and end is not None and start.reshape(-1)[at] == 0 and end.reshape(-1)[at] >= 2**31 - 1
        )
        if not whole or (steps is not None and steps[at] != 1):
            raise mixes(f"it takes part of axis {label.axis}, which holds the samples")
    return label


@handler("Pad")
def pad(t: Tracker, n: Call, given: Labels) -> Label:
    label, x = only(n, given), n["data"]
    axes = list(range(t.rank(x))) if n.get("axes") is None else list(constant(t, n.get("axes"), "axes") % t.rank(x))
    if label.axis in axes:
        amounts, at = constant(t, n["pads"], "pads"), axes.index(label.axis)
        if amounts[at] or amounts[at + len(axes)]:
            raise mixes(f"it pads axis {label.axis}, which holds the samples")
    return label


@handler("Gather")
def gather(t: Tracker, n: Call, given: Labels) -> Label:
    """Rows of a table by indices that depend on the samples, or the same positions of every sample."""
    x, indices = n["data"], n["indices"]
    axis = n.int("axis", 0) % t.rank(x)
    if given[0] is None:
        return only(n, given, 1).at(axis + only(n, given, 1).axis)
    label = only(n, given)
    if label.axis == axis and (found := _axis_of_samples(t, label, indices)) is not None:
        return Samples(axis + found)
    apart(label, axis, t.rank(x), "picks along")
    return label if label.axis < axis else label.at(label.axis - 1 + t.rank(indices))


def _axis_of_samples(t: Tracker, label: Samples, indices: ir.Value, component: int | None = None) -> int | None:
    return axis_of_samples(list(t.e.graph.inputs), t.size, label, indices, component)


@handler("GatherElements", "ScatterElements")
def elements(t: Tracker, n: Call, given: Labels) -> Label:
    """Positions along one axis; all operands have the same axes."""
    labels = {label for label in given if isinstance(label, Samples)}
    if len(labels) > 1:
        raise mixes("its operands hold the samples on different axes")
    (label,) = labels
    apart(label, n.int("axis", 0), t.rank(n["data"]), "picks along")
    if any(own is None and v in t.varied for v, own in zip(n.inputs, given, strict=True)):
        raise UnsupportedCase("an operand that is differentiated holds no samples.")
    return label


@handler("GatherND")
def gather_nd(t: Tracker, n: Call, given: Labels) -> Label:
    """Entries of a table by indices that depend on the samples, or of each sample by its own."""
    x, indices, batch = n["data"], n["indices"], n.int("batch_dims", 0)
    if given[0] is None and not batch:
        label = only(n, given, 1)
        apart(label, -1, t.rank(indices), "reads an index along")
        return label
    labels = {label for label in given if isinstance(label, Samples)}
    if len(labels) == 1 and None not in given and next(iter(labels)).axis < batch and x is not indices:
        return labels.pop()
    if isinstance(given[0], Samples) and given[1] is None and (picked := _indexed(t, indices)) is not None:
        behind = given[0].axis - batch - picked
        if behind >= 0:
            return given[0].at(t.rank(indices) - 1 + behind)
        if not batch and (found := _axis_of_samples(t, given[0], indices, given[0].axis)) is not None:
            return Samples(found)
    raise UnsupportedCase("which entries of which sample it picks is not known.")


@handler("ScatterND")
def scatter_nd(t: Tracker, n: Call, given: Labels) -> Label:
    """Rows in place of others, with the samples on an axis of the rows, or each sample's in that sample."""
    data, indices, updates = (n[name] for name in ("data", "indices", "updates"))
    picked = _indexed(t, indices)
    found: set[Label] = set()
    if given[1] is None and picked is not None:
        for value, label, first in ((data, given[0], picked), (updates, given[2], t.rank(indices) - 1)):
            if isinstance(label, Samples) and label.axis >= first:
                found.add(label.at(label.axis - first + picked))
            elif label is not None or value in t.varied:
                found.add(None)
    if len(found) == 1 and None not in found:
        return found.pop()
    if given[1] is None and isinstance(given[0], Samples) and given[0].axis < (picked or 0):
        own = _axis_of_samples(t, given[0], indices, given[0].axis)
        if own is not None and (given[2] == Samples(own) or (given[2] is None and updates not in t.varied)):
            return given[0]
    raise UnsupportedCase("which entries of which sample it replaces is not known.")


def _indexed(t: Tracker, indices: ir.Value) -> int | None:
    """How many axes the rows of a table of indices go along."""
    t.rank(indices)
    return known(indices.shape[-1]) if indices.shape else None


@handler("OneHot")
def one_hot(t: Tracker, n: Call, given: Labels) -> Label:
    label = only(n, given)
    rank = t.rank(n["indices"]) + 1
    return label.at(label.axis + (n.int("axis", -1) % rank <= label.axis))


@handler("Shape", "Size")
def sizes(t: Tracker, n: Call, given: Labels) -> Label:
    """Sizes say nothing about what is in the samples."""
    return None


@handler(
    *"Equal Greater GreaterOrEqual Less LessOrEqual And Or Xor Not IsNaN IsInf Ceil Floor Round Sign Where".split(),
    *"BitwiseAnd BitwiseOr BitwiseXor BitwiseNot BitShift Cast Identity Mod".split(),
)
def each(t: Tracker, n: Call, given: Labels) -> Label:
    return t.aligned(n, given)
