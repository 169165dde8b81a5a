"""The layers of a model that can have a low-rank adapter, and the layouts of its two weights.

A layer is a product of a float activation and a stored weight, possibly quantized, however many nodes compute it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff import layers as products
from onnx_convgrad.frontend.stored_weight import StoredWeight, read_dtype, stored_weight
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.nodes import is_op

Kind = Literal["Conv", "MatMul", "left MatMul", "Gather"]

_INTEGER = ("ConvInteger", "MatMulInteger")


@dataclass(frozen=True, slots=True, eq=False)
class AdaptableLayer:
    """A layer that can have an adapter.

    Attributes:
        node: The node that reads the weight.
        kind: `"MatMul"` computes `x W`, `"left MatMul"` computes `W x`; a Gemm is a `"MatMul"`.
        x: The activation, or the indices of a Gather.
        y: The result, to which the adapter's path is added.
        weight: The weight.
        shape: The shape of W: `[K, N]`, `[M, K]`, `[V, D]`, or `[M, C/group, *kernel]`.
        dtype: The type of the adapter's weights.
        transposed: Whether W is the transpose of what `weight` says, as in a Gemm with transB.
        factor: The factor of the product: alpha of a Gemm.
        group: Groups of a convolution.
    """

    node: ir.Node
    kind: Kind
    x: ir.Value
    y: ir.Value
    weight: StoredWeight
    shape: tuple[int, ...]
    dtype: ir.DataType
    transposed: bool = False
    factor: float = 1.0
    group: int = 1
    attributes: tuple[ir.Attr, ...] = field(default=())

    @property
    def names(self) -> list[str]:
        """The names by which a caller can name the layer."""
        return [name for name in (self.weight.root.name, self.node.name) if name]

    @property
    def operand(self) -> int:
        """The position of the weight among the operands."""
        return 0 if self.kind in ("left MatMul", "Gather") else 1

    @property
    def is_table(self) -> bool:
        """Whether the weight is a table of rows that the layer picks."""
        return self.kind == "Gather"

    @property
    def operators(self) -> tuple[str, str]:
        """The operators of the adapter's path, with A and with B."""
        return ("Conv", "Conv") if self.kind == "Conv" else ("Gather" if self.is_table else "MatMul", "MatMul")

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A, which reads the activation, and B."""
        if self.kind == "Conv":
            features, channels, *kernel = self.shape
            return (rank * self.group, channels, *kernel), (features, rank, *[1] * len(kernel))
        rows, columns = self.shape
        if self.kind == "left MatMul":
            return (rank, columns), (rows, rank)
        return (rows, rank), (rank, columns)

    def excess(self, rank: int) -> str:
        """The reason why an adapter of this rank is of no use here; empty if it is smaller than the weight."""
        count, whole = sum(map(math.prod, self.shapes(rank))), math.prod(self.shape)
        if count < whole:
            return ""
        kind = "it is depthwise, and " if self.kind == "Conv" and self.group > 1 and self.shape[1] == 1 else ""
        return f"{kind}an adapter of rank {rank} has {count:,} numbers and its weight only {whole:,}"

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The change of W that the adapter computes, without its scale, in float64."""
        a, b = a.astype(np.float64), b.astype(np.float64)
        if self.kind == "Conv":
            rank, groups = b.shape[1], self.group
            a, b = a.reshape(groups, rank, -1), b.reshape(groups, -1, rank)
        change: np.ndarray = a @ b if self.kind in ("MatMul", "Gather") else b @ a
        return change.reshape(self.shape)


def layers(graph: ir.Graph) -> Iterator[tuple[ir.Node, AdaptableLayer | str]]:
    """Yield every layer with a stored weight, and for one that cannot have an adapter the reason."""
    for node in graph.all_nodes():
        found = layer_of(node)
        if found is not None:
            yield node, found if node.graph is graph else "it is in the body of an If, Loop or Scan"


def read_names(node: ir.Node) -> list[str]:
    """The names by which a caller can name a layer that cannot have an adapter."""
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    return [name for name in (weight.name if weight else None, node.name) if name]


