"""Inline the functions of a model."""

from __future__ import annotations

import onnx.inliner
import onnx_ir as ir
from onnx_ir.passes import common

from onnx_convgrad.base.boundary import root_cause
from onnx_convgrad.errors import ModelError
from onnx_convgrad.frontend.gate import expanded_nodes
from onnx_convgrad.ir.passes import GraphPass


class InlineFunctions(GraphPass):
    """Replace calls of functions by their nodes; ONNX's own inliner converts those of another opset than the model's.

    Raises:
        ModelError: Some function cannot be inlined.
    """

    def rewrite(self, model: ir.Model) -> bool:
        if not model.functions:
            return False
        try:
            if expanded_nodes(model) > _MANY:
                _inline_by_onnx(model)
            else:
                try:
                    common.InlinePass()(model)
                except ValueError:
                    _inline_by_onnx(model)
        except Exception as problem:
            raise ModelError(f"The model's functions cannot be inlined: {root_cause(problem)}.") from problem
        return True


_MANY = 1000
"""Smallest number of nodes for which ONNX's inliner is used: the time of onnx_ir's grows with their square."""


def _inline_by_onnx(model: ir.Model) -> None:
    stored = {name: value.const_value for name, value in model.graph.initializers.items()}
    result = ir.from_proto(onnx.inliner.inline_local_functions(ir.to_proto(model), convert_version=True))
    for name, value in result.graph.initializers.items():  # external ones know their folder
        value.const_value = stored.get(name, value.const_value)
    model.graph = result.graph
    model.functions.clear()
