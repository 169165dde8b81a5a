"""Check that an emitted model is valid ONNX without private operators, and that given shapes fit a model."""

from __future__ import annotations

import logging
from collections.abc import Callable

import onnx
import onnx_ir as ir

from onnx_convgrad.autodiff.layers import layer_of
from onnx_convgrad.autodiff.registry import is_built_in, lookup
from onnx_convgrad.errors import ArgumentError, RuleContractError
from onnx_convgrad.frontend.diagnose import checker_complaint, inference_complaint
from onnx_convgrad.frontend.usable import has_known_operands
from onnx_convgrad.ir.dims import known, static_product
from onnx_convgrad.ir.emit import DOMAIN
from onnx_convgrad.ir.nodes import all_nodes, is_op
from onnx_convgrad.ir.serialize import skeleton

logger = logging.getLogger(__name__)


def verify_shapes(model: ir.Model, without: Callable[[], ir.Model]) -> None:
    """Check that the canonical `model` accepts the shapes that the caller gave its inputs.

    `without` makes the model without these shapes: the caller is not to blame for its faults.

    Raises:
        ArgumentError: ONNX's shape inference finds a node whose operands do not fit together.
    """
    complaint = _mismatch(model)
    if complaint is not None and _mismatch(without()) is None:
        raise ArgumentError(f"The model does not take inputs of the given shapes: {complaint}.")


def _mismatch(model: ir.Model) -> str | None:
    """The first node whose operands do not fit together. Declared shapes are ignored: they may belong to other inputs."""
    for node in model.graph:
        layer, x = layer_of(node), next(iter(node.inputs), None)
        if x is None or x.shape is None:
            continue
        if layer is not None and layer.convolves:
            channels, expected = known(x.shape[layer.summed[0]]), layer.channels  # inference does not compare them
            if None not in (channels, expected) and channels != expected:
                return f"{node.name} ({node.op_type}) takes {expected} channels, and {x.name!r} has {channels}"
        if is_op(node, "Reshape"):
            counts = {static_product(v.shape.dims) for v in (x, node.outputs[0]) if v.shape is not None} - {None}
            if len(counts) > 1:
                return f"{node.name} (Reshape) makes {node.outputs[0].shape} of {x.shape}"
    proto = skeleton(model)
    del proto.graph.value_info[:]
    for info in proto.graph.output:
        info.type.tensor_type.ClearField("shape")
    complaint = inference_complaint(proto)
    return None if complaint is None else complaint.rstrip(".")


def verify(model: ir.Model, primal: ir.Model) -> onnx.ModelProto | None:
    """Check the emitted `model`; a complaint is only logged if the canonical `primal` draws one, too.

    Returns:
        The `skeleton` that was checked, if one was made.

    Raises:
        RuleContractError: A private operator is left, or ONNX's full check fails where the primal's passes; it names the
            rule of a plugin that emitted the node at fault.
    """
    nodes = list(all_nodes(model.graph))
    left = {node.op_type for node in nodes if node.domain == DOMAIN}
    if left:
        raise RuleContractError(f"Operators of the private domain are left after lowering: {sorted(left)}.")
    if not has_known_operands(nodes):
        return None
    proto = skeleton(model)
    complaint = checker_complaint(proto)
    if complaint is None:
        return proto
    if checker_complaint(skeleton(primal)) is not None:
        logger.info("The given model does not pass onnx.checker, nor does the result: %s", complaint)
        return proto
    for node in primal.graph:
        rule = lookup(node.domain, node.op_type)  # nodes that it emits are named after the forward node
        if rule is not None and not is_built_in(rule) and f"{node.name}/grad_" in complaint:
            raise RuleContractError(
                f"The rule of {rule.name} in {rule.module} emitted a node that is not valid: {complaint}",
                hint=f"Correct it in {rule.module}.",
            )
    raise RuleContractError(
        f"The emitted model does not pass onnx.checker: {complaint}",
        suspect="The shapes or types that the model declares contradict one another: with its gradients,"
        f" {complaint.rstrip('.')}.",
    )
