"""Training mode: batch statistics in BatchNormalization, random masks in Dropout."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from onnx_convgrad.backends.cpu.covariance import NormalizeByCovariance
from onnx_convgrad.backends.cpu.gelu import FuseGelu
from onnx_convgrad.backends.cpu.group_statistics import ShareGroupStatistics
from onnx_convgrad.backends.cpu.pad_in_conv import PadInConv
from onnx_convgrad.ir.constants import number_of
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.passes import NodePass
from onnx_convgrad.ir.targets import Target

__all__ = ["drop", "dropped_share", "set_training", "training_passes"]


def set_training(graph: ir.Graph) -> list[tuple[str, ir.Value]]:
    """Switch every BatchNormalization and Dropout of `graph` to training mode, in place.

    Returns:
        For each running statistic that is stored as an initializer, its name and the value with its update, in the
        order of the nodes (mean, then variance). ONNX's convention: next = momentum * old + (1 - momentum) * batch.
        What several nodes share is updated by one after the other.
    """
    latest: dict[ir.Value, ir.Value] = {}
    names = Namespace.of_values(graph)
    for node in list(graph):
        if node.domain:
            continue
        if node.op_type == "BatchNormalization":
            _batch_statistics(node, latest)
        elif node.op_type == "Dropout":
            drop(graph, node, names)
    return [(statistic.name or "", update) for statistic, update in latest.items()]


def training_passes(target: Target, keep: Collection[ir.Value]) -> list[NodePass]:
    """Rewrites of a canonical graph in training mode that make both directions together faster.

    Forward values may differ in the last digits, except for those in `keep`.
    """
    kinds = (FuseGelu, PadInConv, NormalizeByCovariance, ShareGroupStatistics)
    return [kind(target, keep) for kind in kinds]


def _batch_statistics(node: ir.Node, latest: dict[ir.Value, ir.Value]) -> None:
    node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
    if len(node.outputs) < 3:
        node.resize_outputs(3)
    for index, output in ((3, node.outputs[1]), (4, node.outputs[2])):
        operand = node.inputs[index]
        if operand is None:
            continue
        output.dtype, output.shape = operand.dtype, operand.shape  # type: ignore[assignment]
        if _is_stored(operand):
            node.replace_input_with(index, latest.get(operand, operand))
            latest[operand] = output


def _is_stored(value: ir.Value) -> bool:
    """Whether a value is an initializer, or a copy of one: PyTorch's older exporter stores equal tensors once."""
    node = value.producer()
    copy = node.inputs[0] if is_op(node, "Identity") else None
    return value.is_initializer() or (copy is not None and _is_stored(copy))


def dropped_share(node: ir.Node) -> float | None:
    """What a Dropout drops in training, if known while building; by default one half."""
    ratio = node.inputs[1] if len(node.inputs) > 1 else None
    return 0.5 if ratio is None else number_of(ratio)


def drop(graph: ir.Graph, node: ir.Node, names: Namespace) -> None:
    """Switch a Dropout to training mode. One that drops nothing needs no mask, and is switched to inference."""
    if dropped_share(node) == 0:
        node.resize_inputs(1)
        return
    name = names.claim(f"{node.outputs[0].name}_training_mode")
    flag = ir.Value(name=name, shape=ir.Shape(()), type=ir.TensorType(ir.DataType.BOOL))
    flag.const_value = ir.Tensor(np.ones((), np.bool_), name=name)
    graph.register_initializer(flag)
    while len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, flag)
