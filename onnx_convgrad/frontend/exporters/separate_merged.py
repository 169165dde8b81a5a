"""Give every parameter its own initializer, undoing the exporter's merging of equal ones.

PyTorch's TorchScript exporter stores equal tensors once. In a network fresh from its constructor, all BatchNormalization
scales and variances (ones) and all shifts and means (zeros) of one width become a single initializer, which Identity nodes
copy under the other names. Training such a file would tie them. The newer exporter drops the other names, and biases that
are zero; its notes identify them (see `pytorch`), as long as the nodes are those of the file.
"""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir

from onnx_convgrad.frontend.exporters.pytorch import FOLDED, by_exporter, left_out, merged, tie_copies
from onnx_convgrad.frontend.tidy import store
from onnx_convgrad.ir.namespace import Namespace
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.notes import INITIALIZER_KIND, RESTORED
from onnx_convgrad.ir.passes import GraphPass

_LARGE = 1 << 22

_MEMBER = re.compile(r"\w+(\.\w+)+")
"""Name of a parameter of a submodule."""


class SeparateMembers(GraphPass):
    """Give members of modules that an exporter merged, and statistics, their own initializers.

    Identity copies of constant-filled initializers become initializers, if both have names of members of modules, or the
    copy is a statistic. Others stay: they may be intended, and equal weights with different numbers are tied on purpose.
    """

    def rewrite(self, model: ir.Model) -> bool:
        graph = model.graph
        names = [node.outputs[0].name for node in graph if is_op(node, "Identity")]
        of_modules = model.producer_name == "pytorch" or any(
            _MEMBER.fullmatch(n or "") for n in (*graph.initializers, *names)
        )
        for node in list(graph):
            if not is_op(node, "Identity") or by_exporter(node):
                continue
            source, copy = node.inputs[0], node.outputs[0]
            if source is None or not source.is_initializer() or source.is_graph_input() or copy.is_graph_output():
                continue
            named = all(_is_member(v.name or "", outermost=of_modules) for v in (source, copy))
            if not (named or _is_statistic(copy)) or source.const_value is None or not _filled(source.const_value):
                continue
            name, copy.name = copy.name or "", None
            copy.replace_all_uses_with(store(graph, name, source.const_value.numpy()))
            graph.remove(node, safe=True)
        _separate_statistics(graph)
        return True


def _is_member(name: str, *, outermost: bool) -> bool:
    """Whether a name may be that of a member of a submodule, or of the `outermost` module."""
    return bool(_MEMBER.fullmatch(name)) or (outermost and name.isidentifier())


def _is_statistic(value: ir.Value) -> bool:
    """Whether a value is read only as a running mean or variance."""
    return all(is_op(use.node, "BatchNormalization") and use.idx in (3, 4) for use in value.uses())


class RestoreMerged(GraphPass):
    """Give each parameter and buffer that the newer exporter merged, omitted or copied exactly one initializer.

    The graph must be that of the file: the notes refer to its nodes.
    """

    def rewrite(self, model: ir.Model) -> bool:
        graph = model.graph
        for value in graph.initializers.values():
            value.meta.pop(RESTORED, None)  # of an earlier transformation, whose result this is
        _separate_merged(graph)
        _separate_statistics(graph)
        tie_copies(graph)
        return True


def merge_again(graph: ir.Graph) -> None:
    """Let nodes read what the file stores instead of the parameters that `RestoreMerged` added, in place."""
    for name, value in list(graph.initializers.items()):
        kept = graph.initializers.get(value.meta.get(RESTORED, ""))
        if RESTORED not in value.meta or (kept is None and value.meta[RESTORED]):
            continue
        for node, index in list(value.uses()):
            node.replace_input_with(index, kept)
            if kept is None:
                node.resize_inputs(index)
        del graph.initializers[name]
    _separate_statistics(graph)


def _separate_merged(graph: ir.Graph) -> None:
    names = Namespace.of_values(graph)
    for entry in merged(graph):
        tensor = entry.value.const_value
        if tensor is None or entry.value.is_graph_input():
            continue
        folded = FOLDED in entry.value.metadata_props
        own = store(graph, names.claim(entry.value.name or "" if folded else entry.name), tensor.numpy())
        own.metadata_props[INITIALIZER_KIND] = "PARAMETER" if entry.parameter else "BUFFER"
        if entry.parameter:
            own.meta[RESTORED] = entry.value.name
        if folded:
            own.metadata_props[FOLDED] = str([entry.name])
        for node, index in entry.uses:
            node.replace_input_with(index, own)
    for missing in left_out(graph):
        layer = missing.layer
        if layer.weight.dtype is None or layer.outputs is None:
            continue
        zeros = np.zeros(layer.outputs, layer.weight.dtype.numpy())
        own = store(graph, names.claim(missing.name), zeros)
        own.metadata_props[INITIALIZER_KIND] = "PARAMETER"
        own.meta[RESTORED] = ""
        layer.node.resize_inputs(3)
        layer.node.replace_input_with(2, own)


def _separate_statistics(graph: ir.Graph) -> None:
    """Give a BatchNormalization its own statistics where they are merged with a scale or shift."""
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
            own = store(graph, names.claim(f"{stem}.running_{statistic}"), value.const_value.numpy())
            node.replace_input_with(index, own)


def _filled(tensor: ir.TensorProtocol) -> bool:
    """Whether all elements of a floating tensor are one number."""
    if not tensor.size or tensor.size > _LARGE or not tensor.dtype.is_floating_point():
        return False
    numbers = np.asarray(tensor.numpy())
    return bool((numbers == numbers.reshape(-1)[0]).all())
