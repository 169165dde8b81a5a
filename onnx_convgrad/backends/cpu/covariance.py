"""Training-mode BatchNormalization after a pointwise convolution, with statistics from what the convolution takes.

y = scale (W u - mean) r + B, with W u of many more channels than u. Its mean is W mean(u), and its variances are the
diagonal of W S W' with S the covariance of u. So, with z = u - mean(u),

    S = z z' / M        v = diag(W S W')        y = (W scale (v + eps)^(-1/2)) z + B

W u is never written down: normalizing it costs no pass over memory, neither forward nor backward, where S gives one small
product. The derivative follows from that of the operators. The variance has the digits of W S W', which are fewer than
those of a sum over W u where W all but cancels u: `lowering="exact"` does without.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import DOMAIN, Dim, Emitter, known
from onnx_convgrad.ir.geometry import HINT_BATCH, HINT_SIZE
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.ir.replace import become
from onnx_convgrad.ir.targets import Rates, Target

__all__ = ["normalize_by_covariance"]

_PASSES = 12
"""Over W u, that normalizing it takes, forward and backward."""

_SIDE = 16
"""More nodes than the operands of a BatchNormalization take: what else uses its input."""


def normalize_by_covariance(graph: ir.Graph, target: Target, keep: Collection[ir.Value] = ()) -> None:
    """Rewrite those BatchNormalization nodes of `graph`, in place, for which it pays.

    Args:
        graph: A canonical graph, whose statistics are shared (see `share_statistics`).
        target: What it will run on.
        keep: Values that must stay what they are.
    """
    if target.narrow_products:
        return  # the variance would have three digits, and none where W cancels u
    e = Emitter(graph, opsets=graph.opset_imports, target=target)
    for node in list(graph):
        conv = _convolution(node, keep)
        if conv is not None and _pays(conv, target.rates):
            _rewrite(e, node, conv)


def _convolution(node: ir.Node, keep: Collection[ir.Value]) -> ir.Node | None:
    """The pointwise convolution that `node` normalizes, if nothing else sees its result or the blended statistics."""
    if not is_op(node, "BatchNormalization") or not _of_batch(node):
        return None
    if any(v in keep or v.is_graph_output() for v in node.outputs[1:]):
        return None
    x = node.inputs[0]
    conv = x.producer() if x is not None else None
    if x is None or not is_op(conv, "Conv"):
        return None
    alone = x not in keep and _only_for(x, node)
    operands = [*conv.inputs, *node.inputs[1:3]]
    single = all(v is None or v.dtype == ir.DataType.FLOAT for v in operands)
    return conv if alone and single and _pointwise(conv) else None


def _only_for(value: ir.Value, node: ir.Node) -> bool:
    """Whether whatever is computed from `value` ends at `node`, after the few nodes that make its operands."""
    seen, open_ = {node}, [value]
    while open_:
        value = open_.pop()
        users = {use.node for use in value.uses()} - seen
        seen |= users
        if value.is_graph_output() or len(seen) > _SIDE:
            return False
        open_ += [v for user in users for v in user.outputs]
    return True


def _of_batch(node: ir.Node) -> bool:
    """Whether the node normalizes with the statistics of the batch, and gives those or none."""
    n = Call(node)
    if not n.int("training_mode", 0):
        return False
    return n.float("momentum", 0.9) == 0 or not any(v.uses() for v in node.outputs[1:])


def _pointwise(conv: ir.Node) -> bool:
    """Whether it multiplies each point by one matrix, of known size, and adds nothing."""
    u, w = conv.inputs[:2]
    if len(conv.inputs) > 2 and conv.inputs[2] is not None:
        return False
    if u is None or w is None or u.shape is None or w.shape is None or len(w.shape) < 3:
        return False
    sizes = [known(d) for d in w.shape]
    if None in sizes or any(d != 1 for d in sizes[2:]) or known(u.shape[1]) != sizes[1]:
        return False
    n = Call(conv)
    return n.int("group", 1) == 1 and set(n.ints("strides") or ()) <= {1} and set(n.ints("pads") or ()) <= {0}


def _pays(conv: ir.Node, rates: Rates) -> bool:
    """Whether the passes over W u cost more than the products and passes that S takes."""
    u, w = conv.inputs[:2]
    assert u is not None
    assert u.shape is not None
    assert w is not None
    assert w.shape is not None
    features, channels = (known(d) or 1 for d in list(w.shape)[:2])
    batch, *sizes = (known(d) for d in (u.shape[0], *list(u.shape)[2:]))
    points = (batch or HINT_BATCH) * math.prod(s or HINT_SIZE for s in sizes)
    saved = _PASSES * _pass(features * points, rates)
    slow = 1 + (rates.small + 8) / channels
    spent = 4.0 * points * channels**2 * slow / rates.gemm + 8 * _pass(channels * points, rates) + 60 * rates.node
    return saved > spent


def _pass(elements: int, rates: Rates) -> float:
    """Seconds of reading so many numbers once; three such arrays compete for the cache."""
    return 4 * elements / (rates.cached if 12 * elements < rates.cache else rates.memory)


def _rewrite(e: Emitter, node: ir.Node, conv: ir.Node) -> None:
    u, w = conv.inputs[:2]
    scale, bias = node.inputs[1:3]
    assert u is not None
    assert w is not None
    assert scale is not None
    assert u.shape is not None
    start, e.anchor = len(e.emitted), node
    rank = len(u.shape)
    features, channels = (e.dim(w, axis) for axis in (0, 1))
    assert isinstance(channels, int)
    mean = e.reduce("ReduceMean", u, [0, *range(2, rank)])
    centred = e.sub(u, mean)
    matrix = e.reshape(w, [features, channels])
    covariance = _covariance(e, centred, channels)
    product = e.mul(e.matmul(matrix, covariance), matrix)
    variance = e.op("Relu", e.reduce_sum(product, [1], keepdims=False))
    deviation = e.op("Sqrt", e.add(variance, Call(node).float("epsilon", 1e-5)))
    scaled = e.mul(w, e.unsqueeze(e.div(scale, deviation), list(range(1, rank))))
    if len(node.outputs) == 3:
        means = e.reshape(e.matmul(matrix, e.reshape(mean, [channels, 1])), [features])
        for given, value in zip(node.outputs[1:], (means, variance), strict=True):
            given.replace_all_uses_with(value)
    for count, made in enumerate(e.emitted[start:], 1):
        made.name = f"{node.name}/covariance_{count}"
    copies = [ir.Attr(a.name, a.type, a.value) for a in conv.attributes.values()]
    become(node, "Conv", [centred, scaled, bias], copies)


def _covariance(e: Emitter, centred: ir.Value, channels: int) -> ir.Value:
    """z z' / M: the weight gradient of a pointwise convolution with itself."""
    assert centred.shape is not None
    rank = len(centred.shape) - 2
    like = e.const(np.zeros((channels, channels, *[1] * rank)), centred.dtype)
    window = {"strides": (1,) * rank, "dilations": (1,) * rank, "pads": (0,) * (2 * rank), "group": 1}
    total = e.op("ConvWeightGrad", centred, centred, like, domain=DOMAIN, **window)
    sizes: list[Dim] = [e.dim(centred, axis) for axis in (0, *range(2, rank + 2))]
    count = e.size_mul(*sizes)
    flat = e.reshape(total, [channels, channels])
    return e.mul(flat, 1 / max(count, 1)) if isinstance(count, int) else e.div(flat, e.size_as(count, flat))
