"""Make the values of a quantized graph differentiable by the straight-through estimator.

Between QuantizeLinear and DequantizeLinear values are integers, which carry no derivative. `mark_quantized` gives each value
that returns to floating numbers the abstract operator StraightThrough, whose first operand is the number before rounding and
whose last is the value itself. Integer operators between them are computed once more on real numbers, for the derivative
alone: QLinearConv, QLinearMatMul, ConvInteger and MatMulInteger by their dequantized meaning, and operators that move or
compare elements. The forward nodes stay as they are, so results keep their bits. `unmark_quantized` removes the operators
after differentiation.

So are values in the bodies of If, Loop and Scan. Integers that cross the border of a body as its operands or results carry
no derivative; those that it captures do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import carriers, floating, rule_of
from onnx_convgrad.autodiff.facts import moved_operands
from onnx_convgrad.frontend.quantizers import is_quantizer, level_range
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.dims import known, static_product
from onnx_convgrad.ir.emit import DOMAIN, Emitter
from onnx_convgrad.ir.nodes import all_nodes, is_op, nested_graphs, subgraphs
from onnx_convgrad.ir.replace import OutputPlaces, put_in_place

STRAIGHT_THROUGH = "StraightThrough"


def mark_quantized(
    graph: ir.Graph, sources: Collection[ir.Value], *, even_steps: bool = False
) -> dict[ir.Value, ir.Value]:
    """Insert StraightThrough after the values that depend on `sources` through quantizers, in place.

    Args:
        graph: A canonical graph.
        sources: The values to differentiate with respect to.
        even_steps: Divide the gradient of a scale by the root of the number of values that share it times the greatest
            level (Esser et al. 2020, section 2.2), so that scales and weights make steps of like size. Of an activation the
            values of one sample count.

    Returns:
        Value -> the result of StraightThrough that took its name, its readers and its place among the outputs.
    """
    if not any(map(is_quantizer, all_nodes(graph))):
        return {}
    e = Emitter(graph, opsets=graph.opset_imports)
    return _Marking(e, sources, even_steps, {}).run()


def unmark_quantized(graph: ir.Graph) -> None:
    """Replace the results of StraightThrough by the values that they stand for, in place."""
    writer = None
    for g in (graph, *nested_graphs(graph)):
        marks = [node for node in g if node.domain == DOMAIN and node.op_type == STRAIGHT_THROUGH]
        if not marks:
            continue
        writer = writer or Emitter(graph)
        e, outputs = writer if g is graph else writer.of_body(g), OutputPlaces(g)
        for node in marks:
            result, value = node.outputs[0], node.inputs[-1]
            assert value is not None, "the value is always given"
            e.anchor = node
            put_in_place(e, outputs, result, value, new=value.name is None)
        g.remove(marks, safe=True)


@dataclass(slots=True)
class _Twin:
    """An integer value whose real numbers (levels - zero) scale depend on the sources.

    `real` emits a value with these numbers and the derivative. `source` is the number before a quantizer rounded it.
    """

    real: Callable[[], ir.Value]
    scale: ir.Value
    zero: ir.Value | None = None
    axis: int = 1
    block: int = 0
    source: ir.Value | None = None
    bounds: tuple[float, float] = (0.0, 0.0)

    @property
    def whole(self) -> bool:
        """Whether one scale holds for the whole tensor."""
        return _is_single(self.scale)

    def same(self, scale: ir.Value, zero: ir.Value | None) -> bool:
        """Whether another scale and zero point are known to be equal."""
        return _same_numbers(self.scale, scale) and _same_numbers(self.zero, zero)

    def convertible(self, scale: ir.Value, zero: ir.Value | None) -> bool:
        """Whether the numbers can be expressed by another scale: the same, or one for the whole tensor."""
        return self.same(scale, zero) or (self.whole and _is_single(scale))


def _is_single(value: ir.Value) -> bool:
    """Whether a value is known to have one element."""
    return value.shape is not None and static_product(value.shape.dims) == 1


def _sharing(source: ir.Value, scale: ir.Value) -> float:
    """Number of values of a weight, or of one sample of an activation, per entry of the scale; unknown sizes are 1."""
    values, scales = ([known(d) or 1 for d in v.shape or ()] for v in (source, scale))
    return math.prod(values if source.is_initializer() else values[1:]) / math.prod(scales)


def _same_numbers(a: ir.Value | None, b: ir.Value | None) -> bool:
    """Whether two scales or zero points are known to be equal; an absent zero point is zero."""
    if a is b:
        return True
    left, right = (np.zeros(()) if v is None else constant_of(v) for v in (a, b))
    if left is None or right is None or (left.shape != right.shape and 1 not in (left.size, right.size)):
        return False
    return bool((left.astype(np.float64) == right.astype(np.float64)).all())


class _Marking:
    """One walk over the graph in its order, with the twins of the integer values so far."""

    def __init__(
        self, e: Emitter, sources: Collection[ir.Value], even_steps: bool, twins: dict[ir.Value, _Twin]
    ) -> None:
        self.graph, self.varied, self.even_steps = e.graph, set(sources), even_steps
        self.e, self.outputs, self.twins = e, OutputPlaces(e.graph), twins
        self.moved: dict[ir.Value, ir.Value] = {}

    def run(self) -> dict[ir.Value, ir.Value]:
        nodes = list(self.graph)
        for node, following in zip(nodes, [*nodes[1:], None], strict=True):
            start = len(self.e.emitted)
            self.e.anchor = node  # what a body reads of this graph comes before it
            for _, body in subgraphs(node):  # all floating operands of a body count as sources
                sources = self.varied.union(filter(floating, body.inputs))
                self.moved.update(_Marking(self.e.of_body(body), sources, self.even_steps, self.twins).run())
            self.e.anchor = following
            handler = None if node.domain else _HANDLERS.get(node.op_type, _Marking.move)
            if handler is not None:
                handler(self, Call(node))
            if any(operand in self.varied for _, operand in carriers(node, rule_of(node))):
                self.varied.update(v for v in node.outputs if floating(v))
            for count, added in enumerate(self.e.emitted[start:], 1):
                added.name = f"{node.name}/real_{count}"
        return self.moved

    # -- marks ---------------------------------------------------------------------------------------------------------

    def mark(self, value: ir.Value, source: ir.Value | None, twin: _Twin | None = None) -> ir.Value:
        """StraightThrough: the numbers of `value`, with the derivative of `source`, clipped to the range of `twin`."""
        if twin is None:
            return self.e.op(STRAIGHT_THROUGH, source, None, None, value, domain=DOMAIN)
        low, high = twin.bounds
        of_floats = twin.zero is not None and twin.zero.dtype is not None and twin.zero.dtype.is_floating_point()
        operands = source, twin.scale, None if of_floats else twin.zero, value
        options: dict[str, float] = {"axis": twin.axis, "block_size": twin.block, "low": low, "high": high}
        if self.even_steps and source is not None:
            options["step_factor"] = 1 / math.sqrt(max(_sharing(source, twin.scale), 1) * high)
        return self.e.op(STRAIGHT_THROUGH, *operands, domain=DOMAIN, **options)

    def put(self, value: ir.Value, mark: ir.Value) -> None:
        """Let `mark` take the name, the readers and the place of `value`."""
        node = mark.producer()
        assert node is not None, "it was just emitted"
        self.outputs.replace(value, mark)
        node.replace_input_with(len(node.inputs) - 1, value)
        mark.name, value.name = value.name, None
        self.moved[value] = mark
        self.varied.add(mark)

    # -- operands ------------------------------------------------------------------------------------------------------

    def quantized(
        self, q: ir.Value, source: ir.Value, scale: ir.Value, zero: ir.Value | None, axis: int = 1, block: int = 0
    ) -> None:
        """Note that `q` is `source` after quantization."""
        dtype = q.dtype or (ir.DataType.UINT8 if zero is None else zero.dtype)
        bounds = None if dtype is None else level_range(dtype)
        if bounds is None:
            return

        def value() -> ir.Value:
            return self.mark(self.dequantized(q, scale, zero, axis, block), source, twin)

        self.twins[q] = twin = _Twin(value, scale, zero, axis, block, source, bounds)

    def dequantized(
        self, q: ir.Value, scale: ir.Value, zero: ir.Value | None = None, axis: int = 1, block: int = 0
    ) -> ir.Value:
        """The real numbers of an integer value, without a derivative."""
        if _is_single(scale):
            return self.e.op("DequantizeLinear", q, scale, zero)
        return self.e.op("DequantizeLinear", q, scale, zero, axis=axis, block_size=block or None)

    def real(self, q: ir.Value, scale: ir.Value, zero: ir.Value | None, axis: int = 1) -> ir.Value:
        """The real numbers of an integer value by a scale and a zero point of its reader."""
        twin = self.twins.get(q)
        if twin is None:
            return self.dequantized(q, scale, zero, axis)
        if twin.same(scale, zero):
            return twin.real()
        return self.e.mul(self.e.sub(self.levels(twin), self._zero(zero, scale)), scale)

    def levels(self, twin: _Twin) -> ir.Value:
        """The levels of a twin with one scale, as floating numbers."""
        return self.e.add(self.e.div(twin.real(), twin.scale), self._zero(twin.zero, twin.scale))

    def _zero(self, zero: ir.Value | None, scale: ir.Value) -> ir.Value | float:
        return 0 if zero is None else self.e.cast_like(zero, scale)

    def _level_zero(self, twin: _Twin) -> ir.Value:
        """The real number of level 0."""
        if twin.zero is None:
            return self.e.zeros_like(twin.scale)
        return self.e.neg(self.e.mul(self.e.cast_like(twin.zero, twin.scale), twin.scale))

    def note(self, y: ir.Value, real: ir.Value, scale: ir.Value, zero: ir.Value | None = None) -> None:
        """Note that the levels of `y` stand for the numbers `real`."""
        if y.shape is not None:
            real.shape = y.shape
        self.twins[y] = _Twin(lambda: real, scale, zero)

    # -- operators -----------------------------------------------------------------------------------------------------

    def quantize(self, n: Call) -> None:
        x, scale = n["x"], n["y_scale"]
        if x in self.varied or scale in self.varied:
            self.quantized(n.y, x, scale, n.get("y_zero_point"), n.int("axis", 1), n.int("block_size", 0))

    def quantize_by_range(self, n: Call) -> None:
        """DynamicQuantizeLinear: scale and zero point, functions of the extremes of x, count as constants.

        The range holds all of x up to half a level, by which the rounded zero point moves it: nothing counts as outside.
        """
        x, (q, scale, zero) = n["x"], n.node.outputs
        if x not in self.varied or not q.uses():
            return
        fixed = self.mark(scale, None)
        for use in list(scale.uses()):
            if use.node is not fixed.producer():
                use.node.replace_input_with(use.idx, fixed)
        self.twins[q] = _Twin(lambda: self.mark(self.dequantized(q, fixed, zero), x), fixed, zero)

    def dequantize(self, n: Call) -> None:
        q, scale, zero = n["x"], n["x_scale"], n.get("x_zero_point")
        twin = self.twins.get(q)
        if twin is None or not twin.convertible(scale, zero):
            return
        if twin.source is not None and twin.same(scale, zero):
            self.put(n.y, self.mark(n.y, twin.source, twin))
        else:
            self.put(n.y, self.mark(n.y, self.real(q, scale, zero)))

    def move(self, n: Call) -> None:
        """Operators that move or compare levels do the same to the real numbers, if all have one scale."""
        operands = list(n.node.inputs)
        moved = operands[:1] if is_op(n.node, "Resize") else moved_operands(n.node)
        data = [(i, v) for i, v in enumerate(operands) if v is not None and v in moved]
        twins = [self.twins[v] for _, v in data if v in self.twins]
        twin = next(iter(twins), None)
        if twin is None or not twin.whole or not all(other.convertible(twin.scale, twin.zero) for other in twins):
            return
        for i, v in data:
            operands[i] = self.real(v, twin.scale, twin.zero)
        if n.node.op_type == "Pad" and operands[2:3] in ([], [None]) and n.string("mode", "constant") == "constant":
            operands[2:3] = [self.e.reshape(self._level_zero(twin), [])]
        outputs = len(n.node.outputs) if is_op(n.node, "Split", "TopK") else 1
        made = self.e.ops(n.node.op_type, *operands, outputs=outputs, **n.attributes())
        for y, real in zip(n.node.outputs, made, strict=False):
            self.note(y, real, twin.scale, twin.zero)

    def rectify(self, n: Call) -> None:
        """Relu of levels: the maximum with level 0, whose real number is -zero scale."""
        twin = self.twins.get(n["X"])
        if twin is None or not twin.whole:
            return
        self.note(n.y, self.e.op("Max", twin.real(), self._level_zero(twin)), twin.scale, twin.zero)

    def linear_product(self, n: Call) -> None:
        """QLinearConv, QLinearMatMul: the product of real numbers, quantized. Those of matrices may have a scale per row."""
        conv = n.node.op_type == "QLinearConv"
        names, axes = ("xw", (0, 0)) if conv else ("ab", (-2, -1))
        operands = [(n[name], n[f"{name}_scale"], n[f"{name}_zero_point"]) for name in names]
        fits = [self.twins[q].convertible(scale, zero) for q, scale, zero in operands if q in self.twins]
        if not fits or not all(fits):
            return
        x, w = (self.real(*operand, axis=axis) for operand, axis in zip(operands, axes, strict=True))
        bias = n.get("B")
        if bias is not None:
            bias = self.dequantized(bias, self.e.mul(n["x_scale"], n["w_scale"]), axis=0)
        y = self.e.conv(x, w, bias, **n.attributes()) if conv else self.e.matmul(x, w)
        if n.y.shape is not None:
            y.shape = n.y.shape
        self.quantized(n.y, y, n["y_scale"], n["y_zero_point"])

    def integer_product(self, n: Call) -> None:
        """ConvInteger, MatMulInteger: the product of levels minus zero points, in units of the scales."""
        conv = n.node.op_type == "ConvInteger"
        pairs = [(n[name], n.get(f"{name.lower()}_zero_point")) for name in ("xw" if conv else "AB")]
        mine = [self.twins[v] for v, _ in pairs if v in self.twins]
        if not mine or not all(twin.whole for twin in mine):
            return
        factors = []
        for position, (q, zero) in enumerate(pairs):
            if q in self.twins:
                factors.append(self.real(q, self.twins[q].scale, zero))
            else:
                factors.append(self._integers(q, zero, None if conv else 1 - position, mine[0].scale))
        scale = mine[0].scale if len(mine) == 1 else self.e.mul(mine[0].scale, mine[1].scale)
        self.note(n.y, self.e.conv(*factors, **n.attributes()) if conv else self.e.matmul(*factors), scale)

    def _integers(self, q: ir.Value, zero: ir.Value | None, after: int | None, like: ir.Value) -> ir.Value:
        """An integer operand that depends on no source, minus its zero point, as floating numbers.

        A vector of zero points is along the axis with `after` axes behind it, or along the first.
        """
        number = self.e.cast_like(q, like)
        if zero is None:
            return number
        offset = self.e.cast_like(zero, like)
        if _is_single(zero):
            offset = self.e.reshape(offset, [])
        elif zero.shape is not None and len(zero.shape) == 1:
            after = self.e.rank(q) - 1 if after is None else after
            offset = self.e.unsqueeze(offset, list(range(1, 1 + after)))
        return self.e.sub(number, offset)

    def add(self, n: Call) -> None:
        """The sum with an integer that depends on no source, such as the int32 bias behind a ConvInteger."""
        pairs = [(self.twins[v], w) for v, w in ((n["A"], n["B"]), (n["B"], n["A"])) if v in self.twins]
        if len(pairs) != 1 or not pairs[0][0].whole:
            return
        twin, other = pairs[0]
        added = self.e.mul(self.e.cast_like(other, twin.scale), twin.scale)
        self.note(n.y, self.e.add(twin.real(), added), twin.scale, twin.zero)

    def cast(self, n: Call) -> None:
        """Levels as floating numbers."""
        twin = self.twins.get(n["input"])
        if twin is not None and twin.whole and floating(n.y):
            self.put(n.y, self.mark(n.y, self.e.cast_like(self.levels(twin), n.y)))


_HANDLERS: dict[str, Callable[[_Marking, Call], None]] = {
    "Add": _Marking.add,
    "Cast": _Marking.cast,
    "ConvInteger": _Marking.integer_product,
    "DequantizeLinear": _Marking.dequantize,
    "DynamicQuantizeLinear": _Marking.quantize_by_range,
    "MatMulInteger": _Marking.integer_product,
    "QLinearConv": _Marking.linear_product,
    "QLinearMatMul": _Marking.linear_product,
    "QuantizeLinear": _Marking.quantize,
    "Relu": _Marking.rectify,
}
"""Operators that compute with integers or make them; others may move or compare them."""
