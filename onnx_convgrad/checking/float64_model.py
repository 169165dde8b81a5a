"""Convert a canonical model to float64 and run it, for numeric derivatives.

Convolutions are lowered to matrix products, for which ONNX Runtime has float64 kernels, and differentiated values become
inputs. `float64_session` runs the operators for which the runtime lacks a float64 kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.backends.cpu.widen_bfloat16 import WidenBfloat16
from onnx_convgrad.backends.runtime_faults import WriteFloat64
from onnx_convgrad.checking.float64_session import Float64Session, needs_kernels
from onnx_convgrad.errors import ConvGradError
from onnx_convgrad.ir.emit import DOMAIN
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.passes import RemoveUnused, run_passes
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
        if self.double and needs_kernels(proto.graph.node):
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


def primal_function(model: ir.Model, targets: Sequence[str], moved: Sequence[str] = (), *, double: bool) -> Primal:
    """`targets` as a function of the inputs and of the values `moved`, in float64 or in the dtypes of the model.

    An initializer becomes an input of its name; an intermediate value gets the input `<name>__shift`, which is added.
    """
    return Primal(prepared(model, targets, moved, double=double), double=double)


def prepared(
    model: ir.Model,
    targets: Sequence[str],
    moved: Sequence[str] = (),
    *,
    double: bool = True,
    change: Callable[[ir.Graph], None] = lambda _: None,
) -> onnx.ModelProto:
    """The model with `targets` as its outputs, as `primal_function` runs it; `change` may rewrite its graph."""
    m = model.clone()
    graph = m.graph
    values = named_values(graph)
    graph.outputs.clear()
    graph.outputs.extend(values[name] for name in targets)
    for name in moved:
        _free(graph, values[name])
    RemoveUnused()(m)
    if double:
        convert_floats(graph, ir.DataType.DOUBLE)
    lower(graph, replace(target_named("cpu"), loops=False))  # nodes with a body cannot be run one by one
    m.opset_imports.pop(DOMAIN, None)
    run_passes(m, [WidenBfloat16(), WriteFloat64()])
    change(graph)
    for node in graph.all_nodes():  # declared sizes may be those of other inputs; a Scan needs ranks
        for value in node.outputs:
            value.shape = None if value.shape is None else ir.Shape([None] * len(value.shape))
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


_FLOATS = frozenset((ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE))
_TYPES = ("to", "dtype", "output_datatype")
"""Attributes with the type of the result."""


def convert_floats(graph: ir.Graph, dtype: ir.DataType) -> None:
    """Give every floating value, constant and conversion the type `dtype`; the scales of Resize stay float32."""
    for g in (graph, *graph.subgraphs()):
        for value in (*g.inputs, *g.initializers.values()):
            _convert(value, dtype)
    for node in list(graph.all_nodes()):
        for value in node.outputs:
            _convert(value, dtype)
        _state_type(node)
        for name, attr in node.attributes.items():
            if attr.type == ir.AttributeType.TENSOR and attr.value.dtype in _FLOATS:
                converted = ir.Tensor(attr.value.numpy().astype(dtype.numpy()), name=attr.value.name)
                node.attributes[name] = ir.AttrTensor(name, converted)
            elif attr.name in _TYPES and not node.domain and ir.DataType(attr.value) in _FLOATS:
                node.attributes[name] = ir.AttrInt64(name, int(dtype))
        if node.op_type == "Resize" and dtype != ir.DataType.FLOAT:
            cast_to_float32(node, 2)


def _state_type(node: ir.Node) -> None:
    """Write the type of the result that is implied by the absence of an attribute."""
    name = None if node.domain else _implied(node.op_type)
    if name is not None and name not in node.attributes:
        node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
    if is_op(node, "ConstantOfShape") and "value" not in node.attributes:
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.zeros(1, np.float32)))


@cache
def _implied(op_type: str) -> str | None:
    """The attribute with the type of an operator's result, if that is float32 where the attribute is absent."""
    if op_type == "SequenceEmpty":  # its schema says so in words
        return "dtype"
    known = onnx.defs.get_schema(op_type).attributes if onnx.defs.has(op_type) else {}
    return next((name for name in _TYPES if name in known and known[name].default_value.i == ir.DataType.FLOAT), None)


def _convert(value: ir.Value, dtype: ir.DataType) -> None:
    if value.dtype in _FLOATS and value.dtype != dtype:
        value.type = _typed(value.type, dtype)
        if value.const_value is not None:
            value.const_value = ir.Tensor(value.const_value.numpy().astype(dtype.numpy()), name=value.name)


def _typed(kind: Any, dtype: ir.DataType) -> Any:
    """The type of a tensor, a sequence or an optional value with other elements; a clone shares that of the original."""
    if isinstance(kind, (ir.SequenceType, ir.OptionalType)):
        return type(kind)(_typed(kind.elem_type, dtype))
    return ir.TensorType(dtype)


def cast_to_float32(node: ir.Node, index: int) -> None:
    """Cast an operand of a node, if it is there."""
    value = node.inputs[index] if len(node.inputs) > index else None
    if value is None or node.graph is None:
        return
    cast = ir.Node("", "Cast", [value], {"to": ir.AttrInt64("to", int(ir.DataType.FLOAT))}, num_outputs=1)
    cast.outputs[0].name = f"{node.name}__float32_{index}"
    cast.outputs[0].dtype = ir.DataType.FLOAT
    node.graph.insert_before(node, cast)
    node.replace_input_with(index, cast.outputs[0])
