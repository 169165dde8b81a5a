"""Emit the update of all parameters and of the optimizer's state.

With a loss scale, all of them stay as they are if a gradient is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.programs.draft import Draft
from onnx_convgrad.programs.integers import Rounding
from onnx_convgrad.programs.loss_scale import rescale, sum_of_all
from onnx_convgrad.programs.manifest import Manifest
from onnx_convgrad.programs.masters import AVERAGE, AVERAGE_MASTER, MASTER
from onnx_convgrad.programs.optim.optimizers import Operands, prepared
from onnx_convgrad.programs.plan import ProgramPlan


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
    """Emit one update; return the next value of each parameter and state, and the norm of the gradients if it is an output.

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
    rounding = Rounding.of(e, plan.base.graph, parameters, done, plan.seed)
    with draft.named("step"):
        wide = {k: e.cast(g, ir.DataType.FLOAT) if MASTER in slots.get(k, {}) else g for k, g in gradients.items()}
        ready, norm = prepared(e, wide, optimizer, done, measured=manifest.grad_norm is not None)
        following = {shared["step"]: e.add(done, 1)}
        ema = manifest.options.get("ema")
        kept = None if ema is None else e.where(e.compare("Equal", done, 0), 0.0, e.scalar(ema, rate))
    for name, parameter in parameters.items():
        rule, factor, start = optimizer.of(name)
        values = {slot: state[key] for slot, key in slots.get(name, {}).items()}
        weight = values.pop(MASTER, parameter)
        with draft.named(f"{name}/{type(rule).__name__}"):
            own = e.op("Max", e.sub(done, start), e.scalar(0, done)) if start else done
            exact = rounding is not None and name in rounding.nodes
            if rounding is not None and exact:
                weight = rounding.read(e, name, parameter)
            changed, updates = rule.step(Operands(e, weight, ready[name], values, own, rate, factor, premultiplied))
            if start:
                begun = e.compare("GreaterOrEqual", done, start)
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
    if plan.precision.scaled:
        with draft.named("loss_scale"):
            total = sum_of_all(e, [e.cast(g, ir.DataType.FLOAT) for g in (scaled or gradients).values()])
            ok = e.op("Not", e.op("Or", e.op("IsNaN", total), e.op("IsInf", total)))
            current = {**state, **parameters}
            following = {k: e.typed(e.where(ok, v, current[k]), current[k]) for k, v in following.items()}
            scale_name, good = shared["loss_scale"], shared["good_steps"]
            following[scale_name], following[good] = rescale(e, plan.precision, state[scale_name], state[good], ok)
    if norm is not None and manifest.grad_norm is not None:
        following[manifest.grad_norm] = norm
    return following


def learning_rate(draft: Draft, manifest: Manifest) -> ir.Value:
    """The input of the learning rate, with the optimizer's as the default."""
    return draft.input(manifest.learning_rate, np.asarray(manifest.optimizer["lr"], np.float32))


def _rounded(e: Emitter, master: ir.Value, parameter: ir.Value) -> ir.Value:
    """A master in the dtype of its parameter."""
    return e.typed(e.cast(master, parameter.dtype or ir.DataType.FLOAT), parameter)


def _averaged(e: Emitter, average: ir.Value, parameter: ir.Value, kept: ir.Value) -> ir.Value:
    """kept average + (1 - kept) parameter."""
    share = e.cast(kept, average.dtype or ir.DataType.FLOAT)
    return e.typed(e.add(e.mul(average, share), e.mul(parameter, e.sub(1, share))), average)
