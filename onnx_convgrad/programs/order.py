"""The order of the inputs and outputs of a program's graphs: part of the format, so that a reader needs no names.

Each graph has the roles below in this order, and each role has its members in the order of the manifest. `manifest.json`
repeats it under `order`, with the number of members of each role. A change of it is a new version of the format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx_convgrad.programs.manifest import Manifest

_DATA, _RESULTS = ("data", "targets"), ("loss", "terms", "parts", "outputs")
_FORWARD, _UPDATED = ("statistics", "wide_statistics", "random"), ("parameters", "optimizer")

ROLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "initial": ((), ("learning_rate", *_UPDATED, *_FORWARD)),
    "step": ((*_DATA, "learning_rate", *_UPDATED, *_FORWARD), (*_RESULTS, *_UPDATED, *_FORWARD)),
    "gradients": ((*_DATA, "parameters", "loss_scale", *_FORWARD), (*_RESULTS, "gradients", *_FORWARD)),
    "update": (("learning_rate", "parameters", "gradients", "optimizer"), _UPDATED),
    "evaluate": ((*_DATA, "parameters", "statistics"), _RESULTS),
}
"""Graph -> roles of its inputs and of its outputs, in order.

As outputs, parameters and state are the next values; those of `initial`, which exists without defaults, the first ones.
"""

_KINDS = {"optimizer": "optimizer", "statistics": "statistic", "wide_statistics": "wide statistic", "random": "random"}


def input_names(m: Manifest, part: str) -> list[str]:
    """The names of the inputs of a graph, in order."""
    return [name for role in ROLES[part][0] for name in _members(m, role)]


def output_names(m: Manifest, part: str) -> list[str]:
    """The names of the outputs of a graph, in order."""
    return [name for role in ROLES[part][1] for name in _members(m, role, following=part != "initial")]


def order_json(m: Manifest) -> dict[str, dict[str, list[tuple[str, int]]]]:
    """Graph -> `"inputs"` and `"outputs"` -> pairs of a role and its number of members; empty roles are left out."""
    counts = {role: len(_members(m, role)) for sides in ROLES.values() for roles in sides for role in roles}
    return {
        part: {
            side: [(role, counts[role]) for role in roles if counts[role]]
            for side, roles in zip(("inputs", "outputs"), sides, strict=True)
        }
        for part, sides in ROLES.items()
    }


def _members(m: Manifest, role: str, *, following: bool = False) -> list[str]:
    """The names of a role: with `following`, of the next values of parameters and state."""
    if role in ("data", "targets"):
        return [port.name for port in getattr(m, role)]
    if role in ("learning_rate", "loss"):
        return [m.learning_rate.name if role == "learning_rate" else m.loss]
    if role == "parts":
        return m.parts()
    if role in ("terms", "outputs"):
        return list(getattr(m, role))
    if role == "gradients":
        return [p.gradient for p in m.parameters]
    if role == "loss_scale":
        return [s.name for s in m.state if s.slot == role]
    moving = m.parameters if role == "parameters" else [s for s in m.state if s.kind == _KINDS[role]]
    return [entry.next if following else entry.name for entry in moving]
