"""Exchange BatchNormalization, which mixes samples, for GroupNormalization, which treats each by itself."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.base.numbers import whole
from onnx_convgrad.errors import ArgumentError, ModelError
from onnx_convgrad.frontend.files import AnyModel, cloned
from onnx_convgrad.frontend.kinds import transformation
from onnx_convgrad.frontend.load import load
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.nodes import is_op


@transformation
def replace_batchnorm(model: AnyModel, *, groups: int = 32) -> ir.Model:
    """Exchange every BatchNormalization for a GroupNormalization with the same scale and bias.

    GroupNormalization (Wu and He 2018, arXiv:1803.08494) normalizes each sample by itself over groups of channels, so that
    the model can be trained with privacy, or on small batches. The model computes other numbers than before, until it is
    trained: its running statistics are gone.

    Args:
        model: A path, an `onnx.ModelProto`, an `onnx_ir.Model` or an `onnx_convgrad.Model`. Never changed.
        groups: Most groups of a layer; the greatest divisor of its channels up to this is taken.

    Returns:
        The model at opset 21, with the same inputs and outputs. Scale and bias keep their names.

    Raises:
        ArgumentError: The model has no BatchNormalization.
        ModelError: The model cannot be read, or the number of channels of a layer is unknown.
    """
    groups = whole(groups, "groups")
    changed = cloned(load(model).canonical)
    nodes = [n for n in changed.graph.all_nodes() if is_op(n, "BatchNormalization")]
    if not nodes:
        raise ArgumentError(
            "The model has no BatchNormalization.",
            hint="Converters fold it into the convolution before it; such a file needs no replacement.",
        )
    for node in nodes:
        _replace(node, groups)
    for name in [name for name, v in changed.graph.initializers.items() if not (v.uses() or v.is_graph_output())]:
        del changed.graph.initializers[name]
    return changed


def _replace(node: ir.Node, groups: int) -> None:
    x, scale, bias = node.inputs[:3]
    size = scale.shape[0] if scale is not None and scale.shape is not None and len(scale.shape) == 1 else None
    if not isinstance(size, int):
        raise ModelError(f"The number of channels of the BatchNormalization {node.name!r} is unknown.")
    if any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
        raise ModelError(f"The statistics of the BatchNormalization {node.name!r} are used elsewhere.")
    number = max(g for g in range(1, min(groups, size) + 1) if size % g == 0)
    attributes = [
        ir.AttrInt64("num_groups", number),
        ir.AttrFloat32("epsilon", Call(node).float("epsilon", 1e-5)),
    ]
    old = node.outputs[0]
    new = ir.Node("", "GroupNormalization", [x, scale, bias], attributes, name=node.name)
    result = new.outputs[0]
    result.name, result.type, result.shape = old.name, old.type, old.shape
    graph = node.graph
    assert graph is not None
    graph.insert_after(node, new)
    old.replace_all_uses_with(result, replace_graph_outputs=True)
    graph.remove(node, safe=True)
