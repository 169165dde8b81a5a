"""Certified bounds: numbers that no input in a box around the given one can cross, inside one plain file.

Interval propagation bounds every value (`interval`). CROWN (Zhang et al. 2018, arXiv:1811.00866) tightens the last bounds:
it replaces every nonlinear operator by a line below and a line above, by the box of its operand, and walks backward with
the coefficients A of each value, for the least of A y:

    y = f(x),  lower(x) <= f(x) <= upper(x):   A y >= max(A, 0) lower(x) + min(A, 0) upper(x)

The boxes before nonlinear operators come from the same walk, from each number that they read, or from interval propagation
(CROWN-IBP, Zhang et al. 2020, arXiv:1906.06316). All numbers are taken relative to the forward values at the input itself,
so affine operators add no constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from onnx_convgrad.attacks.attack import Bounds, clipped, ends_of
from onnx_convgrad.attacks.interval import Box, Boxes, again, boxes, is_affine
from onnx_convgrad.autodiff.activity import Activity, rule_of
from onnx_convgrad.autodiff.per_sample.sample_axis import Samples
from onnx_convgrad.autodiff.per_sample.tracker import Tracker
from onnx_convgrad.autodiff.registry import Rule
from onnx_convgrad.autodiff.reverse import Walk, backward
from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import positive
from onnx_convgrad.errors import ArgumentError, DifferentiationError, UnsupportedCase
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter, known
from onnx_convgrad.ir.loop_bodies import Layout, Slices, emit_loop, placeholder
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.options import TargetLike
from onnx_convgrad.pipeline.scores import Label, ScoreArguments, Scores, with_scores

METHODS = ("crown", "crown-ibp", "interval")


@transformation
def certify(
    model: AnyModel,
    epsilon: float,
    *,
    method: str = "crown",
    label: Label = None,
    bounds: Bounds = (0.0, 1.0),
    of: str | None = None,
    input: str | None = None,  # noqa: A002 - the term of ONNX
    target: TargetLike = "cpu",
) -> Built:
    """Bound the scores of a classifier over all inputs whose numbers differ by at most epsilon each.

    Other arguments and errors as for `fgsm`.

    Args:
        epsilon: The largest change of a number, in the units of the input.
        method: `"crown"`: a backward walk for each number that a nonlinear operator reads. `"crown-ibp"`: only for the
            scores, faster and looser. `"interval"`: no walk, fastest and loosest.
        label: The class whose score is compared with the others: its number, `"input"` for a graph input `label` (int64
            `[N]`), or `None` for the class with the highest score, sample by sample.
        bounds: The smallest and the largest number of the input, as for `fgsm`; changed inputs keep them.

    Returns:
        The model with five more outputs: `lower` and `upper` (the bounds of all scores, `[N, C]`), `margin` (`[N, C]`: the
        least that the score of the class exceeds that of each other by; 0 for the class itself), `certified` (bool `[N]`:
        all other margins are above 0, so no such input changes the prediction) and `certified_label`, int64 `[N]`. The
        bounds hold up to the rounding of the arithmetic.

    Raises:
        ArgumentError: An unknown name or option, an ambiguous input or output, or the number of classes is unknown.
        DifferentiationError: No bounds of some operators are known; all are listed.
    """
    positive(epsilon, "epsilon")
    check_names([method], METHODS, "method")
    ends = ends_of(bounds)

    def added(e: Emitter, image: ir.Value, scores: Scores) -> dict[str, ir.Value]:
        classes = None if scores.values.shape is None else known(scores.values.shape[1])
        if classes is None:
            raise ArgumentError("The number of classes is unknown.", hint="Give the shapes of the inputs.")
        low, high = (e.const(end, image.dtype) for end in ends)
        box = Box(*(clipped(e, moved(image, float(epsilon)), low, high, image) for moved in (e.sub, e.add)))
        tighten = partial(_tightened, e, image) if method == "crown" else None
        found = boxes(e, image, box, scores.values, tighten)
        return _outputs(e, scores, classes, found, image, method)

    return with_scores(model, added, ScoreArguments(label, of, input, target))


def _outputs(
    e: Emitter, scores: Scores, classes: int, found: Boxes, image: ir.Value, method: str
) -> dict[str, ir.Value]:
    values, own = scores.values, e.unsqueeze(scores.mask, [1])
    box = found.get(values, Box(values, values))
    unit = e.const(np.eye(classes)[None], values.dtype)
    least = e.reduce_sum(e.mul(scores.mask, box.low), [1])
    margin = e.mul(e.sub(least, box.high), e.sub(1, scores.mask))
    lower, upper = box
    if method != "interval" and values in found:
        # Rows of coefficients of the scores: each score, each negated, the class minus each.
        rows = [e.add(e.zeros_like(own), unit), e.sub(e.zeros_like(own), unit), e.sub(own, unit)]
        tight = _least(e, e.concat(rows, 1), values, image, found)  # [N, 3 C]
        first, second, third = (e.slice(tight, [i * classes], [(i + 1) * classes], [1]) for i in range(3))
        lower, upper = e.op("Max", lower, first), e.op("Min", upper, e.neg(second))
        margin = e.op("Max", margin, e.mul(third, e.sub(1, scores.mask)))
    lower, upper, margin = (e.typed(v, values) for v in (lower, upper, margin))
    rivals = e.where(e.compare("Greater", scores.mask, 0), e.scalar(np.inf, values), margin)
    certified = e.compare("Greater", e.reduce("ReduceMin", rivals, [1], keepdims=False), 0)
    named = {"lower": lower, "upper": upper, "margin": margin, "certified": certified}
    return {**named, "certified_label": scores.label}


def _least(e: Emitter, rows: ir.Value, values: ir.Value, image: ir.Value, found: Boxes) -> ir.Value:
    """The least of `rows` `[N, R, C]` times the scores over the box, `[N, R]`: one backward walk for each row, in a loop."""
    rows.shape = ir.Shape(
        [(values.shape or [None])[0], rows.shape[1] if rows.shape else None, (values.shape or [0])[-1]]
    )
    start = len(e.emitted)
    row = placeholder(e, values, values.shape)
    total = _bound(e, row, values, image, found)
    _, (result,) = emit_loop(e, start, [], {row: Slices(rows, Layout(1))}, [(total, Layout(1))])
    return result


def _tightened(e: Emitter, image: ir.Value, x: ir.Value, found: Boxes) -> Box:
    """The box of a value by one backward walk for each of its numbers and each direction, in a loop."""
    sizes = None if x.shape is None else [known(d) for d in x.shape[1:]]
    if sizes is None or None in sizes:
        raise ArgumentError(
            f"The shape {x.shape} of {x.name!r} is not known, so its numbers cannot be bounded one by one.",
            hint="Give the shapes of the inputs with input_shapes, or use method='crown-ibp'.",
        )
    if _is_exact(x, image, found):
        return found[x]
    numbers = e.const(np.arange(math.prod(size for size in sizes if size is not None), dtype=np.int64))
    start = len(e.emitted)
    number = placeholder(e, numbers, ir.Shape([]))
    hit = e.compare("Equal", numbers, number)
    unit = e.reshape(e.mask(hit, x), [1, *(size for size in sizes if size is not None)])
    row = e.typed(e.add(e.zeros_like(x), unit), x)
    low, high = _bound(e, row, x, image, found), e.neg(_bound(e, e.typed(e.neg(row), x), x, image, found))
    made = [(e.typed(v, low), Layout(1)) for v in (low, high)]
    _, ends = emit_loop(e, start, [], {number: Slices(numbers)}, made)
    lower, upper = (e.typed(e.reshape_like(v, x), x) for v in ends)
    return Box(e.typed(e.op("Max", found[x].low, lower), x), e.typed(e.op("Min", found[x].high, upper), x))


def _is_exact(x: ir.Value, image: ir.Value, found: Boxes) -> bool:
    """Whether a chain of one product, and operators that move or add constants, leads from the input: the box is exact."""
    products = 0
    while x is not image:
        node = x.producer()
        varied = [] if node is None else [v for v in node.inputs if v in found]
        if node is None or len(varied) != 1 or not is_affine(node, found) or varied[0] is None:
            return False
        rule = rule_of(node)
        products += rule is None or not (rule.moves or rule.is_elementwise)
        x = varied[0]
    return products <= 1


def _bound(e: Emitter, row: ir.Value, values: ir.Value, image: ir.Value, found: Boxes) -> ir.Value:
    """The least of `row`, of the shape of the values, times them, `[N]`."""
    activity = Activity.between([image], [values], e.order)
    tracker = Tracker(e, [image], activity.varied)
    tracker.follow([values])
    if tracker.problems:  # nodes that mix samples
        raise DifferentiationError(tracker.problems)
    walk = _Relaxed(e, activity, found, tracker)
    slopes = walk.run({values: row}, [image])
    low, high = found[image]
    terms = [walk.summed(e.typed(e.mul(row, values), values)), *walk.offsets]
    if image in slopes:
        slope = slopes[image]
        terms += [
            walk.summed(e.mul(_part(e, "Max", slope), e.sub(low, image))),
            walk.summed(e.mul(_part(e, "Min", slope), e.sub(high, image))),
        ]
    total = e.sum(terms)
    total.dtype, total.shape = row.dtype, ir.Shape(list(values.shape or ())[:1])  # type: ignore[assignment]
    return total


def _part(e: Emitter, operator: str, a: ir.Value) -> ir.Value:
    """The positive (`Max`) or the negative (`Min`) part."""
    return e.typed(e.op(operator, a, e.scalar(0, a)), a)


class _Relaxed(Walk):
    """The reverse walk with lines in place of nonlinear operators.

    `offsets` are what the lines add to the least value, relative to the forward values, `[N]` each.
    """

    joint = False  # every node is walked through by itself

    def __init__(self, e: Emitter, activity: Activity, found: Boxes, tracker: Tracker) -> None:
        super().__init__(e, activity)
        self.found, self.tracker = found, tracker
        self.offsets: list[ir.Value] = []

    def node(
        self, node: ir.Node, rule: Rule | None, upstream: dict[ir.Value, ir.Value]
    ) -> list[tuple[ir.Value, ir.Value]]:
        if is_affine(node, self.found):
            return super().node(node, rule, upstream)
        y = node.outputs[0]
        if self.tracker[y] != Samples(0):
            raise UnsupportedCase(
                "its first axis is not that of the samples.", hint="Give the shapes of the inputs with input_shapes."
            )
        return self._relaxed(node, rule, y, upstream[y])

    def _relaxed(self, node: ir.Node, rule: Rule | None, y: ir.Value, a: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
        e, x = self.e, node.inputs[0]
        above, below = _part(e, "Max", a), _part(e, "Min", a)
        assert x is not None
        if node.op_type == "MaxPool":
            return self._pooled(node, x, y, above, below)
        curve = "" if rule is None else rule.curve_of(Call(node))
        if rule is None or not curve:
            low, high = self.found[y]
            self._add(above, low, y)
            self._add(below, high, y)
            return []
        tangent = partial(_tangent, e, node, rule, x)
        lines = _convex if curve == "convex" else _sigmoid
        (lower, under), (upper, over) = lines(e, tangent, x, self.found[x], self.found[y])
        self._add(above, under, y)
        self._add(below, over, y)
        return [(x, e.typed(e.add(e.mul(above, lower), e.mul(below, upper)), x))]

    def _pooled(
        self, node: ir.Node, x: ir.Value, y: ir.Value, above: ir.Value, below: ir.Value
    ) -> list[tuple[ir.Value, ir.Value]]:
        """A maximum is at least the operand whose least number is the greatest, and at most the greatest number."""
        e, box = self.e, self.found[x]
        low = e.typed(e.op("Identity", box.low), x)
        (pooled,) = again(e, node, {x: low})[:1]
        slope = backward(e, {pooled: above}, [low], partial=True)[low]
        self.offsets.append(e.sub(self.summed(e.mul(slope, x)), self.summed(e.mul(above, y))))
        self._add(below, self.found[y].high, y)
        return [(x, e.typed(slope, x))]

    def _add(self, a: ir.Value, line: ir.Value, y: ir.Value) -> None:
        """Add the coefficients times what a line exceeds the forward value by."""
        self.offsets.append(self.summed(self.e.typed(self.e.mul(a, self.e.sub(line, y)), y)))

    def summed(self, value: ir.Value) -> ir.Value:
        """The sum of each sample, `[N]`."""
        axes: Sequence[int] = range(1, self.e.rank(value, "the sum of each sample"))
        return self.e.reduce_sum(value, axes, keepdims=False) if axes else value


# -- lines: (slope of the lower, its value at x), (slope of the upper, its value at x) -----------------------------------

Line = tuple[ir.Value, ir.Value]
Tangent = Callable[[ir.Value], Line]
"""From a place to the slope of a function there, and its value."""


def _tangent(e: Emitter, node: ir.Node, rule: Rule, x: ir.Value, place: ir.Value) -> Line:
    """The slope and the value of a function of one operand, by its rule."""
    (y,) = again(e, node, {x: e.typed(place, x)})[:1]
    there = y.producer()
    assert there is not None, "it was just emitted"
    assert rule.function is not None, "functions of one operand have a derivative"
    slope = rule.function(e, Call(there))[rule.wrt[0]]()
    return e.typed(slope, x) if isinstance(slope, ir.Value) else e.full_like(x, slope or 0), y


def _convex(e: Emitter, tangent: Tangent, x: ir.Value, of_x: Box, of_y: Box) -> tuple[Line, Line]:
    """Above, the chord over the box; below, the tangent in the middle, of a Relu the side with the smaller area."""
    width, middle = e.sub(of_x.high, of_x.low), e.mul(e.add(of_x.low, of_x.high), 0.5)
    slope, at_middle = tangent(middle)
    narrow = e.compare("LessOrEqual", width, 0)
    rise = e.div(e.sub(of_y.high, of_y.low), e.where(narrow, e.full_like(x, 1), width))
    chord = e.typed(e.where(narrow, slope, rise), x)
    under = e.add(at_middle, e.mul(slope, e.sub(x, middle)))
    over = e.add(of_y.low, e.mul(chord, e.sub(x, of_x.low)))
    return (slope, e.typed(under, x)), (chord, e.typed(over, x))


def _sigmoid(e: Emitter, tangent: Tangent, x: ir.Value, of_x: Box, of_y: Box) -> tuple[Line, Line]:
    """Through both ends of the curve with the smaller of the slopes there, which the slope between never falls below."""
    slopes = (tangent(end)[0] for end in of_x)
    slope = e.typed(e.op("Max", e.op("Min", *slopes), e.scalar(0, x)), x)
    under, over = (e.add(y, e.mul(slope, e.sub(x, end))) for y, end in zip(of_y, of_x, strict=True))
    return (slope, e.typed(under, x)), (slope, e.typed(over, x))
