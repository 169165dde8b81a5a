"""`onnx_convgrad.vmap`: a model for many examples at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from onnx_convgrad.autodiff.batching import Batched
from onnx_convgrad.base.names import INSPECT, check_names
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import Dim, Emitter
from onnx_convgrad.ir.namespace import Namespace, rename

Axes: TypeAlias = int | Sequence[int | None] | Mapping[str, int | None] | None
"""The axis of the examples: of every input, of the inputs in order, or by name; `None`: the input is shared."""


def write_vmap(e: Emitter, in_axes: Axes, axis_size: int | None) -> dict[str, ir.Value]:
    """Give inputs an axis of examples and emit all that depends on them; see `onnx_convgrad.vmap`.

    The old inputs and outputs get other names, so that the new ones can have theirs.
    """
    graph = e.graph
    axes = _axes(graph, in_axes)
    if not axes and axis_size is None:
        raise ArgumentError("No input has an axis of examples.", hint="Name an input in in_axes, or give axis_size.")
    nodes, outputs = list(graph), {v.name or "": v for v in graph.outputs}
    names = Namespace.of_values(graph)
    for value in dict.fromkeys([*axes, *outputs.values()]):
        value.meta["name"] = value.name
        rename(value, names.claim(f"{value.name}_of_one"))
    graph.outputs.clear()
    size: int | ir.SymbolicDim = ir.SymbolicDim("examples") if axis_size is None else axis_size
    inputs = {old: _input(old, axis, size) for old, axis in axes.items()}
    for old, new in inputs.items():
        if old.is_initializer():
            graph.initializers.pop(old.name or "")
        if old.is_graph_input():
            graph.inputs[graph.inputs.index(old)] = new
        else:
            graph.inputs.append(new)
    count: Dim = axis_size if axis_size is not None else next(e.dim(new, axes[old]) for old, new in inputs.items())
    e.names.used.update(outputs)  # reserved: nothing new may take them
    batched = Batched(e, {old: e.move_axis(new, axes[old], 0) for old, new in inputs.items()}, count)
    batched.run(nodes, {*outputs.values()})
    graph.sort()  # sizes of examples are read from batched values now
    results = {name: batched.all(batched.replaced.get(value, value)) for name, value in outputs.items()}
    e.names.used.difference_update(set(outputs) - {value.name for value in graph.inputs})
    return results


def _axes(graph: ir.Graph, in_axes: Axes) -> dict[ir.Value, int]:
    """The axis of every value that has one, checked against its rank."""
    inputs = [v for v in graph.inputs if not v.is_initializer()]
    if isinstance(in_axes, Mapping):
        values = {v.name or "": v for v in (*graph.initializers.values(), *inputs)}
        check_names(list(in_axes), list(values), "in_axes: there is no input", INSPECT)
        found = {values[name]: axis for name, axis in in_axes.items()}
    elif in_axes is None or isinstance(in_axes, int):
        found = dict.fromkeys(inputs, in_axes)
    elif not isinstance(in_axes, Sequence):
        raise ArgumentError(f"in_axes must be an axis, None, a sequence or a mapping of them, not {in_axes!r}.")
    else:
        if len(in_axes) != len(inputs):
            raise ArgumentError(f"in_axes has {len(in_axes)} entries for {len(inputs)} inputs.")
        found = dict(zip(inputs, in_axes, strict=True))
    axes = {}
    for value, axis in found.items():
        if axis is None:
            continue
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise ArgumentError(f"The axis of {value.name!r} in in_axes must be an integer or None, not {axis!r}.")
        if value.shape is None:
            raise ArgumentError(
                f"The rank of {value.name!r} is unknown, so it can get no axis.", hint="Give its shape in input_shapes."
            )
        rank = len(value.shape) + 1
        if not -rank <= axis < rank:
            raise ArgumentError(
                f"{value.name!r} has {rank - 1} axes, so in_axes must be from {-rank} to {rank - 1} for it, not {axis}."
            )
        axes[value] = axis % rank
    return axes


def _input(old: ir.Value, axis: int, size: int | ir.SymbolicDim) -> ir.Value:
    assert old.shape is not None
    sizes = list(old.shape)
    sizes.insert(axis, size)
    return ir.Value(name=old.meta["name"], shape=ir.Shape(sizes), type=ir.TensorType(old.dtype or ir.DataType.FLOAT))
