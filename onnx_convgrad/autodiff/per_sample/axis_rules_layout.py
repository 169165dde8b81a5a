"""The axis of the samples in the results of operators that move, join, slice and gather elements."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.per_sample.axis_rules import Labels, axes_of, constant, only, other_axis, shared
from onnx_convgrad.autodiff.per_sample.index_trials import axis_of_samples
from onnx_convgrad.autodiff.per_sample.sample_axis import Label, Samples, reshaped
from onnx_convgrad.autodiff.per_sample.shape_vectors import entries
from onnx_convgrad.autodiff.per_sample.tracker import Tracker, handler, mixes
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import known
from onnx_convgrad.ir.shape_hints import input_shape_option

# -- layout ------------------------------------------------------------------------------------------------------------


@handler("Reshape", "Flatten")
def reshape(t: Tracker, n: Call, labels: Labels) -> Label:
    """Where the samples are is derived from the sizes before and after, see `sample_axis.reshaped`."""
    x = n.node.inputs[0]
    assert x is not None
    label = only(n, labels)
    t.rank(x)
    if n.node.op_type == "Flatten" and label.axis == 0 and n.int("axis", 1) % (t.rank(x) + 1) == 1:
        return label
    target = _target(t, n, x)
    result = None if target is None else reshaped(label, t.sizes(x), target)
    if result is None:
        raise UnsupportedCase(
            f"the axis of the samples cannot be determined after the change from shape {x.shape} to {n.y.shape}.",
            hint=f"Give the sizes of the inputs, as in {input_shape_option(t.e.graph.inputs)}.",
        )
    return result


def _target(t: Tracker, n: Call, x: ir.Value) -> list[Any] | None:
    """The sizes of the result; those that inference did not find are taken from the operand `shape`."""
    inferred = None if n.y.shape is None else list(n.y.shape)
    wanted = entries(t.e, n.get("shape"), t.sizes) if n.node.op_type == "Reshape" else None
    if wanted is None or len(inferred or wanted) != len(wanted):
        return inferred
    copied = [] if n.int("allowzero", 0) else t.sizes(x)
    wanted = [copied[i] if d == 0 and i < len(copied) else None if d == -1 else d for i, d in enumerate(wanted)]
    pairs = zip(inferred or wanted, wanted, strict=True)
    return [d if isinstance(d, int) or size is None else size for d, size in pairs]


@handler("Transpose")
def transpose(t: Tracker, n: Call, labels: Labels) -> Label:
    label = only(n, labels)
    perm = n.ints("perm") or tuple(reversed(range(t.rank(n["data"]))))
    return label.at(perm.index(label.axis))


@handler("Unsqueeze")
def unsqueeze(t: Tracker, n: Call, labels: Labels) -> Label:
    label = only(n, labels)
    added = constant(t, n["axes"], "axes")
    rank = t.rank(n["data"]) + len(added)
    new = {int(a) % rank for a in added}
    return label.at([axis for axis in range(rank) if axis not in new][label.axis])


@handler("Squeeze")
def squeeze(t: Tracker, n: Call, labels: Labels) -> Label:
    label, x = only(n, labels), n["data"]
    if n.get("axes") is not None:
        axes = axes_of(t, n, x)
    else:
        t.rank(x)
        axes = [i for i, d in enumerate(x.shape or ()) if known(d) == 1]
        if any(known(d) is None for i, d in enumerate(x.shape or ()) if i != label.axis):
            raise UnsupportedCase("the axes that it removes are not known while building.")
    if label.axis in axes:
        raise UnsupportedCase(
            f"it removes axis {label.axis}, which holds the samples.", hint="Export the model with a larger batch."
        )
    return label.at(label.axis - sum(a < label.axis for a in axes))


@handler("Expand")
def expand(t: Tracker, n: Call, labels: Labels) -> Label:
    label = only(n, labels)
    return label.at(label.axis - t.rank(n["input"]) + t.rank(n.y))


@handler("Tile")
def tile(t: Tracker, n: Call, labels: Labels) -> Label:
    label = only(n, labels)
    if constant(t, n["repeats"], "repeats")[label.axis] != 1:
        raise mixes(f"it repeats axis {label.axis}, which holds the samples")
    return label


@handler("Trilu", "Det", "CastLike", "RandomNormalLike", "RandomUniformLike", "Bernoulli")
def first_operand(t: Tracker, n: Call, labels: Labels) -> Label:
    """The axes stay; of Trilu and Det the last two are those of a matrix, and may not be that of the samples."""
    label = labels[0]
    if not isinstance(label, Samples):
        return None
    if n.node.op_type in ("Trilu", "Det") and label.axis >= t.rank(n.node.inputs[0] or n.y) - 2:
        raise mixes(f"it works on matrices along axis {label.axis}, which holds the samples")
    return label


# -- joining, slicing, gathering ---------------------------------------------------------------------------------------


@handler("Concat")
def concat(t: Tracker, n: Call, labels: Labels) -> Label:
    label = shared(labels)
    rank = t.rank(n.y)
    other_axis(label, n.int("axis", 0), rank, "joins along")
    for value, own in zip(n.inputs, labels, strict=True):
        if own is None and value is not None and value in t.varied:
            t.constant_along(value, label.at(label.axis - rank))
            if t[value] is None:
                raise UnsupportedCase(f"its operand {value.name!r} has a single row, where one per sample is needed.")
    return label


@handler("Slice")
def slice_(t: Tracker, n: Call, labels: Labels) -> Label:
    label, x = only(n, labels), n["data"]
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
def pad(t: Tracker, n: Call, labels: Labels) -> Label:
    label, x = only(n, labels), n["data"]
    axes = list(range(t.rank(x))) if n.get("axes") is None else list(constant(t, n.get("axes"), "axes") % t.rank(x))
    if label.axis in axes:
        amounts = entries(t.e, n["pads"]) or [None] * 2 * len(axes)
        own = amounts[axes.index(label.axis) :: len(axes)]
        if None in own:
            own = list(constant(t, n["pads"], "pads"))
        if any(own):
            raise mixes(f"it pads axis {label.axis}, which holds the samples")
    return label


@handler("Gather")
def gather(t: Tracker, n: Call, labels: Labels) -> Label:
    """Rows of a table at indices that depend on the samples, or the same positions of every sample."""
    x, indices = n["data"], n["indices"]
    axis = n.int("axis", 0) % t.rank(x)
    if labels[0] is None:
        return only(n, labels, 1).at(axis + only(n, labels, 1).axis)
    label = only(n, labels)
    if label.axis == axis and (own := _axis_of_samples(t, label, indices)) is not None:
        return Samples(axis + own)
    other_axis(label, axis, t.rank(x), "gathers along")
    return label if label.axis < axis else label.at(label.axis - 1 + t.rank(indices))


def _axis_of_samples(t: Tracker, label: Samples, indices: ir.Value, component: int | None = None) -> int | None:
    return axis_of_samples(list(t.e.graph.inputs), t.size, label, indices, component)


@handler("GatherElements", "ScatterElements")
def elements(t: Tracker, n: Call, labels: Labels) -> Label:
    """All operands have the same axes; the one along which indices count may not be that of the samples."""
    label = shared(labels)
    other_axis(label, n.int("axis", 0), t.rank(n["data"]), "gathers along")
    if any(own is None and v in t.varied for v, own in zip(n.inputs, labels, strict=True)):
        raise UnsupportedCase("an operand that is differentiated holds no samples.")
    return label


@handler("GatherND")
def gather_nd(t: Tracker, n: Call, labels: Labels) -> Label:
    """Entries of a table at indices that depend on the samples, or of each sample at its own indices."""
    x, indices, batch = n["data"], n["indices"], n.int("batch_dims", 0)
    if labels[0] is None and not batch:
        label = only(n, labels, 1)
        other_axis(label, -1, t.rank(indices), "reads an index along")
        return label
    distinct = {label for label in labels if isinstance(label, Samples)}
    if len(distinct) == 1 and None not in labels and next(iter(distinct)).axis < batch and x is not indices:
        return distinct.pop()
    if isinstance(labels[0], Samples) and labels[1] is None and (picked := _indexed(t, indices)) is not None:
        behind = labels[0].axis - batch - picked
        if behind >= 0:
            return labels[0].at(t.rank(indices) - 1 + behind)
        if not batch and (own := _axis_of_samples(t, labels[0], indices, labels[0].axis)) is not None:
            return Samples(own)
    raise UnsupportedCase("the samples that its indices belong to cannot be determined.")


@handler("ScatterND")
def scatter_nd(t: Tracker, n: Call, labels: Labels) -> Label:
    """Rows that replace others: the samples are on an axis of the rows, or each row replaces one of the same sample."""
    data, indices, updates = (n[name] for name in ("data", "indices", "updates"))
    picked = _indexed(t, indices)
    places: set[Label] = set()
    if labels[1] is None and picked is not None:
        for value, label, first in ((data, labels[0], picked), (updates, labels[2], t.rank(indices) - 1)):
            if isinstance(label, Samples) and label.axis >= first:
                places.add(label.at(label.axis - first + picked))
            elif label is not None or value in t.varied:
                places.add(None)
    if len(places) == 1 and None not in places:
        return places.pop()
    if labels[1] is None and isinstance(labels[0], Samples) and labels[0].axis < (picked or 0):
        own = _axis_of_samples(t, labels[0], indices, labels[0].axis)
        if own is not None and (labels[2] == Samples(own) or (labels[2] is None and updates not in t.varied)):
            return labels[0]
    raise UnsupportedCase("the samples whose entries it replaces cannot be determined.")


def _indexed(t: Tracker, indices: ir.Value) -> int | None:
    """The number of axes that each row of `indices` indexes."""
    t.rank(indices)
    return known(indices.shape[-1]) if indices.shape else None


@handler("OneHot")
def one_hot(t: Tracker, n: Call, labels: Labels) -> Label:
    label = only(n, labels)
    rank = t.rank(n["indices"]) + 1
    return label.at(label.axis + (n.int("axis", -1) % rank <= label.axis))


@handler("Shape", "Size")
def sizes(t: Tracker, n: Call, labels: Labels) -> Label:
    """Sizes do not depend on the contents of the samples."""
    return None


@handler(
    *"Equal Greater GreaterOrEqual Less LessOrEqual And Or Xor Not IsNaN IsInf Ceil Floor Round Sign Where".split(),
    *"BitwiseAnd BitwiseOr BitwiseXor BitwiseNot BitShift Cast Identity Mod".split(),
)
def each(t: Tracker, n: Call, labels: Labels) -> Label:
    return t.aligned(n, labels)
