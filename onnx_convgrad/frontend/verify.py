"""The last stage: the emitted model is valid ONNX, holds nothing private, and says what it computes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import onnx
import onnx_ir as ir

from onnx_convgrad.errors import ArgumentError, RuleContractError
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import DOMAIN
from onnx_convgrad.ir.serialize import skeleton

__all__ = ["skeleton", "verify", "verify_shapes"]

logger = logging.getLogger(__name__)


def _complaint(model: ir.Model) -> str | None:
    try:
        onnx.checker.check_model(skeleton(model), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as problem:
        return str(problem)
    return None


def verify_shapes(model: ir.Model, without: Callable[[], ir.Model]) -> None:
    """Check that the canonical `model` takes the shapes that the caller gave its inputs.

    What is wrong with the model `without` them, too, is not the caller's fault.

    Raises:
        ArgumentError: ONNX's shape inference finds a node whose operands do not go together.
    """
    complaint = _clash(model)
    if complaint is not None and _clash(without()) is None:
        raise ArgumentError(f"The model does not take inputs of the given shapes: {complaint}.")


def _clash(model: ir.Model) -> str | None:
    """The first node that inference objects to; declared shapes, which may be of other inputs, are no objection."""
    for node in model.graph:
        x, w = (*node.inputs, None, None)[:2]
        if node.op_type == "Conv" and x is not None and w is not None and x.shape is not None and w.shape is not None:
            have, each = x.shape[1], w.shape[1]  # which inference does not compare
            if isinstance(have, int) and isinstance(each, int) and have != each * Call(node).int("group", 1):
                takes = each * Call(node).int("group", 1)
                return f"{node.name} (Conv) takes {takes} channels, and {x.name!r} has {have}"
    proto = skeleton(model)
    del proto.graph.value_info[:]
    for info in proto.graph.output:
        info.type.tensor_type.ClearField("shape")
    try:
        onnx.shape_inference.infer_shapes(proto, strict_mode=True)
    except onnx.shape_inference.InferenceError as problem:
        return " ".join(str(problem).split()).rstrip(".")
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
