"""What an operator adapter may do to the graph around the node that it rewrites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.namespace import Namespace

__all__ = ["AttributeValue", "Rewriter", "Scope", "Unsupported"]

AttributeValue: TypeAlias = int | float | str | Sequence[int] | Sequence[float] | ir.Attr


class Unsupported(Exception):  # noqa: N818 - a signal from an adapter to the walk, which collects all of them
    """The node has no equivalent at the canonical opset; the text completes "because ..."."""


@dataclass
class Scope:
    """State shared by all rewrites of one model: value names must be unique across nested graphs, too."""

    names: Namespace
    constants: dict[tuple[object, ...], ir.Value] = field(default_factory=dict)


class Rewriter:
    """Reads and replaces one node.

    The node itself always stays and becomes the last operator of its replacement, so that its name, its metadata and
    the identity of its output values survive. Everything else is inserted before it.
    """

    def __init__(self, node: ir.Node, scope: Scope, *, in_function: bool = False) -> None:
        self.node = node
        self._scope = scope
        self._in_function = in_function

    @property
    def graph(self) -> ir.Graph:
        """The graph that holds the node."""
        graph = self.node.graph
        assert graph is not None
        return graph

    # -- reading -------------------------------------------------------------------------------------------------------

    def input(self, index: int) -> ir.Value | None:
        """An input, `None` when it is omitted."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def required(self, index: int) -> ir.Value:
        """An input without which the node is invalid."""
        value = self.input(index)
        if value is None:
            raise Unsupported(f"its required input {index} is missing")
        return value

    def _attribute(self, name: str) -> ir.Attr | None:
        attribute = self.node.attributes.get(name)
        if attribute is not None and attribute.is_ref():
            raise Unsupported(f"its attribute {name!r} is a parameter of the enclosing function: inline that first")
        return attribute

    def get_int(self, name: str, default: int) -> int:
        """An integer attribute."""
        attribute = self._attribute(name)
        return default if attribute is None else attribute.as_int()

    def get_float(self, name: str, default: float) -> float:
        """A float attribute."""
        attribute = self._attribute(name)
        return default if attribute is None else attribute.as_float()

    def get_string(self, name: str, default: str) -> str:
        """A string attribute."""
        attribute = self._attribute(name)
        return default if attribute is None else attribute.as_string()

    def get_ints(self, name: str) -> Sequence[int] | None:
        """A list of integers, `None` when absent."""
        attribute = self._attribute(name)
        return None if attribute is None else attribute.as_ints()

    def get_floats(self, name: str) -> Sequence[float] | None:
        """A list of floats, `None` when absent."""
        attribute = self._attribute(name)
        return None if attribute is None else attribute.as_floats()

    @staticmethod
    def dtype(*values: ir.Value | None) -> ir.DataType | None:
        """The first known element type among values that the operator's schema gives one type."""
        for value in values:
            if value is None:
                continue
            found = value.dtype if value.dtype is not None else getattr(value.const_value, "dtype", None)
            if isinstance(found, ir.DataType) and found != ir.DataType.UNDEFINED:
                return found
        return None

    @staticmethod
    def array(value: ir.Value | None) -> np.ndarray | None:
        """The content of a constant, `None` for anything that is computed or can be fed."""
        if value is None or value.is_graph_input():
            return None
        tensor = ir.convenience.get_const_tensor(value)
        return None if tensor is None else tensor.numpy()

    # -- writing -------------------------------------------------------------------------------------------------------

    def constant(self, array: np.ndarray, hint: str, *, name: str = "") -> ir.Value:
        """A constant of the graph that owns the node; equal ones are shared. Functions cannot have initializers."""
        key = (id(self.graph), hint, str(array.dtype), array.shape, array.tobytes())
        if key in self._scope.constants:
            return self._scope.constants[key]
        name = self._scope.names.claim(name or hint)
        tensor = ir.tensor(array, name=name)
        if self._in_function:
            made = ir.Node("", "Constant", (), [ir.AttrTensor("value", tensor)], name=name)
            value = self._insert(made, name)
            value.dtype, value.shape = tensor.dtype, ir.Shape(array.shape)
        else:
            value = ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
            )
            self.graph.register_initializer(value)
        self._scope.constants[key] = value
        return value

    def ints(self, values: Sequence[int] | int, hint: str) -> ir.Value:
        """An int64 constant: a vector for a sequence, a scalar for a number."""
        return self.constant(np.array(values, dtype=np.int64), hint)

    def scalar(self, number: float, like: ir.Value, hint: str, *others: ir.Value | None) -> ir.Value:
        """A scalar of the element type of `like` (or of `others`, which share it); cast at run time if unknown."""
        dtype = self.dtype(like, *others)
        if dtype is not None:
            with np.errstate(over="ignore"):
                return self.constant(np.array(number).astype(dtype.numpy()), hint)
        return self.emit("CastLike", [self.constant(np.array(number, dtype=np.float32), hint), like])

    def pop_as_input(self, name: str, *, vector: bool = False) -> ir.Value | None:
        """Take an attribute away and give its value as a tensor; a function's parameter stays one in a Constant."""
        attribute = self.node.attributes.pop(name, None)
        if attribute is None:
            return None
        floats = attribute.type in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS)
        if attribute.is_ref():
            lists = attribute.type in (ir.AttributeType.INTS, ir.AttributeType.FLOATS)
            if vector and not lists:
                raise Unsupported(f"its attribute {name!r} is a parameter of the enclosing function: inline that first")
            target = f"value_{'float' if floats else 'int'}{'s' if lists else ''}"
            assert attribute.ref_attr_name is not None
            return self.emit("Constant", [], {target: ir.RefAttr(target, attribute.ref_attr_name, attribute.type)})
        array = np.array(attribute.value, dtype=np.float32 if floats else np.int64)
        return self.constant(array.reshape(-1) if vector else array, name)

    def emit(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, AttributeValue] | None = None,
        *,
        dtype: ir.DataType | None = None,
    ) -> ir.Value:
        """Insert a node with one output before the node. `op_type` has its canonical form already."""
        name = self._scope.names.claim(f"{self.node.outputs[0].name or 'value'}_{op_type}")
        node = ir.Node("", op_type, _trimmed(inputs), _attributes(attributes), name=name)
        value = self._insert(node, name)
        if dtype is not None:
            value.dtype = dtype
        return value

    def become(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        """Turn the node into another one of ai.onnx with the same outputs."""
        self.node.domain, self.node.op_type = "", op_type
        self.set_inputs(*inputs)
        self.node.attributes.clear()
        for attribute in _attributes(attributes):
            self.node.attributes.add(attribute)

    def set_inputs(self, *values: ir.Value | None) -> None:
        """Replace the list of inputs; trailing omitted ones are dropped."""
        kept = _trimmed(values)
        self.node.resize_inputs(len(kept))
        for index, value in enumerate(kept):
            self.node.replace_input_with(index, value)

    def set_attribute(self, name: str, value: AttributeValue) -> None:
        """Add or replace one attribute."""
        self.node.attributes.add(_attributes({name: value})[0])

    def redirect(self, old: ir.Value, new: ir.Value) -> None:
        """Let `new` take the place, the name and the declared type of `old`."""
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        name = old.name
        old.name = self._scope.names.claim(f"{name}_old")
        new.name = name
        if old.type is not None:
            new.type = old.type
        if old.shape is not None:
            new.shape = old.shape
        new.metadata_props.update(old.metadata_props)

    def _insert(self, node: ir.Node, output: str) -> ir.Value:
        node.outputs[0].name = output
        node.metadata_props.update(self.node.metadata_props)
        self.graph.insert_before(self.node, node)
        return node.outputs[0]


def _trimmed(values: Sequence[ir.Value | None]) -> list[ir.Value | None]:
    kept = list(values)
    while kept and kept[-1] is None:
        kept.pop()
    return kept


def _attributes(attributes: Mapping[str, AttributeValue] | None) -> list[ir.Attr]:
    return list(ir.convenience.convert_attributes(attributes)) if attributes else []
