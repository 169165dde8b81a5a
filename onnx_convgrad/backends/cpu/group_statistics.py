"""Write instance and group normalization out for training, so that both directions share the statistics.

    z = x - mean(x)        r = (mean(z z) + eps)^(-1/2)        y = z (r scale) + B

with means over each sample's groups of channels. As one operator each direction computes z and r, and the scale takes
another pass over memory; written out, both directions take 21 passes instead of about 30. The derivative follows from that
of the operators. PyTorch's exporters write a GroupNorm as

    Reshape to [N, groups, -1], InstanceNormalization with a scale of ones, Reshape to the shape of x, Mul, Add

where r is multiplied into the factor of the Mul. The forward value may differ in the last digit.

Wu and He, "Group Normalization", 2018.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.constants import constant_of
from onnx_convgrad.ir.emit import Emitter, dims_equal, known, static_dims
from onnx_convgrad.ir.nodes import is_op, sole_producer
from onnx_convgrad.ir.normalized import Normalized, axes_from
from onnx_convgrad.ir.passes import NodePass
from onnx_convgrad.ir.replace import become


class ShareGroupStatistics(NodePass):
    """Write out InstanceNormalization and GroupNormalization: 21 passes over memory for both directions instead of 30."""

    operators = ("GroupNormalization", "InstanceNormalization")
    label = "statistics"

    def rewrite_node(self, e: Emitter, node: ir.Node) -> bool:
        """Turn the node, or the Mul behind it, into the last of the operators."""
        if not _fits(node):
            return False
        scaled = _Scaled.after(node, self.keep)
        if scaled is not None:
            _scale(e, node, scaled)
        elif node.op_type == "GroupNormalization":
            _normalize_groups(e, node)
        else:
            _normalize_channels(e, node)
        return True


def _fits(node: ir.Node) -> bool:
    """Whether the type is precise enough for the sums, and the sizes on which the shape of the result depends are known."""
    n = Call(node)
    x, scale = node.inputs[:2]
    if x is None or scale is None or x.shape is None or scale.shape is None or x.dtype not in _TYPES:
        return False
    channels = known(scale.shape[0]) if scale.shape else None
    return len(x.shape) >= 3 and channels is not None and channels % n.int("num_groups", 1) == 0


_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def _statistics(e: Emitter, x: ir.Value, epsilon: float) -> tuple[ir.Value, ir.Value]:
    """z and r, over the axes from the third on."""
    normalized = Normalized.of(e, x, axes_from(e, x, 2), epsilon)
    return normalized.centered, normalized.inverse


def _normalize_channels(e: Emitter, node: ir.Node) -> None:
    x, scale, bias = (Call(node)[name] for name in ("input", "scale", "B"))
    centered, inverse = _statistics(e, x, Call(node).float("epsilon", 1e-5))
    if _is(scale, 1) and _is(bias, 0):
        become(node, "Mul", [centered, inverse])
        return
    inner = range(1, e.rank(x) - 1)
    slope = e.mul(inverse, e.unsqueeze(scale, inner))
    become(node, "Add", [e.mul(centered, slope), e.unsqueeze(bias, inner)])


def _normalize_groups(e: Emitter, node: ir.Node) -> None:
    n = Call(node)
    x, scale, bias = (n[name] for name in ("X", "scale", "bias"))
    dims, groups = e.dims(x), n.int("num_groups", 1)
    within = e.size_div(e.size_mul(*dims[1:]), groups)
    centered, inverse = _statistics(e, e.reshape(x, [dims[0], groups, within]), n.float("epsilon", 1e-5))
    scaled = e.mul(e.reshape(centered, dims), _slope(e, inverse, scale, len(dims)))
    become(node, "Add", [scaled, e.unsqueeze(bias, range(1, len(dims) - 1))])


def _slope(e: Emitter, inverse: ir.Value, scale: ir.Value, rank: int) -> ir.Value:
    """r scale per sample and channel, for values of this rank; r has one entry per sample and group."""
    groups, channels = e.dim(inverse, 1), e.dim(scale, 0)
    each = e.mul(inverse, e.reshape(scale, [1, groups, e.size_div(channels, groups)]))
    return e.reshape(each, [e.dim(inverse, 0), channels, *[1] * (rank - 2)])


def _is(value: ir.Value, wanted: float) -> bool:
    array = constant_of(value)
    return array is not None and bool((array == wanted).all())


@dataclass(frozen=True, slots=True)
class _Scaled:
    """The nodes after the InstanceNormalization of an exported GroupNorm: the Reshape, the Mul and its factor."""

    shaped: ir.Node
    scaling: ir.Node
    factor: ir.Value

    @classmethod
    def after(cls, node: ir.Node, keep: Collection[ir.Value]) -> _Scaled | None:
        """Match the nodes after `node`, if nothing else reads the values between; the factor is a vector over channels."""
        n = Call(node)
        if node.op_type != "InstanceNormalization" or not (_is(n["scale"], 1) and _is(n["B"], 0)):
            return None
        shaped = _only_reader(node.outputs[0], keep, "Reshape")
        scaling = None if shaped is None else _only_reader(shaped.outputs[0], keep, "Mul")
        if shaped is None or scaling is None or shaped.inputs[0] is not node.outputs[0]:
            return None
        x, whole = n["input"], shaped.outputs[0]
        factor = scaling.inputs[1 if scaling.inputs[0] is whole else 0]
        if x.shape is None or whole.shape is None or len(whole.shape) < 3 or factor is None:
            return None
        groups, channels, sizes = known(x.shape[1]), known(whole.shape[1]), static_dims(factor)
        if groups is None or channels is None or channels % groups or not dims_equal(x.shape[0], whole.shape[0]):
            return None
        spread = [channels, *[1] * (len(whole.shape) - 2)]
        return cls(shaped, scaling, factor) if sizes in (spread, [1, *spread]) else None


def _only_reader(value: ir.Value, keep: Collection[ir.Value], op_type: str) -> ir.Node | None:
    """The only reader of a value, if it is in the same graph and of that type."""
    node = sole_producer(value)
    reader = None if node is None or value in keep else next(iter(value.uses())).node
    return reader if node is not None and is_op(reader, op_type) and reader.graph is node.graph else None


def _scale(e: Emitter, node: ir.Node, found: _Scaled) -> None:
    """Pass z instead of z r to the Reshape, and multiply r into the factor."""
    centered, inverse = _statistics(e, Call(node)["input"], Call(node).float("epsilon", 1e-5))
    found.shaped.replace_input_with(0, centered)
    e.anchor, whole = found.scaling, found.shaped.outputs[0]
    slope = _slope(e, inverse, e.reshape(found.factor, [-1]), e.rank(whole))
    become(found.scaling, "Mul", [whole, slope])
    e.graph.remove(node, safe=True)
