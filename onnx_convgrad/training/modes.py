"""Training and inference mode of a canonical graph, in place: batch statistics, running statistics, Dropout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.emit import Emitter, known
from onnx_convgrad.pipeline import Namespace
from onnx_convgrad.training.draft import name_nodes

__all__ = ["batch_normalizations", "inference_mode", "training_mode"]


def batch_normalizations(graph: ir.Graph) -> Iterator[ir.Node]:
    """The BatchNormalization nodes of the main graph."""
    return (n for n in graph if n.op_type == "BatchNormalization" and n.domain in ("", "ai.onnx"))


def training_mode(graph: ir.Graph, frozen: Callable[[ir.Node], bool], *, unbiased: bool) -> dict[str, ir.Value]:
    """Normalize with batch statistics, except in nodes that are `frozen`, and let Dropout drop.

    A statistic that several nodes share is updated by one after the other.

    Args:
        graph: A canonical graph.
        frozen: Whether a BatchNormalization keeps to its stored statistics.
        unbiased: Whether the running variance averages variances over n - 1 entries (as PyTorch and TensorFlow do)
            instead of n (as ONNX defines the operator).

    Returns:
        Name of each running statistic that is stored in the graph -> the value with its update.
    """
    e, names = Emitter(graph, opsets=graph.opset_imports), Namespace(graph)
    latest: dict[str, ir.Value] = {}
    counts: dict[tuple[Any, ...], ir.Value] = {}
    nodes = list(graph)
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "BatchNormalization":
            e.anchor = following
            if frozen(node):
                _use_stored(node)
            else:
                _use_batch(e, node, latest, names, counts if unbiased else None)
        elif node.op_type == "Dropout":
            _drop(graph, node, names)
    return latest


def _use_batch(
    e: Emitter, node: ir.Node, latest: dict[str, ir.Value], names: Namespace, counts: dict[Any, ir.Value] | None
) -> None:
    """Batch statistics; `counts` keeps what was computed of equal shapes, `None`: variances stay biased."""
    node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
    if len(node.outputs) < 3:
        node.resize_outputs(3)
    for i, suffix in ((3, "mean"), (4, "var")):
        stored, output = node.inputs[i], node.outputs[i - 2]
        output.name = output.name or names.claim(f"{node.outputs[0].name}_{suffix}")
        if stored is None:
            continue
        output.dtype, output.shape = stored.dtype, stored.shape  # type: ignore[assignment]
        if not stored.is_initializer():
            continue
        name = stored.name or ""
        before = latest.get(name, stored)
        node.replace_input_with(i, before)
        start = len(e.emitted)
        latest[name] = output if counts is None or i == 3 else _unbiased(e, node, before, output, counts)
        name_nodes(e.emitted[start:], f"{node.name}/unbiased")


def _unbiased(e: Emitter, node: ir.Node, before: ir.Value, after: ir.Value, counts: dict[Any, ir.Value]) -> ir.Value:
    """The running variance after = m before + (1 - m) v, with v n / (n - 1) in the place of v."""
    x = node.inputs[0]
    assert x is not None
    attribute = node.attributes.get("momentum")
    momentum = 0.9 if attribute is None else attribute.as_float()
    key = None if x.shape is None else (*(d if isinstance(d, int) else d.value for d in x.shape), after.dtype)
    if key is None or None in key or key not in counts:
        counts[key] = _share(e, x, after)
    return e.typed(e.add(after, e.mul(e.sub(after, e.mul(before, momentum)), counts[key])), after)


def _share(e: Emitter, x: ir.Value, like: ir.Value) -> ir.Value:
    """1 / (n - 1), with n entries per channel."""
    dims = None if x.shape is None else [known(d) for d in x.shape]
    channels = known(like.shape[0]) if like.shape is not None else None
    if dims is not None and None not in dims and len(dims) > 1:
        entries = math.prod(d for i, d in enumerate(dims) if i != 1 and d is not None)
        return e.scalar(1 / max(entries - 1, 1), like)
    total = e.cast(e.op("Size", x), like.dtype or ir.DataType.FLOAT)
    width = e.scalar(channels, like) if channels else e.cast(e.op("Size", like), like.dtype or ir.DataType.FLOAT)
    others = e.sub(e.div(total, width), 1)
    return e.op("Reciprocal", e.op("Max", others, e.scalar(1, like)))


def _use_stored(node: ir.Node) -> None:
    """Inference mode; results other than the first become the stored statistics."""
    node.attributes["training_mode"] = ir.AttrInt64("training_mode", 0)
    for output, stored in zip(node.outputs[1:], node.inputs[3:5], strict=False):
        if stored is not None and (output.uses() or output.is_graph_output()):
            output.replace_all_uses_with(stored, replace_graph_outputs=True)
    node.resize_outputs(1)


def _drop(graph: ir.Graph, node: ir.Node, names: Namespace) -> None:
    name = names.claim(f"{node.outputs[0].name}_training_mode")
    flag = ir.Value(name=name, shape=ir.Shape(()), type=ir.TensorType(ir.DataType.BOOL))
    flag.const_value = ir.Tensor(np.ones((), np.bool_), name=name)
    graph.register_initializer(flag)
    while len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, flag)


def inference_mode(graph: ir.Graph) -> None:
    """Stored statistics in every BatchNormalization, and no Dropout."""
    for node in list(graph):
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "BatchNormalization":
            _use_stored(node)
        elif node.op_type == "Dropout" and len(node.inputs) > 2:
            node.replace_input_with(2, None)
            node.resize_inputs(2)
