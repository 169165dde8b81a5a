"""Record loops over samples that lowerings emitted in the model's metadata, and undo them before differentiating again.

A Scan of unknown length has no derivative here, and one of known length is differentiated iteration by iteration. The
abstract operator that it computes has derivatives for all samples at once: so it replaces the loop, and is lowered anew
together with its derivatives.

A file may say anything in its metadata. So an entry is only a hint: the recorded lowering is emitted again, and the abstract
operator replaces the loop only if that gives the very nodes that the file has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from onnx_convgrad.base.forms import check_form, parse_json
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import DOMAIN, Emitter
from onnx_convgrad.ir.isomorphism import computes_the_same
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.notes import LOOPS
from onnx_convgrad.ir.passes import RemoveUnused
from onnx_convgrad.ir.targets import TARGETS, target_named
from onnx_convgrad.lowering.candidates import emit_lowering
from onnx_convgrad.lowering.table import lowerings, reader_of

_FORM = {
    "op_type": str,
    "domain": str,
    "inputs": [str],
    "attributes": dict,
    "lowering": str,
    "chunks": int,
    "target": str,
    "deterministic": bool,
    "training": bool,
}
"""Form of an entry of the metadata: an abstract operator, and the lowering that the loop comes from."""

_Loop = Mapping[str, Any]
"""An entry of this form."""


def _is_known(loop: _Loop) -> bool:
    """Whether this version has the operator, the lowering and the target."""
    abstract = loop["domain"] == DOMAIN or (loop["domain"], loop["op_type"]) == ("", "Conv")
    return abstract and loop["target"] in TARGETS and loop["lowering"] in lowerings().get(loop["op_type"], ())


def note_loop(e: Emitter, node: ir.Node, result: ir.Value, lowering: str, chunks: int) -> None:
    """Note in `graph.meta` that the abstract `node` computes `result` by a lowering in chunks."""
    loop = {
        "op_type": node.op_type,
        "domain": node.domain,
        "inputs": (),
        "attributes": Call(node).attributes(),
        "lowering": lowering,
        "chunks": chunks,
        "target": e.target.name,
        "deterministic": e.target.ordered_sums,
        "training": e.samples,
    }
    e.graph.meta.setdefault(LOOPS, []).append((result, tuple(node.inputs), loop))


def record_loops(model: ir.Model) -> None:
    """Write the notes into the metadata, once all values have their names; leave out results that no longer exist."""
    graph = model.graph
    model.metadata_props.pop(LOOPS, None)
    if LOOPS not in graph.meta:
        return
    names: dict[ir.Value | None, str] = {None: "", **{v: name for name, v in named_values(graph).items()}}
    recorded = {
        names[result]: {**loop, "inputs": [names[v] for v in operands]}
        for result, operands, loop in graph.meta.pop(LOOPS)
        if names.keys() >= {result, *operands}
    }
    if recorded:
        model.metadata_props[LOOPS] = json.dumps(recorded)


def undo_loops(model: ir.Model) -> None:
    """Replace the loops that the metadata records by their abstract operators, where the nodes confirm it."""
    text = model.metadata_props.pop(LOOPS, None)
    if text is None:
        return
    for name, loop in _entries(text):
        values: dict[str, ir.Value | None] = {"": None, **named_values(model.graph)}
        result = values.get(name)
        if result is not None and result.producer() is not None and values.keys() >= set(loop["inputs"]):
            _undo(model, result, [values[operand] for operand in loop["inputs"]], loop)
    RemoveUnused()(model)  # the loops, which would else count as uses of their operands


def _entries(text: str) -> Iterator[tuple[str, _Loop]]:
    """The entries of the form and of this version; another version may write others."""
    try:
        recorded = parse_json(text, {str: object})
    except ValueError:
        return
    for name, entry in recorded.items():
        try:
            check_form(entry, _FORM)
        except ValueError:
            continue
        if _is_known(entry):
            yield name, entry


def _undo(model: ir.Model, result: ir.Value, operands: Sequence[ir.Value | None], loop: _Loop) -> None:
    producer = result.producer()
    assert producer is not None, "the caller has looked"
    target = target_named(loop["target"], deterministic=loop["deterministic"])
    e = Emitter(model.graph, opsets=model.opset_imports, target=target, samples=loop["training"])
    e.anchor, e.origin = producer, producer.name or ""
    try:
        whole = e.op(loop["op_type"], *operands, domain=loop["domain"], **loop["attributes"])
        whole.shape, whole.type = result.shape, result.type
        node = whole.producer()
        assert node is not None, "it was just emitted"
        spec = reader_of(loop["op_type"]).build(Call(node))
        again = emit_lowering(e, lowerings()[loop["op_type"]][loop["lowering"]], node, spec, loop["chunks"])
    except Exception:  # noqa: BLE001 - the entry is of another version, or forged: then the loop stays as it is
        return
    if computes_the_same(again, result):
        name, result.name = result.name, None
        whole.name = name
        result.replace_all_uses_with(whole, replace_graph_outputs=True)
