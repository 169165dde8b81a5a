"""Follow the axis of the classes from the last layer to the outputs, and change every size on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import ModelError
from onnx_convgrad.frontend.tidy import store
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.dims import static_product
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.nodes import is_op

_SAME = (
    "Identity Cast CastLike Softmax LogSoftmax Hardmax Sigmoid Relu LeakyRelu Elu Selu Tanh HardSigmoid HardSwish Clip "
    "Exp Log Softplus Neg Sqrt Abs Dropout QuantizeLinear DequantizeLinear"
).split()
_POOLS = "GlobalAveragePool GlobalMaxPool GlobalLpPool AveragePool MaxPool LpPool".split()
_REDUCTIONS = "ReduceMean ReduceMax ReduceSum ReduceMin ReduceL1 ReduceL2 ReduceLogSumExp".split()
_BINARY = "Add Sub Mul Div Max Min Pow Sum".split()
_TARGETS = {"Reshape": 1, "Resize": 3, "Upsample": 1, "Expand": 1}
"""Operators with an operand that holds the sizes (or scales) of the result, and its index."""

PASSING = frozenset(
    (
        *_SAME,
        *_POOLS,
        *_REDUCTIONS,
        *_BINARY,
        *_TARGETS,
        "Transpose",
        "Flatten",
        "Squeeze",
        "Unsqueeze",
        "Slice",
        "Gather",
    )
)
"""Operators between the last layer and an output that keep classes apart."""

_ENDS = frozenset(("Shape", "Size", "ArgMax", "ArgMin"))
"""Operators whose results have no axis of classes."""


def stored(value: ir.Value | None, through: Sequence[str] = ()) -> ir.TensorProtocol | None:
    """The tensor of an initializer or a Constant; of what one is computed from by operators `through` one operand."""
    while value is not None and is_op(value.producer(), *through):
        value = value.producer().inputs[0]  # type: ignore[union-attr]
    if value is None:
        return None
    node = value.producer()
    if node is None:
        return value.const_value
    return ir.convenience.get_const_tensor(value) if is_op(node, "Constant") else None


def labeled(node: ir.Node) -> str:
    """A node for messages: by its name, or by that of its first result."""
    name = node.name or node.outputs[0].name
    return f"{name!r} ({node.op_type})"


def operands_of(node: ir.Node) -> list[ir.Value | None]:
    """The operands of a node that hold data, not sizes or options."""
    return list(node.inputs if node.op_type in _BINARY else node.inputs[:1])


class Follower:
    """Changes the number of classes in all that follows a layer, in place.

    Args:
        model: The model.
        node: The layer.
        axis: The axis of the classes in its result.
        counts: The old and the new number of classes.
        label: Its name, for messages.
        shapes: Inferred shapes by name.
    """

    def __init__(
        self,
        model: ir.Model,
        node: ir.Node,
        axis: int,
        counts: tuple[int, int],
        label: str,
        shapes: Mapping[str, ir.Shape],
    ) -> None:
        self.graph, self.node, self.label, self.shapes = model.graph, node, label, dict(shapes)
        self.old, self.new = counts
        shape = self._shape(node.outputs[0])
        self.axes: dict[ir.Value, int] = {}
        if axis < 0 and shape is None:
            raise ModelError(
                f"The rank of the result of the head {label} is unknown.", hint="Infer the model's shapes."
            )
        self.axes[node.outputs[0]] = axis % len(shape) if shape is not None else axis

    def follow(self) -> None:
        """Change reshapes and declared shapes.

        Raises:
            ModelError: A node behind the layer mixes classes, or holds values for each of them.
        """
        started = False
        for node in self.graph:
            started |= node is self.node
            if not started or node is self.node or not any(v in self.axes for v in node.inputs if v is not None):
                continue
            if node.op_type in _ENDS and not node.domain:
                continue
            axis = self._passed(node) if is_op(node, *PASSING) else self._refuse(node, "it may mix the classes")
            if axis is not None:
                self.axes[node.outputs[0]] = axis
        for value, axis in self.axes.items():
            shape = value.shape
            if shape is not None and axis < len(shape) and shape[axis] == self.old:
                dims = list(shape)
                dims[axis] = self.new
                value.shape = ir.Shape(dims)

    def _shape(self, value: ir.Value | None) -> ir.Shape | None:
        if value is None:
            return None
        return self.shapes.get(value.name or "") or value.shape

    def _refuse(self, node: ir.Node, reason: str) -> int:
        raise ModelError(
            f"The head {self.label} cannot be given another number of classes: behind it is node "
            f"{labeled(node)}, and {reason}.",
            hint="Export the model without what follows its last layer, or name another layer with head= (or --head).",
        )

    # -- operators -----------------------------------------------------------------------------------------------------

    def _passed(self, node: ir.Node) -> int | None:
        """The axis of the classes in the result of a node; `None` if it has none."""
        op = node.op_type
        if op in _BINARY:
            return self._binary(node)
        x = node.inputs[0]
        if x is None or x not in self.axes:
            return self._refuse(node, "it takes the classes for sizes or options")
        axis = self.axes[x]
        if op in _SAME:
            return axis
        if op in _POOLS:
            return axis if axis == 1 else self._refuse(node, "it pools over the classes")
        return self._moved(node, axis)

    def _moved(self, node: ir.Node, axis: int) -> int | None:
        """The axis of the classes in the result of a node that changes the layout, reduces or picks."""
        op, x = node.op_type, node.inputs[0]
        before, after = self._shape(x), self._shape(node.outputs[0])
        if before is None:
            return self._refuse(node, "the shape of its operand is unknown")
        rank = len(before)
        if op == "Transpose":
            return list(Call(node).ints("perm") or reversed(range(rank))).index(axis)
        if op in _REDUCTIONS:
            return self._reduced(node, axis, rank)
        if op in ("Slice", "Gather"):
            return self._picked(node, axis, before, after)
        return self._reshaped(node, axis, before, after)

    def _binary(self, node: ir.Node) -> int:
        """The axis in the result of a sum or product; the other operand may have values per class only as a bias."""
        rank = max((len(s) for v in node.inputs if (s := self._shape(v)) is not None), default=0)
        behind = {len(s) - self.axes[v] for v in node.inputs
                  if v in self.axes and v is not None and (s := self._shape(v)) is not None}  # fmt: skip
        if len(behind) != 1:
            return self._refuse(node, "the axis of the classes in its operands is not certain")
        (back,) = behind
        for value in node.inputs:
            if value is None or value in self.axes:
                continue
            shape = self._shape(value)
            bias = is_op(node, "Add") and self.node.outputs[0] in node.inputs and stored(value) is not None
            if shape is None or (len(shape) >= back and shape[-back] != 1 and not bias):
                return self._refuse(node, f"{value.name!r} may hold a value for each class")
        return rank - back

    def _axes(self, node: ir.Node) -> list[int] | None:
        axes = Call(node).ints("axes")
        if axes is not None:
            return list(axes)
        tensor = stored(node.inputs[1]) if len(node.inputs) > 1 else None
        return None if tensor is None else [int(i) for i in tensor.numpy().reshape(-1)]

    def _reduced(self, node: ir.Node, axis: int, rank: int) -> int | None:
        axes = self._axes(node)
        if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
            return self._refuse(node, "its axes are computed")
        over = sorted(i % rank for i in (range(rank) if axes is None else axes))
        if axis in over:
            return None
        return axis if Call(node).int("keepdims", 1) else axis - sum(i < axis for i in over)

    def _picked(self, node: ir.Node, axis: int, before: ir.Shape, after: ir.Shape | None) -> int:
        if node.op_type == "Gather":
            on = Call(node).int("axis", 0) % len(before)
            index = self._shape(node.inputs[1])
            if on == axis or index is None:
                return self._refuse(node, "it picks some of the classes")
            return axis + len(index) - 1 if on < axis else axis
        if after is None or after[axis] != before[axis]:
            return self._refuse(node, "it picks some of the classes")
        return axis

    def _reshaped(self, node: ir.Node, axis: int, before: ir.Shape, after: ir.Shape | None) -> int:
        """The axis in the result of a change of shape, whose target is corrected if it names the old number."""
        if after is None:
            return self._refuse(node, "the shape of its result is unknown")
        behind = static_product(before[axis + 1 :])
        places = [i for i, d in enumerate(after) if d == self.old and static_product(after[i + 1 :]) == behind]
        if node.op_type in ("Resize", "Upsample", "Expand"):
            places = [axis + len(after) - len(before)]
        if len(places) > 1 and axis in places:
            places = [axis]
        if len(places) != 1:
            return self._refuse(node, "it may mix the classes with another axis")
        index = _TARGETS.get(node.op_type)
        if index is not None and index < len(node.inputs) and node.op_type != "Upsample":
            self._correct(node, index, places[0])
        return places[0]

    def _correct(self, node: ir.Node, index: int, place: int) -> None:
        """Replace the old number of classes in a vector of sizes, which may be joined of several."""
        value = node.inputs[index]
        if value is None:
            return
        tensor = stored(value)
        if tensor is not None:
            sizes = tensor.numpy().copy()
            if place < sizes.size and sizes[place] == self.old:
                sizes[place] = self.new
                node.replace_input_with(index, added(self.graph, f"{value.name}_head", sizes))
            return
        joined = value.producer()
        if is_op(joined, "Cast", "Identity"):
            self._correct(joined, 0, place)
        if not is_op(joined, "Concat"):
            return  # computed from the classes themselves, or refused by ONNX Runtime's own check
        for i, part in enumerate(joined.inputs):
            shape = self._shape(part)
            size = shape[0] if shape is not None and len(shape) == 1 else None
            if not isinstance(size, int):
                self._refuse(node, "its sizes are computed")
            assert isinstance(size, int)
            if place < size:
                self._correct(joined, i, place)
                return
            place -= size


def added(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Add an initializer under a free name."""
    return store(graph, Namespace.of_values(graph).claim(name), array)
