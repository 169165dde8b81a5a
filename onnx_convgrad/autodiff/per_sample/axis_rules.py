"""The axis of the samples in the results of operators that compute, or the reason why an operator mixes samples.

Elementwise rules need no entry. Operators that move elements are in `axis_rules_layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.per_sample.sample_axis import Label, Samples, State
from onnx_convgrad.autodiff.per_sample.tracker import Tracker, handler, mixes
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.einsum_equation import ELLIPSIS, parse_equation

Labels = Sequence[Label]

# -- operands ----------------------------------------------------------------------------------------------------------


def only(n: Call, labels: Labels, position: int = 0) -> Samples:
    """The label of one operand; no other operand may hold samples."""
    label = labels[position]
    for i, other in enumerate(labels):
        if i != position and other is not None:
            raise UnsupportedCase(f"its operand {n.names[0][i]} depends on the samples, which is not supported.")
    assert isinstance(label, Samples)
    return label


def shared(labels: Labels) -> Samples:
    """The one label of all operands that hold samples."""
    distinct = {label for label in labels if isinstance(label, Samples)}
    if len(distinct) > 1:
        raise mixes("its operands hold the samples on different axes")
    (label,) = distinct
    return label


def constant(t: Tracker, value: ir.Value | None, what: str) -> np.ndarray:
    """An operand that must be known while building, as a vector."""
    array = t.e.constant_of(value)
    if array is None:
        raise UnsupportedCase(f"its {what} are not known while building, so they may include that of the samples.")
    return array.reshape(-1)


def axes_of(t: Tracker, n: Call, value: ir.Value, operand: str = "axes") -> list[int]:
    """The axes in an operand, non-negative and sorted."""
    rank = t.rank(value)
    return sorted(int(a) % rank for a in constant(t, n.get(operand), operand))


def other_axis(label: Samples, axis: int, rank: int, does: str) -> int:
    """The axis as a non-negative number; it must not be that of the samples."""
    axis %= max(rank, 1)
    if axis == label.axis:
        raise mixes(f"it {does} axis {axis}, which holds the samples")
    return axis


# -- operators with the batch on the first axis ------------------------------------------------------------------------


@handler(
    *"Conv ConvTranspose MaxPool AveragePool LpPool GlobalAveragePool GlobalMaxPool GlobalLpPool LRN STFT".split(),
    *"DepthToSpace SpaceToDepth InstanceNormalization GroupNormalization Col2Im MaxUnpool AffineGrid GridSample".split(),
)
def batched(t: Tracker, n: Call, labels: Labels) -> Label:
    """y[n] = f(x[n]); further operands belong to all samples, or have one row per sample."""
    first = labels[0]
    if n.node.op_type in ("MaxUnpool", "GridSample", "AffineGrid"):
        distinct = {label for label in labels if isinstance(label, Samples)}
        first = distinct.pop() if len(distinct) == 1 else first
    else:
        first = only(n, labels) if first is not None else None
    if not isinstance(first, Samples):
        raise UnsupportedCase("its weights depend on the samples, but its data does not.")
    if first.axis != 0:
        raise mixes(f"its batch is axis 0, but the samples are on axis {first.axis}")
    return first


@handler("QuantizeLinear", "DequantizeLinear", "StraightThrough")
def quantizer(t: Tracker, n: Call, labels: Labels) -> Label:
    """The axis of the samples stays; scales per entry may not be along it."""
    label = shared(labels)
    scale = n.node.inputs[1]
    if scale is not None and scale.shape is not None and list(scale.shape) not in ([], [1]):
        other_axis(label, n.int("axis", 1), t.rank(n.y), "has a scale per entry of")
    return label


@handler("BatchNormalization")
def batch_normalization(t: Tracker, n: Call, labels: Labels) -> Label:
    """With labels statistics, a function of each sample."""
    if n.int("training_mode", 0):
        raise UnsupportedCase(
            "in training mode it normalizes with the mean and variance of the whole batch, which mixes samples.",
            hint="Use inference mode (training=False), or replace it by GroupNormalization or InstanceNormalization.",
        )
    return batched(t, n, labels)


@handler("Resize")
def resize(t: Tracker, n: Call, labels: Labels) -> Label:
    """The axis of the samples stays; it may not be resized."""
    label, x = only(n, labels), n["X"]
    axes = n.ints("axes")
    if axes is not None and label.axis not in {a % t.rank(x) for a in axes}:
        return label
    where = label.axis if axes is None else [a % t.rank(x) for a in axes].index(label.axis)
    scales, sizes = t.e.constant_of(n.get("scales")), n.y.shape
    same = x.shape is not None and sizes is not None and x.shape[label.axis] == sizes[label.axis]
    if (scales is not None and scales.size and scales.reshape(-1)[where] == 1) or same:
        return label
    raise mixes(f"it may resize axis {label.axis}, which holds the samples")


# -- operators along an axis -------------------------------------------------------------------------------------------


Axes = Callable[[Tracker, Call], Iterable[int]]


def _attribute(name: str, default: int) -> Axes:
    return lambda t, n: [n.int(name, default)]


def _operand(t: Tracker, n: Call) -> list[int]:
    return [int(constant(t, n["axis"], "axes")[0])]


_ALONG: dict[str, tuple[str, Axes]] = {
    **dict.fromkeys(
        ("Softmax", "LogSoftmax", "Hardmax", "LpNormalization"), ("normalizes along", _attribute("axis", -1))
    ),
    "MeanVarianceNormalization": ("normalizes along", lambda t, n: n.ints("axes") or (0, 2, 3)),
    "CumSum": ("sums along", _operand),
    "DFT": ("transforms along", lambda t, n: [-2] if n.get("axis") is None else _operand(t, n)),
    "TopK": ("sorts along", _attribute("axis", -1)),
    "Split": ("splits", _attribute("axis", 0)),
}
"""Operator -> what it does, and the axes along which it does so."""


@handler(*_ALONG)
def along(t: Tracker, n: Call, labels: Labels) -> Label:
    """The axis of the samples stays; the operator may not work along it."""
    label, (does, axes) = only(n, labels), _ALONG[n.node.op_type]
    for axis in axes(t, n):
        other_axis(label, axis, t.rank(n.node.inputs[0] or n.y), does)
    return label


@handler("LayerNormalization")
def layer_normalization(t: Tracker, n: Call, labels: Labels) -> Label:
    """The axis of the samples stays; it must be before the normalized ones."""
    label = only(n, labels)
    if label.axis >= n.int("axis", -1) % t.rank(n["X"]):
        raise mixes(f"it normalizes along axis {label.axis}, which holds the samples")
    return label


@handler("ArgMax", "ArgMin")
def arg_max(t: Tracker, n: Call, labels: Labels) -> Label:
    """The reduced axis is dropped, or kept with size one."""
    label = only(n, labels)
    axis = other_axis(label, n.int("axis", 0), t.rank(n["data"]), "chooses along")
    return label.at(label.axis - (axis < label.axis)) if not n.int("keepdims", 1) else label


@handler(*(f"Reduce{kind}" for kind in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()))
def reduction(t: Tracker, n: Call, labels: Labels) -> Label:
    """Reduced axes are dropped, or kept with size one. Over the samples only sums and means are possible, as a total."""
    label, x = only(n, labels), n["data"]
    if n.get("axes") is None:
        if n.int("noop_with_empty_axes", 0):
            return label
        axes = list(range(t.rank(x)))
    else:
        axes = axes_of(t, n, x)
        if not axes:
            axes = [] if n.int("noop_with_empty_axes", 0) else list(range(t.rank(x)))
    if label.axis in axes:
        if n.node.op_type in ("ReduceSum", "ReduceMean"):
            return State.TOTAL
        raise mixes(f"it reduces axis {label.axis}, which holds the samples")
    return label if n.int("keepdims", 1) else label.at(label.axis - sum(a < label.axis for a in axes))


# -- products ----------------------------------------------------------------------------------------------------------


@handler("MatMul")
def matmul(t: Tracker, n: Call, labels: Labels) -> Label:
    """y[.., m, n] = sum over k of a[.., m, k] b[.., k, n]; the samples are on a leading axis, or on m or n."""
    a, b = n["A"], n["B"]
    ranks = t.rank(a), t.rank(b)
    rank = max(*ranks, 2)
    places = [
        label.at(label.axis - r) if isinstance(label, Samples) else None for label, r in zip(labels, ranks, strict=True)
    ]
    left, right = places
    if (left and left.axis == -1) or (right and (right.axis == -2 or ranks[1] == 1)):
        raise mixes("it sums over the samples")
    if left and right and (left != right or left.axis > -3):
        raise mixes("it multiplies samples with one another")
    place = left or right
    assert place is not None
    for value, own, r in ((a, left, ranks[0]), (b, right, ranks[1])):
        if own is None and value in t.varied and r > 2 and place.axis < -2:
            t.constant_along(value, place)
    if 1 in ranks:  # the axis of a vector is not in the result
        place = place.at(place.axis + (place.axis < -1))
        rank = max(ranks) - 1
    return place.at(rank + place.axis)


@handler("Gemm")
def gemm(t: Tracker, n: Call, labels: Labels) -> Label:
    """y = alpha A' B' + beta C, with the samples in the rows of A' or the columns of B'."""
    rows = [1 if n.int("transA", 0) else 0, 0 if n.int("transB", 0) else 1]
    if labels[0] is not None and labels[1] is not None:
        raise mixes("it multiplies samples with one another")
    if labels[0] is None and labels[1] is None:
        raise UnsupportedCase("its operand C depends on the samples, which is not supported.")
    side = 0 if labels[0] is not None else 1
    label = labels[side]
    assert isinstance(label, Samples)
    if label.axis != rows[side]:
        raise mixes("it sums over the samples")
    label, c = label.at(side), n.get("C")
    if c is not None:
        own = labels[2] if len(labels) > 2 else None
        if isinstance(own, Samples) and own.at(own.axis - t.rank(c)) != label.at(label.axis - 2):
            raise mixes("its operands hold the samples on different axes")
        if own is None and c in t.varied:
            t.constant_along(c, label.at(label.axis - 2))
    return label


@handler("Einsum")
def einsum(t: Tracker, n: Call, labels: Labels) -> Label:
    """One index of the equation is that of the samples, and the output has it."""
    terms, right = parse_equation(n.string("equation", ""), [v for v in n.inputs if v is not None])
    if ELLIPSIS in right or any(ELLIPSIS in term for term in terms):
        raise UnsupportedCase("the axes of its ellipsis are not known, because the shape of an operand is not.")
    held = {(terms[i][label.axis], label.at(0)) for i, label in enumerate(labels) if isinstance(label, Samples)}
    if len(held) > 1:
        raise mixes("its operands hold the samples under different indices")
    ((index, label),) = held
    if index not in right or any(term.count(index) > 1 for term in terms):
        raise mixes(f"its index {index} is that of the samples and is summed")
    if any(labels[i] is None and index in term and n.inputs[i] in t.varied for i, term in enumerate(terms)):
        raise UnsupportedCase("an operand that is differentiated has its own rows along the axis of the samples.")
    return label.at(right.index(index))
