"""The names of the graphs of a training program."""

from __future__ import annotations

from typing import Literal

from onnx_convgrad.programs.manifest import Manifest

GraphName = Literal["step", "gradients", "update", "evaluate", "inference", "synchronized", "shared", "counts"]

PARTS: tuple[GraphName, ...] = ("step", "gradients", "update", "evaluate", "inference")
"""The graphs of every program."""


def parts_of(manifest: Manifest) -> tuple[GraphName, ...]:
    """The graphs of a program; those after the first five are for joining batches and ranks, where they are needed."""
    more: list[GraphName] = ["synchronized"] if manifest.options.get("sync_batchnorm") else []
    ways = [summand["joining"] for summand in manifest.summands()]
    alike = len(ways) == 1 or set(ways) in ({"samples"}, {"sum"})  # one factor for all gradients of a batch suffices
    if not alike and "privacy" not in manifest.options and not more:
        more.append("shared")
    if "count" in ways:
        more.append("counts")
    return (*PARTS, *more)
