"""Follow the axis of the classes from the last layer to the outputs, and change every size on it.

Factors say where the axis goes (`autodiff.facts`). They describe operators at the canonical opset, so a canonical copy of
the model is followed; values of the file are found by their names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import rule_of
from onnx_convgrad.autodiff.facts import passage
from onnx_convgrad.errors import ModelError, UnsupportedCase, require
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.frontend.files import copied
from onnx_convgrad.frontend.tidy import store
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.dims import static_product
from onnx_convgrad.ir.namespace import Namespace, named_values
from onnx_convgrad.ir.nodes import is_op


def stored(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer or a Constant."""
    return None if value is None else ir.convenience.get_const_tensor(value)


def labeled(node: ir.Node) -> str:
    """A node for messages: by its name, or by that of its first result."""
    name = node.name or node.outputs[0].name
    return f"{name!r} ({node.op_type})"


class Follower:
    """Changes the number of classes in all that follows a layer, in place.

    Args:
        model: The model.
        node: The layer.
        axis: The axis of the classes in its result.
        counts: The old and the new number of classes.
        label: Its name, for messages.
        biases: Values with a number for each class that are drawn anew.
    """

    def __init__(
        self,
        model: ir.Model,
        node: ir.Node,
        axis: int,
        counts: tuple[int, int],
        label: str,
        biases: Collection[str | None],
    ) -> None:
        self.graph, self.label, self.biases = model.graph, label, biases
        self.old, self.new = counts
        self.values = named_values(model.graph)
        self.copy = canonicalize(copied(model)).graph
        result = named_values(self.copy).get(node.outputs[0].name or "")
        if result is None or result.shape is None:
            raise ModelError(
                f"The rank of the result of the head {label} is unknown.", hint="Infer the model's shapes."
            )
        self.axes = {result: axis % len(result.shape)}

    def follow(self) -> None:
        """Change reshapes and declared shapes.

        Raises:
            ModelError: A node behind the layer mixes classes, or holds values for each of them.
        """
        for node in self.copy:
            held = {i: self.axes[v] for i, v in enumerate(node.inputs) if v in self.axes}
            if node.outputs[0] in self.axes or not held:
                continue
            try:
                axes = self._results(Call(node), held)
            except UnsupportedCase as case:
                raise ModelError(
                    f"The head {self.label} cannot be given another number of classes: behind it is node "
                    f"{labeled(self._origin(node) or node)}, and {case.message.rstrip('.')}.",
                    hint="Export the model without what follows its last layer, or name another layer with head= (or "
                    "--head).",
                ) from None
            self.axes |= {value: axis for value, axis in zip(node.outputs, axes, strict=False) if axis is not None}
        for followed, axis in self.axes.items():
            value = self.values.get(followed.name or "")
            if value is not None and value.shape is not None and value.shape[axis : axis + 1] == (self.old,):
                dims = list(value.shape)
                dims[axis] = self.new
                value.shape = ir.Shape(dims)

    def _results(self, call: Call, held: dict[int, int]) -> Sequence[int | None]:
        """The axis of the classes in each result of a node, `None` in those that have none."""
        rule, results = rule_of(call.node), call.node.outputs
        if rule is None or rule.factors is None or rule.unnoted:
            raise UnsupportedCase("it may mix the classes")
        factors = rule.factors(call)
        held = {i: axis for i, axis in held.items() if i not in factors.unread}
        if not held:
            return ()
        axes: Sequence[int | None]
        if factors.flat:
            require(0 in held, "it takes the classes for sizes or options")
            axes = [self._reshaped(call, held[0])]
        else:
            require(all(factors.operands[i] is not None for i in held), "it takes the classes for sizes or options")
            way = passage(call, factors, held)
            if way is None:
                raise UnsupportedCase("the axis of the classes in its operands is not certain")
            for value, axis in way.others:
                one = value.shape is not None and value.shape[axis] == 1
                require(one or value.name in self.biases, f"{value.name!r} may hold a value for each class")
            require(way.work.kind != "unknown", way.work.reason)
            require(way.work.kind != "pick", "it picks some of the classes")
            axes = way.results
            kept = any(axis is not None for axis in axes)
            alone = len(results) == 1 if kept else sum(own is not None for own in factors.operands) == 1
            require(way.goes_on or (alone and way.work.kind != "each"), "it may mix the classes")
        for value, found in zip(results, axes, strict=False):
            if found is not None:
                require(value.shape is not None and value.shape[found] == self.old, "it may mix the classes")
                if factors.sizes is not None:
                    self._correct(self._origin(call.node), factors.sizes, found)
        return axes

    def _reshaped(self, call: Call, axis: int) -> int:
        """The axis in the result of a change of shape."""
        before, after = call.node.inputs[0].shape, call.y.shape  # type: ignore[union-attr]
        if before is None or after is None:
            raise UnsupportedCase(f"the shape of its {'operand' if before is None else 'result'} is unknown")
        behind = static_product(before[axis + 1 :])
        places = [i for i, d in enumerate(after) if d == self.old and static_product(after[i + 1 :]) == behind]
        places = [axis] if len(places) > 1 and axis in places else places
        require(len(places) == 1, "it may mix the classes with another axis")
        return places[0]

    def _origin(self, node: ir.Node) -> ir.Node | None:
        """The node of the file that computes the results of a node of the copy."""
        value = self.values.get(node.outputs[0].name or "")
        return None if value is None else value.producer()

    def _correct(self, node: ir.Node | None, index: int, place: int) -> None:
        """Replace the old number of classes in a vector of sizes, which may be joined of several."""
        value = None if node is None or index >= len(node.inputs) else node.inputs[index]
        if node is None or value is None:
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
        values = named_values(self.copy)
        for i, part in enumerate(joined.inputs):
            inferred = part and (values.get(part.name or "", part).shape or part.shape)
            size = inferred[0] if inferred and len(inferred) == 1 else None
            if not isinstance(size, int):
                raise UnsupportedCase("its sizes are computed")
            if place < size:
                self._correct(joined, i, place)
                return
            place -= size


def added(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Add an initializer under a free name."""
    return store(graph, Namespace.of_values(graph).claim(name), array)
