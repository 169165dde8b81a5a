"""Inline the functions of a model."""

from __future__ import annotations

import onnx.inliner
import onnx_ir as ir
from onnx_ir.passes import common

from onnx_convgrad.base.boundary import root_cause
from onnx_convgrad.errors import ModelError
from onnx_convgrad.frontend.gate import expanded_nodes


def inline_functions(model: ir.Model) -> ir.Model:
    """Inline all functions; one of another opset than the model's is converted by ONNX's own inliner.

    Raises:
        ModelError: Neither can inline them.
    """
    try:
        if expanded_nodes(model) > _MANY:
            return _inlined_by_onnx(model)
        try:
            common.InlinePass()(model)
        except ValueError:
            return _inlined_by_onnx(model)
    except Exception as problem:
        raise ModelError(f"The model's functions cannot be inlined: {root_cause(problem)}.") from problem
    return model


_MANY = 1000
"""Smallest number of nodes for which ONNX's inliner is used: the time of onnx_ir's grows with their square."""


def _inlined_by_onnx(model: ir.Model) -> ir.Model:
    stored = {name: value.const_value for name, value in model.graph.initializers.items()}
    result = ir.from_proto(onnx.inliner.inline_local_functions(ir.to_proto(model), convert_version=True))
    for name, value in result.graph.initializers.items():  # external ones know their folder
        value.const_value = stored.get(name, value.const_value)
    return result
