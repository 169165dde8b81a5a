"""Time each node of a model and of its gradients, with ONNX Runtime's profiler.

The runtime fuses and renames nodes, and a fused node counts for the one that gives its result: a Conv with the Relu behind
it counts for the Relu. What belongs to no node of the model, such as changes of the memory layout, is summed up.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnx_convgrad.bench.timing import Budget
from onnx_convgrad.checking.random_inputs import Feed
from onnx_convgrad.runtime import session

_CONTROL = ("If", "Loop", "Scan")
_MARK = "/grad"


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one node of the model, in the forward pass and in the gradients."""

    node: str
    operator: str
    forward: float
    gradients: float

    @property
    def seconds(self) -> float:
        return self.forward + self.gradients


def profile(
    primal: ir.Model, model: ir.Model, feed: Feed, threads: int, *, repeats: int = 3, budget: Budget | None = None
) -> tuple[LayerTimes, ...]:
    """Time the nodes of `primal` in runs of `model`, the same with gradients, in the order of the model.

    The last one, without a name, is what belongs to no node.
    """
    with tempfile.TemporaryDirectory() as folder:
        live = session(model, options={"threads": threads}, profile=str(Path(folder) / "nodes"))
        live.run(None, feed)
        runs = 0
        while not runs or (runs < repeats and (budget is None or budget.left)):
            live.run(None, feed)
            runs += 1
        events = json.loads(Path(live.end_profiling()).read_text(encoding="utf-8"))
    return _by_layer(primal, _kernels(events, 1 + runs), runs)


def _kernels(events: list[dict[str, Any]], runs: int) -> Iterator[tuple[str, float]]:
    """Name and seconds of each node's kernel, in all `runs` but the first; bodies of loops count for the loop."""
    kernels = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    kernels.sort(key=lambda e: e["ts"])
    end = 0.0
    outer = []
    for event in kernels:
        if event["ts"] >= end:
            outer.append(event)
            if event["args"]["op_name"] in _CONTROL:
                end = event["ts"] + event["dur"]
    for event in outer[len(outer) // runs :]:
        yield event["name"].removesuffix("_kernel_time"), 1e-6 * event["dur"]


def _by_layer(primal: ir.Model, kernels: Iterator[tuple[str, float]], runs: int) -> tuple[LayerTimes, ...]:
    owners: dict[str, str] = {}
    for node in primal.graph:
        owners |= {v.name or "": node.name or "" for v in node.outputs}
    owners |= {node.name or "": node.name or "" for node in primal.graph}
    forward: dict[str, float] = defaultdict(float)
    gradients: dict[str, float] = defaultdict(float)
    for name, seconds in kernels:
        part = gradients if _MARK in name else forward
        part[_owner(name, owners)] += seconds / runs
    operators = {node.name or "": node.op_type for node in primal.graph} | {"": ""}
    times = [LayerTimes(name, operator, forward[name], gradients[name]) for name, operator in operators.items()]
    return tuple(t for t in times if t.seconds)


def _owner(name: str, owners: Mapping[str, str]) -> str:
    """The node of the model that a node of the runtime belongs to, or nothing."""
    name = name.removesuffix("_nchwc")
    while name and name not in owners:
        name = name.rpartition("/")[0]
    return owners.get(name, "")
