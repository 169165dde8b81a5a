"""Reverse mode: one walk over the active nodes, last to first.

The walk does for all rules: accumulation, sums over broadcast axes, checks of each cotangent against its primal, and
recursion into equivalent subgraphs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.accumulate import merge_terms
from onnx_convgrad.autodiff.activity import MISFIT, Activity, carriers, misfit, problem, rule_of
from onnx_convgrad.autodiff.function_bodies import equivalent, has_body
from onnx_convgrad.autodiff.registry import Rule, is_built_in
from onnx_convgrad.autodiff.remedies import remedy
from onnx_convgrad.base.boundary import unforeseen
from onnx_convgrad.errors import ConvGradError, DifferentiationError, Problem, RuleContractError, UnsupportedCase
from onnx_convgrad.ir.broadcasting import shapes_differ, unbroadcast
from onnx_convgrad.ir.call import Call, stem
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op, sole_producer
from onnx_convgrad.ir.notes import origin_of

DETOUR = "Take `of` before it or `wrt` after it"
"""The hint for a node that cannot be differentiated."""


def backward(
    e: Emitter,
    cotangents: Mapping[ir.Value, ir.Value],
    sources: Collection[ir.Value],
    *,
    partial: bool = False,
    held: Collection[ir.Value] = (),
    walk: type[Walk] | None = None,
) -> dict[ir.Value, ir.Value]:
    """Emit the cotangents of `sources`, given those of the differentiated values.

    Args:
        e: Emitter positioned after every node that computes these values.
        cotangents: Differentiated value -> its cotangent, of the same shape and dtype.
        sources: Values to differentiate with respect to; any values of the graph.
        partial: The sources are independent of each other, as the operands of a node are for its rule.
        held: With `partial`, further values that are constants.
        walk: The walk, by default the plain one; another changes how cotangents pass certain nodes.

    Returns:
        Source -> cotangent. A source that none of the values depends on is absent: its derivative is zero.

    Raises:
        DifferentiationError: Listing every node that a wanted derivative must pass through and cannot.
    """
    activity = Activity.between(sources, cotangents, e.order, partial=partial, held=held)
    walker = (walk or Walk)(e, activity)
    return walker.run(cotangents, sources, {*sources, *held} if partial else ())


Pairs = list[tuple[ir.Value, ir.Value]]
"""Operands of a node, and what it adds to their cotangents; or its results, and their tangents."""


class Walk:
    """The reverse walk, and what forward mode shares with it: the activity, and the problems found so far."""

    joint = True  # whether joint forms of rules are used

    def __init__(self, e: Emitter, activity: Activity) -> None:
        self.e = e
        self.activity = activity
        self.problems: list[Problem] = []

    def run(
        self, cotangents: Mapping[ir.Value, ir.Value], sources: Collection[ir.Value], leaves: Collection[ir.Value] = ()
    ) -> dict[ir.Value, ir.Value]:
        """The cotangents of `sources`, or an error with all problems; that of a leaf is not passed on to its producer."""
        pending: dict[ir.Value, list[ir.Value]] = {v: [g] for v, g in cotangents.items()}
        fixed = {*cotangents, *sources, *leaves}
        for node in reversed(self.activity.nodes):
            upstream = {v: self._total(pending, v) for v in node.outputs if v in pending and v not in leaves}
            rule = rule_of(node)
            if self.blocked(node, rule) or not upstream:
                continue
            inner = self._joint_producer(node, rule, fixed)
            with self.at(inner or node):
                together = None if inner is None or rule is None else self._jointly(node, rule, inner, upstream)
                for operand, contribution in self.node(node, rule, upstream) if together is None else together:
                    pending.setdefault(operand, []).append(contribution)
        result = {v: self._total(pending, v) for v in sources if v in pending}
        self.finish()
        return result

    def finish(self) -> None:
        """Raise the problems found, if there are any."""
        if self.problems:
            raise DifferentiationError(self.problems)

    def _total(self, pending: dict[ir.Value, list[ir.Value]], value: ir.Value) -> ir.Value:
        terms = pending[value]
        if len(terms) > 1:
            pending[value] = terms = [self.e.sum(merge_terms(self.e, terms))]
        return terms[0]

    @contextmanager
    def at(self, node: ir.Node) -> Iterator[None]:
        """Note `node` as the origin of the nodes emitted inside; record an `UnsupportedCase` as a problem of `node`."""
        origin = origin_of(node) or node.name or node.op_type
        previous, self.e.origin = self.e.origin, self.e.origin or origin
        try:
            yield
        except UnsupportedCase as case:
            self._report(node, case.message, case.hint)
        except DifferentiationError as inner:
            author = _author(node)
            if author is None:
                self.problems.extend(inner.problems)
            else:
                for p in inner.problems:
                    self._report(node, f"its rule, in {author.module}, emits {p.op_type}: {p.reason}", p.hint)
        except ConvGradError as fault:
            if isinstance(fault, RuleContractError) and fault.suspect and _author(node) is not None:
                raise _failure(node, fault) from fault
            raise
        except Exception as fault:
            if not isinstance(fault, MISFIT) or _author(node) is not None:
                raise _failure(node, fault) from fault
            contradiction = misfit(fault)
            self._report(node, contradiction.message, contradiction.hint)
        finally:
            self.e.origin = previous

    # -- one node ------------------------------------------------------------------------------------------------------

    def node(self, node: ir.Node, rule: Rule | None, upstream: dict[ir.Value, ir.Value]) -> Pairs:
        """The contributions of one node to the cotangents of its operands, given those of its results."""
        call = Call(node)
        if rule is None or rule.kind == "expansion":
            return self._through_equivalent(call, rule, upstream)
        assert rule.function is not None
        if rule.kind == "elementwise":
            returned = rule.function(self.e, call)
        else:
            g = {name: upstream.get(v) for name, v in zip(call.names[1], node.outputs, strict=True)}
            returned = rule.function(self.e, call, g)
        contributions = []
        for name, operand in carriers(node, rule):
            if operand in self.activity.varied:
                value = self.contribution(call, rule, returned, name, operand, upstream)
                if value is not None:
                    contributions.append((operand, value))
        return contributions

    def _joint_producer(self, node: ir.Node, rule: Rule | None, fixed: Collection[ir.Value]) -> ir.Node | None:
        """The producer of the first operand that the rule differentiates with `node`, if nothing else uses that operand."""
        if rule is None or rule.joint is None or not (self.joint and self.e.joint):
            return None
        between = node.inputs[0]
        inner = None if between in fixed or between not in self.activity.varied else sole_producer(between)
        return inner if is_op(inner, rule.joint[0]) else None

    def _jointly(
        self, node: ir.Node, rule: Rule, inner: ir.Node, upstream: Mapping[ir.Value, ir.Value]
    ) -> Pairs | None:
        """Differentiate `node` and `inner` by the joint form of a rule; `None` if it does not apply."""
        assert rule.joint is not None
        result = rule.joint[1](self.e, Call(node), Call(inner), self.activity.varied)
        if result is None:
            return None
        sources = [v for n in (node, inner) for _, v in carriers(n, rule_of(n)) if v in self.activity.varied]
        wanted = dict.fromkeys(v for v in sources if v is not node.inputs[0])
        return list(backward(self.e, {result: upstream[node.outputs[0]]}, wanted, partial=True).items())

    def contribution(
        self, call: Call, rule: Rule, returned: Any, name: str, operand: ir.Value, upstream: Mapping[ir.Value, ir.Value]
    ) -> ir.Value | None:
        """The cotangent of one operand from the thunks that the rule `returned`; `None` stands for zero."""
        value = self.take(rule, returned, name)
        if value is None:
            return None
        if rule.kind == "elementwise" and isinstance(value, ir.Value):
            value = sloped(self.e, upstream[call.y], value)
        elif rule.kind == "elementwise":  # a number: sum first, then multiply the smaller result
            value = self.e.mul(self._fit(call, rule, upstream[call.y], operand), value)
        return self._fit(call, rule, value, operand)

    def take(self, rule: Rule, returned: Any, name: str) -> Any:
        """Call the thunk for operand `name`. The thunk of a variadic operand, under its stem, takes the position."""
        if name in returned:
            return returned[name]()
        if stem(name) in returned and "." in name:
            return returned[stem(name)](int(name.rsplit(".", 1)[1]))
        raise RuleContractError(
            f"The rule of {rule.name} declares {name} in wrt but returned only {sorted(returned)}.",
            hint=f"Return a thunk for {name}, or remove it from wrt, in {rule.module}.",
        )

    def _fit(self, call: Call, rule: Rule, value: ir.Value, operand: ir.Value) -> ir.Value:
        """Sum over broadcast axes if the rule may broadcast, and check the cotangent against its primal."""
        subject = f"The rule of {rule.name} returned"
        if not isinstance(value, ir.Value):
            raise RuleContractError(
                f"{subject} {value!r} for {operand.name!r}, not an ir.Value.",
                hint=f"Return what the Emitter returns, in {rule.module}; only elementwise rules may return numbers.",
            )
        if value.dtype is not None and operand.dtype is not None and value.dtype != operand.dtype:
            raise RuleContractError(
                f"{subject} {value.dtype.name} for {operand.name!r}, which is {operand.dtype.name}.",
                hint=f"Cast the cotangent to the dtype of its operand, e.cast(value, operand.dtype), in {rule.module}.",
                suspect=f"The types around node {call.node.name!r} ({rule.name}) contradict one another: {operand.name!r} is"
                f" {operand.dtype.name}, its gradient {value.dtype.name}."
                if is_built_in(rule)
                else "",
            )
        aligned = rule.kind == "elementwise" or rule.broadcasts
        if aligned or rule.kind == "multilinear":
            value = unbroadcast(
                self.e, value, operand, call.y if aligned else None, call.node.inputs if aligned else ()
            )
        if shapes_differ(value, operand):
            fault = (
                f"The operands of node {call.node.name!r} ({rule.name}) do not fit together: {operand.name!r} is"
                f" {operand.shape}, its gradient {value.shape}."
            )
            raise RuleContractError(
                f"{subject} shape {value.shape} for {operand.name!r}, which is {operand.shape}.",
                hint=f"A cotangent has the shape of its operand: correct it in {rule.module}, or declare broadcasts=True.",
                suspect=fault if is_built_in(rule) else "",
            )
        return self.e.typed(value, operand) if value is not operand and value.producer() is not None else value

    def _through_equivalent(self, call: Call, rule: Rule | None, upstream: dict[ir.Value, ir.Value]) -> Pairs:
        """Differentiate directly, or through an equivalent subgraph."""
        sources = dict.fromkeys(v for _, v in carriers(call.node, rule) if v in self.activity.varied)
        contributions = None if rule is None else self.directly(call, rule, upstream, sources)
        if contributions is not None:
            return contributions
        results = equivalent(self.e, call, rule)
        cotangents: dict[ir.Value, ir.Value] = {}
        for r, v in zip(results, call.node.outputs, strict=False):
            if v in upstream and r is not None:  # several results may be one value
                cotangents[r] = self.e.add(cotangents[r], upstream[v]) if r in cotangents else upstream[v]
        return list(self.within(cotangents, sources).items())

    def directly(
        self, call: Call, rule: Rule, upstream: Mapping[ir.Value, ir.Value], sources: Collection[ir.Value]
    ) -> Pairs | None:
        """The contributions by the direct form of an expansion; `None` if it has none or does not take it."""
        return None if rule.reverse is None else rule.reverse(self.e, call, upstream, sources)

    def within(self, cotangents: dict[ir.Value, ir.Value], sources: dict[ir.Value, None]) -> dict[ir.Value, ir.Value]:
        """The cotangents of `sources` through an equivalent subgraph, given those of its results."""
        return backward(self.e, cotangents, sources, partial=True)

    # -- problems ------------------------------------------------------------------------------------------------------

    def blocked(self, node: ir.Node, rule: Rule | None) -> bool:
        """Whether no derivative can pass through a node, which then becomes a problem."""
        if rule is not None and rule.kind == "not_differentiable":
            self._report(node, rule.reason, f"{DETOUR}.")
            return True
        if rule is None and not has_body(node):
            reason = "no rule covers this operator."
            hint = f"{DETOUR}, or add a rule (entry-point group onnx_convgrad.rules). {remedy(node)}".rstrip()
            self._report(node, reason, hint)
            return True
        return False

    def _report(self, node: ir.Node, reason: str, hint: str) -> None:
        self.problems.append(problem(self.e.graph, node, reason, self.activity.path(node), hint))


def _author(node: ir.Node) -> Rule | None:
    """The rule of a node, if it belongs to a plugin."""
    rule = rule_of(node)
    return None if rule is None or is_built_in(rule) else rule


def _failure(node: ir.Node, fault: Exception) -> ConvGradError:
    """The error for an unforeseen exception in the rule of a node."""
    rule, where = _author(node), f"node {node.name or node.outputs[0].name!r} ({node.op_type})"
    if rule is None or isinstance(fault, (MemoryError, RecursionError)):
        return unforeseen(fault, where)
    reason = getattr(fault, "suspect", "") or f"{type(fault).__name__}: {fault}."
    return RuleContractError(f"The rule of {rule.name} in {rule.module} failed at {where}: {reason}")


def sloped(e: Emitter, value: ir.Value, slope: ir.Value | float) -> ir.Value:
    """The product with a local derivative. A boolean derivative selects, so that infinity times zero is zero."""
    if isinstance(slope, ir.Value) and slope.dtype == ir.DataType.BOOL:
        return e.where(slope, value, 0)
    return e.mul(value, slope)
