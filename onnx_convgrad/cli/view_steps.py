"""The changes of a graph by each step of the pipeline, for the page that `view` writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

Nodes = Mapping[tuple[str, str], tuple[str, ...]]
"""Operator and first output of each node -> the names of what it reads."""

NAMED = 60
"""Most nodes that are named for each step."""


class StepRecorder:
    """Record which nodes each step adds, removes and rewires; an instance is a function for `watched_steps`.

    Attributes:
        steps: One entry per step that changed a node, as JSON values.
        read: The operators of the file.
        abstract: A copy of the differentiated graph.
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.read: list[str] = []
        self.abstract = ir.Graph([], [], nodes=[])
        self._before: Nodes | None = None

    def __call__(self, name: str, does: str, graph: ir.Graph) -> None:
        """Compare the graph with its state after the step before."""
        if name == "read":
            self.read = [node.op_type for node in graph]
        elif name == "differentiate":
            self.abstract = graph.clone()
        before, after = self._before, _nodes(graph)
        self._before = after
        if before is None or before == after:
            return
        added = [key for key in after if key not in before]
        removed = [key for key in before if key not in after]
        rewired = [key for key, inputs in after.items() if before.get(key, inputs) != inputs]
        self.steps.append(
            {
                "name": name,
                "does": does,
                "before": len(before),
                "after": len(after),
                "added": _counted(added),
                "removed": _counted(removed),
                "rewired": _counted(rewired),
                "values": [value for _, value in added[:NAMED]],
            }
        )


def _nodes(graph: ir.Graph) -> Nodes:
    return {
        (node.op_type, next((v.name or "" for v in node.outputs), "")): tuple(
            v.name or "" if v else "" for v in node.inputs
        )
        for node in graph
    }


def _counted(keys: list[tuple[str, str]]) -> list[tuple[str, int]]:
    return Counter(operator for operator, _ in keys).most_common()
