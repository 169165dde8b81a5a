"""The content of the page that `view` writes: both graphs, the lowering of each gradient, and memory over time."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnx_convgrad.cli.tables import shape_text
from onnx_convgrad.errors import shown
from onnx_convgrad.frontend.model import Model
from onnx_convgrad.ir.notes import origin_of
from onnx_convgrad.ir.targets import Rates
from onnx_convgrad.lowering.cost.node import node_seconds
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.memory.timeline import timeline
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import Built, build, target_of

_ORIGIN = re.compile(r"^(.*)/grad_\d+$")
"""New nodes are named after the node that they were added for."""

_ATTRIBUTE = 200
"""Most characters of an attribute that are shown."""


def view_data(
    title: str,
    model: Model,
    options: Options,
    built: Built,
    progress: Callable[[str], None],
    steps: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Describe a transformed model for the page, as JSON values.

    Args:
        title: Name of the page.
        model: The model that was transformed.
        options: The arguments of the transformation.
        built: Its result, with all lowerings priced.
        progress: Called with the name of each stage.
        steps: What each step of the pipeline changed, see `StepRecorder`.
    """
    progress("describing")
    abstract = build(model, options, lower=False)
    forward = list(built.primal.graph)
    place = {node.name: i for i, node in enumerate(forward)}
    rates = target_of(options).rates
    lowered = _described(built.model.graph, place, rates)
    graphs = {
        "forward": _described(built.primal.graph, place, rates),
        "abstract": [node for node in _described(abstract.model.graph, place, rates) if node["name"] not in place],
        "lowered": [node for node in lowered if node["name"] not in place],
    }
    return {
        "title": title,
        "target": options.target,
        "values": _values([built.primal.graph, abstract.model.graph, built.model.graph]),
        "graphs": graphs,
        "choices": [_choice(choice) for choice in built.choices],
        "gradients": dict(built.gradients),
        "stages": [
            _stage("as read", model.source.graph),
            _stage("canonical", built.primal.graph),
            _stage("differentiated", abstract.model.graph),
            _stage("lowered", built.model.graph),
        ],
        "steps": list(steps),
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
            "inputs": [value.name or "" if value is not None else "" for value in node.inputs],
            "outputs": [value.name or "" for value in node.outputs],
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
            shape = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
            found[value.name or ""] = [value.dtype.name.lower() if value.dtype else "?", shape_text(shape), role]
    return found


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "node": choice.node,
        "operator": choice.op_type,
        "spec": str(choice.spec),
        "chosen": choice.chosen,
        "forced": choice.forced,
        "candidates": [[str(c), c.seconds, c.workspace, c.reason or "", c.name] for c in choice.candidates],
    }


def _stage(name: str, graph: ir.Graph) -> dict[str, Any]:
    """The name of a stage, the number of nodes after it, and its most frequent operators."""
    nodes = list(graph)
    counts = Counter(node.op_type for node in nodes)
    return {"name": name, "nodes": len(nodes), "operators": counts.most_common(12)}
