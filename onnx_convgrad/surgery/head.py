"""Replace the last layer of a classifier, or the last layers of a detector, by fresh ones with another number of classes.

The layer of a classifier is the last product with a stored weight before the outputs; what follows it may only move, pool
or activate its numbers. Weights and bias are drawn from U(-b, b) with b = 1 / sqrt(inputs of one number), which is what
PyTorch's Linear and Conv start with (`kaiming_uniform_` with a = sqrt(5), and the bound of the bias).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import floating, rule_of
from onnx_convgrad.autodiff.layers import Features, WeightLayer, layer_of
from onnx_convgrad.autodiff.registry import lookup
from onnx_convgrad.base.names import as_names, check_names
from onnx_convgrad.base.numbers import whole
from onnx_convgrad.errors import ArgumentError, ModelError, first_few
from onnx_convgrad.frontend.metadata import LABELS, describe
from onnx_convgrad.frontend.quantizers import INTEGER_WEIGHTS
from onnx_convgrad.frontend.stored_weight import StoredWeight, stored_weight
from onnx_convgrad.ir.call import Call, stem
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.surgery.class_axis import Follower, added, labeled, stored

_NAMES = "names"
"""Metadata of Ultralytics: the names of the classes as a dictionary of Python."""


@dataclass(frozen=True, slots=True)
class Head:
    """A layer whose outputs are classes.

    Attributes:
        layer: Its node and operands.
        stored: The stored weight.
        features: The axis of the classes.
    """

    layer: WeightLayer
    stored: StoredWeight
    features: Features

    @property
    def node(self) -> ir.Node:
        """The node that reads the weight."""
        return self.layer.node

    @property
    def weight(self) -> ir.Value:
        """The initializer or constant with the weight."""
        return self.stored.root

    @property
    def parameters(self) -> list[str]:
        """Names of its stored values: the weight, and the bias if there is one."""
        return [value.name for value in (self.weight, *(bias for _, _, bias, _ in _biases(self))) if value.name]

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.stored.shape[self.features.of_weight]

    @property
    def label(self) -> str:
        """The name of the layer in messages: its weight, and its node if that has a name."""
        return f"{self.weight.name!r}" + (f" (node {self.node.name!r})" if self.node.name else "")


def with_new_head(
    model: ir.Model,
    classes: int,
    *,
    head: str | Sequence[str] | None = None,
    seed: int = 0,
    labels: Sequence[str] | None = None,
) -> ir.Model:
    """Give a model a new last layer, in place, and return it; see `onnx_convgrad.transforms.replace_head`."""
    classes, seed = whole(classes, "classes"), whole(seed, "seed", 0)
    if labels is not None:
        labels = as_names(labels, "labels")
        if len(labels) != classes:
            raise ArgumentError(
                f"There are {len(labels)} labels for {classes} classes.", hint="Give one name for each class."
            )
    names: list[str | None] = [None] if head is None else list(dict.fromkeys(as_names(head, "head")))
    heads = [find_head(model, name) for name in names or [None]]
    for last in heads:
        _refuse_shared(last)
    counts = {last.classes: last.label for last in heads}
    if len(counts) > 1:
        raise ArgumentError(
            "The layers in head= have different numbers of classes: "
            + ", ".join(f"{label} has {count}" for count, label in counts.items())
            + ".",
            hint="Name the layers that give the scores of the classes.",
        )
    (old,) = counts
    if classes != old:
        biases = {bias.name for last in heads for _, _, bias, _ in _biases(last)}
        layers = {last.node: last.features.of_result for last in heads}
        Follower(model, layers, (old, classes), first_few([last.label for last in heads]), biases).follow()
    generator = np.random.default_rng(seed)
    for last in heads:
        _renew(model.graph, last, classes, generator)
    named = model.metadata_props.get(_NAMES, "").startswith("{0:")
    if labels is None and classes != old:
        model.metadata_props.pop(LABELS, None)
        if named:
            del model.metadata_props[_NAMES]
    elif labels is not None and named:
        model.metadata_props[_NAMES] = str(dict(enumerate(labels)))
    describe(model, labels=labels)
    return model


# -- finding -----------------------------------------------------------------------------------------------------------


def find_head(model: ir.Model, name: str | None = None) -> Head:
    """The last layer before the outputs, or the layer of a node, weight or result with a certain name.

    Raises:
        ArgumentError: There is none of this name, or, without a name, more than one.
        ModelError: There is none, or its weights are not plain constants.
    """
    graph = model.graph
    if name is not None:
        layers = [node for node in graph if layer_of(node) is not None]
        names = {n: node for node in layers for n in _names(node)}
        if any(n.op_type in INTEGER_WEIGHTS and n.name == name for n in graph):
            raise ModelError(f"The layer {name!r} is quantized.", hint=_FLOAT_HINT)
        check_names([name], list(names), "layer in head:")
        return _head_of(names[name])
    last = list(dict.fromkeys(node for y in graph.outputs if floating(y) or y.dtype is None for node in _last(y)))
    heads = [_head_of(node) for node in last if _stored_head(node) is not None]
    if len(heads) == 1 and len(last) == 1:
        return heads[0]
    if heads:
        listed = ", ".join(one.label for one in heads)
        raise ArgumentError(
            f"The outputs come from {len(last)} layers: which one gives the classes is not certain.",
            hint=f"Name one with head= (or --head): {listed}.",
        )
    for node in last:
        if node.op_type in INTEGER_WEIGHTS:
            raise ModelError(f"The last layer, node {labeled(node)}, is quantized.", hint=_FLOAT_HINT)
    for node in last:
        if layer_of(node) is not None:
            _head_of(node)  # says why not
    found = f"the outputs come from {', '.join(map(labeled, last))}, which is not a layer with stored weights"
    raise ModelError(
        f"The last layer cannot be found: {found if last else 'no node has weights'}.",
        hint="Name a Gemm, MatMul or Conv with head= (or --head), by its node or its weight.",
    )


_FLOAT_HINT = "Replace the head of the model from before its quantization."


def _names(node: ir.Node) -> Iterator[str]:
    head = _stored_head(node)
    yield from (n for n in (node.name, node.outputs[0].name, head and head.weight.name) if n)


def _last(output: ir.Value) -> Iterator[ir.Node]:
    """The nodes that an output comes from, through nodes that move, pool or activate numbers."""
    todo: list[ir.Value | None] = [output]
    seen = set()
    while todo:
        value = todo.pop()
        node = None if value is None else value.producer()
        if value is None or node is None or value in seen:
            continue
        seen.add(value)
        if is_op(node, "Constant", "Shape"):
            continue
        passed = None if node.domain else _data_of(node)
        if passed is None:
            yield node
        else:
            todo += [v for v in passed if stored(v) is None]


def _data_of(node: ir.Node) -> list[ir.Value] | None:
    """The operands with the data of a node that has no weights, `None` for a layer or an operator that is not known.

    A layer is an operator with parameters that is neither elementwise nor moves numbers alone.
    """
    rule = rule_of(node) if node.op_type != "Upsample" else lookup("", "Resize")  # its name before opset 10
    if rule is None or rule.factors is None or rule.unnoted:
        return None
    if rule.parameters and rule.kind != "elementwise" and not rule.moves:
        return None
    named = zip(Call(node).names[0], node.inputs, strict=False)
    first = rule.kind in ("zero", "multilinear")  # what is quantized, or compared, has no derivative
    return [v for i, (name, v) in enumerate(named) if v is not None and (stem(name) in rule.wrt or (first and i == 0))]


def _stored_head(node: ir.Node) -> Head | None:
    """The head that a node computes with a stored weight, as far as that can be seen."""
    layer = layer_of(node)
    weight = None if layer is None else stored_weight(layer.weight)
    layer = None if weight is None or weight.quantized else layer_of(node, rank=len(weight.shape))
    if weight is None or layer is None or layer.features is None:
        return None
    return Head(layer, weight, layer.features)


def _head_of(node: ir.Node) -> Head:
    found = _stored_head(node)
    weights = [v.producer() for v in node.inputs[1:2] if v is not None]
    if found is None:
        quantized = any(n is not None and n.op_type in INTEGER_WEIGHTS for n in weights)
        reason = "its weight is quantized" if quantized else "it is not a layer with stored weights"
        raise ModelError(
            f"The head of node {labeled(node)} cannot be replaced: {reason}.",
            hint=_FLOAT_HINT if quantized else "Name another layer with head= (or --head).",
        )
    if found.layer.group != 1:
        raise ModelError(
            f"The head of node {labeled(node)} cannot be replaced: it is a {node.op_type} in groups.",
            hint="Name another layer with head= (or --head).",
        )
    return found


def _refuse_shared(head: Head) -> None:
    """Raise `ModelError` if something else reads the weight."""
    path = head.stored.path
    own = {head.node, *(v.producer() for v in path)}
    others = [labeled(node) for v in path for node, _ in v.uses() if node not in own]
    others += ["an output of the model" for v in path if v.is_graph_output()]
    if others:
        raise ModelError(
            f"The head {head.label} cannot be replaced: its weight is shared; {first_few(others)} reads it too.",
            hint="Store a copy of the weight for the head under a name of its own.",
        )


# -- renewing ----------------------------------------------------------------------------------------------------------


def _renew(graph: ir.Graph, head: Head, classes: int, generator: np.random.Generator) -> None:
    """Draw weight and bias anew, in place."""
    tensor = head.stored.tensor
    place = head.stored.stored_axis(head.features.of_weight)
    shape = [classes if i == place else d for i, d in enumerate(tensor.shape.numpy())]
    bound = 1 / math.sqrt(max(1, math.prod(shape) // classes))

    def drawn(shape: Sequence[int], dtype: ir.DataType) -> np.ndarray:
        return generator.uniform(-bound, bound, shape).astype(dtype.numpy())

    _store(head.weight, drawn(shape, tensor.dtype))
    for node, index, bias, axis in _biases(head):
        old = stored(bias)
        assert old is not None, "_biases looks"
        sizes = [classes if i == axis else d for i, d in enumerate(old.shape.numpy())]
        if len(bias.uses()) == 1 and not bias.is_graph_output():
            _store(bias, drawn(sizes, old.dtype))
        else:  # exporters store equal biases once
            node.replace_input_with(index, added(graph, f"{bias.name}_head", drawn(sizes, old.dtype)))


def _biases(head: Head) -> Iterator[tuple[ir.Node, int, ir.Value, int]]:
    """The operands that are added per class, by the node itself or an Add right behind it: place, value, axis of classes."""
    node, behind = head.node, -1 - head.features.of_result
    operands = [(node, 2, 0)] if len(node.inputs) > 2 else []
    operands += [(user, 1 - index, behind) for user, index in node.outputs[0].uses() if is_op(user, "Add")]
    for user, index, back in operands:
        bias, tensor = user.inputs[index], stored(user.inputs[index])
        axis = -1 if tensor is None else len(tensor.shape) - 1 - back
        if bias is not None and tensor is not None and axis >= 0 and tensor.shape[axis] == head.classes:
            yield user, index, bias, axis


def _store(value: ir.Value, array: np.ndarray) -> None:
    """Replace the numbers of a stored value, in place."""
    tensor = ir.Tensor(array, name=value.name)
    node = value.producer()
    if node is not None:  # a Constant
        node.attributes.clear()
        node.attributes["value"] = ir.AttrTensor("value", tensor)
    else:
        value.const_value = tensor
    value.shape = ir.Shape(array.shape)
