"""The graphs of a training program: their names, and the order of their inputs and outputs.

The order is part of the format, so that a reader needs no names: each graph has the roles below in this order, and each role
has its members in the order of the manifest. `manifest.json` repeats it under `order`, with the number of members of each
role. A change of it is a new version of the format.
"""

from __future__ import annotations

from typing import Literal

GraphName = Literal["step", "gradients", "update", "evaluate", "inference", "synchronized", "shared", "counts"]

PARTS: tuple[GraphName, ...] = ("step", "gradients", "update", "evaluate", "inference")
"""The graphs of every program."""

_DATA, _RESULTS = ("data", "targets", "term_weights"), ("loss", "terms", "parts", "outputs")
_FORWARD, _UPDATED = ("statistics", "wide_statistics", "random"), ("parameters", "optimizer")

ROLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "initial": ((), ("learning_rate", *_UPDATED, *_FORWARD)),
    "step": ((*_DATA, "learning_rate", *_UPDATED, *_FORWARD), (*_RESULTS, "grad_norm", *_UPDATED, *_FORWARD)),
    "gradients": ((*_DATA, "parameters", "loss_scale", *_FORWARD), (*_RESULTS, "gradients", *_FORWARD)),
    "update": (("learning_rate", "parameters", "gradients", "optimizer"), ("grad_norm", *_UPDATED)),
    "evaluate": ((*_DATA, "parameters", "statistics"), _RESULTS),
}
"""Graph -> roles of its inputs and of its outputs, in order.

As outputs, parameters and state are the next values; those of `initial`, which exists without defaults, the first ones.
"""
