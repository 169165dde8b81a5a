"""If with a condition that is known only at run time, differentiated by another If.

    y = f(c) if p else g(c)    with values c of the outer graph

Both derivatives are emitted into the graph and moved into the branches of a new If on the same condition. A value that one
branch does not read has the derivative zero there.

The new If needs values from inside f or g. Those that take longer to compute again than to store (`TargetInfo.stored`), and
random numbers, become results of the old If, which is extended in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import floating
from onnx_convgrad.autodiff.forward import forward
from onnx_convgrad.autodiff.reverse import Pairs
from onnx_convgrad.autodiff.turns import Derivatives, Pullback, costly, needed
from onnx_convgrad.errors import require
from onnx_convgrad.ir.broadcasting import shapes_differ
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.loop_bodies import BranchNodes, draws, emit_if, emit_once
from onnx_convgrad.ir.nodes import captured_values

BRANCHES = ("then_branch", "else_branch")


def if_reverse(
    e: Emitter,
    n: Call,
    upstream: Mapping[ir.Value, ir.Value],
    wanted: Collection[ir.Value],
    pull: Pullback | None = None,
) -> Pairs:
    """The contributions to the cotangents of the `wanted` values that an If captures."""
    pull = pull or Pullback(e)
    captured = dict.fromkeys(v for v in captured_values(n.node) if v in wanted)

    def pulled(results: Sequence[ir.Value]) -> Derivatives:
        pull.enter_branch(results, n.node.outputs)
        cotangents: Derivatives = {}
        for result, y in zip(results, n.node.outputs, strict=True):
            if y in upstream:
                g = _alike(e, upstream[y], pull.like(result), pull.like(y))
                cotangents[result] = e.add(cotangents[result], g) if result in cotangents else g
        return pull(cotangents, captured)

    return _if(e, n, pulled, pull)


def if_forward(e: Emitter, n: Call, tangents: Mapping[ir.Value, ir.Value]) -> Pairs:
    """The tangents of the results of an If."""

    def pushed(results: Sequence[ir.Value]) -> Derivatives:
        reached = forward(e, tangents, dict.fromkeys(results))
        found = zip(n.node.outputs, results, strict=True)
        return {y: reached.get(r) or e.zeros_like(r) for y, r in found if floating(y)}

    return _if(e, n, pushed, Pullback(e))


def _if(e: Emitter, n: Call, derive: Callable[[Sequence[ir.Value]], Derivatives], kind: Pullback) -> Pairs:
    """An If whose branches hold what `derive` emits for the results of each branch of `n`; `kind` gives their shapes."""
    branches = [Branch(e, n.node, name, derive) for name in BRANCHES]
    values = list(dict.fromkeys(v for branch in branches for v in branch.found))
    condition = n.inputs[0]
    assert condition is not None
    ends = [branch.end(values, kind) for branch in branches]
    likes = [kind.like(v) for v in values]
    return list(zip(values, emit_if(e, condition, ends[0], ends[1], likes), strict=True)) if values else []


class Branch:
    """The derivatives of one branch, emitted into the graph together with the branch itself, and taken out of it."""

    def __init__(
        self, e: Emitter, node: ir.Node, name: str, derive: Callable[[Sequence[ir.Value]], Derivatives]
    ) -> None:
        self.e, self.node, self.name = e, node, name
        self.nodes: list[ir.Node] = []
        values: dict[ir.Value, ir.Value] = {}
        with self._emitting():
            results = emit_once(e, self._body(name), [], values)
            self._forward = dict.fromkeys(e.emitted[self._start :])
            made = {v for n in self._forward for v in n.outputs}
            self.found = derive(results)
        self.in_body = {emitted: own for own, emitted in reversed(values.items()) if emitted in made}

    @contextmanager
    def _emitting(self) -> Iterator[None]:
        self._start = len(self.e.emitted)
        yield
        nodes = self.e.emitted[self._start :]
        self.e.forget(nodes)
        self.nodes += nodes

    def _body(self, name: str) -> ir.Graph:
        return self.node.attributes[name].as_graph()

    def end(self, values: Sequence[ir.Value], kind: Pullback) -> BranchNodes:
        """The nodes of the branch of the new If and its results, the derivatives of all `values`."""
        with self._emitting():
            results = [self.found[v] if v in self.found else kind.zeros(v) for v in values]
            kept = {value: self._kept(own, value) for value, own in self._stored(results).items()}
        copies = self.nodes[len(self.nodes) - len(kept) :]
        for value, copy in kept.items():
            value.replace_all_uses_with(copy)
        return [*copies, *self.nodes[: len(self.nodes) - len(kept)]], [kept.get(v, v) for v in results]

    def _stored(self, results: Sequence[ir.Value]) -> dict[ir.Value, ir.Value]:
        """The values of the branch that the results need and the old If gives out, each with its own in the old branch."""
        inner = {*self.nodes, *self.e.emitted[self._start :]}
        worth = costly(self.e, self._forward, passes=2)

        def keep(value: ir.Value) -> ir.Value | None:
            node, known = value.producer(), value in self.in_body
            if node is None or node not in inner:
                return None
            drawn = draws(node)
            require(known or not drawn, f"a branch contains {node.op_type}, whose random result cannot be kept.")
            return self.in_body[value] if known and (drawn or value in worth) else None

        return needed(results, inner, keep)[1]

    def _kept(self, own: ir.Value, like: ir.Value) -> ir.Value:
        """A copy of a value of the old branch, which the old If gives out; its other branch gives out next to nothing."""
        e, node, body = self.e, self.node, self._body(self.name)
        if own not in body.outputs:
            body.outputs.append(own)
            other = self._body(next(name for name in BRANCHES if name != self.name))
            assert like.dtype is not None
            rank = 1 if like.shape is None else len(like.shape)  # branches may give results of different ranks
            # one bool: ONNX Runtime refuses an If on none, even in a branch that is not taken
            size = int(like.dtype == ir.DataType.BOOL)
            nothing = ir.tensor(np.zeros([size] * rank, like.dtype.numpy()), like.dtype)
            name = e.names.claim("kept")
            other.append(ir.node("Constant", [], {"value": nothing}, outputs=[ir.Value(name=name)], name=name))
            other.outputs.append(e.typed(other[-1].outputs[0], like))
            other.outputs[-1].shape = ir.Shape([size] * rank)
            node.resize_outputs(len(node.outputs) + 1)
            added = node.outputs[-1]
            added.name = e.names.claim(f"{node.outputs[0].name}_kept")
            added.dtype = like.dtype
            added.shape = None if like.shape is None else ir.Shape([None] * rank)
        copy = ir.Node("", "Identity", [node.outputs[list(body.outputs).index(own)]], num_outputs=1)
        e.place(copy)
        return e.typed(copy.outputs[0], like)


def _alike(e: Emitter, value: ir.Value, like: ir.Value, whole: ir.Value) -> ir.Value:
    """A cotangent of the result `whole` of an If, with the shape that this result has in the branch where it is `like`."""
    if like.shape is None or value.shape == like.shape:
        return value
    never = shapes_differ(value, like) or shapes_differ(whole, like)  # this branch is never taken
    if never or value.shape is None:
        return e.typed(e.op("Reshape", value, e.op("Shape", like if never else whole)), like)
    return e.typed(e.copied(value), like)
