"""Whether a cotangent may be infinite, so that a rule must select it instead of multiplying it by a mask of 0 and 1."""

from __future__ import annotations

import onnx_ir as ir

from onnx_convgrad.autodiff.activity import rule_of
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.notes import origin_of


def meets_a_pole(value: ir.Value) -> bool:
    """Whether the model applies a function with an infinite derivative at 0 (a root, a logarithm) to multiples of `value`.

    The cotangent is then infinite where the value is 0, and must be selected, not multiplied by 0.
    """
    todo, seen = [value], {value}
    while todo:
        for use in todo.pop().uses():
            node = use.node
            rule = None if origin_of(node) else rule_of(node)  # nodes with an origin were added by differentiation
            if rule is None:
                continue
            call = Call(node)
            name = call.names[0][use.idx]
            if 0 in rule.poles_in(call, name):
                return True
            if rule.is_zero_with(call, name):
                todo += [result for result in node.outputs if result not in seen]
                seen.update(node.outputs)
    return False


def chosen(e: Emitter, condition: ir.Value, y: ir.Value) -> ir.Value:
    """A condition as the derivative of y: as 0 and 1, which is fast, or to select cotangents that may be infinite."""
    return condition if meets_a_pole(y) else e.mask(condition, y)
