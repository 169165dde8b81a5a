"""Float32 masters of float16 and bfloat16 parameters and statistics (Micikevicius et al., "Mixed Precision Training", 2018).

An update is often smaller than half the distance of two float16 numbers, and is then lost. So a float32 copy of the
parameter is updated, with the optimizer's state in float32, and the parameter is that copy, rounded. Masters are further
state of the optimizer, in the slot `master`; an average of the parameter has a float32 copy, too, in the slot
`ema_master`. Parameters, gradients and the exported model keep the dtype of the model; checkpoints hold both.

A running statistic is the average of its float32 master, rounded: a variance is often beyond the largest float16 number,
65504, to which it is limited, and its average moves in steps that float16 would lose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from onnx_convgrad.programs.manifest import Manifest, Port

NARROW = ("float16", "bfloat16")
"""Dtypes of parameters that have masters."""

WIDE = "float32"

MASTER, AVERAGE, AVERAGE_MASTER = "master", "ema", "ema_master"
"""Slots: the master, the average of the parameter, and the master of that."""


def slots(port: Port, own: Iterable[str], *, average: bool, masters: bool) -> Iterator[tuple[str, str]]:
    """Slot and dtype of all state of a parameter; `own` are the slots of the optimizer."""
    kept = masters and port.dtype in NARROW
    for slot in own:
        yield slot, WIDE if kept or "int" in port.dtype else port.dtype
    if average:
        yield AVERAGE, port.dtype
    if kept:
        yield MASTER, WIDE
        if average:
            yield AVERAGE_MASTER, WIDE


def masters_of(manifest: Manifest, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The masters of those of the values that have one, by the masters' names."""
    averages = {s.of: s.name for s in manifest.state if s.slot == AVERAGE}
    copied = {}
    for s in manifest.state:
        source = s.of if s.slot == MASTER else averages.get(s.of) if s.slot == AVERAGE_MASTER else None
        if source is not None and source in values:
            copied[s.name] = np.asarray(values[source], s.dtype)
    return copied
