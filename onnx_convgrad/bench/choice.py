"""How good the choice of a lowering was: every one that applies is timed, beside what was predicted."""

from __future__ import annotations

import os
from collections.abc import Mapping

from onnx_convgrad.bench.layer import OPERATORS, ConvLayer
from onnx_convgrad.bench.timing import Bound, Side, Turns, interleave
from onnx_convgrad.lowering.lower import Choice

__all__ = ["predicted", "time_lowerings"]

_NEAR = 2.5
"""What is within this factor of the fastest is timed again, more carefully."""

_ROOM = 0.3
"""A lowering may hold this part of the machine's memory: the runtime keeps as much again while arenas grow."""


def predicted(choice: Choice) -> dict[str, float]:
    """Seconds predicted of every lowering that applies."""
    return {c.name: c.seconds for c in choice.candidates if c.seconds is not None}


def time_lowerings(
    choice: Choice, layer: ConvLayer, threads: int, repeats: int, others: Mapping[str, Side] | None = None
) -> dict[str, float]:
    """Measured seconds of every lowering that applies to a convolution and that memory has room for, and of `others`.

    All are timed roughly first, one after the other; the fast ones, the chosen one and the others then in turns.
    """
    found = {}
    for candidate in choice.candidates:
        fits = candidate.name == choice.chosen or candidate.workspace < _ROOM * _memory()
        if candidate.seconds is not None and fits:
            run = Turns(_run(choice.op_type, layer, candidate.name, threads), tries=3)
            found[candidate.name] = run()
            del run  # a session keeps what it ever held
    bound = _NEAR * min(found.values())
    near = [name for name, seconds in found.items() if name == choice.chosen or seconds < bound]
    careful: dict[str, Side] = {name: Turns(_run(choice.op_type, layer, name, threads)) for name in near}
    return found | interleave({**careful, **(others or {})}, repeats=repeats)


def _memory() -> float:
    """Bytes of the machine's memory; where the system does not say (Windows), as if there were no end of it."""
    names = getattr(os, "sysconf_names", {})
    if not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= set(names):
        return float("inf")
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _run(op_type: str, layer: ConvLayer, lowering: str, threads: int) -> Bound:
    wrt = OPERATORS[op_type]
    return layer.ours(wrt, threads, {op_type: lowering}) if wrt else layer.forward(threads, lowering)
