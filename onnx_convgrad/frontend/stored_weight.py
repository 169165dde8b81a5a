"""Find the stored weight that a value holds, through changes of layout and type."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.nodes import is_op

_QUANTIZERS = ("DequantizeLinear", "QuantizeLinear")

PASSED = (*_QUANTIZERS, "Cast", "Identity", "Transpose")
"""Operators between a stored weight and its reader: they keep its axes, or exchange them."""

_DEQUANTIZING = ("Mul", "Sub")
"""Operators that integers pass behind a Cast, with a stored scale or zero point: dequantization that is written out."""


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
        """Whether integers are stored, or quantizers lie between."""
        return not self.tensor.dtype.is_floating_point() or any(is_op(v.producer(), *_QUANTIZERS) for v in self.path)

    @property
    def changed(self) -> bool:
        """Whether the reader has other numbers than the stored ones."""
        return self.quantized or any(is_op(v.producer(), "Cast") for v in self.path)

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
    between: list[ir.Node] = []
    while value is not None:
        path.append(value)
        tensor, node = _tensor(value), value.producer()
        if tensor is not None:
            return _behind(tuple(path), between, tensor)
        if is_op(node, *_DEQUANTIZING):
            value = _integers(node)
        elif is_op(node, *PASSED):
            value = node.inputs[0]
        else:
            return None
        between.append(node)
    return None


def _tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of a value that is stored itself."""
    node = None if value is None else value.producer()
    if is_op(node, "Constant") and "value" in node.attributes:
        return node.attributes["value"].as_tensor()
    return value.const_value if value is not None and node is None else None


def _integers(node: ir.Node) -> ir.Value | None:
    """The operand that a Mul or Sub changes by a stored scale or zero point."""
    for value, other in itertools.permutations(node.inputs):
        if _number(other) is not None and is_op(None if value is None else value.producer(), "Cast", *_DEQUANTIZING):
            return value
    return None


def _number(value: ir.Value | None) -> ir.TensorProtocol | None:
    """A stored scale, or a zero point, which may be an integer behind a Cast."""
    node = None if value is None else value.producer()
    return _tensor(node.inputs[0] if is_op(node, "Cast") else value)


def _behind(path: tuple[ir.Value, ...], nodes: list[ir.Node], tensor: ir.TensorProtocol) -> StoredWeight | None:
    """The weight behind these nodes, from the reader to what is stored; `None` if they compute another one."""
    shape, perms = tuple(tensor.shape.numpy()), []
    for node in reversed(nodes):
        if node.op_type == "Transpose":
            perms.append(Call(node).ints("perm") or tuple(reversed(range(len(shape)))))
            shape = tuple(shape[axis] for axis in perms[-1])
        elif node.op_type in _DEQUANTIZING:
            numbers = [found for v in node.inputs if v not in path and (found := _number(v)) is not None]
            try:
                whole = np.broadcast_shapes(shape, *(tuple(number.shape.numpy()) for number in numbers))
            except ValueError:
                return None
            if tensor.dtype.is_floating_point() or whole != shape:
                return None
    return StoredWeight(path, shape, tuple(reversed(perms)), tensor)


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
