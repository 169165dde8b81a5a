"""The update of all parameters, emitted: clipping, one optimizer rule per parameter, and what a loss scale needs."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnx_convgrad.training.optim.optimizers import Clock, Moving, prepared
from onnx_convgrad.training.program.draft import Draft
from onnx_convgrad.training.program.manifest import Manifest
from onnx_convgrad.training.program.plan import Plan
from onnx_convgrad.training.program.scaling import finite, rescale, unless

__all__ = ["update"]


def update(
    draft: Draft,
    plan: Plan,
    manifest: Manifest,
    parameters: Mapping[str, ir.Value],
    gradients: Mapping[str, ir.Value],
    state: Mapping[str, ir.Value],
    rate: ir.Value,
    *,
    rated: bool = False,
) -> dict[str, ir.Value]:
    """Emit one update.

    Args:
        draft: Where to.
        plan: Holds the optimizer and the loss scale.
        manifest: Names the state.
        parameters: Parameter -> its value.
        gradients: Parameter -> its gradient.
        state: State of the optimizer -> its value.
        rate: The learning rate.
        rated: Whether the gradients are multiplied by it already, which an optimizer must be linear for.

    Returns:
        Parameter or state -> its next value.
    """
    e = draft.e
    slots: dict[str, dict[str, str]] = {}
    common: dict[str, str] = {}
    for s in manifest.state:
        if s.kind == "optimizer" and s.slot is not None:
            (common if s.of is None else slots.setdefault(s.of, {}))[s.slot] = s.name
    done = state[common["step"]]
    with draft.named("step"):
        ready = prepared(e, gradients, plan.optimizer)
        following = {common["step"]: e.add(done, 1)}
    clock = Clock(e, done, rate)
    for name, parameter in parameters.items():
        rule, share = plan.optimizer.of(name)
        own = {slot: state[key] for slot, key in slots.get(name, {}).items()}
        with draft.named(f"{name}/{type(rule).__name__}"):
            following[name], moved = rule.step(Moving(e, parameter, ready[name], own, clock, share, rated))
        following.update({slots[name][slot]: value for slot, value in moved.items()})
    if plan.scale is not None:
        with draft.named("loss_scale"):
            ok = finite(e, gradients.values())
            following = unless(e, ok, following, {**state, **parameters})
            scale, good = common["loss_scale"], common["good_steps"]
            following[scale], following[good] = rescale(e, plan.scale, state[scale], state[good], ok)
    return following
