"""Give a result the opset and the nodes of the model, so that it computes the model's outputs as the model does.

Differentiation works at opset 21, where newer operators are written with older ones. That changes the last bits of outputs,
and ONNX Runtime picks other kernels for some operators at another opset. A result that keeps the outputs of a newer model
therefore gets its opset and its own nodes. Gradients read what they need from the older form.

Of the older opsets, AveragePool before 19 has a kernel of its own. A result with such nodes gets opset 18 where it is
valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onnx_convgrad.frontend.diagnose import checker_complaint
from onnx_convgrad.ir.emit import CANONICAL_OPSET
from onnx_convgrad.ir.namespace import Namespace, named_values
from onnx_convgrad.ir.nodes import is_op, subgraphs
from onnx_convgrad.ir.passes import RemoveUnused
from onnx_convgrad.ir.serialize import skeleton

_OLD_POOLS = 18
"""The last opset at which ONNX Runtime runs AveragePool by its older kernel."""

_KEY = "onnx_convgrad.newer"
"""Key in the `meta` of a model in memory that holds its `Newer`."""


@dataclass(frozen=True, slots=True)
class Newer:
    """The parts of a model of a newer opset that `restore_newer` needs."""

    opset: int
    ir_version: int
    nodes: tuple[onnx.NodeProto, ...]


def remember_newer(model: ir.Model, opset: int, changed: Sequence[ir.Node]) -> None:
    """Note the opset, and the nodes of the main graph that are about to be written with older operators."""
    nodes = tuple(ir.to_proto(node) for node in changed if node.graph is model.graph and not any(subgraphs(node)))
    model.meta[_KEY] = Newer(opset, model.ir_version, nodes)


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


def _restore(graph: ir.Graph, own: onnx.NodeProto, names: Namespace, nodes: Namespace) -> None:
    """Insert a node, and let it compute the results that the older form computed."""
    values = named_values(graph)
    old = [values.get(name) for name in own.output]
    known = all(name in values for name in own.input if name)
    if not known or any(v is None or v.producer() is None for v, name in zip(old, own.output, strict=True) if name):
        return  # a size or a branch was folded away
    inputs, attributes = map(values.get, own.input), map(ir.serde.deserialize_attribute, own.attribute)
    node = ir.Node("", own.op_type, inputs, attributes, num_outputs=len(old))
    node.name = nodes.claim(own.name)
    graph.append(node)
    for new, value in zip(node.outputs, old, strict=True):
        if value is None:
            continue
        new.shape, new.type = value.shape, value.type
        value.replace_all_uses_with(new, replace_graph_outputs=True)
        new.name, value.name = value.name, names.claim(f"{value.name}_plain")
