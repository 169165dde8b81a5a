"""Differentiate and train some of the output channels of a stored value: `wrt={"layer3.*": slice(0, 16)}`.

The value becomes the concatenation of up to three stored parts, of which the one with the chosen channels is a value of its
own, called `<name>[0:16]`. So gradients, optimizer state, checkpoints and messages between processes have the size of that
part (sparse updates, Lin et al. 2022, arXiv:2206.15472). `join_parts` stores the value as one again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from onnx_convgrad.autodiff.facts import arranges, kept_axes
from onnx_convgrad.autodiff.layers import layer_of
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.selection import GROUPS, resolve_wrt
from onnx_convgrad.frontend.tidy import store
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import PARTS

Parts = Mapping[str, slice]
"""Name, glob or group -> output channels; `slice(None)` means all."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The range `start:stop` along an axis of a stored value."""

    value: str
    axis: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.value}[{self.start}:{self.stop}]"


def chosen_parts(graph: ir.Graph, wrt: Parts) -> tuple[list[str], list[StoredPart]]:
    """The names of all values that a mapping chooses, whole ones and parts, and the parts.

    A later pattern replaces the channels that an earlier one chose for the same value.

    Raises:
        ArgumentError: A pattern means nothing, a range is empty or has steps, or the value has no output channels.
    """
    chosen: dict[ir.Value, slice] = {}
    for pattern, channels in wrt.items():
        if not isinstance(channels, slice) or channels.step not in (None, 1):
            raise ArgumentError(
                f"wrt maps {pattern!r} to {channels!r}, which is not a range of output channels.",
                hint="For example {'layer3.*': slice(0, 16), 'fc.*': slice(None)}.",
            )
        chosen |= dict.fromkeys(resolve_wrt(graph, pattern if pattern in GROUPS else [pattern]), channels)
    parts = {value: part for value, channels in chosen.items() if (part := _part(value, channels)) is not None}
    return [parts[v].name if v in parts else v.name or "" for v in chosen], list(parts.values())


def _part(value: ir.Value, channels: slice) -> StoredPart | None:
    """The part of a value; `None` if the channels are all that it has."""
    if channels == slice(None):
        return None
    if value.const_value is None:
        raise ArgumentError(
            f"wrt chooses channels of {value.name!r}, which is not stored in the model.",
            hint="Only parameters have parts; slice(None) means the whole value.",
        )
    axis = _channel_axis(value)
    if axis is None:
        raise ArgumentError(
            f"wrt chooses channels of {value.name!r}, which has no axis of output channels that its readers agree on.",
            hint="Name it with slice(None), or leave it out.",
        )
    size = value.const_value.shape.numpy()[axis]
    start, stop, _ = channels.indices(size)
    if start >= stop:
        raise ArgumentError(
            f"wrt chooses the channels {channels.start}:{channels.stop} of {value.name!r}, which has {size}: none is left."
        )
    return None if (start, stop) == (0, size) else StoredPart(value.name or "", axis, start, stop)


def output_channels(value: ir.Value) -> int | None:
    """The number of output channels of a stored value; `None` if its readers have no such axis in common."""
    axis = _channel_axis(value)
    return None if axis is None or value.const_value is None else int(value.const_value.shape.numpy()[axis])


def _channel_axis(value: ir.Value) -> int | None:
    """The axis of a stored value along which its readers have their output channels; `None` if they differ."""
    rank = 0 if value.shape is None else len(value.shape)
    found = {_axis_in(use.node, use.idx, rank) for use in value.uses()}
    return found.pop() if len(found) == 1 else None


def _axis_in(node: ir.Node, operand: int, rank: int) -> int | None:
    if not rank:
        return None
    passes = arranges(node) or is_op(node, "QuantizeLinear", "DequantizeLinear")
    places = kept_axes(node) if operand == 0 and passes else []
    if {*places} == {*range(rank)}:
        axis = _channel_axis(node.outputs[0])
        return places.index(axis) if axis in places else None
    layer = layer_of(node)
    if rank == 1 or layer is None:
        return 0
    features = layer.features if operand == 1 else None
    return None if features is None or features.parts != 1 else features.of_weight


def split_parts(graph: ir.Graph, parts: list[StoredPart]) -> None:
    """Store values as their parts, in place, where the graph stores a value of that name."""
    e, names, node_names = Emitter(graph), Namespace.of_values(graph), Namespace.of_nodes(graph)
    e.anchor = next(iter(graph), None)
    for part in parts:
        value = graph.initializers.get(part.value)
        if value is None or value.const_value is None:
            continue
        array, size = value.const_value.numpy(), value.const_value.shape.numpy()[part.axis]
        pieces = []
        for start, stop in pairwise(sorted({0, part.start, part.stop, size})):
            piece = np.ascontiguousarray(array.take(range(start, stop), part.axis))
            pieces.append(store(graph, names.claim(f"{part.value}[{start}:{stop}]"), piece, value.dtype))
        del graph.initializers[part.value]
        result = e.typed(e.op("Concat", *pieces, axis=part.axis), value)
        joined = e.emitted[-1]
        joined.name = node_names.claim(f"{part.value}/Concat")
        joined.metadata_props[PARTS] = "true"
        value.replace_all_uses_with(result, replace_graph_outputs=True)
        result.name = part.value


def join_parts(graph: ir.Graph) -> None:
    """Store the values that `split_parts` split as one again, in place."""
    for node in [node for node in graph if node.metadata_props.get(PARTS)]:
        result, pieces = node.outputs[0], [v for v in node.inputs if v is not None]
        stored = [v.const_value for v in pieces if v.const_value is not None]
        if len(stored) != len(pieces):
            continue
        array = np.concatenate([tensor.numpy() for tensor in stored], Call(node).int("axis", 0))
        name, result.name = result.name or "", None
        result.replace_all_uses_with(store(graph, name, array, stored[0].dtype), replace_graph_outputs=True)
        graph.remove(node, safe=True)
        for piece in pieces:
            if not piece.uses() and not piece.is_graph_output():
                graph.initializers.pop(piece.name or "", None)
