"""Replace the last layer of a classifier by one with another number of classes and fresh weights.

The layer is the last Gemm, MatMul or Conv before the outputs; what follows it may only move, pool or activate its numbers.
Weights and bias are drawn from U(-b, b) with b = 1 / sqrt(inputs of one number), which is what PyTorch's Linear and Conv
start with (`kaiming_uniform_` with a = sqrt(5), and the bound of the bias).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.activity import floating
from onnx_convgrad.base.names import as_names, check_names
from onnx_convgrad.base.numbers import whole
from onnx_convgrad.errors import ArgumentError, ModelError, first_few
from onnx_convgrad.frontend.load import load
from onnx_convgrad.frontend.metadata import LABELS, describe
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.namespace import named_values
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.surgery.class_axis import PASSING, Follower, added, labeled, operands_of, stored

_PRODUCTS = ("Gemm", "MatMul", "Conv")
_QUANTIZED = frozenset(
    "QLinearConv QLinearMatMul QGemm QLinearConvTranspose ConvInteger MatMulInteger MatMulNBits DynamicQuantizeMatMul "
    "MatMulIntegerToFloat DequantizeLinear".split()
)


@dataclass(frozen=True, slots=True)
class Head:
    """A layer whose outputs are classes.

    Attributes:
        node: Its Gemm, MatMul or Conv.
        weight: The stored weight.
        axis: The axis of the classes in the stored weight.
        classes: Their number.
    """

    node: ir.Node
    weight: ir.Value
    axis: int
    classes: int

    @property
    def label(self) -> str:
        """Its weight, and its node if that has a name."""
        return f"{self.weight.name!r}" + (f" (node {self.node.name!r})" if self.node.name else "")

    @property
    def class_axis(self) -> int:
        """The axis of the classes in the result; negative for that of a MatMul."""
        return 1 if self.node.op_type in ("Gemm", "Conv") else -1


def with_new_head(
    model: ir.Model, classes: int, *, head: str | None = None, seed: int = 0, labels: Sequence[str] | None = None
) -> ir.Model:
    """Give a model a new last layer, in place, and return it; see `onnx_convgrad.replace_head`."""
    classes, seed = whole(classes, "classes"), whole(seed, "seed", 0)
    if labels is not None:
        labels = as_names(labels, "labels")
        if len(labels) != classes:
            raise ArgumentError(
                f"There are {len(labels)} labels for {classes} classes.", hint="Give one name for each class."
            )
    last = find_head(model, head)
    _refuse_shared(last)
    if classes != last.classes:
        Follower(model, last.node, last.class_axis, (last.classes, classes), last.label, _shapes(model)).follow()
    _renew(model.graph, last, classes, np.random.default_rng(seed))
    if labels is None and classes != last.classes:
        model.metadata_props.pop(LABELS, None)
    describe(model, labels=labels)
    return model


def _shapes(model: ir.Model) -> dict[str, ir.Shape]:
    """The shapes of all values that can be inferred, by name."""
    values = named_values(load(model).canonical.graph)
    return {name: value.shape for name, value in values.items() if value.shape is not None}


# -- finding -----------------------------------------------------------------------------------------------------------


def find_head(model: ir.Model, name: str | None = None) -> Head:
    """The last layer before the outputs, or the layer of a node, weight or result with a certain name.

    Raises:
        ArgumentError: There is none of this name, or, without a name, more than one.
        ModelError: There is none, or its weights are no plain constants.
    """
    graph = model.graph
    if name is not None:
        layers = [node for node in graph if is_op(node, *_PRODUCTS)]
        names = {n: node for node in layers for n in _names(node)}
        quantized = [n.name for n in graph if n.op_type in _QUANTIZED and n.name == name]
        if quantized:
            raise ModelError(f"The layer {name!r} is quantized.", hint=_FLOAT_HINT)
        check_names([name], list(names), "layer in head:")
        return _head_of(names[name])
    last = {
        node: None for output in graph.outputs if floating(output) or output.dtype is None for node in _last(output)
    }
    heads = [_head_of(node) for node in last if is_op(node, *_PRODUCTS) and _weight_of(node) is not None]
    if len(heads) == 1 and len(last) == 1:
        return heads[0]
    if heads:
        listed = ", ".join(one.label for one in heads)
        raise ArgumentError(
            f"The outputs come from {len(last)} layers: which one gives the classes is not certain.",
            hint=f"Name one with head= (or --head): {listed}.",
        )
    if any(node.op_type in _QUANTIZED for node in last):
        node = next(node for node in last if node.op_type in _QUANTIZED)
        raise ModelError(f"The last layer, node {labeled(node)}, is quantized.", hint=_FLOAT_HINT)
    for node in last:
        if is_op(node, *_PRODUCTS):
            _head_of(node)  # says why not
    found = ", ".join(map(labeled, last))
    raise ModelError(
        "The last layer cannot be found: "
        + (
            f"the outputs come from {found}, which is no layer with stored weights." if last else "no node has weights."
        ),
        hint="Name a Gemm, MatMul or Conv with head= (or --head), by its node or its weight.",
    )


_FLOAT_HINT = "Replace the head of the model from before its quantization."


def _names(node: ir.Node) -> Iterator[str]:
    weight = _weight_of(node)
    yield from (n for n in (node.name, node.outputs[0].name, weight and weight[0].name) if n)


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
        if is_op(node, *PASSING):
            todo += [v for v in operands_of(node) if stored(v) is None]
        elif not is_op(node, "Constant", "Shape"):
            yield node


def _weight_of(node: ir.Node) -> tuple[ir.Value, int] | None:
    """The stored weight behind the second operand and the axis of its results; `None` if it is not stored."""
    value = node.inputs[1] if len(node.inputs) > 1 else None
    tensor = stored(value, through=("Transpose", "Identity", "Cast"))
    if tensor is None or len(tensor.shape) < 2:
        return None
    rank, call = len(tensor.shape), Call(node)
    axis = 0 if node.op_type == "Conv" or (node.op_type == "Gemm" and call.int("transB", 0)) else rank - 1
    while value is not None and is_op(value.producer(), "Transpose", "Identity", "Cast"):
        before = value.producer()
        assert before is not None
        if before.op_type == "Transpose":
            axis = list(Call(before).ints("perm") or reversed(range(rank)))[axis]
        value = before.inputs[0]
    assert value is not None
    return value, axis


def _head_of(node: ir.Node) -> Head:
    found = _weight_of(node)
    weights = [v.producer() for v in node.inputs[1:2] if v is not None]
    if found is None:
        quantized = any(n is not None and n.op_type in _QUANTIZED for n in weights)
        reason = "its weight is quantized" if quantized else "it is no layer with stored weights"
        raise ModelError(
            f"The head of node {labeled(node)} cannot be replaced: {reason}.",
            hint=_FLOAT_HINT if quantized else "Name another layer with head= (or --head).",
        )
    if node.op_type == "Conv" and Call(node).int("group", 1) != 1:
        raise ModelError(
            f"The head of node {labeled(node)} cannot be replaced: it is a Conv in groups.",
            hint="Name another layer with head= (or --head).",
        )
    weight, axis = found
    tensor = stored(weight)
    assert tensor is not None
    return Head(node, weight, axis, tensor.shape.numpy()[axis])


def _refuse_shared(head: Head) -> None:
    """Raise `ModelError` if something else reads the weight."""
    path: list[ir.Value] = []
    value = head.node.inputs[1]
    while value is not None and value is not head.weight:
        path.append(value)
        value = value.producer().inputs[0]  # type: ignore[union-attr]
    own = {head.node, *(v.producer() for v in path)}
    others = [labeled(node) for v in (*path, head.weight) for node, _ in v.uses() if node not in own]
    others += ["an output of the model" for v in (*path, head.weight) if v.is_graph_output()]
    if others:
        raise ModelError(
            f"The head {head.label} cannot be replaced: its weight is shared; {first_few(others)} reads it too.",
            hint="Store a copy of the weight for the head under a name of its own.",
        )


# -- renewing ----------------------------------------------------------------------------------------------------------


def _renew(graph: ir.Graph, head: Head, classes: int, generator: np.random.Generator) -> None:
    """Draw weight and bias anew, in place."""
    tensor = stored(head.weight)
    assert tensor is not None
    shape = [classes if i == head.axis else d for i, d in enumerate(tensor.shape.numpy())]
    bound = 1 / math.sqrt(max(1, math.prod(shape) // classes))

    def drawn(shape: Sequence[int], dtype: ir.DataType) -> np.ndarray:
        return generator.uniform(-bound, bound, shape).astype(dtype.numpy())

    _store(head.weight, drawn(shape, tensor.dtype))
    for node, index, axis in _biases(head):
        old = stored(node.inputs[index])
        assert old is not None
        sizes = [classes if i == axis else d for i, d in enumerate(old.shape.numpy())]
        bias = node.inputs[index]
        assert bias is not None
        if len(bias.uses()) == 1 and not bias.is_graph_output():
            _store(bias, drawn(sizes, old.dtype))
        else:  # exporters store equal biases once
            node.replace_input_with(index, added(graph, f"{bias.name}_head", drawn(sizes, old.dtype)))


def _biases(head: Head) -> Iterator[tuple[ir.Node, int, int]]:
    """The operands that are added per class, by the node itself or an Add right behind it, and their axis of classes."""
    node, weight = head.node, stored(head.weight)
    operands = [(node, 2, 0)] if len(node.inputs) > 2 else []
    behind = len(weight.shape) - 2 if node.op_type == "Conv" and weight is not None else 0
    operands += [(user, 1 - index, behind) for user, index in node.outputs[0].uses() if is_op(user, "Add")]
    for user, index, back in operands:
        tensor = stored(user.inputs[index])
        axis = -1 if tensor is None else len(tensor.shape) - 1 - back
        if tensor is not None and axis >= 0 and tensor.shape[axis] == head.classes:
            yield user, index, axis


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
