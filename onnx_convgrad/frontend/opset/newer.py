"""Give a result the opset and the nodes of the model, so that it computes the model's outputs as the model does.

Differentiation works at opset 21, where newer operators are written with older ones. That changes the last bits of outputs,
and ONNX Runtime picks other kernels for some operators at another opset. A result that keeps the outputs of a newer model
therefore gets its opset and its own nodes. Gradients read what they need from the older form.

Of the older opsets, AveragePool before 19 has a kernel of its own. A result with such nodes gets opset 18 where it is
valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.frontend.diagnose import checker_complaint
from onnx_convgrad.ir.emit import CANONICAL_OPSET
from onnx_convgrad.ir.namespace import Namespace, named_values
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.passes import RemoveUnused
from onnx_convgrad.ir.serialize import skeleton

_OLD_POOLS = 18
"""The last opset at which ONNX Runtime runs AveragePool by its older kernel."""

_KEY = "onnx_convgrad.newer"
"""Key in the `meta` of a model in memory that holds its `Newer`."""


@dataclass(frozen=True, slots=True)
class _Own:
    """A node as it was: names of operands and results, "" where there is none."""

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[ir.Attr, ...]


@dataclass(frozen=True, slots=True)
class Newer:
    """The parts of a model of a newer opset that `restore_newer` needs."""

    opset: int
    ir_version: int
    nodes: tuple[_Own, ...]


def remember_newer(model: ir.Model, opset: int, changed: Sequence[ir.Node]) -> None:
    """Note the opset, and the nodes of the main graph that are about to be written with older operators."""
    nodes = tuple(_own(node) for node in changed if node.graph is model.graph and not any(_bodies(node)))
    model.meta[_KEY] = Newer(opset, model.ir_version, nodes)


def _own(node: ir.Node) -> _Own:
    inputs = tuple(v.name or "" if v is not None else "" for v in node.inputs)
    outputs = tuple(v.name or "" for v in node.outputs)
    return _Own(node.name or "", node.op_type, inputs, outputs, tuple(node.attributes.values()))


def _bodies(node: ir.Node) -> Iterator[ir.Attr]:
    return (a for a in node.attributes.values() if a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS))


def restore_newer(model: ir.Model) -> None:
    """Give a finished model the opset and the nodes that compute its outputs as before, in place."""
    newer = model.meta.get(_KEY)
    if not isinstance(newer, Newer):
        return
    if newer.opset <= _OLD_POOLS and any(is_op(node, "AveragePool") for node in model.graph):
        model.opset_imports[""] = _OLD_POOLS
        if checker_complaint(skeleton(model)) is not None:
            model.opset_imports[""] = CANONICAL_OPSET
    if newer.opset <= CANONICAL_OPSET:
        return
    graph = model.graph
    names, nodes = Namespace.of_values(graph), Namespace.of_nodes(graph)
    for own in newer.nodes:
        _restore(graph, own, names, nodes)
    graph.sort()
    RemoveUnused()(model)
    model.opset_imports[""] = newer.opset
    model.ir_version = max(model.ir_version, newer.ir_version)


def _restore(graph: ir.Graph, own: _Own, names: Namespace, nodes: Namespace) -> None:
    """Insert a node, and let it compute the results that the older form computed."""
    values = named_values(graph)
    old = [values.get(name) if name else None for name in own.outputs]
    known = all(name in values for name in own.inputs if name)
    if not known or any(v is None or v.producer() is None for v, name in zip(old, own.outputs, strict=True) if name):
        return  # a size or a branch was folded away
    inputs = [values[name] if name else None for name in own.inputs]
    node = ir.Node("", own.op_type, inputs, own.attributes, num_outputs=len(old))
    node.name = nodes.claim(own.name)
    graph.append(node)
    for new, value in zip(node.outputs, old, strict=True):
        if value is None:
            continue
        new.shape, new.type = value.shape, value.type
        value.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name, value.name = value.name, names.claim(f"{value.name}_plain")
