"""If, Scan and Loop, parts of a sequence, and optional values.

A small known number of iterations is unrolled, and differentiated through the unrolled body. Other loops are differentiated
by a Scan (`autodiff.loops`), and an If by another If (`autodiff.branches`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.branches import if_forward, if_reverse
from onnx_convgrad.autodiff.factors import none
from onnx_convgrad.autodiff.loops import scan_forward, scan_reverse
from onnx_convgrad.autodiff.per_sample.control import if_labels, loop_labels
from onnx_convgrad.autodiff.per_sample.sample_axis import Label
from onnx_convgrad.autodiff.per_sample.tracker import Tracker
from onnx_convgrad.autodiff.registry import expansion, linear
from onnx_convgrad.autodiff.turns import layouts
from onnx_convgrad.errors import UnsupportedCase, require
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.loop_bodies import draws, emit_once
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.shape_hints import input_shape_option
from onnx_convgrad.rules.movement import size_in

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
    """Whether a Scan or Loop is differentiated by a Scan, and not unrolled: the turns written down would draw again."""
    drawn = any(map(draws, n.node.attributes["body"].as_graph()))
    if n.node.op_type == "Loop":
        return drawn or _has_many_turns(e, n)
    return is_long(e.dim(_sequences(n)[0], (n.ints("scan_input_axes") or [0])[0])) or drawn


def _sequences(n: Call) -> list[ir.Value]:
    operands = [v for v in n.inputs if v is not None]
    return operands[len(operands) - n.int("num_scan_inputs", 0) :]


def _reverse(e: Emitter, n: Call, *arguments: Any) -> Any:
    return scan_reverse(e, n, *arguments) if _in_loop(e, n) else None


def _forward(e: Emitter, n: Call, tangents: Mapping[ir.Value, ir.Value]) -> Any:
    return scan_forward(e, n, tangents) if _in_loop(e, n) else None


def _labels(t: Tracker, n: Call, labels: Sequence[Label]) -> list[Label] | None:
    return loop_labels(t, n, labels) if _in_loop(t.e, n) else None


_BODIES = none("what it does is in its bodies")
_LOOP: dict[str, Any] = {"reverse": _reverse, "forward": _forward, "labels": _labels, "factors": _BODIES}


@expansion("If", wrt=(), reverse=if_reverse, forward=if_forward, labels=if_labels, factors=_BODIES)
def if_(e: Emitter, n: Call) -> list[ir.Value | None]:
    """y = f(c) or g(c): another If, of the derivatives of both branches."""
    raise UnsupportedCase(
        "its condition is known only at run time.",
        hint=f"Make its condition a constant; static input sizes may determine it, as with"
        f" {input_shape_option(e.graph.inputs)}.",
    )


@expansion("Scan", wrt="initial_state_and_scan_inputs", **_LOOP)
def scan(e: Emitter, n: Call) -> list[ir.Value | None]:
    """s[t + 1], z[t] = body(s[t], x[t]): a second Scan, or unrolled over the slices x[t] if these are known and few."""
    body, scanned = n.node.attributes["body"].as_graph(), _sequences(n)
    state = [v for v in n.inputs[: len(n.inputs) - len(scanned)] if v is not None]
    takes, gives = layouts(n, "scan_input", scanned), layouts(n, "scan_output", body.outputs[len(state) :])
    turns = e.dim(scanned[0], takes[0].axis)
    _require_known(e, isinstance(turns, int), "its number of iterations", _SCAN_HINT)
    assert isinstance(turns, int)
    require(0 < turns <= _MOST_ITERATIONS, f"it has {turns} iterations; 1 to {_MOST_ITERATIONS} are unrolled.")
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


def _has_many_turns(e: Emitter, n: Call) -> bool:
    body, count = n.node.attributes["body"].as_graph(), n.get("M")
    most = None if count is None else e.number_of(count)
    if count is not None and (most is None or most > _MOST_ITERATIONS):
        return True
    going = body.outputs[0].producer()
    if most is not None and is_op(going, "Identity") and going.inputs[0] is body.inputs[1]:  # the count alone decides
        return most <= 0 or is_long(int(most))  # no turn: its joined results are empty
    try:
        loop(e, n)
    except UnsupportedCase:
        return True
    return False


@expansion("Loop", wrt="v_initial", **_LOOP)
def loop(e: Emitter, n: Call) -> list[ir.Value | None]:
    """go[t + 1], s[t + 1], z[t] = body(t, go[t], s[t]) while go[t] holds, at most M times: unrolled."""
    body, count, go = n.node.attributes["body"].as_graph(), n.get("M"), n.get("cond")
    state = [v for v in n.inputs[2:] if v is not None]
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
    _require_known(e, number is not None, what, _LOOP_HINT)
    return int(number)


def _require_known(e: Emitter, known: bool, what: str, hint: str) -> None:
    require(known, f"{what} is not known while building.", hint.format(option=input_shape_option(e.graph.inputs)))


# -- sequences and optional values -------------------------------------------------------------------------------------
#
# part[i] = x[b_i : b_i + n_i], so dx[b_i : b_i + n_i] = g_i for SequenceAt of a sequence that SplitToSequence makes; others
# are refused. The cotangent of the sequence is represented by a tensor of the shape of x, so that the walk adds up the
# cotangents of its parts as those of any other value. The cotangent of an optional value is that of its element.


_SEQUENCE = none("its operand or result is a sequence")


@linear("SplitToSequence", wrt="input", factors=_SEQUENCE)
def split_to_sequence_vjp(e: Emitter, n: Call, g: dict[str, ir.Value]) -> ir.Value:
    """The cotangent of the sequence already has the shape of x, see `sequence_at_vjp`: dx = g."""
    return g["output_sequence"]


@linear("SequenceAt", wrt="input_sequence", factors=_SEQUENCE)
def sequence_at_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """y[i] = x[b + i], where b is the sum of the sizes of the parts before: dx[b + i] = g[i], zero elsewhere."""
    source = n["input_sequence"].producer()
    require(
        source is not None and source.op_type == "SplitToSequence",
        "its sequence was not made by a SplitToSequence of the same graph.",
        hint="Export the model with Split in place of sequences.",
    )
    assert source is not None
    split = Call(source)
    x, axis = split["input"], split.int("axis", 0)
    gy = g["tensor"]
    if split.get("split") is None and not split.int("keepdims", 1):
        gy = e.unsqueeze(gy, [axis])
    begin = _begin(e, split, n["position"], e.dim(x, axis))
    end = e.size_sub(e.size_sub(e.dim(x, axis), begin), e.dim(gy, axis))
    return e.typed(e.pad(gy, [begin], [end], [axis]), x)


@linear("Optional", "OptionalGetElement", wrt="input", factors=none("its operand or result is optional"))
def optional_vjp(e: Emitter, n: Call, g: dict[str, ir.Value]) -> ir.Value:
    """y = x, which is there: dx = g."""
    return g["output"]


def _begin(e: Emitter, split: Call, position: ir.Value, size: Dim) -> Dim:
    """The first row of a part. Negative positions count from the last part."""
    sizes, at = split.get("split"), size_in(e, position)
    if sizes is None or (sizes.shape is not None and len(sizes.shape) == 0):
        chunk = 1 if sizes is None else size_in(e, sizes)
        if not isinstance(at, int) or at < 0:
            parts = e.size_div(e.size_sub(e.size_add(size, chunk), 1), chunk)
            back = e.size_add(parts, at)
            at = back if isinstance(at, int) else e.where(e.compare("Less", at, 0), back, at)
        return e.size_mul(at, chunk)
    require(sizes.shape is not None, "it is unknown whether its operand `split` is one size or a list of sizes.")
    known_sizes = e.constant_of(sizes)
    if known_sizes is not None and isinstance(at, int):
        return int(known_sizes[:at].sum())
    before = e.op("Slice", e.cast(sizes, ir.DataType.INT64), e.ints([0]), e.vector([at]), e.ints([0]))
    return e.op("ReduceSum", before, keepdims=1)
