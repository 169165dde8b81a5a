"""Follow the axis of the classes from the last layers to the outputs, and change every size on it.

Factors say where the axis goes (`autodiff.facts`). They describe operators at the canonical opset, so a canonical copy of
the model is followed; values of the file are found by their names. The classes may be some of the entries of their axis, as
behind a Concat with boxes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class Place:
    """The entries of a value that hold the classes.

    Attributes:
        axis: Their axis.
        start: Entries before them on this axis.
        size: All entries of the axis.
    """

    axis: int
    start: int
    size: int


class Follower:
    """Changes the number of classes in all that follows some layers, in place.

    Args:
        model: The model.
        layers: Each layer, with the axis of the classes in its result.
        counts: The old and the new number of classes.
        label: The name of the layers, for messages.
        biases: Values with a number for each class that are drawn anew.
    """

    def __init__(
        self,
        model: ir.Model,
        layers: Mapping[ir.Node, int],
        counts: tuple[int, int],
        label: str,
        biases: Collection[str | None],
    ) -> None:
        self.graph, self.label, self.biases = model.graph, label, biases
        self.old, self.more = counts[0], counts[1] - counts[0]
        self.values = named_values(model.graph)
        self.copy = canonicalize(copied(model)).graph
        self.places: dict[ir.Value, Place] = {}
        copies = named_values(self.copy)
        for node, axis in layers.items():
            result = copies.get(node.outputs[0].name or "")
            if result is None or result.shape is None:
                raise ModelError(
                    f"The rank of the result of the head {label} is unknown.", hint="Infer the model's shapes."
                )
            self.places[result] = Place(axis % len(result.shape), 0, self.old)

    def follow(self) -> None:
        """Change reshapes and declared shapes.

        Raises:
            ModelError: A node behind the layers mixes classes, or holds values for each of them.
        """
        for node in self.copy:
            held = {i: self.places[v] for i, v in enumerate(node.inputs) if v in self.places}
            if node.outputs[0] in self.places or not held:
                continue
            try:
                found = self._results(Call(node), held)
            except UnsupportedCase as case:
                raise ModelError(
                    f"The head {self.label} cannot be given another number of classes: behind it is node "
                    f"{labeled(self._origin(node) or node)}, and {case.message.rstrip('.')}.",
                    hint="Export the model without what follows its last layer, or name another layer with head= (or "
                    "--head): of a detector, all layers of the scores, head=[...].",
                ) from None
            self.places |= {
                value: place for value, place in zip(node.outputs, found, strict=False) if place is not None
            }
        for followed, place in self.places.items():
            value = self.values.get(followed.name or "")
            axis = place.axis
            if value is not None and value.shape is not None and value.shape[axis : axis + 1] == (place.size,):
                dims = list(value.shape)
                dims[axis] = place.size + self.more
                value.shape = ir.Shape(dims)

    def _results(self, call: Call, held: dict[int, Place]) -> Sequence[Place | None]:
        """The place of the classes in each result of a node, `None` in those that have none."""
        rule, results = rule_of(call.node), call.node.outputs
        if rule is None or rule.factors is None or rule.unnoted:
            raise UnsupportedCase("it may mix the classes")
        factors = rule.factors(call)
        held = {i: place for i, place in held.items() if i not in factors.unread}
        if not held:
            return ()
        place = next(iter(held.values()))
        if is_op(call.node, "Concat", "Split") and _axis(call) == place.axis:
            return [self._joined(call, held)] if call.node.op_type == "Concat" else self._parted(call, place)
        found: Sequence[Place | None]
        if factors.flat:
            require(0 in held, "it takes the classes for sizes or options")
            found = [replace(place, axis=self._reshaped(call, held[0]))]
        else:
            require(all(factors.operands[i] is not None for i in held), "it takes the classes for sizes or options")
            way = passage(call, factors, {i: own.axis for i, own in held.items()})
            if way is None or len({(own.start, own.size) for own in held.values()}) > 1:
                raise UnsupportedCase("the axis of the classes in its operands is not certain")
            for value, axis in way.others:
                one = value.shape is not None and value.shape[axis] == 1
                require(one or value.name in self.biases, f"{value.name!r} may hold a value for each class")
            require(way.work.kind != "unknown", way.work.reason)
            require(way.work.kind != "pick", "it picks some of the classes")
            kept = any(axis is not None for axis in way.results)
            alone = len(results) == 1 if kept else sum(own is not None for own in factors.operands) == 1
            require(way.goes_on or (alone and way.work.kind != "each"), "it may mix the classes")
            found = [None if axis is None else replace(place, axis=axis) for axis in way.results]
        for value, own in zip(results, found, strict=False):
            if own is not None:
                right = value.shape is not None and value.shape[own.axis] == own.size
                require(right, "it may mix the classes")
                if factors.sizes is not None:
                    self._correct(self._origin(call.node), factors.sizes, own.axis, own.size)
        return found

    def _joined(self, call: Call, held: dict[int, Place]) -> Place:
        """The place in the result of a Concat along the axis of the classes."""
        require(len(held) == 1, "it joins the classes of several layers")
        ((index, place),) = held.items()
        sizes = [None if v is None or v.shape is None else v.shape[place.axis] for v in call.node.inputs]
        known = [size for size in sizes if isinstance(size, int)]
        require(len(known) == len(sizes), "it joins the classes with values of unknown sizes")
        return Place(place.axis, sum(known[:index]) + place.start, sum(known))

    def _parted(self, call: Call, place: Place) -> Sequence[Place | None]:
        """The places in the results of a Split along the axis of the classes; corrects its sizes."""
        found: list[Place | None] = []
        start = place.start
        for i, value in enumerate(call.node.outputs):
            size = None if value.shape is None else value.shape[place.axis]
            if not isinstance(size, int):
                raise UnsupportedCase("the sizes of its parts are unknown")
            inside = start >= 0 and start + self.old <= size
            require(inside or start >= size or start + self.old <= 0, "it parts the classes")
            found.append(Place(place.axis, start, size) if inside else None)
            node = self._origin(call.node)
            if inside and node is not None:
                attribute = node.attributes.get("split")  # before opset 13
                sizes = [] if attribute is None else list(attribute.as_ints())
                require(len(node.inputs) > 1 or bool(sizes), "it parts an axis with the classes in equal sizes")
                self._correct(node, 1, i, size)
                if sizes:
                    sizes[i] = size + self.more
                    node.attributes["split"] = ir.AttrInt64s("split", sizes)
            start -= size
        return found

    def _reshaped(self, call: Call, place: Place) -> int:
        """The axis in the result of a change of shape."""
        before, after, axis = call.node.inputs[0].shape, call.y.shape, place.axis  # type: ignore[union-attr]
        if before is None or after is None:
            raise UnsupportedCase(f"the shape of its {'operand' if before is None else 'result'} is unknown")
        behind = static_product(before[axis + 1 :])
        places = [i for i, d in enumerate(after) if d == place.size and static_product(after[i + 1 :]) == behind]
        places = [axis] if len(places) > 1 and axis in places else places
        require(len(places) == 1, "it may mix the classes with another axis")
        return places[0]

    def _origin(self, node: ir.Node) -> ir.Node | None:
        """The node of the file that computes the results of a node of the copy."""
        value = self.values.get(node.outputs[0].name or "")
        return None if value is None else value.producer()

    def _correct(self, node: ir.Node | None, index: int, place: int, size: int) -> None:
        """Replace a size with the classes in a vector of sizes, which may be joined of several."""
        value = None if node is None or index >= len(node.inputs) else node.inputs[index]
        if node is None or value is None:
            return
        tensor = stored(value)
        if tensor is not None:
            sizes = tensor.numpy().copy()
            if place < sizes.size and sizes[place] == size:
                sizes[place] = size + self.more
                node.replace_input_with(index, added(self.graph, f"{value.name}_head", sizes))
                if value.is_initializer() and not value.uses():
                    self.graph.initializers.pop(value.name or "")
            return
        joined = value.producer()
        if is_op(joined, "Cast", "Identity"):
            self._correct(joined, 0, place, size)
        if not is_op(joined, "Concat"):
            return  # computed from the classes themselves, or refused by ONNX Runtime's own check
        values = named_values(self.copy)
        for i, part in enumerate(joined.inputs):
            inferred = part and (values.get(part.name or "", part).shape or part.shape)
            count = inferred[0] if inferred and len(inferred) == 1 else None
            if not isinstance(count, int):
                raise UnsupportedCase("its sizes are computed")
            if place < count:
                self._correct(joined, i, place, size)
                return
            place -= count


def _axis(call: Call) -> int | None:
    """The axis of a Concat or Split; `None` if it is not certain."""
    shape = call.node.inputs[0].shape if call.node.inputs[0] is not None else None
    return None if shape is None else call.int("axis", 0) % len(shape)


def added(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    """Add an initializer under a free name."""
    return store(graph, Namespace.of_values(graph).claim(name), array)