def layer_of(node: ir.Node) -> AdaptableLayer | str | None:
    """The layer that a node computes, or the reason why it cannot have an adapter; `None` for other nodes."""
    if node.domain == "com.microsoft" and node.op_type == "MatMulNBits":
        return _of_bits(node)
    if is_op(node, "QLinearConv", "QLinearMatMul"):
        return "its operands and its result are integers; use a file with QuantizeLinear and DequantizeLinear"
    if is_op(node, "Conv", "ConvInteger"):
        return _of_conv(node)
    if is_op(node, "MatMul", "Gemm", "MatMulInteger"):
        return _of_product(node)
    if is_op(node, "Gather"):
        return _of_gather(node)
    other = products.layer_of(node)
    whole = None if other is None else stored_weight(other.weight)
    return None if whole is None else f"adapters of {node.op_type} are not offered"


def _of_conv(node: ir.Node) -> AdaptableLayer | str | None:
    weight, ends = stored_weight(node.inputs[1]), _ends(node)
    if weight is None:
        return None
    if isinstance(ends, str):
        return ends
    x, y, dtype = ends
    return AdaptableLayer(node, "Conv", x, y, weight, weight.shape, dtype or read_dtype(node.inputs[1]),
                 group=Call(node).int("group", 1), attributes=tuple(node.attributes.values()))  # fmt: skip


def _of_product(node: ir.Node) -> AdaptableLayer | str | None:
    right, left = stored_weight(node.inputs[1]), stored_weight(node.inputs[0])
    if (right is None) == (left is None):
        return None
    call, gemm, ends = Call(node), node.op_type == "Gemm", _ends(node)
    weight = right or left
    assert weight is not None
    if isinstance(ends, str):
        return ends
    x, y, dtype = ends
    if len(weight.shape) != 2:
        return f"its weight has {len(weight.shape)} axes, and adapters are for matrices"
    if right is None:
        if gemm or node.op_type in _INTEGER:
            return "its weight is on the left"
        assert node.inputs[1] is not None
        return AdaptableLayer(node, "left MatMul", node.inputs[1], y, weight, weight.shape, read_dtype(node.inputs[0]))
    if gemm and call.int("transA", 0):
        return "it transposes its activation (transA)"
    transposed = gemm and bool(call.int("transB", 0))
    shape = weight.shape[::-1] if transposed else weight.shape
    return AdaptableLayer(node, "MatMul", x, y, weight, shape, dtype or read_dtype(node.inputs[1]), transposed,
                 call.float("alpha", 1.0) if gemm else 1.0)  # fmt: skip


def _of_gather(node: ir.Node) -> AdaptableLayer | None:
    table, indices = stored_weight(node.inputs[0]), node.inputs[1]
    if table is None or indices is None or stored_weight(indices) is not None or len(table.shape) != 2:
        return None
    dtype = read_dtype(node.inputs[0])
    if Call(node).int("axis", 0) or not dtype.is_floating_point():
        return None
    return AdaptableLayer(node, "Gather", indices, node.outputs[0], table, table.shape, dtype)


def _of_bits(node: ir.Node) -> AdaptableLayer | str | None:
    """A product with a matrix of 2, 4 or 8 bits per number, `[N, blocks, bytes]` (ONNX Runtime's ContribOperators.md)."""
    weight, call, x = stored_weight(node.inputs[1]), Call(node), node.inputs[0]
    if weight is None or x is None:
        return None
    shape = call.int("K", 0), call.int("N", 0)
    whole = replace(weight, shape=shape)
    scales = node.inputs[2]
    return AdaptableLayer(node, "MatMul", x, node.outputs[0], whole, shape, x.dtype or read_dtype(scales))


def _ends(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.DataType | None] | str:
    """The float activation and the float result of a layer, and the type of an integer layer's adapter."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None:
        return "it has no activation"
    if node.op_type not in _INTEGER:
        return x, y, None
    quantize = x.producer()
    cast = next((use.node for use in y.uses() if is_op(use.node, "Cast")), None)
    scaled = None if cast is None else next((u.node for u in cast.outputs[0].uses() if is_op(u.node, "Mul")), None)
    if not is_op(quantize, "DynamicQuantizeLinear") or scaled is None or len(y.uses()) != 1:
        return "it is not between a DynamicQuantizeLinear and a Cast with a Mul"
    if quantize.inputs[0] is None or cast is None or len(cast.outputs[0].uses()) != 1:
        return "its integer result is read more than once"
    return quantize.inputs[0], scaled.outputs[0], ir.DataType(cast.attributes["to"].as_int())
