"""The content of the page that `view` writes: both graphs, the change by each step, lowerings, and memory over time."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnx_convgrad.base.progress import announce
from onnx_convgrad.cli.rewrite import described
from onnx_convgrad.cli.tables import shape_text
from onnx_convgrad.errors import shown
from onnx_convgrad.ir.notes import origin_of
from onnx_convgrad.ir.targets import Rates
from onnx_convgrad.lowering.cost.node import node_seconds
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.memory.timeline import timeline
from onnx_convgrad.pipeline.built import Built

NAMED = 60
"""Most nodes that are named for each step."""

_ORIGIN = re.compile(r"^(.*)/grad_\d+$")
"""Names of new nodes, which begin with that of the node that they were added for."""

_ATTRIBUTE = 200
"""Most characters of an attribute that are shown."""


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
        self._before: Mapping[tuple[str, str], list[str]] | None = None

    def __call__(self, name: str, does: str, graph: ir.Graph) -> None:
        """Compare the graph with its state after the step before."""
        if name == "read":
            self.read = [node.op_type for node in graph]
        elif name == "differentiate":
            self.abstract = graph.clone()
        after = {(n.op_type, _names(n.outputs[:1] or [None])[0]): _names(n.inputs) for n in graph}
        before, self._before = self._before, after
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


def _names(values: Sequence[ir.Value | None]) -> list[str]:
    return [value.name or "" if value is not None else "" for value in values]


def _counted(keys: list[tuple[str, str]]) -> list[tuple[str, int]]:
    return Counter(operator for operator, _ in keys).most_common()


def view_data(name: str, built: Built, recorder: StepRecorder) -> dict[str, Any]:
    """Describe a transformed model for the page, as JSON values; `name` is that of its file."""
    announce("describing")
    forward = list(built.primal.graph)
    place = {node.name: i for i, node in enumerate(forward)}
    rates = built.target.rates
    lowered = _described(built.model.graph, place, rates)
    graphs = {
        "forward": _described(built.primal.graph, place, rates),
        "abstract": [node for node in _described(recorder.abstract, place, rates) if node["name"] not in place],
        "lowered": [node for node in lowered if node["name"] not in place],
    }
    return {
        "title": name,
        "target": built.target.name,
        "values": _values([built.primal.graph, recorder.abstract, built.model.graph]),
        "graphs": graphs,
        "choices": [_choice(choice) for choice in built.choices],
        "gradients": dict(built.gradients),
        "stages": [
            _stage("as read", recorder.read),
            _stage("canonical", [node.op_type for node in forward]),
            _stage("differentiated", [node.op_type for node in recorder.abstract]),
            _stage("lowered", [node.op_type for node in built.model.graph]),
        ],
        "steps": recorder.steps,
        "memory": timeline(built.model.graph, list(built.model.graph)).held,
        "order": [node["name"] for node in lowered],
    }


def page(data: Mapping[str, Any]) -> str:
    """The page as HTML, with the data inside; it loads nothing else."""
    template = Path(__file__).with_name("view.html").read_text(encoding="utf-8")
    text = json.dumps(_shown(data), separators=(",", ":")).replace("<", "\\u003c")  # no name can end the script element
    return template.replace("/*DATA*/", text)


def _shown(value: Any) -> Any:  # what JSON holds
    """A value whose texts show as they are: none changes the direction of the text around it."""
    if isinstance(value, Mapping):
        return {shown(key): _shown(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shown(member) for member in value]
    return shown(value) if isinstance(value, str) else value


def _described(graph: ir.Graph, place: Mapping[str | None, int], rates: Rates) -> list[dict[str, Any]]:
    """The nodes of a graph; `forward` is the position of the node that each was added for, -1 if there is none."""
    sizes = TypicalSizes(graph)
    return [
        {
            "name": node.name or "",
            "op": node.op_type,
            "domain": node.domain,
            "inputs": _names(node.inputs),
            "outputs": _names(node.outputs),
            "attributes": {name: _text(attribute) for name, attribute in node.attributes.items()},
            "forward": place.get(node.name, place.get(_origin(node), -1)),
            "seconds": _seconds(sizes.node(node), rates),
        }
        for node in graph
    ]


def _origin(node: ir.Node) -> str:
    """The name of the node that a node was added for: a note before the last stage, its name after that."""
    found = _ORIGIN.match(node.name or "")
    return origin_of(node) or (found[1] if found else "")


def _seconds(node: ir.Node, rates: Rates) -> float | None:
    """The predicted time of a node; `None` if its sizes are unknown."""
    try:
        return float(f"{node_seconds(node, rates):.3g}")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, AssertionError):
        return None


def _text(attribute: ir.Attr) -> str:
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return "a graph"
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return f"{tensor.dtype.name.lower()} {shape_text(tuple(tensor.shape))}"
    text = str(attribute.value)
    return text if len(text) <= _ATTRIBUTE else f"{text[:_ATTRIBUTE]}..."


def _values(graphs: Iterable[ir.Graph]) -> dict[str, list[str]]:
    """Dtype, shape and role of every value by name."""
    found: dict[str, list[str]] = {}
    for graph in graphs:
        results = (value for node in graph for value in node.outputs)
        for value in (*graph.inputs, *graph.initializers.values(), *results):
            role = "stored" if value.is_initializer() else "input" if value.is_graph_input() else ""
            role = "output" if value.is_graph_output() else role
            dtype = value.dtype.name.lower() if value.dtype else "?"
            found[value.name or ""] = [dtype, shape_text(described(value)["shape"]), role]
    return found


def _choice(choice: Choice) -> dict[str, Any]:
    candidates = [[str(c), c.seconds, c.workspace, c.reason or "", c.name] for c in choice.candidates]
    settled = {"spec": str(choice.spec), "chosen": choice.chosen, "forced": choice.forced}
    return {"node": choice.node, "operator": choice.op_type, **settled, "candidates": candidates}


def _stage(name: str, operators: Sequence[str]) -> dict[str, Any]:
    """The name of a stage, the number of nodes after it, and its most frequent operators."""
    return {"name": name, "nodes": len(operators), "operators": Counter(operators).most_common(12)}
