"""Parameters that an exporter has merged because they happened to be equal are given back their own storage.

PyTorch's TorchScript exporter stores equal tensors once: of a network fresh from its constructor, all BatchNormalization
scales and variances (ones) and all shifts and means (zeros) of one width become a single initializer, from which the
others, still under their own names, are copied by Identity. To train that as it is would tie them together. The newer
exporter drops the other names, and biases that are zero; its notes tell what was there (see `exporter`), as long as the
nodes are the file's own.
"""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir

from onnx_convgrad.frontend.exporters.pytorch import FOLDED, by_exporter, left_out, merged, tie_copies
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.dims import static_dims
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import INITIALIZER_KIND

__all__ = ["part_members", "restore", "untie"]

_LARGE = 1 << 22


_MEMBER = re.compile(r"\w+(\.\w+)+")
"""What a module calls a parameter of one of its parts."""


def part_members(graph: ir.Graph) -> None:
    """Store the members of modules apart that an exporter stores once: their copies, and statistics."""
    untie(graph, members=True)
    _part_statistics(graph)


def untie(graph: ir.Graph, *, members: bool = False) -> None:
    """Turn every copy of a constant-filled initializer into an initializer, in place.

    Equal numbers that are not all the same are left shared: those are tied weights, not a coincidence. With `members`, so
    are those that neither have names as members of modules do nor are statistics: a copy may be meant.
    """
    for node in list(graph):
        if not is_op(node, "Identity") or by_exporter(node):
            continue
        source, copy = node.inputs[0], node.outputs[0]
        named = all(v is not None and _MEMBER.fullmatch(v.name or "") for v in (source, copy))
        if members and not named and not _is_statistic(copy):
            continue
        if source is None or not source.is_initializer() or source.is_graph_input() or copy.is_graph_output():
            continue
        if source.const_value is None or not _filled(source.const_value):
            continue
        name, copy.name = copy.name or "", None
        copy.replace_all_uses_with(_store(graph, name, source.const_value.numpy()))
        graph.remove(node, safe=True)


def _is_statistic(value: ir.Value) -> bool:
    """Whether a value is read as a running mean or variance, and as nothing else."""
    return all(is_op(use.node, "BatchNormalization") and use.idx in (3, 4) for use in value.uses())


def restore(graph: ir.Graph) -> None:
    """Store each parameter and buffer once that the newer exporter merged with an equal one, left out, or copied.

    The graph is the file's own, in place: its opset and everything else stay.
    """
    _part_merged(graph)
    _part_statistics(graph)
    tie_copies(graph)


def _part_merged(graph: ir.Graph) -> None:
    names = Namespace.of_values(graph)
    for found in merged(graph):
        tensor = found.value.const_value
        if tensor is None or found.value.is_graph_input():
            continue
        folded = FOLDED in found.value.metadata_props
        own = _store(graph, names.claim(found.value.name or "" if folded else found.name), tensor.numpy())
        own.metadata_props[INITIALIZER_KIND] = "PARAMETER" if found.parameter else "BUFFER"
        if folded:
            own.metadata_props[FOLDED] = str([found.name])
        for node, index in found.uses:
            node.replace_input_with(index, own)
    for missing in left_out(graph):
        weight = missing.node.inputs[1]
        features = None if weight is None else _features(missing.node, weight)
        if weight is None or weight.dtype is None or features is None:
            continue
        zeros = np.zeros(features, weight.dtype.numpy())
        own = _store(graph, names.claim(missing.name), zeros)
        own.metadata_props[INITIALIZER_KIND] = "PARAMETER"
        missing.node.resize_inputs(3)
        missing.node.replace_input_with(2, own)


def _part_statistics(graph: ir.Graph) -> None:
    """Give a BatchNormalization statistics of its own where they are stored as its scale or shift, or another's."""
    names = Namespace.of_values(graph)
    learned = {v for n in graph if is_op(n, "BatchNormalization") for v in n.inputs[1:3] if v is not None}
    for node in graph:
        if not is_op(node, "BatchNormalization") or len(node.inputs) != 5:
            continue
        for index, statistic in ((3, "mean"), (4, "var")):
            value = node.inputs[index]
            if value is None or value not in learned or value.const_value is None or value.is_graph_input():
                continue
            scale = node.inputs[1].name if node.inputs[1] is not None else None
            stem = (scale or value.name or "").removesuffix(".weight")
            own = _store(graph, names.claim(f"{stem}.running_{statistic}"), value.const_value.numpy())
            node.replace_input_with(index, own)


def _features(node: ir.Node, weight: ir.Value) -> int | None:
    """How many a convolution or linear layer gives, if the shape of its weight is known."""
    call, sizes = Call(node), static_dims(weight) or [None, None]
    if node.op_type == "ConvTranspose":
        return None if sizes[1] is None else sizes[1] * call.int("group", 1)
    return sizes[1] if node.op_type == "Gemm" and not call.int("transB", 0) else sizes[0]


def _store(graph: ir.Graph, name: str, numbers: np.ndarray) -> ir.Value:
    tensor = ir.Tensor(numbers, name=name)
    value = ir.Value(name=name, shape=ir.Shape(numbers.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def _filled(tensor: ir.TensorProtocol) -> bool:
    """Whether all numbers of a floating vector or larger are the same."""
    if tensor.size < 2 or tensor.size > _LARGE or not tensor.dtype.is_floating_point():
        return False
    numbers = np.asarray(tensor.numpy())
    return bool((numbers == numbers.reshape(-1)[0]).all())
