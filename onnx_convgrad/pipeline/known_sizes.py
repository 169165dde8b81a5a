"""What it would gain to know the sizes of a model's inputs: its gradients are built once more, with typical sizes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import onnx_ir as ir

from onnx_convgrad.errors import ConvGradError
from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.ir.emit import known
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.pipeline.stages import Built, build

__all__ = ["Gain", "gain_of_sizes"]

_LEAST = 0.95
"""Gains of less than a twentieth are not worth a word."""


@dataclass(frozen=True, slots=True)
class Gain:
    """The predicted seconds of all gradients of convolutions and pools, as they are and with sizes known while building.

    Attributes:
        shapes: Typical shapes of the inputs whose sizes are not known.
        gradients: Number of these gradients.
        faster: How many of them would take another form, which is faster.
        seconds: Predicted for all of them, at these shapes, as they are.
        seconds_known: The same if the shapes are given.
    """

    shapes: Mapping[str, tuple[int, ...]]
    gradients: int
    faster: int
    seconds: float
    seconds_known: float

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        given = " ".join(f"--input-shape {name}:{','.join(map(str, sizes))}" for name, sizes in self.shapes.items())
        saved = round(100 * (1 - self.seconds_known / self.seconds))
        return (
            f"Sizes of the inputs are unknown: if given, as with {given}, {self.faster} of {self.gradients} gradients take"
            f" faster forms; {saved} % less time is predicted."
        )


def gain_of_sizes(model: AnyModel, built: Built, arguments: Mapping[str, Any]) -> Gain | None:
    """What giving the sizes would gain over `built`, made from `model` with `arguments`; `None` if little or nothing."""
    shapes = _typical_shapes(built.primal.graph)
    if not shapes or not built.choices:
        return None
    given = {**(arguments.get("input_shapes") or {}), **shapes}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = build(model, **{**arguments, "input_shapes": given})
    except ConvGradError:  # typical sizes do not fit every model
        return None
    now, then = _seconds(built), _seconds(other)
    if now.keys() != then.keys():
        return None
    total, total_known = (sum(seconds for _, seconds in found.values()) for found in (now, then))
    if total_known > _LEAST * total:
        return None
    faster = sum(then[key][0] != form and then[key][1] < seconds for key, (form, seconds) in now.items())
    return Gain(shapes, len(now), faster, total, total_known)


def _typical_shapes(graph: ir.Graph) -> dict[str, tuple[int, ...]]:
    sizes = TypicalSizes(graph)
    found = {}
    for value in graph.inputs:
        if value.shape is not None and any(known(d) is None for d in value.shape):
            typical = [sizes.size(d) for d in value.shape]
            if None not in typical:
                found[value.name or ""] = tuple(size for size in typical if size is not None)
    return found


def _seconds(built: Built) -> dict[tuple[str, str], tuple[str, float]]:
    """Per gradient the form chosen, in how many chunks, and its predicted seconds."""
    return {(c.node, c.op_type): _chosen(c) for c in built.choices}


def _chosen(choice: Choice) -> tuple[str, float]:
    candidate = next(c for c in choice.candidates if c.name == choice.chosen)
    return str(candidate), candidate.seconds or 0.0
