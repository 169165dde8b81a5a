"""The scale of a float16 loss, which keeps gradients away from zero.

The loss is multiplied by it, and the gradients are divided by it. If one of them is not finite, the scale shrinks; after
enough successful steps in a row it grows. Defaults are those of `torch.amp.GradScaler`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.base.numbers import positive, share, whole
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import Emitter, static_dims


@dataclass(frozen=True, slots=True)
class LossScale:
    """Initial value and changes of the scale.

    Args:
        initial: The first scale.
        growth: Factor after `interval` successful steps in a row.
        backoff: Factor after a step that overflowed.
        interval: Number of successful steps until the scale grows.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        positive(self.initial, "initial", zero=False)
        positive(self.backoff, "backoff", zero=False)
        share(self.backoff, "backoff")
        positive(self.growth, "growth")
        whole(self.interval, "interval")
        if self.growth < 1:
            raise ArgumentError(f"growth must be at least 1, not {self.growth!r}.")


def rescale(e: Emitter, rule: LossScale, scale: ir.Value, good: ir.Value, ok: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Emit the next scale and the next number of successful steps in a row."""
    count = e.where(ok, e.add(good, 1), 0)
    full = e.compare("GreaterOrEqual", count, rule.interval)
    larger = e.mul(scale, rule.growth)
    grown = e.where(e.op("And", full, e.op("Not", e.op("IsInf", larger))), larger, scale)
    return e.where(ok, grown, e.mul(scale, rule.backoff)), e.where(full, e.scalar(0, count), count)


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
