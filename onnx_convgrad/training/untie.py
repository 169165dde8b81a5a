"""Parameters that an exporter has merged because they happened to be equal are given back their own storage.

PyTorch's TorchScript exporter stores equal tensors once: of a network fresh from its constructor, all BatchNormalization
scales and variances (ones) and all shifts and means (zeros) of one width become a single initializer, from which the
others, still under their own names, are copied by Identity. To train that as it is would tie them together.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_convgrad.graph.nodes import is_op

__all__ = ["untie"]

_LARGE = 1 << 22


def untie(graph: ir.Graph) -> list[str]:
    """Turn every copy of a constant-filled initializer into an initializer, in place; returns their names.

    Equal numbers that are not all the same are left shared: those are tied weights, not a coincidence.
    """
    done = []
    for node in list(graph):
        if not is_op(node, "Identity"):
            continue
        source, copy = node.inputs[0], node.outputs[0]
        if source is None or not source.is_initializer() or source.is_graph_input() or copy.is_graph_output():
            continue
        if source.const_value is None or not _filled(source.const_value):
            continue
        name, copy.name = copy.name, None
        own = ir.Value(name=name, shape=source.shape, type=source.type)
        own.const_value = ir.Tensor(source.const_value.numpy(), name=name)
        copy.replace_all_uses_with(own)
        graph.remove(node, safe=True)
        graph.register_initializer(own)
        done.append(name or "")
    return done


def _filled(tensor: ir.TensorProtocol) -> bool:
    """Whether all numbers of a floating vector or larger are the same."""
    if tensor.size < 2 or tensor.size > _LARGE or not tensor.dtype.is_floating_point():
        return False
    numbers = np.asarray(tensor.numpy())
    return bool((numbers == numbers.reshape(-1)[0]).all())
