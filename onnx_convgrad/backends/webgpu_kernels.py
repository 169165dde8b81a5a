"""Find the nodes of a model that ONNX Runtime's WebGPU provider leaves to the CPU, by the table of `ir.kernels`."""

from __future__ import annotations

import onnx

from onnx_convgrad.backends.cuda.cuda_kernels import Lack, element_types, size_arithmetic
from onnx_convgrad.ir.kernels import WEBGPU_MISSING

_NARROW_INTEGERS = frozenset(
    {"CumSum", "GatherElements", "Max", "Min", "Neg", "Abs", "Slice", "Tile", "TopK", "Clip", "Trilu"}
)
"""Operators with kernels for floating numbers alone."""

_BODIES = frozenset({"If", "Loop"})


def webgpu_lacks(model: onnx.ModelProto) -> list[Lack]:
    """The nodes of a model that the provider leaves to the CPU, in order, each with the reason.

    Nodes that depend on sizes alone are marked as `arithmetic`: they belong on the CPU.
    """
    types, sizes = element_types(model.graph), size_arithmetic(model.graph)
    found = []
    for node in model.graph.node:
        reason = _reason(node, types)
        if reason is not None:
            found.append(Lack(node.name, node.op_type, reason, set(node.output) <= sizes))
    return found


def _reason(node: onnx.NodeProto, types: dict[str, int]) -> str | None:
    if node.domain not in ("", "ai.onnx"):
        return f"domain {node.domain} is not ai.onnx"
    if node.op_type == "Constant" or node.op_type in _BODIES:
        return None
    if node.op_type in WEBGPU_MISSING:
        return "WebGPU has no such operator"
    if node.op_type == "MaxPool" and len(node.output) > 1 and node.output[1]:
        return "WebGPU's MaxPool gives no indices"
    kinds = {types.get(name) for name in (*node.input[:1], *node.output[:1])}
    if node.op_type != "Shape" and kinds & {onnx.TensorProto.INT64, onnx.TensorProto.DOUBLE}:
        return "WebGPU has no kernel for int64 and float64"
    if node.op_type in _NARROW_INTEGERS and kinds & {onnx.TensorProto.INT32, onnx.TensorProto.BOOL}:
        return "WebGPU has a kernel for floating numbers only"
    return None
