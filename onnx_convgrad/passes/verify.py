"""The last stage: the emitted model is valid ONNX, holds nothing private, and says what it computes."""

from __future__ import annotations

import logging

import onnx
import onnx_ir as ir

from onnx_convgrad.emit import DOMAIN
from onnx_convgrad.errors import RuleContractError

__all__ = ["skeleton", "verify"]

logger = logging.getLogger(__name__)

_SMALL = 1024


def skeleton(model: ir.Model) -> onnx.ModelProto:
    """The model as a proto whose large and external weights are inputs, so that checking never copies or reads them."""
    graph = model.graph
    large = {
        name: value
        for name, value in graph.initializers.items()
        if value.const_value is not None and _apart(value.const_value)
    }
    added = [value for value in large.values() if not value.is_graph_input()]
    for name in large:
        del graph.initializers[name]
    graph.inputs.extend(added)
    try:
        return ir.to_proto(model)
    finally:
        del graph.inputs[len(graph.inputs) - len(added) :]
        for name, value in large.items():
            graph.initializers[name] = value


def _apart(tensor: ir.TensorProtocol) -> bool:
    return tensor.size > _SMALL or isinstance(tensor, ir.ExternalTensor)


def _complaint(model: ir.Model) -> str | None:
    try:
        onnx.checker.check_model(skeleton(model), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as problem:
        return str(problem)
    return None


def verify(model: ir.Model, primal: ir.Model) -> None:
    """Check the emitted `model`; complaints that the canonical `primal` draws too are only logged.

    Raises:
        RuleContractError: A private operator is left, or ONNX's full check fails where the primal's passes.
    """
    left = [node.op_type for node in model.graph.all_nodes() if node.domain == DOMAIN]
    if left:
        raise RuleContractError(f"Operators of the private domain are left after lowering: {sorted(set(left))}.")
    complaint = _complaint(model)
    if complaint is None:
        return
    if _complaint(primal) is not None:
        logger.info("The given model does not pass onnx.checker, nor does the result: %s", complaint)
        return
    raise RuleContractError(f"The emitted model does not pass onnx.checker: {complaint}")
