"""Fold integers that a model computes from constants and static sizes.

Exporters write the amounts of a Pad and the shape of a Reshape as a dozen nodes. With constants, shape inference finds the
sizes of the results, and rules and lowerings see static shapes. One walk infers the shape of each node and then folds its
value; symbolic sizes are left to symbolic inference. Integers are exact: no bit of a forward result changes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

from onnx_convgrad.frontend.shapes import shape_rules
from onnx_convgrad.frontend.tidy import store
from onnx_convgrad.ir.constants import constant_of, forget_constants
from onnx_convgrad.ir.emit import RANDOM, known, static_dims
from onnx_convgrad.ir.nodes import is_op, nested_graphs
from onnx_convgrad.ir.passes import GraphPass

logger = logging.getLogger(__name__)

_EXACT = frozenset((ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL))


class FoldSizes(GraphPass):
    """Infer static sizes and replace integers that follow from them by initializers of the same name.

    In nested graphs integers are replaced that follow from constants alone. Constants must be initializers; the opset may be
    any. Only a replaced node counts as a change.
    """

    def rewrite(self, model: ir.Model) -> bool:
        shape_rules.install()
        graph, changed = model.graph, False
        forget_constants(graph)
        context = ShapeInferenceContext(graph.opset_imports, policy="skip")
        for node in _candidates(graph):
            if node.domain:
                continue
            _infer(context, node, graph.opset_imports.get("", 0))
            if _foldable(node):
                _replace(graph, node)
                changed = True
        return changed


def _candidates(graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes of a graph, and then those in nested graphs that depend on constants alone by then."""
    yield from list(graph)
    for node in [node for inner in nested_graphs(graph) for node in inner]:
        if node.inputs and all(constant_of(v) is not None for v in node.inputs):
            yield node


def _infer(context: ShapeInferenceContext, node: ir.Node, opset: int) -> None:
    """Infer the sizes that are numbers; other known sizes stay."""
    for value in node.outputs:
        _parse_numbers(value)
    unknown = [(v, v.shape) for v in node.outputs if not _static(v)]
    infer = registry.get("", node.op_type, version=opset)
    if not unknown or infer is None or any(v is not None and v.shape is None for v in node.inputs):
        return
    for value, _ in unknown:
        value.shape = None
    try:
        infer(context, node)
    except Exception as problem:  # noqa: BLE001 - a missing shape is never fatal here
        logger.debug("shape inference of %s failed: %s", node.op_type, problem)
    for value, before in unknown:
        if not _static(value):
            value.shape = _merged(before, value.shape)


def _parse_numbers(value: ir.Value) -> None:
    """Turn symbols that are named like a number into the number; symbolic inference leaves some of them."""
    names = [] if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
    if any(isinstance(name, str) and name.isdecimal() for name in names):
        value.shape = ir.Shape([int(d) if isinstance(d, str) and d.isdecimal() else d for d in names])


def _static(value: ir.Value) -> bool:
    dims = static_dims(value)
    return dims is not None and None not in dims


def _merged(before: ir.Shape | None, inferred: ir.Shape | None) -> ir.Shape | None:
    if before is None or inferred is None or len(before) != len(inferred):
        return before
    return ir.Shape([old if known(new) is None else new for old, new in zip(before, inferred, strict=True)])


def _foldable(node: ir.Node) -> bool:
    if node.op_type in RANDOM or len(node.outputs) != 1:
        return False
    value = node.outputs[0]
    exact = value.dtype in _EXACT and not value.is_graph_output() and bool(value.uses())
    return exact and constant_of(value) is not None


def _replace(graph: ir.Graph, node: ir.Node) -> None:
    old = node.outputs[0]
    array = constant_of(old)
    assert array is not None and old.dtype is not None, "only integers of known value are replaced"  # noqa: PT018
    name, old.name = old.name, None
    new = store(graph, name or "", array.astype(old.dtype.numpy()), old.dtype)
    ranges = [use for use in old.uses() if is_op(use.node, "Range")] if array.shape == (1,) else []
    old.replace_all_uses_with(new)
    # The runtime accepts a computed vector of one, as in ONNX's AffineGrid body, but not a constant one.
    for use in ranges:
        use.node.replace_input_with(use.idx, _scalar(graph, new))
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def _scalar(graph: ir.Graph, vector: ir.Value) -> ir.Value:
    """The element of a stored vector of one as a scalar initializer, shared by all uses."""
    name = f"{vector.name}_number"
    if name not in graph.initializers:
        assert vector.const_value is not None
        return store(graph, name, vector.const_value.numpy().reshape(()))
    return graph.initializers[name]
