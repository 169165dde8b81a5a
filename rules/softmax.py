"""Softmax and LogSoftmax.

    y[i] = exp x[i] / sum over j of exp x[j]

The cross-entropy losses have no rule: they are differentiated through their ONNX function bodies.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir

from onnx_convgrad.autodiff.factors import along, attribute, mix
from onnx_convgrad.autodiff.registry import vjp, zero
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op


def _total(e: Emitter, n: Call, value: ir.Value) -> ir.Value:
    """The sum along the axis of the operator, which keeps size one."""
    return e.reduce_sum(value, [n.int("axis", -1)])


_NORMALIZED = along(attribute("axis", -1), mix("normalizes along"))


@vjp("Softmax", wrt="input", factors=_NORMALIZED, bounds=(0, 1))
def softmax_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """dy[i]/dx[j] = y[i] ([i = j] - y[j]): dx[i] = y[i] (g[i] - sum over j of y[j] g[j])."""
    y, gy = _without_nan(e, n.y), g["output"]
    return e.mul(y, e.sub(gy, _total(e, n, e.mul(y, gy))))


def _without_nan(e: Emitter, y: ir.Value) -> ir.Value:
    """y with 0 in place of NaN if a later Where discards NaN: attention with a fully masked row computes NaN for it."""
    readers = list(y.uses())
    for reader, index in readers:
        if is_op(reader, "Cast", "CastLike", "Identity", "Dropout") and index == 0:
            readers += reader.outputs[0].uses()
        elif is_op(reader, "Where") and index > 0:
            safe = reader.outputs[0] if _is_zero_for_nan(e, reader, y) else e.where(e.op("IsNaN", y), 0, y)
            return e.typed(safe, y)
    return y


def _is_zero_for_nan(e: Emitter, where: ir.Node, y: ir.Value) -> bool:
    condition, instead, kept = where.inputs
    test = condition.producer() if condition is not None else None
    constant = e.constant_of(instead) if instead is not None else None
    return kept is y and is_op(test, "IsNaN") and test.inputs[0] is y and constant is not None and not constant.any()


@vjp("LogSoftmax", wrt="input", factors=_NORMALIZED, bounds=(-math.inf, 0))
def log_softmax_vjp(e: Emitter, n: Call, g: dict[str, Any]) -> ir.Value:
    """dy[i]/dx[j] = [i = j] - exp y[j]: dx[j] = g[j] - exp(y[j]) sum over i of g[i]."""
    gy = g["output"]
    return e.sub(gy, e.mul(e.op("Exp", n.y), _total(e, n, gy)))


zero("Hardmax", factors=_NORMALIZED, bounds=(0, 1))
