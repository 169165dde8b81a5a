"""Switch BatchNormalization and Dropout of a canonical graph between training and inference mode, in place."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.backends.covariance import NormalizeByCovariance
from onnx_convgrad.backends.cpu.gelu import FuseGelu
from onnx_convgrad.backends.cpu.group_statistics import ShareGroupStatistics
from onnx_convgrad.backends.cpu.pad_in_conv import PadInConv
from onnx_convgrad.backends.cpu.parts import ConvolveParts
from onnx_convgrad.backends.cpu.recurrent import WriteOutRecurrent
from onnx_convgrad.base.warn import warn
from onnx_convgrad.errors import ModelError, first_few
from onnx_convgrad.ir.constants import number_of
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.nodes import is_op, nested_graphs
from onnx_convgrad.ir.notes import RATIO
from onnx_convgrad.ir.passes import NodePass
from onnx_convgrad.ir.targets import TargetInfo


def set_training(graph: ir.Graph) -> list[tuple[str, ir.Value]]:
    """Switch every BatchNormalization and Dropout to training mode.

    Returns:
        For each running statistic that is stored as an initializer, its name and the value with its update, in the
        order of the nodes (mean, then variance). ONNX's convention: next = momentum * old + (1 - momentum) * batch.
        A statistic that several nodes share is updated by one after the other.
    """
    latest: dict[ir.Value, ir.Value] = {}
    names = Namespace.of_values(graph)
    warn_of_bodies(graph)
    for node in list(graph):
        if is_op(node, "BatchNormalization"):
            statistics = node.inputs[3:5]
            use_batch_statistics(node, [None if v is None else latest.get(v, v) for v in statistics])
            updates = zip(statistics, node.outputs[1:], strict=True)
            latest |= {v: y for v, y in updates if v is not None and original(v).is_initializer()}
        elif is_op(node, "Dropout"):
            drop(graph, node, names)
    return [(statistic.name or "", update) for statistic, update in latest.items()]


def warn_of_bodies(graph: ir.Graph, frozen: Collection[str] = ()) -> None:
    """Warn of nodes in bodies of If, Loop and Scan, which stay in inference mode, except for the `frozen` ones."""
    found = [
        n
        for body in nested_graphs(graph)
        for n in body
        if is_op(n, "BatchNormalization", "Dropout") and n.name not in frozen
    ]
    found = [n for n in found if n.op_type != "Dropout" or dropped_share(n) != 0]
    if found:
        names = first_few([f"{node.name!r} ({node.op_type})" for node in found])
        warn(f"Nodes inside an If, a Loop or a Scan stay in inference mode while the model is trained: {names}.")


def set_inference(graph: ir.Graph) -> None:
    """Switch every BatchNormalization and Dropout to inference mode."""
    for node in list(graph):
        if is_op(node, "BatchNormalization"):
            use_stored_statistics(node)
        elif is_op(node, "Dropout"):
            node.resize_inputs(1)  # ONNX Runtime refuses a ratio of 1 even in inference mode


def training_passes(target: TargetInfo, keep: Collection[ir.Value]) -> list[NodePass]:
    """Rewrites of a canonical graph in training mode that make both directions together faster.

    Forward values may differ in the last digits, except for those in `keep`.
    """
    kinds = (FuseGelu, PadInConv, ConvolveParts, NormalizeByCovariance, ShareGroupStatistics, WriteOutRecurrent)
    return [kind(target, keep) for kind in kinds]


# -- BatchNormalization ------------------------------------------------------------------------------------------------


def batch_normalizations(graph: ir.Graph) -> Iterator[ir.Node]:
    """The BatchNormalization nodes of the main graph."""
    return (n for n in graph if is_op(n, "BatchNormalization"))


def use_batch_statistics(node: ir.Node, statistics: Sequence[ir.Value | None]) -> None:
    """Normalize with the statistics of the batch; results 1 and 2 are updates of the running `statistics`."""
    node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
    if len(node.outputs) < 3:
        node.resize_outputs(3)
    for i, value in enumerate(statistics):
        if value is not None:
            node.outputs[1 + i].dtype, node.outputs[1 + i].shape = value.dtype, value.shape  # type: ignore[assignment]
            node.replace_input_with(3 + i, value)


def use_stored_statistics(node: ir.Node) -> None:
    """Normalize with the stored statistics, which also replace the results after the first."""
    node.attributes.pop("training_mode", None)  # before opset 14 the number of results decides
    for output, stored in zip(node.outputs[1:], node.inputs[3:5], strict=False):
        if stored is not None and (output.uses() or output.is_graph_output()):
            output.replace_all_uses_with(stored, replace_graph_outputs=True)
    node.resize_outputs(1)


def original(value: ir.Value) -> ir.Value:
    """The value that Identity nodes copy; PyTorch's older exporter stores equal tensors once and copies them."""
    node = value.producer()
    source = node.inputs[0] if is_op(node, "Identity") else None
    return value if source is None else original(source)


