"""A convolution and the frozen BatchNormalization after it, differentiated as one convolution.

With mean and variance given, and a = scale (var + eps)^(-1/2) per channel,

    scale (conv(x, w) + b - mean) (var + eps)^(-1/2) + B = conv(x, a w) + a (b - mean) + B

so no cotangent needs the value between them: that of the scale follows from that of the folded weight. The forward nodes
are unchanged. The sums of products are not centered on the mean, which costs digits if that is large against the deviation.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import onnx_ir as ir

from onnx_convgrad.autodiff.registry import joint
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import Emitter, static_dims
from onnx_convgrad.ir.normalized import inverse_deviation
from onnx_convgrad.rules.conv import require_vector


@joint("BatchNormalization", operand="X", producer="Conv")
def folded_conv(e: Emitter, n: Call, inner: Call, varied: Collection[ir.Value]) -> ir.Value | None:
    """conv(x, a w) + a (b - mean) + B."""
    w, scale, var = inner["W"], n["scale"], n["input_var"]
    of_weight_only = w not in varied and (scale in varied or var in varied)
    if n.int("training_mode", 0) or of_weight_only or not _worthwhile(w, n.y):
        return None
    bias, mean = inner.get("B"), n["input_mean"]
    require_vector(bias)
    a = e.mul(scale, inverse_deviation(e, var, n.float("epsilon", 1e-5)))
    rank = e.rank(w, "the gradient of a convolution")
    shift = e.neg(mean) if bias is None else e.sub(bias, mean)
    weight, offset = e.mul(w, e.unsqueeze(a, range(1, rank))), e.add(e.mul(shift, a), n["B"])
    return e.typed(e.op("Conv", inner["X"], weight, offset, **inner.attributes()), n.y)


def _worthwhile(w: ir.Value, y: ir.Value) -> bool:
    """Whether the weight has no more elements than the result; never in float16, which would round the folded weight."""
    weight, result = static_dims(w), static_dims(y)
    if w.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE) or w.shape is None:
        return False
    if weight is None or result is None or None in weight or None in result:
        return True
    return math.prod(d or 0 for d in weight) <= math.prod(d or 0 for d in result)
