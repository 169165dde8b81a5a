"""Emit the update of all parameters, with dynamic loss scaling for float16.

The loss is multiplied by a scale, which keeps gradients away from zero, and the gradients are divided by it. If one of them
is not finite, parameters and optimizer state stay as they are and the scale shrinks; after enough successful steps in a row
it grows. Defaults are those of `torch.amp.GradScaler`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.base.numbers import positive, share, whole
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import Emitter, static_dims
from onnx_convgrad.programs.draft import Draft
from onnx_convgrad.programs.integers import Rounding
from onnx_convgrad.programs.manifest import Manifest
from onnx_convgrad.programs.masters import AVERAGE, AVERAGE_MASTER, MASTER
from onnx_convgrad.programs.optim.optimizers import Operands, Optimizer, prepared


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


def update(
    draft: Draft,
    manifest: Manifest,
    optimizer: Optimizer,
    scale: LossScale | None,
    parameters: Mapping[str, ir.Value],
    gradients: Mapping[str, ir.Value],
    state: Mapping[str, ir.Value],
    rate: ir.Value,
    rounding: Rounding | None = None,
    *,
    scaled: Mapping[str, ir.Value] | None = None,
    premultiplied: bool = False,
) -> dict[str, ir.Value]:
    """Emit one update; return the next value of each parameter and state. Integer parameters have a `rounding`.

    `scaled` are the gradients before the division by the loss scale, if they are at hand: it is checked whether they are
    finite. With `premultiplied`, the gradients are already multiplied by the learning rate, which needs a linear optimizer.
    """
    e = draft.e
    slots: dict[str, dict[str, str]] = {}
    shared: dict[str, str] = {}
    for s in manifest.state:
        if s.kind == "optimizer" and s.slot is not None:
            (shared if s.of is None else slots.setdefault(s.of, {}))[s.slot] = s.name
    done = state[shared["step"]]
    with draft.named("step"):
        wide = {k: e.cast(g, ir.DataType.FLOAT) if MASTER in slots.get(k, {}) else g for k, g in gradients.items()}
        ready = prepared(e, wide, optimizer, done)
        following = {shared["step"]: e.add(done, 1)}
        ema = manifest.options.get("ema")
        kept = None if ema is None else e.where(e.compare("Equal", done, 0), 0.0, e.scalar(ema, rate))
    for name, parameter in parameters.items():
        rule, factor = optimizer.of(name)
        values = {slot: state[key] for slot, key in slots.get(name, {}).items()}
        weight = values.pop(MASTER, parameter)
        with draft.named(f"{name}/{type(rule).__name__}"):
            own = e.op("Max", e.sub(done, rule.start), e.scalar(0, done)) if rule.start else done
            exact = rounding is not None and name in rounding.nodes
            if rounding is not None and exact:
                weight = rounding.read(e, name, parameter)
            changed, updates = rule.step(Operands(e, weight, ready[name], values, own, rate, factor, premultiplied))
            if rule.start:
                begun = e.compare("GreaterOrEqual", done, rule.start)
                changed = e.typed(e.where(begun, changed, weight), weight)
                updates = {slot: e.typed(e.where(begun, v, values[slot]), values[slot]) for slot, v in updates.items()}
            following[name] = changed
            if rounding is not None and exact:
                following[name] = e.typed(rounding.write(e, name, changed), parameter)
            elif weight is not parameter:
                following[name], updates[MASTER] = _rounded(e, changed, parameter), changed
        if kept is not None:
            slot = AVERAGE if weight is parameter else AVERAGE_MASTER
            updates[slot] = _averaged(e, values[slot], changed, kept)
            if slot != AVERAGE:
                updates[AVERAGE] = _rounded(e, updates[slot], parameter)
        following.update({slots[name][slot]: value for slot, value in updates.items()})
    if scale is not None:
        with draft.named("loss_scale"):
            total = _sum_of_all(e, [e.cast(g, ir.DataType.FLOAT) for g in (scaled or gradients).values()])
            ok = e.op("Not", e.op("Or", e.op("IsNaN", total), e.op("IsInf", total)))
            current = {**state, **parameters}
            following = {k: e.typed(e.where(ok, v, current[k]), current[k]) for k, v in following.items()}
            scale_name, good = shared["loss_scale"], shared["good_steps"]
            following[scale_name], following[good] = _rescale(e, scale, state[scale_name], state[good], ok)
    return following


_TOGETHER, _LONGEST = 32, 4096
"""Most operands of a Concat, and most entries of each: see `backends.cuda.batched_updates`."""


def _sum_of_all(e: Emitter, values: Iterable[ir.Value]) -> ir.Value:
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


def _rounded(e: Emitter, master: ir.Value, parameter: ir.Value) -> ir.Value:
    """A master in the dtype of its parameter."""
    return e.typed(e.cast(master, parameter.dtype or ir.DataType.FLOAT), parameter)


def _averaged(e: Emitter, average: ir.Value, parameter: ir.Value, kept: ir.Value) -> ir.Value:
    """kept average + (1 - kept) parameter."""
    share = e.cast(kept, average.dtype or ir.DataType.FLOAT)
    return e.typed(e.add(e.mul(average, share), e.mul(parameter, e.sub(1, share))), average)


def _rescale(e: Emitter, rule: LossScale, scale: ir.Value, good: ir.Value, ok: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Emit the next scale and the next number of successful steps in a row."""
    count = e.where(ok, e.add(good, 1), 0)
    full = e.compare("GreaterOrEqual", count, rule.interval)
    larger = e.mul(scale, rule.growth)
    grown = e.where(e.op("And", full, e.op("Not", e.op("IsInf", larger))), larger, scale)
    return e.where(ok, grown, e.mul(scale, rule.backoff)), e.where(full, e.scalar(0, count), count)