# -- Dropout -----------------------------------------------------------------------------------------------------------


def dropped_share(node: ir.Node) -> float | None:
    """The ratio of a Dropout in training, one half by default; `None` if it is known at run time only.

    Raises:
        ModelError: It is not a number from 0 to 1.
    """
    ratio = node.inputs[1] if len(node.inputs) > 1 else None
    share: float | None = node.meta.get(RATIO, _noted_share(node)) if ratio is None else number_of(ratio)
    if share is not None and not 0 <= share <= 1:
        raise ModelError(
            f"Dropout {node.name!r} has the ratio {share:g}; in training it is a number from 0 to 1.",
            hint="Correct the ratio in the model.",
        )
    return share


def note_shares(graph: ir.Graph) -> None:
    """Note the ratio of each Dropout in its metadata, so that a model in inference mode can be trained on."""
    for node in graph:
        if is_op(node, "Dropout") and len(node.inputs) > 1 and (share := dropped_share(node)) is not None:
            node.metadata_props[RATIO] = f"{share:.9g}"


def _noted_share(node: ir.Node) -> float:
    """The ratio in the metadata of a Dropout, which may be any text; one half without."""
    try:
        return float(node.metadata_props.get(RATIO, "0.5"))
    except ValueError:
        return float("nan")


def drop(graph: ir.Graph, node: ir.Node, names: Namespace) -> None:
    """Switch a Dropout to training mode; one of ratio 0 needs no mask and is switched to inference mode.

    One of ratio 1, which ONNX Runtime refuses, gives zeros.
    """
    share = dropped_share(node)
    if share == 0:
        node.resize_inputs(1)
        return
    if share == 1:
        _give_zeros(graph, node)
        return
    name = names.claim(f"{node.outputs[0].name}_training_mode")
    flag = ir.Value(name=name, shape=ir.Shape(()), type=ir.TensorType(ir.DataType.BOOL))
    flag.const_value = ir.Tensor(np.ones((), np.bool_), name=name)
    graph.register_initializer(flag)
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, flag)


def _give_zeros(graph: ir.Graph, node: ir.Node) -> None:
    """Turn a Dropout into a product with 0; its mask keeps nothing."""
    e = Emitter(graph, opsets=graph.opset_imports)
    e.anchor = node
    x = node.inputs[0]
    assert x is not None
    node.op_type = "Mul"
    node.attributes.clear()
    node.resize_inputs(2)
    node.replace_input_with(1, e.scalar(0, x))
    for mask in node.outputs[1:]:
        nothing = e.op("Expand", e.const(np.zeros((), np.bool_)), e.shape(x))
        mask.replace_all_uses_with(nothing, replace_graph_outputs=True)
        mask.name, nothing.name = None, mask.name
    node.resize_outputs(1)
