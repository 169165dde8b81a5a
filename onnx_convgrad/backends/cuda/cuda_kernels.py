"""Find the nodes of a model that ONNX Runtime's CUDA provider does not run on the GPU, by the table of `ir.kernels`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx

from onnx_convgrad.ir.kernels import CUDA_ALL_TYPES, CUDA_INLINED, CUDA_LAST_OPSET, CUDA_TYPED_BY_RESULT, CUDA_TYPES

_BODIES = frozenset("If Loop Scan".split())

_NAMES = {
    getattr(onnx.TensorProto, name.upper()): name
    for name in (*CUDA_ALL_TYPES.split(), "string", "uint16", "uint32", "uint64", "int16")
}


def types_of(op_type: str) -> frozenset[str]:
    """Element types for which the provider has a kernel of an `ai.onnx` operator; empty if it lacks the operator."""
    return CUDA_TYPES.get(op_type, frozenset())


@dataclass(frozen=True, slots=True)
class Lack:
    """A node that the provider leaves to the CPU or refuses; `arithmetic` tells whether it computes sizes only."""

    node: str
    op_type: str
    reason: str
    arithmetic: bool

    def __str__(self) -> str:
        return f"{self.node or 'unnamed'} ({self.op_type}): {self.reason}"


def lacks(model: onnx.ModelProto) -> list[Lack]:
    """The nodes of a model that CUDA does not run on the GPU, in order, each with the reason.

    Nodes that depend on sizes alone are marked as `arithmetic`: ONNX Runtime puts them on the CPU even if there is a kernel.
    Element types come from the declared and inferred values; an unknown one counts as supported.
    """
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    types = element_types(model.graph)
    found = [Lack("", "opset", f"the model has opset {opset}", arithmetic=False)] if opset > CUDA_LAST_OPSET else []
    sizes = size_arithmetic(model.graph)
    for node in model.graph.node:
        reason = _reason(node, types)
        if reason is not None:
            found.append(Lack(node.name, node.op_type, reason, set(node.output) <= sizes))
    return found


def size_arithmetic(graph: onnx.GraphProto) -> set[str]:
    """The values that depend on sizes and constants alone, in a graph whose nodes are sorted."""
    constants = {t.name for t in graph.initializer} - {v.name for v in graph.input} | {""}
    sizes: set[str] = set()
    for node in graph.node:
        if node.op_type == "Constant":
            constants.update(node.output)
        elif node.op_type in ("Shape", "Size") or (node.input and set(node.input) <= sizes | constants):
            sizes.update(node.output)
    return sizes


def element_types(graph: onnx.GraphProto) -> dict[str, int]:
    """The declared and inferred element types of values."""
    declared: Iterable[onnx.ValueInfoProto] = (*graph.input, *graph.value_info, *graph.output)
    types = {v.name: v.type.tensor_type.elem_type for v in declared}
    types.update({t.name: t.data_type for t in graph.initializer})
    return types


def _reason(node: onnx.NodeProto, types: dict[str, int]) -> str | None:
    """The reason why the provider does not run a node, or `None`."""
    if node.domain not in ("", "ai.onnx"):
        return f"domain {node.domain} is not ai.onnx"
    if node.op_type in _BODIES or node.op_type in CUDA_INLINED or node.op_type == "Constant":
        return None
    kernels = types_of(node.op_type)
    if not kernels:
        return "CUDA has no such operator"
    dtype = _NAMES.get(types.get(_typed(node), 0))
    if dtype is not None and dtype not in kernels:
        return f"CUDA has no kernel for {dtype}"
    return _form(node, types)


def _typed(node: onnx.NodeProto) -> str:
    """The value whose type selects the kernel."""
    at = {"Where": 1, "OneHot": 2}.get(node.op_type, 0)
    name: str = node.output[0] if node.op_type in CUDA_TYPED_BY_RESULT else node.input[at]
    return name


def _form(node: onnx.NodeProto, types: dict[str, int]) -> str | None:
    """The reason why CUDA refuses a node that has a kernel, or `None`."""
    attributes = {a.name: a for a in node.attribute}
    pads = list(attributes["pads"].ints) if "pads" in attributes else []
    half = len(pads) // 2
    if node.op_type in ("Conv", "ConvTranspose") and pads[:half] != pads[half:]:
        return f"padding {pads} differs between begin and end"
    if node.op_type == "BatchNormalization":
        if "training_mode" in attributes and attributes["training_mode"].i:
            return "CUDA has no training mode"
        if len({types[name] for name in node.input if name in types}) > 1:
            return "its statistics are of another type than its data"
    if node.op_type == "MaxPool" and len(node.output) > 1 and any(pads[:half]):
        dilations = attributes["dilations"].ints if "dilations" in attributes else []
        if any(d != 1 for d in dilations):
            return "indices are wrong with dilation and padding at the beginning"  # see quirks.CUDA_MAX_POOL_INDICES
    return None
