"""Read one node and replace it by nodes of the canonical opset."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_convgrad.errors import UnsupportedCase
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.notes import mark_fixed

Results: TypeAlias = ir.Value | Sequence[ir.Value | None] | None


class OpenEmitter(Emitter):
    """Writes formulas of values whose element type may be unknown: numbers are cast to it at run time."""

    def scalar(self, number: float, like: ir.Value | None) -> ir.Value:
        if like is not None and like.dtype is None:
            return self.op("CastLike", self.const(np.float32(number)), like)
        with np.errstate(over="ignore"):
            return super().scalar(number, like)

    def const(self, array: Any, dtype: ir.DataType | None = None) -> ir.Value:
        value = super().const(array, dtype)
        mark_fixed(value)
        return value

    def take_back(self, node: ir.Node) -> None:
        """Remove a node that was emitted lately. Both records are searched from their ends: they may have thousands."""
        del self.emitted[next(i for i in reversed(range(len(self.emitted))) if self.emitted[i] is node)]
        self._memo.pop(next((key for key in reversed(self._memo) if self._memo[key][0].producer() is node), None), None)
        self.graph.remove(node)


def is_used(value: ir.Value) -> bool:
    """Whether a node reads a value, or it is an output of the graph."""
    return bool(value.uses()) or value.is_graph_output()


@dataclass(slots=True)
class Rewriter(Call):
    """A node that a converter replaces; `e` inserts before it.

    The node itself always stays and becomes the last operator of its replacement, so that its name, its metadata and the
    identity of its results survive.
    """

    e: OpenEmitter
    renamed: set[ir.Value] = field(default_factory=set)
    """New values that have taken over the name of another one."""

    # -- reading -------------------------------------------------------------------------------------------------------

    def finite(self, name: str, default: float) -> float:
        """A number; a formula would make NaN of an infinite one, where the operator need not."""
        value = self.float(name, default)
        if not math.isfinite(value):
            raise UnsupportedCase(f"its attribute {name} is {value}")
        return value

    def element_type(self, name: str, default: int) -> ir.DataType:
        """The element type that an integer attribute stands for."""
        number = self.int(name, default)
        try:
            return ir.DataType(number)
        except ValueError:
            raise UnsupportedCase(f"its attribute {name} is {number}, which is not an element type") from None

    def operand(self, index: int) -> ir.Value | None:
        """An operand, `None` when it is omitted."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def required(self, index: int) -> ir.Value:
        """An operand without which the node is invalid."""
        value = self.operand(index)
        if value is None:
            raise UnsupportedCase(f"its required input {index} is missing")
        return value

    @staticmethod
    def dtype(*values: ir.Value | None) -> ir.DataType | None:
        """The first known element type among values that the operator's schema gives one type."""
        return next((v.dtype for v in values if v is not None and v.dtype), None)

    # -- changing the node in place ------------------------------------------------------------------------------------

    def attribute_as_input(self, name: str, *, vector: bool = False) -> ir.Value | None:
        """Remove an attribute and return its value as a constant, `None` if there is none."""
        attribute = self.node.attributes.pop(name, None)
        if attribute is None:
            return None
        floating = attribute.type in (ir.AttributeType.FLOAT, ir.AttributeType.FLOATS)
        array = np.array(attribute.value, dtype=np.float32 if floating else np.int64)
        return self.e.const(array.reshape(-1) if vector else array)

    def set_inputs(self, *values: ir.Value | None) -> None:
        """Replace the list of inputs; trailing omitted ones are dropped."""
        kept = list(values)
        while kept and kept[-1] is None:
            kept.pop()
        self.node.resize_inputs(len(kept))
        for index, value in enumerate(kept):
            self.node.replace_input_with(index, value)

    def set_attributes(self, **attributes: Any) -> None:
        """Add or replace attributes."""
        for attribute in ir.convenience.convert_attributes(attributes):
            self.node.attributes.add(attribute)

    def drop(self, name: str) -> None:
        """Remove an attribute."""
        self.node.attributes.pop(name, None)

    def append(self, result: ir.Value, op_type: str, *others: ir.Value, **attributes: Any) -> None:
        """Compute a result by another operator, behind the node, from what the node gives in its place."""
        after = ir.node(op_type, [None, *others], attributes, name=self.e.names.claim(f"{result.name}_{op_type}"))
        self._redirect(result, after.outputs[0])
        after.replace_input_with(0, result)
        self.e.graph.insert_after(self.node, after)

    def stored(self, name: str, content: np.ndarray | Sequence[str]) -> ir.Value:
        """An initializer with the content of an attribute, named after the node and the attribute."""
        e, stem = self.e, self.node.name or self.node.outputs[-1].name or self.node.op_type
        tensor = ir.tensor(content, name=e.names.claim(f"{stem}.{name}", e.graph.initializers))
        value = ir.Value(
            name=tensor.name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        e.graph.register_initializer(value)
        return value

    # -- replacing it --------------------------------------------------------------------------------------------------

    def flattened(self, op_type: str, x: ir.Value, axis: int) -> ir.Value:
        """Apply an operator to the rows of the matrix that a value is flattened to at `axis`."""
        rows = self.e.op(op_type, self.e.op("Flatten", x, axis=axis), axis=-1)
        # Without allowzero the size of an empty dimension would be copied from the matrix.
        return self.e.op("Reshape", rows, self.e.op("Shape", x), allowzero=1)

    def convert(self, converter: Converter) -> Sequence[ir.Node]:
        """Call a converter, and return what it emitted before the node, with names after the node."""
        start = len(self.e.emitted)
        results = converter(self)
        if results is not None:
            self._become([results] if isinstance(results, ir.Value) else results, start)
        emitted = self.e.emitted[start:]
        self._name(emitted)
        return emitted

    def _become(self, results: Sequence[ir.Value | None], start: int) -> None:
        """Let the node compute the first result, as its last operator, and others take the places of its other results."""
        node, first = self.node, next(v for v in results if v is not None)
        if any(new is None and is_used(old) for old, new in zip(node.outputs, results, strict=False)):
            raise UnsupportedCase("its replacement lacks one of its outputs")
        last = first.producer()
        own = () if last is None else last.outputs
        others = results[len(own) :]
        if last in self.e.emitted[start:] and own == tuple(results[: len(own)]) and not any(map(is_used, own)):
            self.e.take_back(last)
        else:
            last, others = ir.node("Identity", [first]), results[1:]
        for old, new in zip(node.outputs[len(last.outputs) :], others, strict=False):
            if old.name and new is not None:
                self._redirect(old, new)
        node.resize_outputs(min(len(last.outputs), len(node.outputs)))
        for old, new in zip(node.outputs, last.outputs, strict=False):
            _retype(old, new.dtype)
        node.domain, node.op_type = "", last.op_type
        self.set_inputs(*last.inputs)
        node.attributes.clear()
        node.attributes.update(last.attributes)
        last.resize_inputs(0)

    def _redirect(self, old: ir.Value, new: ir.Value) -> None:
        """Let `new` take the place, the name, the shape and, if its own is unknown, the type of the result `old`."""
        dtype = new.dtype
        if new.is_graph_output() or new in self.renamed:
            new = self.e.copied(new)
        new.name, old.name = old.name, self.e.names.claim(f"{old.name}_old")
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        self.e.typed(new, old)
        _retype(new, dtype)
        new.metadata_props.update(old.metadata_props)
        self.renamed.add(new)

    def _name(self, nodes: Iterable[ir.Node]) -> None:
        """Name inserted nodes and their results after the node, and pass on its metadata."""
        stem = self.node.outputs[0].name or "value"
        for node in nodes:
            node.name = self.e.names.claim(f"{stem}_{node.op_type}")
            node.metadata_props.update(self.node.metadata_props)
            for index, value in enumerate(node.outputs):
                if value not in self.renamed:
                    value.name = self.e.names.claim(f"{node.name}_{index}") if index else node.name


def _retype(value: ir.Value, dtype: ir.DataType | None) -> None:
    """Set the element type if it is known: inference guesses it for results of operators that it does not know."""
    if dtype is not None:
        value.dtype = dtype


Converter: TypeAlias = Callable[[Rewriter], Results]
"""Changes a node in place and returns nothing, or emits its replacement and returns its new results."""
