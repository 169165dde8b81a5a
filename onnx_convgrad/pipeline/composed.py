"""Run the stages around nodes of one's own: a function that writes them takes the place of differentiation.

Explanations, for example, are such functions. They call the walks of `autodiff` as often, and at as many points, as they
need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import floating
from onnx_convgrad.base.names import check_names
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.files import AnyModel, cloned
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.loop_bodies import depending, emit_nodes
from onnx_convgrad.ir.nodes import ancestors
from onnx_convgrad.ir.notes import DERIVATIVE_INPUTS, GRADIENTS
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.complete import STAGES
from onnx_convgrad.pipeline.options import Options, TargetLike, Wrt
from onnx_convgrad.pipeline.stages import build

Writer = Callable[[Emitter], Mapping[str, ir.Value]]
"""Adds nodes, and inputs if need be, to the emitter's graph; returns the new outputs by name, in order."""


def compose(
    model: AnyModel, write: Writer, *, wrt: Wrt = "parameters", target: TargetLike, keep_outputs: bool = False
) -> Built:
    """Run all stages, with `write` in the place of differentiation; errors as for `build`.

    If `wrt`, the differentiated values, are inputs alone, parameters that the exporter merged are one again. With
    `keep_outputs` the original outputs come before the new ones.
    """

    def add(built: Built) -> None:
        """Add the nodes of the computation."""
        built.primal = cloned(built.model)
        e, graph, first = built.emitter(), built.model.graph, len(built.model.graph)
        outputs = named(e, write(e), first)
        if not keep_outputs:
            graph.outputs.clear()
        graph.outputs.extend(outputs)
        for note in (GRADIENTS, DERIVATIVE_INPUTS):
            built.model.metadata_props.pop(note, None)

    return build(model, Options.given(wrt=wrt, target=target), mode=None, stages=(add, *STAGES))


def named(e: Emitter, results: Mapping[str, ir.Value], first: int = 0) -> list[ir.Value]:
    """Give graph outputs their names; `_1` is added to one that is taken.

    A value of the original graph, of its first `first` nodes, or one that is an output already, goes through an Identity.
    """
    own, taken = set(list(e.graph)[first:]), set(e.graph.outputs)
    outputs = []
    for name, value in results.items():
        result = value
        if value in taken or value.name != name or not value.is_graph_input():  # else an input that is an output
            if value in taken or value.producer() not in own:
                result = e.copied(value)
            result.name = e.names.claim(name)
        taken.add(result)
        outputs.append(result)
    return outputs


def new_input(e: Emitter, name: str, dtype: ir.DataType, shape: ir.Shape | None) -> ir.Value:
    """Add an input to the graph; `_1` is added to a name that is taken."""
    value = ir.Value(name=e.names.claim(name), shape=shape, type=ir.TensorType(dtype))
    e.graph.inputs.append(value)
    return value


def at_point(e: Emitter, source: ir.Value, point: ir.Value, target: ir.Value) -> ir.Value:
    """Compute a value of the graph once more, with `point`, of the same dtype and shape, in the place of `source`.

    One that does not depend on `source` is returned as it is. All nodes that compute it stand before the emitted ones.
    """
    above = ancestors(target)
    nodes = [node for node in depending(e.graph, [source]) if node in above]
    values = {source: point}
    emit_nodes(e, nodes, values)
    for node in nodes:
        for original in node.outputs:
            e.typed(values[original], original)
    return values.get(target, target)


def one_floating_input(graph: ir.Graph, name: str | None) -> ir.Value:
    """The input of this name, or the only floating input.

    Raises:
        ArgumentError: There is none of this name, or, without a name, none or several.
    """
    inputs = {v.name or "": v for v in graph.inputs if floating(v) and not v.is_initializer()}
    if name is not None:
        check_names([name], list(inputs), "input")
        return inputs[name]
    if len(inputs) != 1:
        listed = ", ".join(inputs) or "none"
        raise ArgumentError(
            f"The model has {len(inputs)} floating inputs ({listed}), not one.", hint="Name one of them with input=."
        )
    return next(iter(inputs.values()))
