"""Find which provider runs each node: a node that falls back to the CPU costs two copies and a stall of the GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx

from onnx_convgrad.backends.cuda.cuda_kernels import Lack, lacks, size_arithmetic
from onnx_convgrad.backends.webgpu_kernels import webgpu_lacks
from onnx_convgrad.cli.tables import Table
from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.runtime import import_runtime, session
from onnx_convgrad.runtime.providers import CPU, CUDA, WEBGPU, Providers, resolve_providers, short_name


@dataclass(frozen=True)
class Placement:
    """The execution provider of each node of a model.

    Attributes:
        wanted: The preferred provider.
        counts: Provider -> number of nodes.
        left: The nodes on the CPU, if another provider was preferred.
        source: The origin of this information.
    """

    wanted: str
    counts: Mapping[str, int]
    left: tuple[Lack, ...]
    source: str

    @property
    def fallen(self) -> tuple[Lack, ...]:
        """The nodes on the CPU that do not belong there, as those that compute sizes do."""
        return tuple(lack for lack in self.left if not lack.arithmetic)

    @property
    def arithmetic(self) -> int:
        """Number of nodes on the CPU that compute sizes."""
        return len(self.left) - len(self.fallen)

    @property
    def tables(self) -> list[Table]:
        """Tables of the nodes per provider, and of the fallen nodes with the reason."""
        notes = {} if self.wanted == CPU else {CPU: f"{len(self.fallen)} fell back, {self.arithmetic} compute sizes"}
        rows = [[short_name(name), str(count), notes.get(name, "")] for name, count in self.counts.items()]
        tables = [Table(["provider", "nodes", ""], rows, {1}, title=f"Placement ({self.source})")]
        if self.fallen:
            listed = [[f.node or "unnamed", f.op_type, f.reason] for f in self.fallen]
            tables.append(Table(["fell back to the CPU", "operator", "because"], listed))
        return tables

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, ready for JSON."""
        fallen = [{"node": f.node, "operator": f.op_type, "reason": f.reason} for f in self.fallen]
        return {"wanted": self.wanted, "nodes": self.counts, "arithmetic": self.arithmetic, "fallen": fallen}

    def __str__(self) -> str:
        return "\n\n".join(table.plain() for table in self.tables)


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
    sizes = size_arithmetic(model.graph)
    counting = {node.name for node in model.graph.node if set(node.output) <= sizes}
    reasons = {node.name: "" for node in model.graph.node}
    reasons.update({lack.node: lack.reason for lack in lacks(model)} if wanted == CUDA else {})
    counts: Counter[str] = Counter({wanted: 0})
    left = []
    for provider, nodes in groups:
        counts[provider] += len(nodes)
        for name, op_type in nodes if provider == CPU != wanted else ():
            reason = reasons.get(name, "added by ONNX Runtime's own rewriting")
            left.append(Lack(name, op_type, reason, name in counting))
    return Placement(wanted, dict(counts), tuple(left), source)


def predicted_placement(model: onnx.ModelProto, target: str = "cuda") -> Placement:
    """Predict from a table of kernels, of CUDA or WebGPU, where nodes run; needs no GPU and no session."""
    wanted, found = (WEBGPU, webgpu_lacks(model)) if target == "webgpu" else (CUDA, lacks(model))
    counts = {wanted: len(model.graph.node) - len(found), CPU: len(found)}
    return Placement(wanted, counts, tuple(found), "predicted from the provider's kernels")
