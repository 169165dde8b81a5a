"""Find the stored weight that a value holds, through changes of layout and type."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.nodes import is_op

_QUANTIZED = frozenset(("DequantizeLinear", "QuantizeLinear"))


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A stored weight behind changes of layout and type.

    Attributes:
        root: The initializer, or the result of a Constant node.
        shape: Its shape as the reader has it.
        perms: The permutations of the Transpose nodes between, from the reader to the root.
        passed: The operators between.
        integers: Whether integers are stored.
    """

    root: ir.Value
    shape: tuple[int, ...]
    perms: tuple[tuple[int, ...], ...]
    passed: frozenset[str]
    integers: bool

    @property
    def quantized(self) -> bool:
        """Whether quantizers lie between."""
        return bool(self.passed & _QUANTIZED)

    @property
    def changed(self) -> bool:
        """Whether the reader has other numbers than the stored ones."""
        return self.integers or self.quantized or "Cast" in self.passed

    def stored_axis(self, axis: int) -> int:
        """The axis of the stored numbers that the reader has as `axis`."""
        for perm in self.perms:
            axis = perm[axis]
        return axis


def stored_weight(value: ir.Value | None) -> StoredWeight | None:
    """The stored weight that a value holds; `None` if it is computed from inputs."""
    perms: list[tuple[int, ...]] = []
    passed: set[str] = set()
    while value is not None:
        node = value.producer()
        tensor = value.const_value if node is None else None
        if is_op(node, "Constant") and "value" in node.attributes:
            tensor = node.attributes["value"].as_tensor()
        if tensor is not None:
            shape = tuple(tensor.shape.numpy())
            for perm in reversed(perms):
                shape = tuple(shape[axis] for axis in perm)
            return StoredWeight(value, shape, tuple(perms), frozenset(passed), not tensor.dtype.is_floating_point())
        if not is_op(node, "Identity", "Cast", "Transpose", *_QUANTIZED):
            return None
        passed.add(node.op_type)
        value = node.inputs[0]
        if node.op_type == "Transpose":
            perms.append(Call(node).ints("perm") or tuple(reversed(range(_rank(value)))))
    return None


def _rank(value: ir.Value | None) -> int:
    """The rank of a stored weight, or 0."""
    found = stored_weight(value)
    return 0 if found is None else len(found.shape)


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
        value = node.inputs[1 if node.op_type in _QUANTIZED else 0]
    return ir.DataType.FLOAT
