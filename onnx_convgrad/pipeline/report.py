"""The report of `explain`: the lowering of every gradient of a convolution or pool, and why others were not used.

If input sizes are unknown, the gradients are built again with typical sizes, to estimate the gain of giving them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import onnx_ir as ir

from onnx_convgrad.base.notebook import Shown
from onnx_convgrad.errors import ConvGradError, shown
from onnx_convgrad.frontend.load import reshaped
from onnx_convgrad.ir.emit import known
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.memory.budget import Fit
from onnx_convgrad.memory.recompute import Recomputation
from onnx_convgrad.memory.timeline import largest_results
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.stages import build

_WORTH_REPORTING = 0.95
"""Largest share of the time that may be left by a gain that is reported."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Predicted seconds of all gradients of convolutions and pools, with the sizes unknown and known.

    Attributes:
        shapes: Typical shapes of the inputs whose sizes are unknown.
        gradients: Number of these gradients.
        faster: Number of gradients that would get another, faster lowering.
        seconds: Predicted seconds of all gradients at these shapes, as the model is.
        seconds_known: Predicted seconds of all gradients if the shapes are given.
    """

    shapes: Mapping[str, tuple[int, ...]]
    gradients: int
    faster: int
    seconds: float
    seconds_known: float

    def __str__(self) -> str:
        given = " ".join(f"--input-shape {name}:{','.join(map(str, sizes))}" for name, sizes in self.shapes.items())
        saved = round(100 * (1 - self.seconds_known / self.seconds))
        return (
            f"Some input sizes are unknown. With {given}, {self.faster} of {self.gradients} gradients would get faster"
            f" lowerings: {saved} % less time is predicted."
        )


_LARGEST = 6
"""Number of results that a report names at the peak of the memory."""


def _node_of(value: ir.Value) -> str:
    """The name of the node that computes a value, or of the value itself."""
    node = value.producer()
    return (node.name if node is not None else None) or value.name or ""


@dataclass(frozen=True)
class Report(Shown):
    """The lowering decisions for one model and target; `rows` and `to_json()` for programs, `str()` for people.

    Args:
        choices: The decision for each gradient operator.
        gradients: Differentiated value -> output with its gradient.
        target: The execution provider.
        recomputation: The values that are computed again, if that was requested.
        gain: The time that known sizes would save, if it is worth telling.
        memory: The predicted memory, if there is a budget.
    """

    choices: tuple[Choice, ...]
    gradients: Mapping[str, str]
    target: str
    recomputation: Recomputation | None = None
    gain: Gain | None = None
    memory: Fit | None = None

    @classmethod
    def of(cls, built: Built) -> Report:
        """Report on a model that was built with all lowerings priced."""
        gain, memory = gain_of_sizes(built), built.memory
        if memory is not None:
            alive = largest_results(built.model.graph)[:_LARGEST]
            memory = replace(memory, largest=tuple((_node_of(value), size) for value, size in alive))
        return cls(built.choices, built.gradients, built.target.name, built.recomputation, gain, memory)

    @property
    def rows(self) -> list[dict[str, Any]]:  # Any: what JSON holds
        """Return one mapping per gradient operator: node, operator, spec, chosen, forced, candidates."""
        return [
            {
                "node": choice.node,
                "operator": choice.op_type,
                "spec": str(choice.spec),
                "chosen": choice.chosen,
                "forced": choice.forced,
                "candidates": [
                    {
                        "name": c.name,
                        "seconds": c.seconds,
                        "workspace": c.workspace,
                        "chunks": c.chunks,
                        "rounding": None if c.reason else c.rounding,
                        "rejected": c.reason,
                    }
                    for c in choice.candidates
                ],
            }
            for choice in self.choices
        ]

    def to_json(self) -> str:
        """Return the report as JSON text."""
        content = {"target": self.target, "gradients": dict(self.gradients), "rows": self.rows}
        if self.recomputation is not None:
            content["recomputation"] = self.recomputation.to_dict()
        if self.memory is not None:
            content["memory"] = self.memory.to_dict()
        if self.gain is not None:
            content["with_known_sizes"] = asdict(self.gain)
        return json.dumps(content, indent=2)

    def __str__(self) -> str:
        count = len(self.choices)
        lines = [f"{count} operator{'s' * (count != 1)} of convolutions and pools for target {self.target}"]
        if self.recomputation is not None:
            lines.append(str(self.recomputation))
        lines += [str(part) for part in (self.memory, self.gain) if part is not None]
        spec = None
        for choice in self.choices:
            heading = (choice.node, str(choice.spec))
            if heading != spec:
                lines += ["", f"{choice.node}: {choice.spec}"]
                spec = heading
            lines.append(f"  {choice.op_type} -> {choice.chosen}{' (forced)' if choice.forced else ''}")
            for c in choice.candidates:
                if c.reason:
                    lines.append(f"      {c.name}: not used, {c.reason}")
                else:
                    held = f", {c.workspace / 1e6:.1f} MB held" if c.workspace else ""
                    rounds = f", {c.rounds}" if c.rounds else ""
                    lines.append(f"      {c}: predicted {1e3 * (c.seconds or 0):.3f} ms{held}{rounds}")
        return "\n".join(map(shown, lines))


def gain_of_sizes(built: Built) -> Gain | None:
    """Estimate the gain of giving sizes over what was built; `None` if it is not worth it, or the model is not at hand."""
    shapes, options = _typical_shapes(built.primal.graph), replace(built.options, compare=False)
    if not shapes or not built.choices or built.loaded is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other = build(reshaped(built.loaded, shapes), options)
    except ConvGradError:  # typical sizes do not fit every model
        return None
    unknown, known_sizes = _seconds(built), _seconds(other)
    if unknown.keys() != known_sizes.keys():
        return None
    total, total_known = (sum(seconds for _, seconds in choices.values()) for choices in (unknown, known_sizes))
    if total_known > _WORTH_REPORTING * total:
        return None
    faster = sum(
        known_sizes[key][0] != lowering and known_sizes[key][1] < seconds
        for key, (lowering, seconds) in unknown.items()
    )
    return Gain(shapes, len(unknown), faster, total, total_known)


def _typical_shapes(graph: ir.Graph) -> dict[str, tuple[int, ...]]:
    """Typical shapes of the inputs with unknown sizes, where all their sizes can be guessed."""
    sizes = TypicalSizes(graph)
    shapes = {}
    for value in graph.inputs:
        if value.shape is not None and any(known(d) is None for d in value.shape):
            typical = [sizes.size(d) for d in value.shape]
            if None not in typical:
                shapes[value.name or ""] = tuple(size for size in typical if size is not None)
    return shapes


def _seconds(built: Built) -> dict[tuple[str, str], tuple[str, float]]:
    """By node and operator, the chosen lowering with its chunks, and its predicted seconds."""
    chosen = {(c.node, c.op_type): next(k for k in c.candidates if k.name == c.chosen) for c in built.choices}
    return {key: (str(candidate), candidate.seconds or 0.0) for key, candidate in chosen.items()}
