"""The report of `explain`: the lowering of every gradient of a convolution or pool, and why others were not used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnx_convgrad.frontend.files import AnyModel
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.memory.recompute import Recomputation
from onnx_convgrad.pipeline.known_sizes import Gain, gain_of_sizes
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import Built


@dataclass(frozen=True)
class Report:
    """The lowering decisions for one model and target; `rows` and `to_json()` for programs, `str()` for people."""

    choices: tuple[Choice, ...]
    gradients: Mapping[str, str]
    target: str
    recomputation: Recomputation | None = None
    gain: Gain | None = None

    @classmethod
    def of(cls, model: AnyModel, options: Options, built: Built) -> Report:
        """Report on `built`, which was made from `model` with `options` and all lowerings priced."""
        gain = gain_of_sizes(model, options, built)
        return cls(built.choices, built.gradients, options.target, built.recomputation, gain)

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
        if self.gain is not None:
            content["with_known_sizes"] = self.gain.to_dict()
        return json.dumps(content, indent=2)

    def __str__(self) -> str:
        lines = [f"{len(self.choices)} operators of convolutions and pools for target {self.target}"]
        if self.recomputation is not None:
            lines.append(str(self.recomputation))
        if self.gain is not None:
            lines.append(str(self.gain))
        spec = None
        for choice in self.choices:
            heading = (choice.node, str(choice.spec))
            if heading != spec:
                lines.append(f"\n{choice.node}: {choice.spec}")
                spec = heading
            lines.append(f"  {choice.op_type} -> {choice.chosen}{' (forced)' if choice.forced else ''}")
            for c in choice.candidates:
                if c.reason:
                    lines.append(f"      {c.name}: not used, {c.reason}")
                else:
                    held = f", {c.workspace / 1e6:.1f} MB held" if c.workspace else ""
                    lines.append(f"      {c}: predicted {1e3 * (c.seconds or 0):.3f} ms{held}")
        return "\n".join(lines)
