"""Replace results of nodes: by another value, or by another operator of the same node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnx_convgrad.ir.emit import Emitter


class OutputPlaces:
    """The positions of a graph's outputs, so that one of thousands is replaced without a search.

    While it is in use, outputs may only be replaced through it.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._outputs = graph.outputs
        self._places: dict[ir.Value, list[int]] = {}
        for place, value in enumerate(graph.outputs):
            self._places.setdefault(value, []).append(place)

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Replace `old` by `new` for all readers and among the outputs."""
        for place in self._places.pop(old, ()):
            self._outputs[place] = new
            self._places.setdefault(new, []).append(place)
        # see quirks.DELETED_OUTPUTS
        old.replace_all_uses_with(new, replace_graph_outputs=old.is_graph_output())


def put_in_place(e: Emitter, outputs: OutputPlaces, old: ir.Value, result: ir.Value, *, new: bool) -> ir.Value:
    """Replace `old` by `result` for all readers and among the outputs; return the value that took its place.

    Graph outputs keep their names: a result that is an output already, or that no node computes, goes through an Identity.
    For other values the name moves to the result only if it is `new`: one that existed before keeps its own.
    """
    e.typed(result, old)
    if old.is_graph_output():
        name = old.name
        old.name = None
        if result.producer() is None or result.is_graph_output():
            result = e.copied(result)
        result.name = name
    elif new:
        result.name, old.name = old.name, None
    outputs.replace(old, result)
    return result


def become(node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], attributes: Iterable[ir.Attr] = ()) -> None:
    """Turn a node into another operator with one result; its place, its name and its first result stay."""
    node.op_type = op_type
    node.attributes.clear()
    node.attributes.update({a.name: a for a in attributes})
    node.resize_outputs(1)
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)
