"""Training and inference mode of a canonical graph, in place: batch statistics, running statistics, Dropout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter, known
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.pipeline.training import drop, dropped_share
from onnx_convgrad.training.program.draft import Draft
from onnx_convgrad.training.program.masks import Masks

__all__ = ["batch_normalizations", "dropouts", "inference_mode", "training_mode"]


def batch_normalizations(graph: ir.Graph) -> Iterator[ir.Node]:
    """The BatchNormalization nodes of the main graph."""
    return (n for n in graph if is_op(n, "BatchNormalization"))


def dropouts(graph: ir.Graph) -> list[tuple[ir.Node, float]]:
    """The Dropout nodes of the main graph that drop a share known while building, and that share; none that drop nothing."""
    nodes = [node for node in graph if is_op(node, "Dropout")]
    shares = [(node, dropped_share(node)) for node in nodes]
    return [(node, share) for node, share in shares if share]


def training_mode(
    draft: Draft, frozen: Callable[[ir.Node], bool], *, unbiased: bool, state: ir.Value | None = None
) -> dict[str, ir.Value]:
    """Normalize with batch statistics, except in nodes that are `frozen`, and let Dropout drop.

    A statistic that several nodes share is updated by one after the other.

    Args:
        draft: Holds a canonical graph.
        frozen: Whether a BatchNormalization keeps to its stored statistics.
        state: What the masks of Dropout are drawn from, an int32 scalar; those of a node whose share is not known while
            building are the runtime's own.
        unbiased: Whether the running variance averages variances over n - 1 entries (as PyTorch and TensorFlow do)
            instead of n (as ONNX defines the operator).

    Returns:
        Name of each running statistic that is stored in the graph -> the value with its update.
    """
    graph = draft.graph
    e = Emitter(graph, opsets=graph.opset_imports)
    latest: dict[str, ir.Value] = {}
    counts: dict[tuple[Any, ...], ir.Value] = {}
    nodes = list(graph)
    shares = dict(dropouts(graph)) if state is not None else {}
    numbers = {node: i for i, node in enumerate(shares)}
    masks = None
    if state is not None and shares:
        e.anchor = nodes[0]
        masks = Masks(e, state, len(shares))
        draft.node_names.give(e.emitted, "masks")
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        if node.domain:
            continue
        if node.op_type == "BatchNormalization":
            e.anchor = following
            if frozen(node):
                _use_stored(node)
            else:
                start = len(e.emitted)
                _use_batch(e, node, latest, counts if unbiased else None)
                draft.node_names.give(e.emitted[start:], f"{node.name}/statistics")
        elif node in shares and masks is not None:
            e.anchor = node
            start = len(e.emitted)
            keep = masks.keep(_data(node), numbers[node], shares[node])
            _replace_dropout(e, node, keep, shares[node])
            draft.node_names.give(e.emitted[start:], node.name or "dropout")
        elif node.op_type == "Dropout":
            drop(graph, node, e.names)
    graph.remove(shares, safe=True)
    return latest


def _data(node: ir.Node) -> ir.Value:
    data = node.inputs[0]
    assert data is not None
    return data


def _replace_dropout(e: Emitter, node: ir.Node, keep: ir.Value, share: float) -> None:
    """x times 1 / (1 - share) where it is kept, and times 0 where not."""
    x = _data(node)
    factor = e.where(keep, e.scalar(1 / (1 - share) if share < 1 else 0.0, x), 0)
    results = (e.typed(e.op("Mul", x, factor), x), keep)
    for old, new in zip(node.outputs, results, strict=False):
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = None, old.name


def _use_batch(e: Emitter, node: ir.Node, latest: dict[str, ir.Value], counts: dict[Any, ir.Value] | None) -> None:
    """Batch statistics, blended with the stored ones outside the node; `counts`: what is computed of equal shapes.

    With momentum 0 the node's results are the statistics of the batch, which its gradient needs too. ONNX Runtime writes
    them over its operands unless they are graph outputs: those are therefore copies that nothing else reads.
    """
    momentum = Call(node).float("momentum", 0.9)
    node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
    node.attributes["momentum"] = ir.AttrFloat32("momentum", 0.0)
    if len(node.outputs) < 3:
        node.resize_outputs(3)
    following, e.anchor = e.anchor, node
    stored = [_original(v) for v in node.inputs[3:5]]
    before = [None if v is None else latest.get(v.name or "", v) for v in stored]
    for i, value in enumerate(before):
        output = node.outputs[1 + i]
        output.name = output.name or e.names.claim(f"{node.outputs[0].name}_{('mean', 'var')[i]}")
        if value is not None:
            output.dtype, output.shape = value.dtype, value.shape  # type: ignore[assignment]
            node.replace_input_with(3 + i, _unshared(e, value))
    e.anchor = following
    for i, (own, value) in enumerate(zip(stored, before, strict=True)):
        result = node.outputs[1 + i]
        if own is None or value is None:
            continue
        fresh = result if i == 0 or counts is None else e.mul(result, _correction(e, node, result, counts))
        blended = e.typed(e.add(e.mul(value, momentum), e.mul(fresh, 1 - momentum)), value)
        for user, index in list(result.uses()):
            if user not in e.emitted:
                user.replace_input_with(index, blended)
        if result.is_graph_output():
            result.replace_all_uses_with(blended, replace_graph_outputs=True)
        if own.is_initializer():
            latest[own.name or ""] = blended


def _original(value: ir.Value | None) -> ir.Value | None:
    """The value of which this is a copy."""
    while value is not None and is_op(value.producer(), "Identity"):
        value = value.producer().inputs[0]  # type: ignore[union-attr]
    return value


def _unshared(e: Emitter, value: ir.Value) -> ir.Value:
    """Numbers of no account, of the shape and dtype of `value`, that no other node gets."""
    node = ir.Node("", "Mul", [value, e.scalar(0, value)], num_outputs=1)
    e.place(node)
    return e.typed(node.outputs[0], value)


def _correction(e: Emitter, node: ir.Node, like: ir.Value, counts: dict[Any, ir.Value]) -> ir.Value:
    """n / (n - 1), with n entries per channel; 1 for one entry."""
    x = _data(node)
    key = None if x.shape is None else (*(d if isinstance(d, int) else d.value for d in x.shape), like.dtype)
    if key is None or None in key or key not in counts:
        counts[key] = _count_ratio(e, x, like)
    return counts[key]


def _count_ratio(e: Emitter, x: ir.Value, like: ir.Value) -> ir.Value:
    dims = None if x.shape is None else [known(d) for d in x.shape]
    if dims is not None and None not in dims and len(dims) > 1:
        entries = math.prod(d for i, d in enumerate(dims) if i != 1 and d is not None)
        return e.scalar(entries / max(entries - 1, 1), like)
    dtype = like.dtype or ir.DataType.FLOAT
    channels = known(like.shape[0]) if like.shape is not None else None
    width = e.scalar(channels, like) if channels else e.cast(e.op("Size", like), dtype)
    entries_ = e.div(e.cast(e.op("Size", x), dtype), width)
    return e.div(entries_, e.op("Max", e.sub(entries_, 1), e.scalar(1, like)))


def _use_stored(node: ir.Node) -> None:
    """Inference mode; results other than the first become the stored statistics."""
    node.attributes.pop("training_mode", None)  # before opset 14 there is none, and the number of results decides
    for output, stored in zip(node.outputs[1:], node.inputs[3:5], strict=False):
        if stored is not None and (output.uses() or output.is_graph_output()):
            output.replace_all_uses_with(stored, replace_graph_outputs=True)
    node.resize_outputs(1)


def inference_mode(graph: ir.Graph) -> None:
    """Stored statistics in every BatchNormalization, and no Dropout."""
    for node in list(graph):
        if node.domain:
            continue
        if node.op_type == "BatchNormalization":
            _use_stored(node)
        elif node.op_type == "Dropout":
            node.resize_inputs(1)  # the share is of no account, and ONNX Runtime refuses one of 1
