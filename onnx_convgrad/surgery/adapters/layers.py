"""The layers of a model that can have a low-rank adapter, and the layouts of its two weights.

A layer is a product of a float activation and a stored weight, possibly quantized, however many nodes compute it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.nodes import is_op

Kind = Literal["Conv", "MatMul", "left MatMul", "Gather"]

_INTEGER = {"ConvInteger": "Conv", "MatMulInteger": "MatMul"}
_REFUSED = {
    "ConvTranspose": "adapters of ConvTranspose are not offered",
    "QLinearConv": "its operands and its result are integers; use a file with QuantizeLinear and DequantizeLinear",
    "QLinearMatMul": "its operands and its result are integers; use a file with QuantizeLinear and DequantizeLinear",
}


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A stored weight behind changes of layout and type.

    Attributes:
        root: The initializer, or the result of a Constant node.
        shape: Its shape as the layer reads it.
        perms: The permutations of the Transpose nodes between, from the layer to the root.
        quantized: Whether the layer reads other numbers than the stored ones.
    """

    root: ir.Value
    shape: tuple[int, ...]
    perms: tuple[tuple[int, ...], ...] = ()
    quantized: bool = False


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
    if is_op(node, *_REFUSED):
        return _REFUSED[node.op_type]
    if is_op(node, "Conv", "ConvInteger"):
        return _of_conv(node)
    if is_op(node, "MatMul", "Gemm", "MatMulInteger"):
        return _of_product(node)
    return _of_gather(node) if is_op(node, "Gather") else None


def _of_conv(node: ir.Node) -> AdaptableLayer | str | None:
    weight, ends = stored(node.inputs[1]), _ends(node)
    if weight is None:
        return None
    if isinstance(ends, str):
        return ends
    x, y, dtype = ends
    return AdaptableLayer(node, "Conv", x, y, weight, weight.shape, dtype or _dtype(node.inputs[1]),
                 group=Call(node).int("group", 1), attributes=tuple(node.attributes.values()))  # fmt: skip


def _of_product(node: ir.Node) -> AdaptableLayer | str | None:
    right, left = stored(node.inputs[1]), stored(node.inputs[0])
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
        return AdaptableLayer(node, "left MatMul", node.inputs[1], y, weight, weight.shape, _dtype(node.inputs[0]))
    if gemm and call.int("transA", 0):
        return "it transposes its activation (transA)"
    transposed = gemm and bool(call.int("transB", 0))
    shape = weight.shape[::-1] if transposed else weight.shape
    return AdaptableLayer(node, "MatMul", x, y, weight, shape, dtype or _dtype(node.inputs[1]), transposed,
                 call.float("alpha", 1.0) if gemm else 1.0)  # fmt: skip


def _of_gather(node: ir.Node) -> AdaptableLayer | None:
    table, indices = stored(node.inputs[0]), node.inputs[1]
    if table is None or indices is None or stored(indices) is not None or len(table.shape) != 2:
        return None
    dtype = _dtype(node.inputs[0])
    if Call(node).int("axis", 0) or not dtype.is_floating_point():
        return None
    return AdaptableLayer(node, "Gather", indices, node.outputs[0], table, table.shape, dtype)


def _of_bits(node: ir.Node) -> AdaptableLayer | str | None:
    """A product with a matrix of 2, 4 or 8 bits per number, `[N, blocks, bytes]` (ONNX Runtime's ContribOperators.md)."""
    weight, call, x = stored(node.inputs[1]), Call(node), node.inputs[0]
    if weight is None or x is None:
        return None
    shape = call.int("K", 0), call.int("N", 0)
    whole = StoredWeight(weight.root, shape, quantized=True)
    scales = node.inputs[2]
    return AdaptableLayer(node, "MatMul", x, node.outputs[0], whole, shape, x.dtype or _dtype(scales))


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


def stored(value: ir.Value | None) -> StoredWeight | None:
    """The stored weight that a value holds, through changes of layout and type; `None` if it is computed from inputs."""
    perms: list[tuple[int, ...]] = []
    quantized = False
    while value is not None:
        node = value.producer()
        tensor = value.const_value if node is None else None
        if is_op(node, "Constant") and "value" in node.attributes:
            tensor = node.attributes["value"].as_tensor()
        if tensor is not None:
            shape = tuple(tensor.shape.numpy())
            for perm in reversed(perms):
                shape = tuple(shape[axis] for axis in perm)
            integers = not tensor.dtype.is_floating_point()
            return StoredWeight(value, shape, tuple(perms), quantized or integers)
        if not is_op(node, "Identity", "Cast", "Transpose", "DequantizeLinear", "QuantizeLinear"):
            return None
        quantized = quantized or node.op_type in ("Cast", "DequantizeLinear", "QuantizeLinear")
        value = node.inputs[0]
        if node.op_type == "Transpose":
            perms.append(Call(node).ints("perm") or tuple(reversed(range(_rank(value)))))
    return None


def _rank(value: ir.Value | None) -> int:
    """The rank of a stored weight, or 0."""
    found = stored(value)
    return 0 if found is None else len(found.shape)


def _dtype(value: ir.Value | None) -> ir.DataType:
    """The type in which a layer reads its weight."""
    while value is not None:
        node = value.producer()
        if value.dtype is not None:
            return value.dtype
        if is_op(node, "Cast"):
            return ir.DataType(node.attributes["to"].as_int())
        if node is None:
            break
        if is_op(node, "Constant"):
            return node.attributes["value"].as_tensor().dtype
        value = node.inputs[1 if node.op_type in ("DequantizeLinear", "QuantizeLinear") else 0]
    return ir.DataType.FLOAT
