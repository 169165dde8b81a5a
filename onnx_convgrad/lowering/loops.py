"""Record loops over samples that lowerings emitted in the model's metadata, and undo them before differentiating again.

A Scan of unknown length has no derivative here, and one of known length is differentiated iteration by iteration. The
abstract operator that it computes has derivatives for all samples at once: so it replaces the loop, and is lowered anew
together with its derivatives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
from onnx_ir.passes import common

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.notes import LOOPS


def note_loop(graph: ir.Graph, node: ir.Node, result: ir.Value) -> None:
    """Note in `graph.meta` that the abstract `node` computes `result`."""
    notes = graph.meta.setdefault(LOOPS, [])
    notes.append((result, node.op_type, node.domain, tuple(node.inputs), Call(node).attributes()))


def record_loops(model: ir.Model) -> None:
    """Write the notes into the metadata, once all values have their names; leave out results that no longer exist."""
    graph = model.graph
    model.metadata_props.pop(LOOPS, None)
    recorded = {}
    names: dict[ir.Value | None, str] = {None: "", **{v: name for name, v in named_values(graph).items()}}
    for result, op_type, domain, operands, attributes in graph.meta.pop(LOOPS, []):
        if names.keys() >= {result, *operands}:
            inputs = [names[v] for v in operands]
            recorded[names[result]] = {"op_type": op_type, "domain": domain, "inputs": inputs, "attributes": attributes}
    if recorded:
        model.metadata_props[LOOPS] = json.dumps(recorded)


def undo_loops(model: ir.Model) -> None:
    """Replace the loops that the metadata records by their abstract operators, where all operands still exist."""
    recorded: Mapping[str, Mapping[str, Any]] = json.loads(model.metadata_props.pop(LOOPS, "{}"))
    if not recorded:
        return
    graph = model.graph
    values: dict[str, ir.Value | None] = {"": None, **named_values(graph)}
    e = Emitter(graph, opsets=model.opset_imports)
    for name, made in recorded.items():
        result = values.get(name)
        producer = None if result is None else result.producer()
        if result is None or producer is None or not values.keys() >= set(made["inputs"]):
            continue
        operands = [values[operand] for operand in made["inputs"]]
        e.anchor, e.origin = producer, producer.name or ""
        whole = e.op(made["op_type"], *operands, domain=made["domain"], **made["attributes"])
        whole.shape, whole.type = result.shape, result.type
        result.name = None
        whole.name = name
        result.replace_all_uses_with(whole, replace_graph_outputs=True)
        values[name] = whole
    common.RemoveUnusedNodesPass()(model)  # the loops, which would else count as uses of their operands
