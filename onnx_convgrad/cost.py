"""Targets and the cost model: what each execution provider can run, and about how long it takes.

Predicted seconds are `flops / rate + bytes / bandwidth + nodes * overhead`. The constants are defaults for a common
machine of each kind; only their ratios matter for a choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from onnx_convgrad.errors import ArgumentError

__all__ = ["TARGETS", "Cost", "Target", "target_named"]

_ALL = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE})


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one lowering: floating-point operations, bytes moved, nodes, and how well its kernel uses the machine."""

    flops: float
    bytes: float
    nodes: int
    efficiency: float = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """What an execution provider runs, and its speed (flop/s, byte/s, seconds per node)."""

    name: str
    conv_dtypes: frozenset[ir.DataType]
    asymmetric_pads: bool = True
    missing: frozenset[str] = field(default_factory=frozenset)
    flops_per_second: float = 2.5e11
    bytes_per_second: float = 1.5e10
    node_seconds: float = 5e-6

    def seconds(self, cost: Cost) -> float:
        """Predicted run time in seconds."""
        return (
            cost.flops / (self.flops_per_second * cost.efficiency)
            + cost.bytes / self.bytes_per_second
            + cost.nodes * self.node_seconds
        )


_NO_DOUBLE = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16})
_CUDA_MISSING = frozenset({"Col2Im", "MaxUnpool", "Mean", "Celu", "Mish"})
_WEB_MISSING = frozenset(
    {"ScatterElements", "Col2Im", "OneHot", "PRelu", "Softplus", "Sign", "TopK", "Mean", "Sum", "Dropout"}
)

TARGETS = {
    "cpu": Target("cpu", _NO_DOUBLE),
    "cuda": Target(
        "cuda", _ALL, asymmetric_pads=False, missing=_CUDA_MISSING, flops_per_second=3e13, bytes_per_second=2e12
    ),
    "web": Target(
        "web", _NO_DOUBLE, asymmetric_pads=False, missing=_WEB_MISSING, flops_per_second=5e10, bytes_per_second=5e9
    ),
    "portable": Target("portable", _NO_DOUBLE, asymmetric_pads=False, missing=_CUDA_MISSING | _WEB_MISSING),
}


def target_named(name: str) -> Target:
    """The target called `name`; raises `ArgumentError` for an unknown one."""
    if name not in TARGETS:
        raise ArgumentError(f"Unknown target {name!r}.", hint=f"Targets: {', '.join(TARGETS)}.")
    return TARGETS[name]
