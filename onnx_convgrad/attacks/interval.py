"""Interval propagation: the smallest and the largest numbers that every value takes over a box of inputs.

Gowal et al. 2018, arXiv:1810.12715. An affine operator maps the middle of a box as it is, and half its width by the sizes of
its weights; a monotone one maps both ends. Which operators are monotone is a fact beside their rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import problem, rule_of
from onnx_convgrad.autodiff.facts import reads_numbers
from onnx_convgrad.errors import DifferentiationError, Problem, UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.loop_bodies import depending
from onnx_convgrad.ir.nodes import ancestors


class Box(NamedTuple):
    """The smallest and the largest numbers of a value, both of its shape."""

    low: ir.Value
    high: ir.Value


PRODUCTS = frozenset("Conv ConvTranspose Gemm MatMul Mul Div BatchNormalization".split())
"""Operators that are affine in one operand."""

Boxes = dict[ir.Value, Box]


Tighten = Callable[[ir.Value, Boxes], Box]
"""Returns a tighter box of a value, given the boxes of those before it."""


def boxes(e: Emitter, image: ir.Value, box: Box, target: ir.Value, tighten: Tighten | None = None) -> Boxes:
    """The box of every value between an input and a target.

    Args:
        e: Emitter positioned behind the target.
        image: The input.
        box: Its box.
        target: A value that depends on it.
        tighten: Tightens the boxes of what nonlinear operators read.

    Raises:
        DifferentiationError: Listing all operators for which no interval is known.
    """
    found: Boxes = {image: box}
    lost: set[ir.Value | None] = set()
    problems: list[Problem] = []
    above = ancestors(target)
    for node in [n for n in depending(e.graph, [image]) if n in above]:
        if lost.intersection(node.inputs):
            lost.update(node.outputs)
            continue
        if not any(v in found for v in node.inputs) or not reads_numbers(node):
            continue
        if tighten is not None and not is_affine(node, found):
            found.update({v: tighten(v, found) for v in node.inputs if v is not None and v in found})
        try:
            found.update(_through(e, node, found))
        except UnsupportedCase as case:
            problems.append(problem(e.graph, node, case.message, (node.outputs[0].name or "?",), case.hint))
            lost.update(node.outputs)
    if problems:
        raise DifferentiationError(problems)
    return found


def _through(e: Emitter, node: ir.Node, found: Boxes) -> Boxes:
    call, op, rule = Call(node), node.op_type, rule_of(node)
    if any(True for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH):
        raise UnsupportedCase("no interval of its result is known.")
    varied = [i for i, v in enumerate(node.inputs) if v in found]
    directions = ["" if rule is None else rule.direction(call, call.names[0][i]) for i in varied]
    if any(directions):
        if not all(directions):
            raise UnsupportedCase("an operand in which it is not monotone depends on the input.")
        low, high = (_end(e, node, dict(zip(varied, directions, strict=True)), found, end) for end in range(2))
        return {v: Box(*ends) for v, *ends in zip(node.outputs, low, high, strict=True)}
    if (op in PRODUCTS and not node.domain) or (rule is not None and rule.kind == "multilinear"):
        return {node.outputs[0]: _product(e, node, call, found)}
    raise UnsupportedCase("no interval of its result is known.", hint="Name scores before it with of=.")


def again(e: Emitter, node: ir.Node, values: Mapping[ir.Value, ir.Value]) -> tuple[ir.Value, ...]:
    """Emit a node on other operands.

    Args:
        e: The emitter.
        node: The node.
        values: Operand -> what takes its place.
    """
    return _emitted(e, node, [None if v is None else values.get(v, v) for v in node.inputs])


def _emitted(e: Emitter, node: ir.Node, inputs: Sequence[ir.Value | None]) -> tuple[ir.Value, ...]:
    results = e.ops(node.op_type, *inputs, outputs=len(node.outputs), **Call(node).attributes(), domain=node.domain)
    return tuple(e.typed(result, v) for result, v in zip(results, node.outputs, strict=True))


def _end(e: Emitter, node: ir.Node, directions: Mapping[int, str], found: Boxes, end: int) -> tuple[ir.Value, ...]:
    """The lower end of the results of a monotone operator, or the upper end, from ends of its operands."""
    inputs = list(node.inputs)
    for place, direction in directions.items():
        v = inputs[place]
        assert v is not None
        inputs[place] = found[v][end if direction == "rising" else 1 - end]
    return _emitted(e, node, inputs)


def _product(e: Emitter, node: ir.Node, call: Call, found: Boxes) -> Box:
    """The middle goes through the node as it is, half the width without bias and with the absolute values of weights."""
    y, varied = node.outputs[0], [i for i, v in enumerate(node.inputs) if v in found]
    if node.op_type == "Mul" and len(varied) == 2:
        return _of_both(e, found[call["A"]], found[call["B"]], y)
    if len(varied) > 1 or varied[0] > 1 or not is_affine(node, found):
        raise UnsupportedCase("several of its operands depend on the input.")
    x = node.inputs[varied[0]]
    assert x is not None
    low, high = found[x]
    middle, half = e.mul(e.add(low, high), 0.5), e.mul(e.sub(high, low), 0.5)
    (center,) = again(e, node, {x: e.typed(middle, x)})[:1]
    half = e.typed(half, x)
    normalization = node.op_type == "BatchNormalization"
    width = _normalized(e, node, call, half) if normalization else _sized(e, node, call, half, x)
    width = e.op("Abs", width) if node.op_type == "Gemm" else width  # alpha may be negative
    return Box(e.typed(e.sub(center, width), y), e.typed(e.add(center, width), y))


def is_affine(node: ir.Node, found: Boxes) -> bool:
    """Whether an operator is affine in what depends on the input.

    Args:
        node: The node.
        found: The boxes of what depends on the input.
    """
    rule, call = rule_of(node), Call(node)
    varied = [name for name, v in zip(call.names[0], node.inputs, strict=False) if v in found]
    return rule is not None and rule.is_affine_in(call, varied)


def _of_both(e: Emitter, a: Box, b: Box, y: ir.Value) -> Box:
    products = [e.typed(e.mul(p, q), y) for p in a for q in b]
    low, high = products[0], products[0]
    for other in products[1:]:
        low, high = e.op("Min", low, other), e.op("Max", high, other)
    return Box(e.typed(low, y), e.typed(high, y))


def _sized(e: Emitter, node: ir.Node, call: Call, half: ir.Value, x: ir.Value) -> ir.Value:
    """Half the width, through the node with the absolute values of the other factor and without a bias."""
    inputs = [half if v is x else e.op("Abs", v) for v in node.inputs[:2] if v is not None]
    return e.typed(e.op(node.op_type, *inputs, **call.attributes(), domain=node.domain), node.outputs[0])


def _normalized(e: Emitter, node: ir.Node, call: Call, half: ir.Value) -> ir.Value:
    zeros = e.zeros_like(call["B"]), e.zeros_like(call["input_mean"])
    return e.op("BatchNormalization", half, e.op("Abs", call["scale"]), *zeros, node.inputs[4], **call.attributes())
