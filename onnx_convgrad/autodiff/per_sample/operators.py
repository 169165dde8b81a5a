"""How each operator of ai.onnx that computes moves the axis of the samples, or why it mixes them.

Elementwise rules need no entry. Operators that only move elements are in `operators_layout`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.per_sample.layout import Label, Samples, State
from onnx_convgrad.autodiff.per_sample.tracking import Tracker, handler, mixes
from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.einsum_equation import ELLIPSIS, parse_equation

Labels = Sequence[Label]

# -- pieces ------------------------------------------------------------------------------------------------------------


def only(n: Call, given: Labels, position: int = 0) -> Samples:
    """The label of one operand; no other may hold samples."""
    label = given[position]
    for i, other in enumerate(given):
        if i != position and other is not None:
            raise UnsupportedCase(f"its operand {n.names[0][i]} depends on the samples, for which no form is known.")
    assert isinstance(label, Samples)
    return label


def constant(t: Tracker, value: ir.Value | None, what: str) -> np.ndarray:
    """An operand that must be known while building."""
    array = t.e.constant_of(value)
    if array is None:
        raise UnsupportedCase(f"its {what} are not known while building, so they may be those of the samples.")
    return array.reshape(-1)


def axes_of(t: Tracker, n: Call, value: ir.Value, operand: str = "axes") -> list[int]:
    """Non-negative axes from an operand."""
    rank = t.rank(value)
    return sorted(int(a) % rank for a in constant(t, n.get(operand), operand))


def apart(label: Samples, axis: int, rank: int, does: str) -> int:
    """The non-negative `axis`, which must not be that of the samples."""
    axis %= max(rank, 1)
    if axis == label.axis:
        raise mixes(f"it {does} axis {axis}, which holds the samples")
    return axis


# -- operators that treat the first axis as a batch --------------------------------------------------------------------


@handler(
    *"Conv ConvTranspose MaxPool AveragePool LpPool GlobalAveragePool GlobalMaxPool GlobalLpPool LRN STFT".split(),
    *"DepthToSpace SpaceToDepth InstanceNormalization GroupNormalization Col2Im MaxUnpool AffineGrid GridSample".split(),
)
def batched(t: Tracker, n: Call, given: Labels) -> Label:
    """y[n] = f(x[n]); further operands are of all samples, or rows that belong to the same ones."""
    first = given[0]
    if n.node.op_type in ("MaxUnpool", "GridSample", "AffineGrid"):
        labels = {label for label in given if isinstance(label, Samples)}
        first = labels.pop() if len(labels) == 1 else first
    else:
        first = only(n, given) if first is not None else None
    if not isinstance(first, Samples):
        raise UnsupportedCase("its weights depend on the samples and its data does not.")
    if first.axis != 0:
        raise mixes(f"its batch is axis 0, and the samples are on axis {first.axis}")
    return first


@handler("BatchNormalization")
def batch_normalization(t: Tracker, n: Call, given: Labels) -> Label:
    """With given statistics, a function of each sample."""
    if n.int("training_mode", 0):
        raise UnsupportedCase(
            "in training mode it normalizes with the mean and variance of the whole batch, which mixes samples.",
            hint="Use inference mode (training=False), or GroupNormalization or InstanceNormalization in its place.",
        )
    return batched(t, n, given)


@handler("Resize")
def resize(t: Tracker, n: Call, given: Labels) -> Label:
    """Interpolation along axes other than that of the samples."""
    label, x = only(n, given), n["X"]
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


@handler("Softmax", "LogSoftmax", "Hardmax", "LpNormalization")
def along(t: Tracker, n: Call, given: Labels) -> Label:
    label = only(n, given)
    apart(label, n.int("axis", -1), t.rank(n.node.inputs[0] or n.y), "normalizes along")
    return label


@handler("CumSum")
def cum_sum(t: Tracker, n: Call, given: Labels) -> Label:
    label = only(n, given)
    apart(label, int(constant(t, n["axis"], "axes")[0]), t.rank(n["x"]), "sums along")
    return label


@handler("DFT")
def dft(t: Tracker, n: Call, given: Labels) -> Label:
    label = only(n, given)
    axis = constant(t, n.get("axis"), "axis") if n.get("axis") is not None else [-2]
    apart(label, int(axis[0]), t.rank(n["input"]), "transforms along")
    return label


@handler("LayerNormalization")
def layer_normalization(t: Tracker, n: Call, given: Labels) -> Label:
    label = only(n, given)
    if label.axis >= n.int("axis", -1) % t.rank(n["X"]):
        raise mixes(f"it normalizes along axis {label.axis}, which holds the samples")
    return label


@handler("MeanVarianceNormalization")
def mean_variance_normalization(t: Tracker, n: Call, given: Labels) -> Label:
    label = only(n, given)
    for axis in n.ints("axes") or (0, 2, 3):
        apart(label, axis, t.rank(n["X"]), "normalizes along")
    return label


@handler("ArgMax", "ArgMin")
def arg_max(t: Tracker, n: Call, given: Labels) -> Label:
    label = only(n, given)
    axis = apart(label, n.int("axis", 0), t.rank(n["data"]), "chooses along")
    return label.at(label.axis - (axis < label.axis)) if not n.int("keepdims", 1) else label


@handler("TopK")
def top_k(t: Tracker, n: Call, given: Labels) -> Label:
    label = only(n, given)
    apart(label, n.int("axis", -1), t.rank(n["X"]), "sorts along")
    return label


@handler(*(f"Reduce{kind}" for kind in "L1 L2 LogSum LogSumExp Max Mean Min Prod Sum SumSquare".split()))
def reduction(t: Tracker, n: Call, given: Labels) -> Label:
    """Over the samples only sums and means: their results are sums of what each sample gives."""
    label, x = only(n, given), n["data"]
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
def matmul(t: Tracker, n: Call, given: Labels) -> Label:
    """y[.., m, n] = sum over k of a[.., m, k] b[.., k, n]; the samples are among the leading axes, or m, or n."""
    a, b = n["A"], n["B"]
    ranks = t.rank(a), t.rank(b)
    rank = max(*ranks, 2)
    places = [
        label.at(label.axis - r) if isinstance(label, Samples) else None for label, r in zip(given, ranks, strict=True)
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
    if 1 in ranks:  # a vector's own axis is not in the result
        place = place.at(place.axis + (place.axis < -1))
        rank = max(ranks) - 1
    return place.at(rank + place.axis)


@handler("Gemm")
def gemm(t: Tracker, n: Call, given: Labels) -> Label:
    """y = alpha A' B' + beta C, with the samples in the rows of A' or the columns of B'."""
    rows = [1 if n.int("transA", 0) else 0, 0 if n.int("transB", 0) else 1]
    if given[0] is not None and given[1] is not None:
        raise mixes("it multiplies samples with one another")
    if given[0] is None and given[1] is None:
        raise UnsupportedCase("its operand C depends on the samples, for which no form is known.")
    side = 0 if given[0] is not None else 1
    label = given[side]
    assert isinstance(label, Samples)
    if label.axis != rows[side]:
        raise mixes("it sums over the samples")
    label, c = label.at(side), n.get("C")
    if c is not None:
        own = given[2] if len(given) > 2 else None
        if isinstance(own, Samples) and own.at(own.axis - t.rank(c)) != label.at(label.axis - 2):
            raise mixes("its operands hold the samples on different axes")
        if own is None and c in t.varied:
            t.constant_along(c, label.at(label.axis - 2))
    return label


@handler("Einsum")
def einsum(t: Tracker, n: Call, given: Labels) -> Label:
    """One index of the equation runs over the samples, and the result has it."""
    terms, right = parse_equation(n.string("equation", ""), [v for v in n.inputs if v is not None])
    if ELLIPSIS in right or any(ELLIPSIS in term for term in terms):
        raise UnsupportedCase("what its ellipsis stands for is not known, as the shape of an operand is not.")
    held = {(terms[i][label.axis], label.at(0)) for i, label in enumerate(given) if isinstance(label, Samples)}
    if len(held) > 1:
        raise mixes("its operands hold the samples under different indices")
    ((index, label),) = held
    if index not in right or any(term.count(index) > 1 for term in terms):
        raise mixes(f"its index {index} runs over the samples and is summed")
    if any(given[i] is None and index in term and n.inputs[i] in t.varied for i, term in enumerate(terms)):
        raise UnsupportedCase("an operand that is differentiated has rows of its own along the axis of the samples.")
    return label.at(right.index(index))
