"""Make the optimizer and the schedule of a training run from its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from onnx_convgrad.base.names import check_names
from onnx_convgrad.cli.train_config import Config, spelled
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.optim.named import OPTIMIZERS, optimizer_named
from onnx_convgrad.programs.optim.optimizers import Optimizer
from onnx_convgrad.programs.optim.schedules import Constant, Cosine, OneCycle, Plateau, Schedule, Step, Warmup
from onnx_convgrad.programs.optim.update_rules import AdamW


def optimizer(config: Config, rate: Schedule, updates: int) -> Optimizer:
    """Make the optimizer; an epoch has this many `updates`."""
    kind = optimizer_named(config.optimizer)
    chosen = {name: getattr(config, name) for name in ("momentum", "weight_decay", "clip_norm", "layer_decay")}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    for name in chosen:
        if name not in {f.name for f in fields(kind)}:
            others = [other for other, own in OPTIMIZERS.items() if name in {f.name for f in fields(own)}]
            raise ArgumentError(
                f"{spelled(name)} is not an option of {config.optimizer}.", hint=f"It is one of {', '.join(others)}."
            )
    settings = {**chosen, **_nested(config.optimizer_options)}
    if config.unfreeze:
        settings["groups"] = _unfrozen(config.unfreeze, settings.get("groups", {}), updates)
    found: Optimizer = made(kind, settings, "optimizer-options", lr=rate)
    return found


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with `others.lr` and the table `others` as an `AdamW`."""
    inner = {key.removeprefix(_OTHERS): value for key, value in options.items() if key.startswith(_OTHERS)}
    if isinstance(options.get("others"), Mapping):
        inner = {**options["others"], **inner}
    if not inner:
        return dict(options)
    others = made(AdamW, inner, "optimizer-options of others")
    return {**{key: value for key, value in options.items() if not key.startswith(_OTHERS)}, "others": others}


_OTHERS = "others."


def _unfrozen(entries: tuple[str, ...], groups: Mapping[str, Any], updates: int) -> dict[str, Any]:
    """Groups of the optimizer with the first step of each; `GLOB@EPOCH` trains from this epoch on, counted from 1."""
    merged = dict(groups)
    for entry in entries:
        glob, _, epoch = entry.rpartition("@")
        if not glob or not epoch.isdecimal() or int(epoch) < 1:
            raise ArgumentError(
                f"--unfreeze {entry!r} is not of the form GLOB@EPOCH.",
                hint="For example: 'layer4.*@3'; the first epoch is 1.",
            )
        merged[glob] = {**merged.pop(glob, {}), "start": (int(epoch) - 1) * updates}
    return merged


def made(kind: Any, settings: Mapping[str, Any], where: str, **more: Any) -> Any:
    """Make an instance, with lists as tuples; unknown names are errors."""
    named = {key.replace("-", "_"): tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
    check_names(list(named), [f.name for f in fields(kind) if f.init and f.name not in more], f"key in {where}:")
    try:
        return kind(**named, **more)
    except TypeError as problem:
        raise ArgumentError(f"The {where} do not fit {kind.__name__}: {problem}.") from problem


def schedule(config: Config, batches: int) -> Schedule:
    """Make the learning-rate schedule over all updates of a run, with `batches` per epoch."""
    steps = max(1, config.epochs * -(-batches // config.accumulate) - config.warmup)
    spans: dict[str, tuple[type[Schedule], dict[str, Any]]] = {
        "constant": (Constant, {}),
        "cosine": (Cosine, {"steps": steps}),
        "onecycle": (OneCycle, {"steps": steps}),
        "step": (Step, {"step_size": -(-steps // 3)}),
        "plateau": (Plateau, {"monitor": "val_loss" if config.validation else "loss"}),
    }
    check_names([config.schedule], list(spans), "schedule")
    kind, span = spans[config.schedule]
    if "milestones" in config.schedule_options:
        span = {}
    chosen: Schedule = made(kind, {**span, **config.schedule_options}, "schedule-options", lr=config.lr)
    return Warmup(chosen, config.warmup) if config.warmup else chosen
