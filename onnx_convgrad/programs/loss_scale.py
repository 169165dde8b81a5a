"""The scale of a float16 loss, which keeps gradients away from zero.

The loss is multiplied by it, and the gradients are divided by it. If one of them is not finite, the scale shrinks; after
enough successful steps in a row it grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnx_convgrad.ir.emit import Emitter, static_dims
from onnx_convgrad.programs.precision import MixedPrecision


def rescale(
    e: Emitter, rule: MixedPrecision, scale: ir.Value, good: ir.Value, ok: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Emit the next scale and the next number of successful steps in a row."""
    count = e.where(ok, e.add(good, 1), 0)
    full = e.compare("GreaterOrEqual", count, rule.growth_interval)
    larger = e.mul(scale, rule.growth_factor)
    grown = e.where(e.op("And", full, e.op("Not", e.op("IsInf", larger))), larger, scale)
    return e.where(ok, grown, e.mul(scale, rule.backoff_factor)), e.where(full, e.scalar(0, count), count)


_TOGETHER, _LONGEST = 32, 4096
"""Most operands of a Concat, and most entries of each: see `backends.cuda.batched_updates`."""


def sum_of_all(e: Emitter, values: Iterable[ir.Value]) -> ir.Value:
    """The sum of all entries, with few nodes: vectors of one size are added up together, and so are the sums."""
    sums: list[ir.Value] = []
    vectors: dict[int, list[ir.Value]] = {}
    for value in values:
        sizes = static_dims(value)
        if sizes is None or len(sizes) != 1 or sizes[0] is None or sizes[0] > _LONGEST:
            sums.append(e.op("ReduceSum", value, keepdims=0))
        else:
            vectors.setdefault(sizes[0], []).append(value)
    sums += [total for group in vectors.values() for total in _joint_sums(e, group)]
    while len(sums) > 1:
        sums = _joint_sums(e, [e.reshape(total, [1]) for total in sums])
    return sums[0]


def _joint_sums(e: Emitter, vectors: Sequence[ir.Value]) -> list[ir.Value]:
    parts = [vectors[start : start + _TOGETHER] for start in range(0, len(vectors), _TOGETHER)]
    return [e.op("ReduceSum", e.concat(part, 0), keepdims=0) for part in parts]
