"""The primal model in float64, as the yardstick of the numeric check.

The canonical graph is widened, its convolutions are lowered to matrix products, which ONNX Runtime has in float64, and
values to be moved become inputs. Where the runtime still lacks a float64 kernel, `nodewise` fills in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from onnx_convgrad.checking.nodewise import NodeWise
from onnx_convgrad.checking.nodewise_ops import KERNELS
from onnx_convgrad.errors import ConvGradError
from onnx_convgrad.ir.emit import DOMAIN
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.serialize import whole_proto
from onnx_convgrad.ir.targets import target_named
from onnx_convgrad.lowering.lower import lower
from onnx_convgrad.runtime import session

__all__ = ["Primal", "narrow_primal", "primal_function", "widened"]

NARROW = frozenset((ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16))
_TYPE_ATTRIBUTES = {"Cast": "to", "RandomNormal": "dtype", "RandomUniform": "dtype", "EyeLike": "dtype"}


class Primal:
    """A model as a function of its inputs and of the values that may be moved, by name."""

    def __init__(self, proto: onnx.ModelProto, double: bool) -> None:
        self.double = double
        self.outputs = [o.name for o in proto.graph.output]
        self.inputs = {i.name for i in proto.graph.input}
        self._run: Any = self._runner(proto)

    def _runner(self, proto: onnx.ModelProto) -> Any:
        """The runtime, unless it lacks or blurs an operator in float64 (`KERNELS`)."""
        if self.double and any(node.op_type in KERNELS for node in proto.graph.node):
            return NodeWise(proto)
        try:
            return session(proto, optimize=False)
        except ConvGradError:
            if not self.double:
                raise
            return NodeWise(proto)

    def __call__(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        given = {k: self._widen(v) for k, v in feed.items() if k in self.inputs}
        return dict(zip(self.outputs, self._run.run(self.outputs, given), strict=True))

    def _widen(self, array: np.ndarray) -> np.ndarray:
        floats = array.dtype.kind == "f" or "float" in array.dtype.name
        return array.astype(np.float64) if self.double and floats else array


def narrow_primal(model: ir.Model, targets: Sequence[str]) -> Primal:
    """The canonical model as it is, with `targets` as its outputs."""
    return Primal(_prepared(model, targets, (), double=False), double=False)


def primal_function(model: ir.Model, targets: Sequence[str], moved: Sequence[str], *, double: bool) -> Primal:
    """`targets` as a function of the inputs and the values `moved`.

    A moved initializer is fed under its name; to a moved intermediate value the input `<name>__shift` is added.
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
        _widen(graph)
    lower(graph, replace(target_named("cpu"), loops=False))  # what has a body cannot be run node by node
    m.opset_imports.pop(DOMAIN, None)
    change(graph)
    for node in graph.all_nodes():  # declared shapes are no part of the function
        for value in node.outputs:
            value.shape = None
    return whole_proto(m)


def _free(graph: ir.Graph, value: ir.Value) -> None:
    """Make the value one that is fed: an input, or an input added to it."""
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


def _widen(graph: ir.Graph) -> None:
    """Every floating value, constant and conversion becomes float64, but for operands that must be float32."""
    for g in (graph, *graph.subgraphs()):
        for value in (*g.inputs, *g.initializers.values()):
            _widen_value(value)
    for node in list(graph.all_nodes()):
        for value in node.outputs:
            _widen_value(value)
        for name, attr in node.attributes.items():
            if attr.type == ir.AttributeType.TENSOR and attr.value.dtype in NARROW:
                wide = ir.Tensor(attr.value.numpy().astype(np.float64), name=attr.value.name)
                node.attributes[name] = ir.AttrTensor(name, wide)
            elif attr.name == _TYPE_ATTRIBUTES.get(node.op_type) and ir.DataType(attr.value) in NARROW:
                node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.DOUBLE))
        if node.op_type == "Resize":
            _keep_float32(node, 2)


def _widen_value(value: ir.Value) -> None:
    if value.dtype in NARROW:
        value.type = ir.TensorType(ir.DataType.DOUBLE)  # a clone shares the type with what it was cloned from
        if value.const_value is not None:
            value.const_value = ir.Tensor(value.const_value.numpy().astype(np.float64), name=value.name)


def _keep_float32(node: ir.Node, index: int) -> None:
    value = node.inputs[index] if len(node.inputs) > index else None
    if value is None or node.graph is None:
        return
    cast = ir.Node("", "Cast", [value], {"to": ir.AttrInt64("to", int(ir.DataType.FLOAT))}, num_outputs=1)
    cast.outputs[0].name = f"{node.name}__float32_{index}"
    cast.outputs[0].dtype = ir.DataType.FLOAT
    node.graph.insert_before(node, cast)
    node.replace_input_with(index, cast.outputs[0])
