"""Convert a canonical model to float64 and run it, for numeric derivatives.

Convolutions are lowered to matrix products, for which ONNX Runtime has float64 kernels, and differentiated values become
inputs. `float64_session` runs the operators for which the runtime lacks a float64 kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from onnx_convgrad.checking.convert_floats import convert_floats
from onnx_convgrad.checking.float64_kernels import KERNELS
from onnx_convgrad.checking.float64_session import Float64Session
from onnx_convgrad.errors import ConvGradError
from onnx_convgrad.ir.emit import DOMAIN
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.serialize import whole_proto
from onnx_convgrad.ir.targets import target_named
from onnx_convgrad.lowering.lower import lower
from onnx_convgrad.runtime import session


class Primal:
    """A model as a function of named inputs and differentiated values."""

    def __init__(self, proto: onnx.ModelProto, double: bool) -> None:
        self.double = double
        self.outputs = [o.name for o in proto.graph.output]
        self.inputs = {i.name for i in proto.graph.input}
        self._run: Any = self._runner(proto)

    def _runner(self, proto: onnx.ModelProto) -> Any:
        """A runtime session, unless ONNX Runtime lacks an operator in float64 or computes it in less (`KERNELS`)."""
        if self.double and any(node.op_type in KERNELS for node in proto.graph.node):
            return Float64Session(proto)
        try:
            return session(proto, optimize=False)
        except ConvGradError:
            if not self.double:
                raise
            return Float64Session(proto)

    def __call__(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        inputs = {k: self._widen(v) for k, v in feed.items() if k in self.inputs}
        return dict(zip(self.outputs, self._run.run(self.outputs, inputs), strict=True))

    def _widen(self, array: np.ndarray) -> np.ndarray:
        floats = array.dtype.kind == "f" or "float" in array.dtype.name
        return array.astype(np.float64) if self.double and floats else array


def narrow_primal(model: ir.Model, targets: Sequence[str]) -> Primal:
    """The canonical model in its own dtype, with `targets` as its outputs."""
    return Primal(_prepared(model, targets, (), double=False), double=False)


def primal_function(model: ir.Model, targets: Sequence[str], moved: Sequence[str], *, double: bool) -> Primal:
    """`targets` as a function of the inputs and of the values `moved`.

    An initializer becomes an input of its name; an intermediate value gets the input `<name>__shift`, which is added.
    """
    return Primal(_prepared(model, targets, moved, double=double), double=double)


def widened(
    model: ir.Model, targets: Sequence[str], change: Callable[[ir.Graph], None] = lambda _: None
) -> onnx.ModelProto:
    """The model in float64 with `targets` as its outputs; `change` may rewrite its graph."""
    return _prepared(model, targets, (), double=True, change=change)


def _prepared(
    model: ir.Model,
    targets: Sequence[str],
    moved: Sequence[str],
    *,
    double: bool,
    change: Callable[[ir.Graph], None] = lambda _: None,
) -> onnx.ModelProto:
    m = model.clone()
    graph = m.graph
    values = named_values(graph)
    graph.outputs.clear()
    graph.outputs.extend(values[name] for name in targets)
    for name in moved:
        _free(graph, values[name])
    common.RemoveUnusedNodesPass()(m)
    if double:
        convert_floats(graph, ir.DataType.DOUBLE)
    lower(graph, replace(target_named("cpu"), loops=False))  # nodes with a body cannot be run one by one
    m.opset_imports.pop(DOMAIN, None)
    change(graph)
    for node in graph.all_nodes():  # declared shapes may be those of other inputs
        for value in node.outputs:
            value.shape = None
    return whole_proto(m)


def _free(graph: ir.Graph, value: ir.Value) -> None:
    """Make an initializer an input; add an input to an intermediate value."""
    if value.is_graph_input():
        return
    if value.is_initializer():
        del graph.initializers[value.name or ""]
        value.const_value = None
        graph.inputs.append(value)
        return
    shift = ir.Value(name=f"{value.name}__shift", shape=value.shape, type=value.type)
    node = ir.Node("", "Add", [value, shift], num_outputs=1, name=f"{value.name}__move")
    moved = node.outputs[0]
    moved.shape, moved.type = value.shape, value.type
    value.replace_all_uses_with(moved, replace_graph_outputs=True)
    node.replace_input_with(0, value)
    producer = value.producer()
    assert producer is not None
    graph.insert_after(producer, node)
    graph.inputs.append(shift)
    if moved.is_graph_output():
        name, value.name = value.name, f"{value.name}__still"
        moved.name = name
    else:
        moved.name = f"{value.name}__moved"
