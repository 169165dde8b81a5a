"""Scan and Loop with a known number of iterations: unrolled, and differentiated through the unrolled body.

s[t + 1], z[t] = body(s[t], x[t]) for t = 0 .. T - 1
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.registry import expansion
from onnx_convgrad.errors import require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.shape_hints import input_shape_option

_MOST_ITERATIONS = 256
"""Most iterations that are unrolled: a graph with more takes too long to load."""

_SCAN_HINT = (
    "Give the sizes of all inputs, including cotangents, as with {option}. If an earlier derivative added"
    " this loop over the samples, build that derivative with the sizes: it then needs no loop."
)


@expansion("Scan", wrt=("initial_state_and_scan_inputs",))
def scan(e: Emitter, n: Call) -> list[ir.Value | None]:
    """s[t + 1], z[t] = body(s[t], x[t]), unrolled over the slices x[t]."""
    body = n.node.attributes["body"].as_graph()
    for name in ("scan_input_axes", "scan_input_directions", "scan_output_axes", "scan_output_directions"):
        require(not any(n.ints(name) or ()), f"its {name} are not all 0.")
    operands = [v for v in n.inputs if v is not None]
    scanned = operands[len(operands) - n.int("num_scan_inputs", 0) :]
    state = operands[: len(operands) - len(scanned)]
    turns = known_iterations(e, scanned[0], "its number of iterations", _SCAN_HINT)
    made: list[list[ir.Value]] = [[] for _ in body.outputs[len(state) :]]
    for turn in range(turns):
        slices = [e.squeeze(e.slice(v, [turn], [turn + 1], [0]), [0]) for v in scanned]
        results = _iteration(e, body, [*state, *slices])
        state = results[: len(state)]
        for parts, part in zip(made, results[len(state) :], strict=True):
            parts.append(e.unsqueeze(part, [0]))
    return [*state, *(e.concat(parts, 0) for parts in made)]


_LOOP_HINT = (
    "Have the exporter unroll it, or compute its trip count and condition from constants or from sizes that are given, as"
    " with {option}."
)


@expansion("Loop", wrt=("v_initial",))
def loop(e: Emitter, n: Call) -> list[ir.Value | None]:
    """go[t + 1], s[t + 1], z[t] = body(t, go[t], s[t]) while go[t] holds, at most M times: unrolled."""
    body, count, go = n.node.attributes["body"].as_graph(), n.get("M"), n.get("cond")
    state = [v for v in n.inputs[2:] if v is not None]
    made: list[list[ir.Value]] = [[] for _ in body.outputs[1 + len(state) :]]
    most = None if count is None else _number(e, count, "its trip count")
    turn, going = 0, go is None or bool(_number(e, go, "its condition"))
    while going and (most is None or turn < most):
        require(turn < _MOST_ITERATIONS, f"it has more than {_MOST_ITERATIONS} iterations, the most that are unrolled.")
        results = _iteration(e, body, [e.const(np.int64(turn)), e.const(np.ones((), np.bool_)), *state])
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


def known_iterations(e: Emitter, sequence: ir.Value, what: str, hint: str) -> int:
    """The number of iterations over the first axis of `sequence`; refuses the node if `what` is unknown or too large."""
    turns = e.dim(sequence, 0)
    option = input_shape_option(e.graph.inputs)
    require(isinstance(turns, int), f"{what} is not known while building.", hint.format(option=option))
    assert isinstance(turns, int)
    require(0 < turns <= _MOST_ITERATIONS, f"it has {turns} iterations; 1 to {_MOST_ITERATIONS} are unrolled.")
    return turns


def _iteration(e: Emitter, body: ir.Graph, operands: Sequence[ir.Value]) -> list[ir.Value]:
    """Emit the body once, on `operands`; values that it captures from the outer graph stay as they are."""
    values = dict(zip(body.inputs, operands, strict=True))
    for constant in body.initializers.values():
        require(constant.const_value is not None, "its body has an initializer without a value.")
        assert constant.const_value is not None
        values[constant] = e.const(constant.const_value.numpy(), constant.dtype)
    for node in body:
        call = Call(node)
        kinds = {attr.type for attr in node.attributes.values()}
        require(not kinds & {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS}, f"its body contains {node.op_type}.")
        inputs = [None if v is None else values.get(v, v) for v in node.inputs]
        results = e.ops(node.op_type, *inputs, outputs=len(node.outputs), domain=node.domain, **call.attributes())
        values.update(zip(node.outputs, results, strict=True))
    return [values.get(v, v) for v in body.outputs]
