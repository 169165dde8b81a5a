"""Compare the gradients that an execution provider computes with those of the CPU, on the same graph and inputs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from onnx_convgrad.base.progress import announce
from onnx_convgrad.checking.check import Arrays, draw_inputs, limit_of, run_gradients
from onnx_convgrad.checking.numeric_derivative import wide
from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.runtime import session

_FLOOR = 1e-3


@dataclass(frozen=True, slots=True)
class ProviderRow:
    """One gradient: its norm on the CPU, the relative distance of the provider's from it, and the largest allowed one."""

    value: str
    shape: tuple[int, ...]
    norm: float
    error: float
    limit: float

    @property
    def verdict(self) -> str:
        """`ok` or `FAIL`."""
        return "ok" if self.error <= self.limit else "FAIL"


@dataclass(frozen=True, slots=True)
class ProviderReport:
    """The comparison of a provider with the CPU.

    Attributes:
        provider: Its name in ONNX Runtime.
        rows: One for each gradient; all errors are infinite if the provider failed.
        inputs: Shapes of the inputs that were drawn.
        seed: The seed that they were drawn with.
        failure: The runtime's message if the provider failed.
    """

    provider: str
    rows: tuple[ProviderRow, ...]
    inputs: dict[str, tuple[int, ...]]
    seed: int
    failure: str = ""

    @property
    def passed(self) -> bool:
        return all(row.verdict == "ok" for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report as data for JSON; infinity and NaN become null."""
        rows = [{**asdict(row), "shape": list(row.shape), "verdict": row.verdict} for row in self.rows]
        rows = [
            {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in rows
        ]
        inputs = {name: list(shape) for name, shape in self.inputs.items()}
        head = {"provider": self.provider, "passed": self.passed, "failure": self.failure, "seed": self.seed}
        return {**head, "inputs": inputs, "rows": rows}


def compare_with_cpu(built: Built, provider: str, *, feed: Arrays | None = None, seed: int = 0) -> ProviderReport:
    """Run the gradients on a provider, and on the CPU without graph optimizations; compare them.

    An error is relative to the norm of the gradient, or to 1e-3 of the largest norm where that is more.

    Args:
        built: A model with gradients.
        provider: A name as for `runtime.session`.
        feed: The inputs; by default random ones that the model accepts.
        seed: Seed of the random inputs and cotangents.

    Raises:
        ModelError: The model draws random numbers, holds more than 2 GB, or runs on no input that was tried.
        ExecutionError: The provider is missing, or refuses the graph; or the CPU fails.
    """
    opened = session(built.model, providers=[provider])
    feed, inputs, _, _ = draw_inputs(built, seed, feed)
    announce("running on the CPU")
    want = run_gradients(built, session(built.model, providers=["cpu"], optimize=False), inputs)
    announce(f"running on {provider}")
    got, failure = want, ""
    try:
        got = run_gradients(built, opened, inputs)
    except ExecutionError as problem:
        failure = problem.message
    values = named_values(built.primal.graph)
    norms = {name: float(np.linalg.norm(wide(g))) for name, g in want.items()}
    floor = max([1e-12, *(_FLOOR * norm for norm in norms.values() if math.isfinite(norm))])
    rows = []
    for name, gradient in want.items():
        error = float("inf")
        if not failure and got[name].shape == gradient.shape and np.isfinite(wide(got[name])).all():
            error = float(np.linalg.norm(wide(got[name]) - wide(gradient))) / max(norms[name], floor)
        rows.append(ProviderRow(name, gradient.shape, norms[name], error, limit_of(values[name].dtype)))
    return ProviderReport(provider, tuple(rows), {k: v.shape for k, v in feed.items()}, seed, failure)
