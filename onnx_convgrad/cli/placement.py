"""Find which provider runs each node: a node that falls back to the CPU costs two copies and a stall of the GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx

from onnx_convgrad.backends.cuda.cuda_kernels import lacks, size_arithmetic
from onnx_convgrad.backends.webgpu_kernels import webgpu_lacks
from onnx_convgrad.cli.tables import Table
from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.runtime import import_runtime, session
from onnx_convgrad.runtime.providers import CPU, CUDA, PROVIDERS, WEBGPU, Providers, resolve_providers


@dataclass(frozen=True, slots=True)
class Fallen:
    """A node that runs on the CPU although another provider was preferred."""

    node: str
    op_type: str
    reason: str = ""


@dataclass(frozen=True)
class Placement:
    """The execution provider of each node of a model.

    Attributes:
        wanted: The preferred provider.
        counts: Provider -> number of nodes.
        arithmetic: Number of nodes on the CPU that compute sizes, which belong there.
        fallen: The other nodes on the CPU, if another provider was preferred.
        source: The origin of this information.
    """

    wanted: str
    counts: Mapping[str, int]
    arithmetic: int
    fallen: tuple[Fallen, ...]
    source: str

    @property
    def tables(self) -> list[Table]:
        """Tables of the nodes per provider, and of the fallen nodes with the reason."""
        rows = [[_short(name), str(count), self._note(name)] for name, count in self.counts.items()]
        tables = [Table(["provider", "nodes", ""], rows, {1}, title=f"Placement ({self.source})")]
        if self.fallen:
            listed = [[f.node or "unnamed", f.op_type, f.reason] for f in self.fallen]
            tables.append(Table(["fell back to the CPU", "operator", "because"], listed))
        return tables

    def _note(self, name: str) -> str:
        if name != CPU or self.wanted == CPU:
            return ""
        return f"{len(self.fallen)} fell back, {self.arithmetic} compute sizes"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, ready for JSON."""
        fallen = [{"node": f.node, "operator": f.op_type, "reason": f.reason} for f in self.fallen]
        return {"wanted": self.wanted, "nodes": self.counts, "arithmetic": self.arithmetic, "fallen": fallen}

    def __str__(self) -> str:
        return "\n\n".join(table.plain() for table in self.tables)


def _short(provider: str) -> str:
    return next((short for short, name in PROVIDERS.items() if name == provider), provider)


def placement(model: onnx.ModelProto, *, providers: Providers | None = None) -> Placement:
    """Ask ONNX Runtime where it puts each node of a model, after its basic optimizations."""
    named = onnx.ModelProto()
    named.CopyFrom(model)
    for index, node in enumerate(named.graph.node):
        node.name = node.name or f"{node.op_type}_{index}"
    opened = session(named, providers=providers, record_placement=True)
    if not hasattr(opened, "get_provider_graph_assignment_info"):
        raise ExecutionError("This ONNX Runtime does not report where it puts nodes.", hint="Install 1.24 or later.")
    groups = [
        (group.ep_name, [(node.name, node.op_type) for node in group.get_nodes()])
        for group in opened.get_provider_graph_assignment_info()
    ]
    wanted = resolve_providers(providers)[0][0]
    return _placed(named, groups, wanted, f"ONNX Runtime {import_runtime().__version__}")


def _placed(
    model: onnx.ModelProto, groups: list[tuple[str, list[tuple[str, str]]]], wanted: str, source: str
) -> Placement:
    counts: Counter[str] = Counter({wanted: 0})
    sizes = size_arithmetic(model.graph)
    counting = {node.name for node in model.graph.node if set(node.output) <= sizes}
    reasons = {node.name: "" for node in model.graph.node}
    reasons.update({lack.node: lack.reason for lack in lacks(model)} if wanted == CUDA else {})
    arithmetic, fallen = 0, []
    for provider, nodes in groups:
        counts[provider] += len(nodes)
        if provider == wanted or provider != CPU:
            continue
        for name, op_type in nodes:
            if name in counting:
                arithmetic += 1
            else:
                fallen.append(Fallen(name, op_type, reasons.get(name, "added by ONNX Runtime's own rewriting")))
    return Placement(wanted, dict(counts), arithmetic, tuple(fallen), source)


def predicted_placement(model: onnx.ModelProto, target: str = "cuda") -> Placement:
    """Predict from a table of kernels, of CUDA or WebGPU, where nodes run; needs no GPU and no session."""
    wanted, found = (WEBGPU, webgpu_lacks(model)) if target == "webgpu" else (CUDA, lacks(model))
    arithmetic = sum(lack.arithmetic for lack in found)
    fallen = tuple(Fallen(lack.node, lack.op_type, lack.reason) for lack in found if not lack.arithmetic)
    counts = {wanted: len(model.graph.node) - len(found), CPU: len(found)}
    return Placement(wanted, counts, arithmetic, fallen, "predicted from the provider's kernels")
