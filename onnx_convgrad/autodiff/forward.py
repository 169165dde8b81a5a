"""Forward mode: one walk over the active nodes, first to last, with the same rule table as reverse mode.

Linear operators are applied to tangents, multilinear ones to each tangent in turn, and elementwise ones multiply tangents by
their local derivatives. A general rule needs no second derivation: its reverse form is linear in the cotangent, and the
reverse walk through that form is the forward form (J = (J')').
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import cast

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import Activity, carriers, rule_of
from onnx_convgrad.autodiff.function_bodies import equivalent
from onnx_convgrad.autodiff.registry import Rule
from onnx_convgrad.autodiff.reverse import Pairs, Walk, backward, sloped
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter


def forward(
    e: Emitter, tangents: Mapping[ir.Value, ir.Value], targets: Collection[ir.Value], *, directions: bool = False
) -> dict[ir.Value, ir.Value]:
    """Emit the tangents of `targets`, given those of some sources, as `backward` does for cotangents.

    A target that depends on no source is absent in the result: its tangent is zero. A source that depends on others
    keeps the tangent that is given. With `directions`, what follows from the others is added, so that this is the transpose
    of `backward`.
    """
    walk = _ForwardWalk(e, Activity.between(tangents, targets, e.order), tangents)
    for node in walk.activity.nodes:
        rule = rule_of(node)
        if walk.blocked(node, rule):
            continue
        with walk.at(node):
            for y, pushed in dict(walk.push(Call(node), rule)).items():
                if y not in tangents:
                    walk.tangents[y] = pushed
                elif directions:
                    walk.tangents[y] = e.add(tangents[y], pushed)
    walk.finish()
    return {v: walk.tangents[v] for v in targets if v in walk.tangents}


class _ForwardWalk(Walk):
    """The tangents of all values so far."""

    def __init__(self, e: Emitter, activity: Activity, tangents: Mapping[ir.Value, ir.Value]) -> None:
        super().__init__(e, activity)
        self.tangents = dict(tangents)

    def push(self, n: Call, rule: Rule | None) -> Pairs:
        """The tangents of the results of one node."""
        e, tangents = self.e, self.tangents
        moving = [(name, v) for name, v in carriers(n.node, rule) if v in tangents]
        if not moving:
            return []
        if rule is not None and rule.forward is not None:
            pushed = rule.forward(e, n, {v: tangents[v] for _, v in moving})
            if pushed is not None:
                return cast(Pairs, pushed)
        if rule is None or rule.kind == "expansion":
            results = equivalent(e, n, rule)
            inner = forward(e, {v: tangents[v] for _, v in moving}, [r for r in results if r is not None])
            pairs = zip(n.node.outputs, results, strict=False)
            return [(y, inner[r]) for y, r in pairs if r is not None and r in inner]
        if rule.kind == "linear":
            return _apply(e, n, {name: tangents.get(v) for name, v in carriers(n.node, rule)})
        if rule.kind == "multilinear":
            terms = [list(_apply(e, n, {name: tangents[v]})) for name, v in moving]
            return [(y, e.typed(e.sum([t[i][1] for t in terms]), y)) for i, y in enumerate(n.node.outputs)]
        return (self._elementwise if rule.kind == "elementwise" else self._transposed)(n, rule, moving)

    def _elementwise(self, n: Call, rule: Rule, moving: Sequence[tuple[str, ir.Value]]) -> Pairs:
        """dy = sum over operands of (local derivative) * (tangent), broadcast to y."""
        assert rule.function is not None
        e, returned = self.e, rule.function(self.e, n)
        terms = []
        for name, value in moving:
            local = self.take(rule, returned, name)
            if local is not None:
                terms.append(sloped(e, self.tangents[value], local))
        return [(n.y, e.typed(e.expand(e.sum(terms), n.y), n.y))] if terms else []

    def _transposed(self, n: Call, rule: Rule, moving: Sequence[tuple[str, ir.Value]]) -> Pairs:
        """The reverse walk through the reverse rule, which is linear in stand-ins for the cotangents."""
        e, outputs = self.e, [y for y in n.node.outputs if y in self.activity.varied]
        stand_ins = {y: e.typed(e.copied(e.zeros_like(y)), y) for y in outputs}  # their numbers are never used
        wanted = {v for _, v in moving}
        pulled = [(v, c) for v, c in self.node(n.node, rule, stand_ins) if v in wanted]
        cotangents: dict[ir.Value, ir.Value] = {}
        for value, c in pulled:
            tangent = self.tangents[value]
            cotangents[c] = e.add(cotangents[c], tangent) if c in cotangents else tangent
        result = backward(e, cotangents, list(stand_ins.values()))
        return [(y, e.typed(result[s], y)) for y, s in stand_ins.items() if s in result]


def _apply(e: Emitter, n: Call, replaced: Mapping[str, ir.Value | None]) -> Pairs:
    """The operator itself with tangents in place of operands; an operand without a tangent becomes zeros."""
    inputs: list[ir.Value | None] = []
    for name, value in zip(n.names[0], n.node.inputs, strict=False):
        if name not in replaced or value is None:
            inputs.append(value)
        else:
            tangent = replaced[name]
            inputs.append(e.zeros_like(value) if tangent is None else tangent)
    outputs = e.ops(n.node.op_type, *inputs, outputs=len(n.node.outputs), domain=n.node.domain, **n.attributes())
    return [(y, e.typed(t, y)) for y, t in zip(n.node.outputs, outputs, strict=True)]
