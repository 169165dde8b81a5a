"""How good the choice of a lowering was: every one that applies is timed, beside what was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from onnx_convgrad.bench.layer import OPERATORS, ConvLayer
from onnx_convgrad.bench.timing import Bound, Side, Turns, calm, interleave, lap
from onnx_convgrad.lowering import Choice

__all__ = ["predicted", "time_lowerings"]

_NEAR = 2.0
"""What is within this factor of the fastest is timed again, more carefully."""


def predicted(choice: Choice) -> dict[str, float]:
    """Seconds predicted of every lowering that applies."""
    return {c.name: c.seconds for c in choice.candidates if c.seconds is not None}


def time_lowerings(
    choice: Choice, layer: ConvLayer, threads: int, repeats: int, others: Mapping[str, Side] | None = None
) -> dict[str, float]:
    """Measured seconds of every lowering that applies to a convolution, and of `others`.

    All are timed roughly first; the fast ones, the chosen one and the others then in turns.
    """
    runs = {name: _run(choice.op_type, layer, name, threads) for name in predicted(choice)}
    found = {name: calm(partial(lap, run), before=run, tries=3)[0] for name, run in runs.items()}
    bound = _NEAR * min(found.values())
    careful: dict[str, Side] = {
        name: Turns(run) for name, run in runs.items() if name == choice.chosen or found[name] < bound
    }
    return found | interleave({**careful, **(others or {})}, repeats=repeats)


def _run(op_type: str, layer: ConvLayer, lowering: str, threads: int) -> Bound:
    wrt = OPERATORS[op_type]
    return layer.ours(wrt, threads, {op_type: lowering}) if wrt else layer.forward(threads, lowering)
