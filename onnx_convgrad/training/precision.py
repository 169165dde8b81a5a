"""Mixed precision: float16 where products dominate, float32 where sums and small differences do, by three lists.

Operators of the first list compute in float16; their float32 operands, the parameters among them, pass through a Cast,
whose gradient is a Cast back, so that parameters, their gradients and the optimizer stay in float32. Operators of the
second list follow their operands. All others compute in float32. Micikevicius et al., "Mixed Precision Training" (2018).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.activity import captured_values
from onnx_convgrad.emit import CANONICAL_OPSET, Emitter
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.training.draft import Draft

__all__ = ["to_half"]

_HALF = frozenset("Conv ConvTranspose Gemm MatMul Einsum".split())

_FOLLOW = frozenset(
    "Abs Add AveragePool BatchNormalization Clip Concat DepthToSpace Div Dropout Elu Expand Flatten Gather Gelu "
    "GlobalAveragePool GlobalMaxPool HardSigmoid HardSwish Identity LeakyRelu Max MaxPool Min Mish Mul Neg PRelu Pad Relu "
    "Reshape Resize Selu Sigmoid Slice Softsign SpaceToDepth Split Squeeze Sub Sum Tanh Tile Transpose Unsqueeze "
    "Where".split()
)

_FLOAT, _FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
_LARGEST = float(np.finfo(np.float16).max)


def to_half(draft: Draft) -> None:
    """Rewrite the model of a draft in place; what the graph takes and gives out keeps its dtype.

    Raises:
        ArgumentError: The model has control flow, which the lists do not reach into.
    """
    graph = draft.graph
    given = [(v, v.dtype) for v in graph.outputs]
    e = Emitter(graph, opsets=graph.opset_imports)
    for node in list(graph):
        if any(captured_values(node)):
            raise ArgumentError(f"Node {node.name!r} ({node.op_type}) has a graph of its own: train it in float32.")
        e.anchor = node
        _convert(e, node)
    e.anchor = None
    for i, (value, dtype) in enumerate(given):
        if value.dtype != dtype:
            graph.outputs[i] = e.cast(value, dtype or _FLOAT)
            value.name, graph.outputs[i].name = draft.node_names.value(value), value.name
    draft.node_names.give(e.emitted, "precision")


def _convert(e: Emitter, node: ir.Node) -> None:
    """Cast the operands of one node to the type that it is to compute in."""
    typed = list(_typed_inputs(node))
    half = node.domain in ("", "ai.onnx") and bool(typed) and _computes_in_half(node, [node.inputs[i] for i in typed])
    for i, value in enumerate(node.inputs):
        if value is None or value.dtype not in (_FLOAT, _FLOAT16):
            continue
        wanted = _FLOAT16 if half and i in typed else _FLOAT
        if value.dtype != wanted:
            node.replace_input_with(i, _stored(e, value) if _constant(value) else e.cast(value, wanted))
    if half:
        for i in _typed_outputs(node):
            if node.outputs[i].dtype == _FLOAT:
                node.outputs[i].type = ir.TensorType(_FLOAT16)  # types are shared with the copies of the model


def _computes_in_half(node: ir.Node, operands: list[ir.Value | None]) -> bool:
    floating = [v for v in operands if v is not None and v.dtype in (_FLOAT, _FLOAT16)]
    if not all(_fits(v) for v in floating):
        return False
    if node.op_type in _HALF:
        return True
    voting = [v for v in floating if not v.is_initializer()]
    return node.op_type in _FOLLOW and bool(voting) and all(v.dtype == _FLOAT16 for v in voting)


def _constant(value: ir.Value) -> bool:
    return value.is_initializer() and not value.is_graph_input()


def _fits(value: ir.Value) -> bool:
    """Whether float16 can hold the numbers, as far as they are known."""
    if not _constant(value) or value.const_value is None or value.dtype == _FLOAT16:
        return True
    numbers = value.const_value.numpy()
    return bool((np.abs(numbers[np.isfinite(numbers)]) <= _LARGEST).all())


def _stored(e: Emitter, value: ir.Value) -> ir.Value:
    assert value.const_value is not None
    return e.const(value.const_value.numpy().astype(np.float16))


@cache
def _schema(op_type: str) -> onnx.defs.OpSchema:
    return onnx.defs.get_schema(op_type, CANONICAL_OPSET)


def _typed_inputs(node: ir.Node) -> Iterator[int]:
    """Positions of the operands that have the type of the first result."""
    if node.op_type not in _HALF | _FOLLOW or node.domain not in ("", "ai.onnx"):
        return
    schema = _schema(node.op_type)
    for i in range(len(node.inputs)):
        if schema.inputs[min(i, len(schema.inputs) - 1)].type_str == schema.outputs[0].type_str:
            yield i


def _typed_outputs(node: ir.Node) -> Iterator[int]:
    """Positions of the results that have the type of the first."""
    schema = _schema(node.op_type)
    for i in range(len(node.outputs)):
        if schema.outputs[min(i, len(schema.outputs) - 1)].type_str == schema.outputs[0].type_str:
            yield i
