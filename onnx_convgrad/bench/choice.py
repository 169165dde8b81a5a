"""Time every lowering that applies to a convolution, to compare with the predictions."""

from __future__ import annotations

import os
from collections.abc import Mapping

from onnx_convgrad.bench.layer import OPERATORS, ConvLayer
from onnx_convgrad.bench.timing import Bound, Side, Turns, interleave
from onnx_convgrad.lowering.lower import Choice

_NEAR = 2.5
"""Lowerings within this factor of the fastest are timed again, more carefully."""

_ROOM = 0.3
"""Most of the machine's memory that a lowering may use: while its arena grows, the runtime uses twice as much."""


def predicted(choice: Choice) -> dict[str, float]:
    """Return the predicted seconds of every lowering that applies."""
    return {c.name: c.seconds for c in choice.candidates if c.seconds is not None}


def time_lowerings(
    choice: Choice, layer: ConvLayer, threads: int, repeats: int, others: Mapping[str, Side] | None = None
) -> dict[str, float]:
    """Time every lowering that applies to a convolution and fits into memory, and `others`; return seconds.

    All are first timed roughly, one after the other; then the fast ones, the chosen one and the others in turns.
    """
    rough = {}
    for candidate in choice.candidates:
        fits = candidate.name == choice.chosen or candidate.workspace < _ROOM * _memory()
        if candidate.seconds is not None and fits:
            run = Turns(_run(choice.op_type, layer, candidate.name, threads), tries=3)
            rough[candidate.name] = run()
            del run  # a session never releases memory
    bound = _NEAR * min(rough.values())
    near = [name for name, seconds in rough.items() if name == choice.chosen or seconds < bound]
    careful: dict[str, Side] = {name: Turns(_run(choice.op_type, layer, name, threads)) for name in near}
    return rough | interleave({**careful, **(others or {})}, repeats=repeats)


def _memory() -> float:
    """Return the bytes of the machine's memory; infinity if the system does not report it (Windows)."""
    names = getattr(os, "sysconf_names", {})
    if not {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= set(names):
        return float("inf")
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _run(op_type: str, layer: ConvLayer, lowering: str, threads: int) -> Bound:
    wrt = OPERATORS[op_type]
    return layer.ours(wrt, threads, {op_type: lowering}) if wrt else layer.forward(threads, lowering)
