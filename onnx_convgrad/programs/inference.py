"""Build and export the trained model in inference mode.

It is the original graph, with its opset, inputs and outputs, if the trained values can be stored in it under their names in
the program; else the canonical graph, which computes the same at opset 21. Inputs that were bound to constants stay inputs:
weights in the branches of an If that depends on them become initializers of the main graph.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import first_few
from onnx_convgrad.frontend.files import check_destination, copied, write
from onnx_convgrad.frontend.load import load_source
from onnx_convgrad.frontend.metadata import Preprocessing, describe
from onnx_convgrad.frontend.model import Model
from onnx_convgrad.frontend.parts import join_parts
from onnx_convgrad.frontend.shapes.declared import declare_shapes
from onnx_convgrad.ir.nodes import is_op, nested_graphs
from onnx_convgrad.ir.passes import RemoveUnused
from onnx_convgrad.pipeline.modes import note_shares, set_inference
from onnx_convgrad.surgery.quantization import store_integers

_OLDEST = 7
"""First opset in which no attribute of BatchNormalization and Dropout chooses their mode."""


def inference_model(model: Model, names: Iterable[str]) -> ir.Model:
    """Copy the source of a model, or else its canonical form, with the named values as initializers, in inference mode.

    The copy declares the sizes that are trained at, those of the canonical form, and has the inputs that are bound there.
    """
    source, base, bound = model.source, model.canonical, tuple(model.input_values or ())
    m = copied(source)
    start = {name: base.graph.initializers[name].const_value for name in names}
    if bound:
        _lift(m.graph, start)
    if source.functions or source.opset_imports.get("", _OLDEST) < _OLDEST or not _place(m.graph, start):
        m = _with_inputs(source, start, bound) or base.clone()
    elif model.input_shapes:
        before = {value: value.shape for value in (*m.graph.inputs, *m.graph.outputs)}
        declare_shapes(m, base.graph, model.input_shapes)
        for value in before if bound else ():
            value.shape = _free_as_before(before[value], value.shape)
    for graph in (m.graph, *nested_graphs(m.graph)):
        note_shares(graph)
        set_inference(graph)
    _remove_unused(m)
    return m


def _free_as_before(before: ir.Shape | None, trained: ir.Shape | None) -> ir.Shape | None:
    """The trained sizes where a file with bound inputs declares numbers: branches that were not trained may take others."""
    if before is None or trained is None:
        return None
    return ir.Shape([new if isinstance(old, int) else old for old, new in zip(before, trained, strict=True)])


def _remove_unused(m: ir.Model) -> None:
    """Remove what nothing reads, such as the ratios of Dropout: ONNX Runtime would warn of it whenever it loads the file."""
    defaults = [value for value in m.graph.inputs if value.is_initializer()]
    RemoveUnused()(m)
    for value in defaults:  # without it, the input would have to be given
        if value.name not in m.graph.initializers:
            m.graph.register_initializer(value)


def _with_inputs(
    source: ir.Model, start: Mapping[str, ir.TensorProtocol | None], bound: Collection[str]
) -> ir.Model | None:
    """The canonical graph with the bound inputs as inputs, and the values in `start`; `None` if none are bound."""
    if not bound:
        return None
    m = load_source(source).canonical
    if _place(m.graph, start):
        return m
    warn(
        f"The exported model will not have the inputs {first_few([repr(name) for name in bound])}: trained values have no"
        " place in the model that has them."
    )
    return None


def _lift(graph: ir.Graph, names: Collection[str]) -> None:
    """Make the named constants in nested graphs initializers of the main graph, in place, where a name is unique."""
    bodies = [body for body in nested_graphs(graph) if body is not graph]
    counts = Counter(
        name for body in bodies for name in (*body.initializers, *(v.name for n in body for v in n.outputs))
    )
    for body in bodies:
        for node in [n for n in body if n.op_type == "Constant" and n.outputs[0].name in names]:
            if counts[node.outputs[0].name] == 1 and not node.outputs[0].is_graph_output():
                _stored(body, node)
        for name in [name for name in body.initializers if name in names and counts[name] == 1]:
            if name not in graph.initializers and not body.initializers[name].is_graph_output():
                graph.register_initializer(body.initializers.pop(name))


def _place(graph: ir.Graph, start: Mapping[str, ir.TensorProtocol | None]) -> bool:
    """Make every value an initializer, in place; return whether each was a constant of the graph with equal numbers."""
    producers = {v.name: node for node in graph for v in node.outputs if v.name in start}
    for name, tensor in start.items():
        value = graph.initializers.get(name)
        if value is None and name in producers:
            value = _stored(graph, producers[name])
        if value is None or tensor is None or value.const_value is None or not _same(value.const_value, tensor):
            return False
        value.const_value = tensor  # shared with the other graphs of the program, in memory and in files
    return True


def store_apart(graph: ir.Graph, names: Collection[str]) -> None:
    """Make initializers of the named values that are Constant nodes or copies of an initializer, in place."""
    for node in [n for n in graph if n.op_type in ("Constant", "Identity") and n.outputs[0].name in names]:
        _stored(graph, node)


def _stored(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Replace the result of a Constant, or of an Identity of an initializer, by an initializer."""
    old = node.outputs[0]
    source = node.inputs[0] if is_op(node, "Identity") else old
    tensor = None if source is None else ir.convenience.get_const_tensor(source)
    if tensor is None:
        return None
    name, old.name, shape = old.name, None, ir.Shape(tensor.shape.numpy())
    new = ir.Value(name=name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    graph.register_initializer(new)
    return new


def _same(a: ir.TensorProtocol, b: ir.TensorProtocol) -> bool:
    return a is b or (a.dtype == b.dtype and np.array_equal(a.numpy(), b.numpy()))


def with_values(model: ir.Model, values: Mapping[str, np.ndarray]) -> ir.Model:
    """Copy an inference model with new values in its initializers; trained parts of weights become whole ones."""
    m = model.clone()
    store_apart(m.graph, [name for name in values if name not in m.graph.initializers])
    for name, array in values.items():
        m.graph.initializers[name].const_value = ir.Tensor(np.asarray(array, order="C"), name=name)
    join_parts(m.graph)
    return m


def export(
    model: ir.Model,
    values: Mapping[str, np.ndarray],
    path: str | os.PathLike[str],
    limit: int | None = None,
    *,
    labels: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
) -> None:
    """Write an inference model with new values in its initializers; more than `limit` bytes go to `<path>.data`.

    Float weights of quantization-aware training are stored as the integers of their quantizers.

    `labels` and `preprocessing` go into the metadata; `None` leaves what is there.

    Raises:
        ArgumentError: The path is a folder, or cannot be written.
        ModelError: Writing failed.
    """
    output = Path(path)
    check_destination(output)
    m = with_values(model, values)
    describe(m, labels, preprocessing)
    store_integers(m)
    _remove_unused(m)
    write(m, output, limit, alone=True)  # it must not refer to the program's files
