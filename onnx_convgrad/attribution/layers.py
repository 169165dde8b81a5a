"""Find the layer that class activation maps are drawn from, and the spatial axes of an input."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import Activity
from onnx_convgrad.autodiff.facts import is_elementwise
from onnx_convgrad.autodiff.layers import convolves
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter, known
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.pipeline.scores import floating_value

_CHANNELS = (1, 3, 4)


def find_layer(e: Emitter, source: ir.Value, target: ir.Value, name: str | None) -> ir.Value:
    """The layer of a class activation map, `[N, C, ...]`: the value of this name, or the last one with spatial axes.

    The latter is the result of the last convolution whose result has more than one place, with the activations,
    normalizations and sums behind it.

    Raises:
        ArgumentError: There is no such value, it has no spatial axes, or no convolution leads to the scores.
    """
    if name is not None:
        named = floating_value(e.graph, name, "layer")
        if named.shape is not None and len(named.shape) < 3:
            raise ArgumentError(
                f"The layer {name!r} has shape {named.shape}: it has no spatial axes.",
                hint="Name a value of shape [N, C, H, W], such as the result of a convolution.",
            )
        return named
    nodes = Activity.between([source], [target], e.order).nodes
    layer = next((n.outputs[0] for n in reversed(nodes) if convolves(n) and _is_spatial(n.outputs[0])), None)
    if layer is None:
        raise ArgumentError(
            f"No convolution leads from {source.name!r} to the scores.",
            hint="Name a value of shape [N, C, H, W] with layer= (or --layer).",
        )
    reached = {layer: None}  # in order
    for node in nodes:
        if _keeps_places(node) and _is_spatial(node.outputs[0]) and not reached.keys().isdisjoint(node.inputs):
            reached[node.outputs[0]] = None
    return [*reached][-1]


def _keeps_places(node: ir.Node) -> bool:
    """Whether a node behind a convolution belongs to the same layer."""
    return is_elementwise(node) or is_op(node, "Concat", "LRN") or node.op_type.endswith("Normalization")


def _is_spatial(value: ir.Value) -> bool:
    """Whether a value has more than one place, as far as its shape is known."""
    if value.shape is None:
        return True
    return len(value.shape) > 2 and any(known(d) != 1 for d in value.shape[2:])


def channel_axis(e: Emitter, image: ir.Value) -> int:
    """The axis of the channels of an input: 1, or the last.

    It is the last if the model moves it to place 1 first, as converted TensorFlow models do, or if its size is 1, 3 or 4 and
    that of axis 1 is not.
    """
    rank = e.rank(image, "the layout of the input")
    if rank < 3:
        return 1
    found = _moved_first(image, rank)
    if found is not None:
        return rank - 1 if found else 1
    assert image.shape is not None
    first, last = known(image.shape[1]), known(image.shape[rank - 1])
    return rank - 1 if rank > 3 and last in _CHANNELS and first not in _CHANNELS else 1


def _moved_first(image: ir.Value, rank: int) -> bool | None:
    """Whether the model moves the last axis to place 1; `None` if neither a Transpose nor a convolution reads it."""
    value = image
    for _ in range(8):
        users = [use.node for use in value.uses()]
        moving = next((n for n in users if is_op(n, "Transpose")), None)
        if moving is not None:
            return list(Call(moving).ints("perm") or ()) == [0, rank - 1, *range(1, rank - 1)]
        if any(convolves(n) for n in users):
            return False
        follower = next(filter(is_elementwise, users), None)
        if follower is None:
            return None
        value = follower.outputs[0]
    return None


def spatial_axes(e: Emitter, image: ir.Value) -> list[int]:
    """The axes of an input besides those of the batch and of the channels; of `[N, F]` the axis F."""
    rank = e.rank(image, "the layout of the input")
    if rank < 2:
        raise ArgumentError(f"The input {image.name!r} has shape {image.shape}: it has no axis beside the batch.")
    return [1] if rank == 2 else [i for i in range(1, rank) if i != channel_axis(e, image)]
