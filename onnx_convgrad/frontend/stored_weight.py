"""Find the stored weight that a value holds, through changes of layout and type."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.nodes import is_op

_QUANTIZERS = ("DequantizeLinear", "QuantizeLinear")

PASSED = (*_QUANTIZERS, "Cast", "Identity", "Transpose")
"""Operators between a stored weight and its reader: they keep its axes, or exchange them."""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A stored weight behind changes of layout and type.

    Attributes:
        path: The values from the operand back to the initializer, or to the result of a Constant node.
        shape: Its shape as the reader has it.
        perms: The permutations of the Transpose nodes between, from the reader to what is stored.
        tensor: What is stored.
    """

    path: tuple[ir.Value, ...]
    shape: tuple[int, ...]
    perms: tuple[tuple[int, ...], ...]
    tensor: ir.TensorProtocol

    @property
    def root(self) -> ir.Value:
        """The initializer, or the result of a Constant node."""
        return self.path[-1]

    @property
    def quantized(self) -> bool:
        """Whether quantizers lie between."""
        return any(is_op(v.producer(), *_QUANTIZERS) for v in self.path)

    @property
    def changed(self) -> bool:
        """Whether the reader has other numbers than the stored ones."""
        return not self.tensor.dtype.is_floating_point() or any(
            is_op(v.producer(), "Cast", *_QUANTIZERS) for v in self.path
        )

    @property
    def shared(self) -> bool:
        """Whether something else reads the weight, or a value between."""
        return any(len(v.uses()) != 1 or v.is_graph_output() for v in self.path)

    def stored_axis(self, axis: int) -> int:
        """The axis of what is stored that the reader has as `axis`."""
        for perm in self.perms:
            axis = perm[axis]
        return axis


def stored_weight(value: ir.Value | None) -> StoredWeight | None:
    """The stored weight that a value holds; `None` if it is computed from inputs."""
    path: list[ir.Value] = []
    given: list[tuple[int, ...] | None] = []
    while value is not None:
        path.append(value)
        node = value.producer()
        tensor = value.const_value if node is None else None
        if is_op(node, "Constant") and "value" in node.attributes:
            tensor = node.attributes["value"].as_tensor()
        if tensor is not None:
            shape = tuple(tensor.shape.numpy())
            perms = tuple(perm or tuple(reversed(range(len(shape)))) for perm in given)
            for perm in reversed(perms):
                shape = tuple(shape[axis] for axis in perm)
            return StoredWeight(tuple(path), shape, perms, tensor)
        if not is_op(node, *PASSED):
            return None
        given += [Call(node).ints("perm")] if node.op_type == "Transpose" else []
        value = node.inputs[0]
    return None


def read_dtype(value: ir.Value | None) -> ir.DataType:
    """The type in which a weight is read."""
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
        value = node.inputs[1 if node.op_type in _QUANTIZERS else 0]
    return ir.DataType.FLOAT
