"""Interval propagation: the smallest and the largest numbers that every value takes over a box of inputs.

Gowal et al. 2018, arXiv:1810.12715. An affine operator maps the middle of a box as it is, and half its width by the sizes of
its weights; a monotone one maps both ends. Which operators are monotone is a fact beside their rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, reduce
from typing import NamedTuple

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import problem, rule_of
from onnx_convgrad.autodiff.facts import reads_numbers
from onnx_convgrad.autodiff.registry import Rule
from onnx_convgrad.errors import DifferentiationError, Problem, UnsupportedCase
from onnx_convgrad.ir.call import Call, stem
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.loop_bodies import depending, draws
from onnx_convgrad.ir.nodes import ancestors, subgraphs


class Box(NamedTuple):
    """The smallest and the largest numbers of a value, both of its shape."""

    low: ir.Value
    high: ir.Value


Boxes = dict[ir.Value, Box]


Tighten = Callable[[ir.Value, Boxes], Box]
"""Returns a tighter box of a value, given the boxes of those before it."""


def boxes(e: Emitter, image: ir.Value, box: Box, target: ir.Value, tighten: Tighten | None = None) -> Boxes:
    """The box of every value between the input `image`, whose box is given, and `target` behind it.

    `tighten` is called for what nonlinear operators read.

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
    call, rule = Call(node), rule_of(node)
    if any(subgraphs(node)):
        raise UnsupportedCase("no interval of its result is known.")
    varied = [i for i, v in enumerate(node.inputs) if v in found]
    directions = ["" if rule is None else rule.direction(call, call.names[0][i]) for i in varied]
    if any(directions):
        if not all(directions):
            raise UnsupportedCase("an operand in which it is not monotone depends on the input.")
        low, high = (_end(e, node, dict(zip(varied, directions, strict=True)), found, end) for end in range(2))
        return {v: Box(*ends) for v, *ends in zip(node.outputs, low, high, strict=True)}
    if rule is not None and is_product(rule) and not draws(node):
        return {node.outputs[0]: _product(e, node, rule, found)}
    raise _unknown()


def _unknown() -> UnsupportedCase:
    return UnsupportedCase("no interval of its result is known.", hint="Name scores before it with of=.")


def is_product(rule: Rule) -> bool:
    """Whether an operator is affine in some of its operands, with coefficients that depend on the others."""
    return rule.kind == "multilinear" or bool(rule.affine)


def again(e: Emitter, node: ir.Node, values: Mapping[ir.Value, ir.Value]) -> tuple[ir.Value, ...]:
    """Emit a node once more, with the values that take the place of some operands."""
    return _emitted(e, node, [None if v is None else values.get(v, v) for v in node.inputs])


def _emitted(e: Emitter, node: ir.Node, inputs: Sequence[ir.Value | None]) -> tuple[ir.Value, ...]:
    results = e.again(node, inputs, Call(node).attributes())
    return tuple(e.typed(result, v) for result, v in zip(results, node.outputs, strict=True))


def _end(e: Emitter, node: ir.Node, directions: Mapping[int, str], found: Boxes, end: int) -> tuple[ir.Value, ...]:
    """The lower end of the results of a monotone operator, or the upper end, from ends of its operands."""
    inputs = list(node.inputs)
    for place, direction in directions.items():
        v = inputs[place]
        assert v is not None
        inputs[place] = found[v][end if direction == "rising" else 1 - end]
    return _emitted(e, node, inputs)


def _product(e: Emitter, node: ir.Node, rule: Rule, found: Boxes) -> Box:
    """The middle goes through the node as it is, and half the width with the sizes of its coefficients."""
    y, call = node.outputs[0], Call(node)
    varied = [name for name, v in zip(call.names[0], node.inputs, strict=False) if v in found]
    if node.op_type == "Mul" and len(varied) == 2:
        products = [e.typed(e.mul(a, b), y) for a in found[call["A"]] for b in found[call["B"]]]
        return Box(*(e.typed(reduce(partial(e.op, operator), products), y) for operator in ("Min", "Max")))
    if not is_affine(node, found):
        raise _unknown()
    if len(varied) > 1:
        raise UnsupportedCase("several of its operands depend on the input.")
    x = call[varied[0]]
    low, high = found[x]
    middle, half = e.mul(e.add(low, high), 0.5), e.typed(e.mul(e.sub(high, low), 0.5), x)
    (center,) = again(e, node, {x: e.typed(middle, x)})[:1]
    added = {name for group in rule.groups(call) if varied[0] in group.split() for name in group.split()} - {*varied}
    width = e.typed(_width(e, call, rule, varied[0], half, added), y)
    return Box(e.typed(e.sub(center, width), y), e.typed(e.add(center, width), y))


def _width(e: Emitter, call: Call, rule: Rule, varied: str, half: ir.Value, added: Collection[str]) -> ir.Value:
    """Half the width of a box behind a node, which adds some operands to the products.

    Where each number of the result depends on one of the operand, its size is that of the product. Other operators sum
    products with other operands, whose sizes bound it.
    """
    node, alone = call.node, _keeps_places(call, rule, varied)
    others = [
        name for name in call.names[0] if name not in added and name != varied and rule.is_affine_in(call, [name])
    ]
    if not alone and (not others or any(stem(name) not in rule.wrt for name in call.names[0])):
        raise _unknown()
    inputs: list[ir.Value | None] = []
    for name, v in zip(call.names[0], node.inputs, strict=False):
        if v is None:
            inputs.append(None)
        elif name in added:
            inputs.append(e.zeros_like(v))
        else:
            inputs.append(half if name == varied else e.op("Abs", v) if name in others and not alone else v)
    while call.names[0][len(inputs) - 1] in added:
        inputs.pop()
    width = e.again(node, inputs, call.attributes())[0]
    if alone and not added and not rule.is_zero_with(call, varied):
        still = [e.zeros_like(half) if v is half else v for v in inputs]
        width = e.sub(width, e.again(node, still, call.attributes())[0])
    return e.op("Abs", width) if alone or node.op_type == "Gemm" else width  # alpha may be negative


def _keeps_places(call: Call, rule: Rule, operand: str) -> bool:
    """Whether each number of the result depends on one number of an operand."""
    factors = None if rule.factors is None else rule.factors(call)
    if factors is None or factors.flat:
        return False
    axes, result = factors.operands[call.names[0].index(operand)], factors.results[0]
    if axes is None or result is None:
        return False
    return {*axes} <= {*result} and all(factors.does(name).kind == "each" for name in axes)


def is_affine(node: ir.Node, found: Boxes) -> bool:
    """Whether an operator is affine in what depends on the input, and so has a box."""
    rule, call = rule_of(node), Call(node)
    varied = [name for name, v in zip(call.names[0], node.inputs, strict=False) if v in found]
    return rule is not None and rule.is_affine_in(call, varied)
