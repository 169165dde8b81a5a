"""Emit the update of all parameters and of the optimizer's state.

A float16 loss is multiplied by a scale, which keeps gradients away from zero, and the gradients are divided by it. If one of
them is not finite, parameters and state stay as they are, and the scale shrinks; after enough successful steps in a row it
grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.emit import Emitter, static_dims
from onnx_convgrad.programs.draft import Draft
from onnx_convgrad.programs.integers import Rounding
from onnx_convgrad.programs.manifest import Manifest
from onnx_convgrad.programs.optim.optimizers import Operands, prepared
from onnx_convgrad.programs.plan import ProgramPlan
from onnx_convgrad.programs.precision import AVERAGE, AVERAGE_MASTER, MASTER, MixedPrecision


def update(
    draft: Draft,
    plan: ProgramPlan,
    manifest: Manifest,
    parameters: Mapping[str, ir.Value],
    gradients: Mapping[str, ir.Value],
    state: Mapping[str, ir.Value],
    *,
    scaled: Mapping[str, ir.Value] | None = None,
    premultiplied: bool = False,
) -> dict[str, ir.Value]:
    """Emit one update; return the next value of each parameter and state, and the norms of gradients that are outputs.

    `scaled` are the gradients before the division by the loss scale, if they are at hand: it is checked whether they are
    finite. With `premultiplied`, the gradients are already multiplied by the learning rate, which needs a linear optimizer.
    """
    e, optimizer, rate = draft.e, plan.optimizer, learning_rate(draft, manifest)
    slots: dict[str, dict[str, str]] = {}
    shared: dict[str, str] = {}
    for s in manifest.state:
        if s.kind == "optimizer" and s.slot is not None:
            (shared if s.of is None else slots.setdefault(s.of, {}))[s.slot] = s.name
    done = state[shared["step"]]
    rounding = Rounding(e, plan.base.graph, parameters, done, plan.seed)
    with draft.named("step"):
        wide = {k: e.cast(g, ir.DataType.FLOAT) if MASTER in slots.get(k, {}) else g for k, g in gradients.items()}
        norms = manifest.grad_norms()
        ready, measured = prepared(e, wide, optimizer, done, [manifest.norm_group(result) for result in norms])
        following = {shared["step"]: e.add(done, 1)}
        ema = manifest.options.get("ema")
        kept = None if ema is None else e.where(e.compare("Equal", done, 0), 0.0, e.scalar(ema, rate))
    for name, parameter in parameters.items():
        rule, factor, start = optimizer.of(name)
        values = {slot: state[key] for slot, key in slots.get(name, {}).items()}
        weight = values.pop(MASTER, parameter)
        with draft.named(f"{name}/{type(rule).__name__}"):
            own = e.op("Max", e.sub(done, start), e.scalar(0, done)) if start else done
            if name in rounding.nodes:
                weight = rounding.read(name, parameter)
            changed, updates = rule.step(Operands(e, weight, ready[name], values, own, rate, factor, premultiplied))
            if start:
                begun = e.compare("GreaterOrEqual", done, start)
                changed = e.typed(e.where(begun, changed, weight), weight)
                updates = {slot: e.typed(e.where(begun, v, values[slot]), values[slot]) for slot, v in updates.items()}
            following[name] = changed
            if name in rounding.nodes:
                following[name] = e.typed(rounding.write(name, changed), parameter)
            elif weight is not parameter:
                following[name], updates[MASTER] = e.typed(e.cast_like(changed, parameter), parameter), changed
        if kept is not None:
            slot = AVERAGE if weight is parameter else AVERAGE_MASTER
            updates[slot] = _averaged(e, values[slot], changed, kept)
            if slot != AVERAGE:
                updates[AVERAGE] = e.typed(e.cast_like(updates[slot], parameter), parameter)
        following.update({slots[name][slot]: value for slot, value in updates.items()})
    if plan.precision.scaled:
        with draft.named("loss_scale"):
            total = sum_of_all(e, [e.cast(g, ir.DataType.FLOAT) for g in (scaled or gradients).values()])
            ok = e.op("Not", e.op("Or", e.op("IsNaN", total), e.op("IsInf", total)))
            current = {**state, **parameters}
            following = {k: e.typed(e.where(ok, v, current[k]), current[k]) for k, v in following.items()}
            scale_name, good = shared["loss_scale"], shared["good_steps"]
            following[scale_name], following[good] = rescale(e, plan.precision, state[scale_name], state[good], ok)
    return following | dict(zip(norms.values(), measured, strict=True))


def learning_rate(draft: Draft, manifest: Manifest) -> ir.Value:
    """The input of the learning rate, with the optimizer's as the default."""
    return draft.input(manifest.learning_rate, np.asarray(manifest.optimizer["lr"], np.float32))


def _averaged(e: Emitter, average: ir.Value, parameter: ir.Value, kept: ir.Value) -> ir.Value:
    """kept average + (1 - kept) parameter."""
    share = e.cast_like(kept, average)
    return e.typed(e.add(e.mul(average, share), e.mul(parameter, e.sub(1, share))), average)


# -- the scale of the loss ------------------------------------------------------------------------------------------------


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
