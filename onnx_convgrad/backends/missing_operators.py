"""Write operators that WebGPU lacks with those that it has, so that no value goes to the CPU and back."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter, static_dims
from onnx_convgrad.ir.passes import NodePass
from onnx_convgrad.ir.slopes import selu_scales

Form = Callable[[Emitter, Call], ir.Value | None]
"""Emits an equivalent; `None`: there is none for this node."""


class ReplaceMissingOperators(NodePass):
    """Replace operators that the target lacks by plain ones; nothing for targets that lack none of them.

    It rests on the kernel table in `backends.webgpu_kernels`. Integers are left alone: their nodes run on the CPU.
    """

    label = "plain"
    bodies = True

    @property
    def operators(self) -> tuple[str, ...]:  # type: ignore[override] # those of the target
        """The operators that the target lacks and that have an equivalent."""
        missing = self.target.missing if self.target is not None and self.target.plain_only else ()
        return tuple(name for name in _FORMS if name in missing)

    def rewrite_node(self, e: Emitter, node: ir.Node) -> ir.Value | bool | None:
        """Rewrite one node."""
        first = node.inputs[0] if node.inputs else None
        if (
            first is None
            or first.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16)
            or node.outputs[0].shape is None
        ):
            return None
        result = _FORMS[node.op_type](e, Call(node))
        return None if result is None else e.typed(result, node.outputs[0])


def _larger(e: Emitter, n: Call) -> ir.Value:
    return functools.reduce(lambda a, b: e.where(e.compare("Greater", a, b), a, b), _operands(n))


def _smaller(e: Emitter, n: Call) -> ir.Value:
    return functools.reduce(lambda a, b: e.where(e.compare("Less", a, b), a, b), _operands(n))


def _operands(n: Call) -> list[ir.Value]:
    return [v for v in n.inputs if v is not None]


def _sum(e: Emitter, n: Call) -> ir.Value:
    return e.sum(_operands(n)) if len(_operands(n)) > 1 else e.op("Identity", n.node.inputs[0])


def _mean(e: Emitter, n: Call) -> ir.Value:
    return e.mul(e.sum(_operands(n)), 1 / len(_operands(n)))


def _sign(e: Emitter, n: Call) -> ir.Value:
    x = _operands(n)[0]
    return e.sub(e.mask(e.compare("Greater", x, 0), x), e.mask(e.compare("Less", x, 0), x))


def _log_softmax(e: Emitter, n: Call) -> ir.Value:
    x, axis = _operands(n)[0], n.int("axis", -1)
    shifted = e.sub(x, e.reduce("ReduceMax", x, [axis]))
    return e.sub(shifted, e.op("Log", e.reduce_sum(e.op("Exp", shifted), [axis])))


def _prelu(e: Emitter, n: Call) -> ir.Value:
    x, slope = _operands(n)
    return e.where(e.compare("Greater", x, 0), x, e.mul(x, slope))


def _softsign(e: Emitter, n: Call) -> ir.Value:
    x = _operands(n)[0]
    return e.div(x, e.add(e.op("Abs", x), 1))


def _selu(e: Emitter, n: Call) -> ir.Value:
    x = _operands(n)[0]
    alpha, gamma = selu_scales(n)
    low = e.mul(e.sub(e.op("Exp", e.op("Clip", x, None, e.scalar(0, x))), 1), alpha)
    return e.mul(e.where(e.compare("Greater", x, 0), x, low), gamma)


def _average_pool(e: Emitter, n: Call) -> ir.Value | None:
    """A convolution of each channel by ones, divided by the number of pixels that count."""
    x, kernel = _operands(n)[0], n.ints("kernel_shape") or ()
    sizes = static_dims(x)
    if n.int("ceil_mode", 0) or len(kernel) > 2 or sizes is None or sizes[1] is None:
        return None
    pads, channels = n.ints("pads"), sizes[1]
    excluding = any(pads or ()) and not n.int("count_include_pad", 0)
    if n.string("auto_pad", "NOTSET") != "NOTSET" or (excluding and None in sizes[2:]):
        return None
    kind: dict[str, Any] = {
        "strides": n.ints("strides"),
        "pads": pads,
        "dilations": n.ints("dilations"),
        "group": channels,
    }
    weight = np.full((channels, 1, *kernel), 1.0 if excluding else 1 / math.prod(kernel))
    total = e.conv(x, e.const(weight, x.dtype), **kind)
    if not excluding:
        return total
    ones = np.ones((1, channels, *(d for d in sizes[2:] if d is not None)))
    return e.div(total, e.conv(e.const(ones, x.dtype), e.const(weight, x.dtype), **kind))


_FORMS: dict[str, Form] = {
    "AveragePool": _average_pool,
    "LogSoftmax": _log_softmax,
    "Max": _larger,
    "Mean": _mean,
    "Min": _smaller,
    "PRelu": _prelu,
    "Selu": _selu,
    "Sign": _sign,
    "Softsign": _softsign,
    "Sum": _sum,
}
