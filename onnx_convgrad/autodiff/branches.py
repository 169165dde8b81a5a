"""If with a condition that is known only at run time, differentiated by another If.

    y = f(c) if p else g(c)    with values c of the outer graph

Both derivatives are emitted into the graph and moved into the branches of a new If on the same condition. A value that one
branch does not read has the derivative zero there. A branch of the new If computes again what it needs of f or g.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import floating
from onnx_convgrad.autodiff.forward import forward
from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.loop_bodies import draws, emit_if, emit_once
from onnx_convgrad.ir.nodes import captured_values

Pairs = list[tuple[ir.Value, ir.Value]]
Derivatives = dict[ir.Value, ir.Value]

_BRANCHES = ("then_branch", "else_branch")


def if_reverse(e: Emitter, n: Call, upstream: Mapping[ir.Value, ir.Value], wanted: Collection[ir.Value]) -> Pairs:
    """The contributions to the cotangents of the `wanted` values that an If captures."""
    captured = dict.fromkeys(v for v in captured_values(n.node) if v in wanted)

    def pulled(results: Sequence[ir.Value]) -> Derivatives:
        seeds: Derivatives = {}
        for result, y in zip(results, n.node.outputs, strict=True):
            if y in upstream:
                g = _alike(e, upstream[y], result)
                seeds[result] = e.add(seeds[result], g) if result in seeds else g
        return backward(e, seeds, captured, partial=True)

    return _if(e, n, pulled)


def if_forward(e: Emitter, n: Call, tangents: Mapping[ir.Value, ir.Value]) -> Pairs:
    """The tangents of the results of an If."""

    def pushed(results: Sequence[ir.Value]) -> Derivatives:
        reached = forward(e, tangents, dict.fromkeys(results))
        found = zip(n.node.outputs, results, strict=True)
        return {y: reached.get(r) or e.zeros_like(r) for y, r in found if floating(y)}

    return _if(e, n, pushed)


def _if(e: Emitter, n: Call, derive: Callable[[Sequence[ir.Value]], Derivatives]) -> Pairs:
    """An If whose branches hold what `derive` emits for the results of each branch of `n`."""
    regions: list[list[ir.Node]] = []
    found: list[Derivatives] = []

    def emit(body: Callable[[], Derivatives]) -> tuple[Derivatives, list[ir.Node]]:
        start = len(e.emitted)
        made = body()
        nodes = e.emitted[start:]
        e.forget(nodes)
        return made, nodes

    for name in _BRANCHES:
        body = n.node.attributes[name].as_graph()
        drawn = next((node.op_type for node in body.all_nodes() if draws(node)), None)
        require(drawn is None, f"a branch contains {drawn}, whose random result cannot be computed again.")
        made, nodes = emit(lambda body=body: derive(emit_once(e, body, [])))  # type: ignore[misc]
        found.append(made)
        regions.append(nodes)
    values = list(dict.fromkeys(v for made in found for v in made))
    if not values:
        return []
    branches = []
    for made, nodes in zip(found, regions, strict=True):
        zeros, more = emit(lambda made=made: {v: e.zeros_like(v) for v in values if v not in made})  # type: ignore[misc]
        branches.append(([*nodes, *more], [(made | zeros)[v] for v in values]))
    condition = n.inputs[0]
    assert condition is not None
    return list(zip(values, emit_if(e, condition, branches[0], branches[1], values), strict=True))


def _alike(e: Emitter, value: ir.Value, like: ir.Value) -> ir.Value:
    """The value with the shape that it has in this branch."""
    if value.shape == like.shape:
        return value
    node = ir.Node("", "Identity", [value], num_outputs=1)
    e.place(node)
    return e.typed(node.outputs[0], like)
