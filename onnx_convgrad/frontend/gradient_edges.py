"""Turn the tensor names in the attributes of Gradient nodes into operands, which every pass keeps up to date.

Inlining functions and lifting constants changes names, but not edges. The node moves to the private domain. Its operands
are the values given for `xs` and `zs`, then the tensors that `xs` and `zs` name, then the tensor `y`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import onnx_ir as ir

from onnx_convgrad.base.names import near_matches
from onnx_convgrad.errors import ModelError
from onnx_convgrad.ir.emit import DOMAIN
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.notes import VEIL

TRAINING_DOMAIN = "ai.onnx.preview.training"

GRADIENT = "Gradient"
"""The operator in its own domain, and in the private domain once its names are operands."""


@dataclass(frozen=True, slots=True)
class GradientCall:
    """A bound Gradient node: the i-th member of `xs`, then of `zs`, is `named[i]` and takes the value `given[i]`."""

    node: ir.Node
    given: tuple[ir.Value, ...]
    named: tuple[ir.Value, ...]
    y: ir.Value
    xs: tuple[str, ...]
    y_name: str

    @classmethod
    def of(cls, node: ir.Node) -> GradientCall:
        values = tuple(v for v in node.inputs if v is not None)
        count = len(values) // 2
        xs = tuple(node.attributes["xs"].as_strings())
        return cls(node, values[:count], values[count:-1], values[-1], xs, node.attributes["y"].as_string())


def label(node: ir.Node) -> str:
    """The node's name in messages."""
    return repr(node.name) if node.name else f"that makes {', '.join(repr(v.name) for v in node.outputs if v.name)}"


def bind_gradients(model: ir.Model) -> bool:
    """Turn the names in the Gradient nodes of `model` and of its functions into operands, in place.

    Nodes in the bodies of other nodes stay as they are.

    Returns:
        Whether a node computes a gradient at other values than those of the tensors that it names.

    Raises:
        ModelError: A name is unknown in the graph or occurs twice, the number of operands is wrong, or a `y` depends on its
            own gradient.
    """
    nodes = _bind(model.graph)
    for function in model.functions.values():
        nodes += _bind(function.graph, veiled=True)
    if nodes:
        model.opset_imports[DOMAIN] = 1
    calls = map(GradientCall.of, nodes)
    return any(given is not named for call in calls for given, named in zip(call.given, call.named, strict=True))


def lift_veils(graph: ir.Graph) -> None:
    """Remove the Identity nodes that `bind_gradients` put behind the inputs of functions, which are inlined into `graph`."""
    for node in list(graph):
        if node.metadata_props.pop(VEIL, None) and not node.outputs[0].is_graph_output():
            assert node.inputs[0] is not None
            node.outputs[0].replace_all_uses_with(node.inputs[0])
            graph.remove(node, safe=True)


def _bind(graph: ir.Graph, *, veiled: bool = False) -> list[ir.Node]:
    """Bind the nodes of one graph, and return them."""
    nodes = [node for node in graph if (node.domain, node.op_type) == (TRAINING_DOMAIN, GRADIENT)]
    if not nodes:
        return []
    tensors = named_values(graph)
    names = {node: _names(node, tensors) for node in nodes}
    if veiled:
        wanted = dict.fromkeys(x for xs, _, _ in names.values() for x in xs if tensors[x] in graph.inputs)
        tensors |= {x: _veil(graph, tensors[x]) for x in wanted}
    at = {node: i for i, node in enumerate(graph)}
    late = False
    for node, (xs, zs, y) in names.items():
        producer = tensors[y].producer()
        late = late or (producer is not None and at[producer] > at[node])
        operands = [*node.inputs, *(tensors[x] for x in (*xs, *zs)), tensors[y]]
        node.domain = DOMAIN
        node.resize_inputs(len(operands))
        for index, value in enumerate(operands):
            node.replace_input_with(index, value)
    if late:  # an attribute imposes no order
        try:
            graph.sort()
        except ValueError:
            labels = " or ".join(label(node) for node in nodes)
            raise ModelError(f"The y of Gradient node {labels} is computed from its own gradient.") from None
    return nodes


def _names(node: ir.Node, tensors: Mapping[str, ir.Value]) -> tuple[list[str], list[str], str]:
    """The names in the attributes `xs`, `zs` and `y` of a Gradient node."""
    for name, attribute in node.attributes.items():
        if attribute.is_ref():
            refuse(node, f"takes its attribute {name!r} from the call of a function, where its names are unknown.")
    missing = [name for name in ("xs", "y") if name not in node.attributes]
    if missing:
        refuse(node, f"lacks its attribute {missing[0]!r}.")
    y = node.attributes["y"].as_string()
    xs, zs = ([*node.attributes.get_strings(name, [])] for name in ("xs", "zs"))
    for what, name in (("y", y), *(("xs", x) for x in xs), *(("zs", z) for z in zs)):
        if name not in tensors:
            near = near_matches(name, tensors)
            hint = f"Did you mean {', '.join(map(repr, near))}?" if near else "It must be one of the same graph."
            refuse(node, f"names {name!r} in {what}, but its graph has no such tensor.", hint)
    twice = [name for name, count in Counter((*xs, *zs)).items() if count > 1]
    if twice:
        refuse(node, f"names {twice[0]!r} twice in xs and zs.")
    if None in node.inputs or len(node.inputs) != len(xs) + len(zs):
        count = sum(v is not None for v in node.inputs)
        refuse(node, f"has {count} inputs, but xs and zs name {len(xs) + len(zs)} tensors.")
    if len(node.outputs) > len(xs):
        refuse(node, f"has {len(node.outputs)} outputs, but xs names {len(xs)} tensors.")
    return xs, zs, y


def refuse(node: ir.Node, reason: str, hint: str = "") -> NoReturn:
    """Raise the error for a Gradient node."""
    raise ModelError(f"Gradient node {label(node)} {reason}", hint=hint)


def _veil(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Put an Identity behind an input of a function: a call may pass one tensor as two inputs, which are two variables."""
    node = ir.Node("", "Identity", [value], num_outputs=1)
    node.metadata_props[VEIL] = "1"
    node.outputs[0].name = f"{value.name}_veil"
    value.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
    node.replace_input_with(0, value)
    if len(graph):
        graph.insert_before(graph[0], node)
    return node.outputs[0]
