"""If, Scan and Loop.

A small known number of iterations is unrolled, and differentiated through the unrolled body. Other loops are differentiated
by a Scan (`autodiff.loops`), and an If by another If (`autodiff.branches`).

s[t + 1], z[t] = body(s[t], x[t]) for t = 0 .. T - 1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import rule_of
from onnx_convgrad.autodiff.branches import if_forward, if_reverse
from onnx_convgrad.autodiff.factors import none
from onnx_convgrad.autodiff.loops import scan_forward, scan_reverse
from onnx_convgrad.autodiff.per_sample.control import if_labels, loop_labels
from onnx_convgrad.autodiff.per_sample.sample_axis import Label
from onnx_convgrad.autodiff.per_sample.tracker import Tracker, handler
from onnx_convgrad.autodiff.registry import expansion
from onnx_convgrad.autodiff.turns import layouts
from onnx_convgrad.errors import UnsupportedCase, require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.loop_bodies import draws, emit_once
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.shape_hints import input_shape_option

_MOST_ITERATIONS = 256
"""Most iterations that are unrolled: a graph with more takes too long to load."""

_SCAN_HINT = (
    "Give the sizes of all inputs, including cotangents, as with {option}. If an earlier derivative added"
    " this loop over the samples, build that derivative with the sizes: it then needs no loop."
)


_SHORT = 16
"""Most iterations that are unrolled where a loop can take their place: a loop of more loads faster and is as fast."""


def is_long(turns: Dim) -> bool:
    """Whether a number of iterations is unknown or large, so that they are differentiated in a loop."""
    return not isinstance(turns, int) or turns > _SHORT


def _in_loop(e: Emitter, n: Call) -> bool:
    """Whether a Scan is differentiated by another Scan."""
    turns = e.dim(_sequences(n)[0], (n.ints("scan_input_axes") or [0])[0])
    if not isinstance(turns, int) or turns > _MOST_ITERATIONS:
        return True
    body = n.node.attributes["body"].as_graph()
    if any(map(draws, body)):  # the turns written down would draw again
        return True
    return is_long(turns)


def _sequences(n: Call) -> list[ir.Value]:
    operands = [v for v in n.inputs if v is not None]
    return operands[len(operands) - n.int("num_scan_inputs", 0) :]


def _reverse(e: Emitter, n: Call, *arguments: Any) -> Any:
    return scan_reverse(e, n, *arguments) if _in_loop(e, n) else None


def _forward(e: Emitter, n: Call, tangents: Mapping[ir.Value, ir.Value]) -> Any:
    return scan_forward(e, n, tangents) if _in_loop(e, n) else None


_BODIES = none("what it does is in its bodies")


@expansion("If", wrt=(), reverse=if_reverse, forward=if_forward, factors=_BODIES)
def if_(e: Emitter, n: Call) -> list[ir.Value | None]:
    """y = f(c) or g(c): another If, of the derivatives of both branches."""
    raise UnsupportedCase(
        "its condition is known only at run time.",
        hint=f"Make its condition a constant; static input sizes may determine it, as with"
        f" {input_shape_option(e.graph.inputs)}.",
    )


handler("If")(if_labels)


@handler("Scan")
def scan_labels(t: Tracker, n: Call, labels: Sequence[Label]) -> list[Label]:
    """The axis of the samples in the results."""
    return loop_labels(t, n, labels) if _in_loop(t.e, n) else t.through(n.node, rule_of(n.node))


@expansion("Scan", wrt="initial_state_and_scan_inputs", reverse=_reverse, forward=_forward, factors=_BODIES)
def scan(e: Emitter, n: Call) -> list[ir.Value | None]:
    """s[t + 1], z[t] = body(s[t], x[t]): a second Scan, or unrolled over the slices x[t] if these are known and few."""
    body, scanned = n.node.attributes["body"].as_graph(), _sequences(n)
    require(not any(map(draws, body)), "its body draws random numbers.")
    state = [v for v in n.inputs[: len(n.inputs) - len(scanned)] if v is not None]
    takes, gives = layouts(n, "scan_input", scanned), layouts(n, "scan_output", body.outputs[len(state) :])
    turns = known_iterations(e, scanned[0], "its number of iterations", _SCAN_HINT, axis=takes[0].axis)
    made: list[list[ir.Value]] = [[] for _ in gives]
    for turn in range(turns):
        slices = []
        for v, layout in zip(scanned, takes, strict=True):
            at = turns - 1 - turn if layout.backwards else turn
            slices.append(e.squeeze(e.slice(v, [at], [at + 1], [layout.axis]), [layout.axis]))
        results = emit_once(e, body, [*state, *slices])
        state = results[: len(state)]
        for parts, part, layout in zip(made, results[len(state) :], gives, strict=True):
            parts.append(e.unsqueeze(part, [layout.axis]))
    joined = [
        e.concat(parts[::-1] if layout.backwards else parts, layout.axis)
        for parts, layout in zip(made, gives, strict=True)
    ]
    return [*state, *joined]


_LOOP_HINT = (
    "Have the exporter unroll it, or compute its trip count and condition from constants or from sizes that are given, as"
    " with {option}."
)


def _loop_in_loop(e: Emitter, n: Call) -> bool:
    """Whether a Loop is differentiated by a Scan over its turns."""
    body, count = n.node.attributes["body"].as_graph(), n.get("M")
    most = None if count is None else e.number_of(count)
    if any(map(draws, body)) or (count is not None and (most is None or most > _MOST_ITERATIONS)):
        return True
    going = body.outputs[0].producer()
    if (
        most is not None and is_op(going, "Identity") and going.inputs[0] is body.inputs[1]
    ):  # no condition but the count
        return most <= 0 or is_long(int(most))  # no turn: its joined results are empty
    try:
        loop(e, n)
    except UnsupportedCase:
        return True
    return False


def _loop_reverse(e: Emitter, n: Call, *arguments: Any) -> Any:
    return scan_reverse(e, n, *arguments) if _loop_in_loop(e, n) else None


def _loop_forward(e: Emitter, n: Call, tangents: Mapping[ir.Value, ir.Value]) -> Any:
    return scan_forward(e, n, tangents) if _loop_in_loop(e, n) else None


@handler("Loop")
def loop_labels_(t: Tracker, n: Call, labels: Sequence[Label]) -> list[Label]:
    """The axis of the samples in the results."""
    return loop_labels(t, n, labels) if _loop_in_loop(t.e, n) else t.through(n.node, rule_of(n.node))


@expansion("Loop", wrt="v_initial", reverse=_loop_reverse, forward=_loop_forward, factors=_BODIES)
def loop(e: Emitter, n: Call) -> list[ir.Value | None]:
    """go[t + 1], s[t + 1], z[t] = body(t, go[t], s[t]) while go[t] holds, at most M times: unrolled."""
    body, count, go = n.node.attributes["body"].as_graph(), n.get("M"), n.get("cond")
    state = [v for v in n.inputs[2:] if v is not None]
    require(not any(map(draws, body)), "its body draws random numbers.")
    made: list[list[ir.Value]] = [[] for _ in body.outputs[1 + len(state) :]]
    most = None if count is None else _number(e, count, "its trip count")
    turn, going = 0, go is None or bool(_number(e, go, "its condition"))
    while going and (most is None or turn < most):
        require(turn < _MOST_ITERATIONS, f"it has more than {_MOST_ITERATIONS} iterations, the most that are unrolled.")
        results = emit_once(e, body, [e.const(np.int64(turn)), e.const(np.ones((), np.bool_)), *state])
        going = bool(_number(e, results[0], "its condition for another iteration"))
        state = results[1 : 1 + len(state)]
        for parts, part in zip(made, results[1 + len(state) :], strict=True):
            parts.append(e.unsqueeze(part, [0]))
        turn += 1
    require(turn > 0 or not made, "it has no iteration.")
    return [*state, *(e.concat(parts, 0) for parts in made)]


def _number(e: Emitter, value: ir.Value, what: str) -> int:
    """A number that determines the number of iterations; refuses the node if it is unknown."""
    number = e.number_of(value)
    option = input_shape_option(e.graph.inputs)
    require(number is not None, f"{what} is not known while building.", _LOOP_HINT.format(option=option))
    return int(number)


def known_iterations(e: Emitter, sequence: ir.Value, what: str, hint: str, axis: int = 0) -> int:
    """The number of iterations over an axis of `sequence`; refuses the node if `what` is unknown or too large."""
    turns = e.dim(sequence, axis)
    option = input_shape_option(e.graph.inputs)
    require(isinstance(turns, int), f"{what} is not known while building.", hint.format(option=option))
    assert isinstance(turns, int)
    require(0 < turns <= _MOST_ITERATIONS, f"it has {turns} iterations; 1 to {_MOST_ITERATIONS} are unrolled.")
    return turns
