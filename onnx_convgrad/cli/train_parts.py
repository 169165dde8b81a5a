"""Make the loss, the optimizer, its schedule and the privacy of a training run from its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from onnx_convgrad.base.names import check_names
from onnx_convgrad.base.numbers import positive
from onnx_convgrad.cli.train_config import Config, refuse_alone, share_of, spelled
from onnx_convgrad.data.mixing import MIXINGS
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.privacy import noise_for
from onnx_convgrad.programs.losses.elementwise import Loss
from onnx_convgrad.programs.optim.named import OPTIMIZERS, optimizer_named
from onnx_convgrad.programs.optim.optimizers import Optimizer
from onnx_convgrad.programs.optim.schedules import Constant, Cosine, OneCycle, Plateau, Schedule, Step, Warmup
from onnx_convgrad.programs.optim.update_rules import AdamW
from onnx_convgrad.programs.privacy import Privacy
from onnx_convgrad.programs.terms import LOSSES, LossLike, distillation


def loss_of(config: Config) -> LossLike:
    """Parse `NAME`, or `OUTPUT=NAME` and `OUTPUT=WEIGHT*NAME` for several."""
    if not config.loss:
        raise ArgumentError("There is no loss.", hint=f"Give --loss: {', '.join(LOSSES)}, or a scalar of the model.")
    options = dict(config.loss_options)
    if set(config.augment) & set(MIXINGS) and config.loss == ("cross_entropy",):
        options["probabilities"] = True
    if len(config.loss) == 1 and "=" not in config.loss[0]:
        return _one_loss(config.loss[0], options)
    several: dict[str, Any] = {}
    for entry in config.loss:
        output, equals, term = entry.partition("=")
        if not equals:
            raise ArgumentError(f"--loss {entry!r} names no output.", hint="Write OUTPUT=NAME.")
        if output in several:
            raise ArgumentError(f"--loss gives the loss of {output!r} twice.", hint="Give it once.")
        weight, star, name = term.rpartition("*")
        factor = share_of(weight) if star else 1.0
        if factor is None:
            raise ArgumentError(f"--loss {entry!r}: {weight!r} is not a number.", hint="Write OUTPUT=0.5*NAME.")
        several[output] = (factor, _one_loss(name, config.loss_options))
    return several


def taught_loss(loss: LossLike, config: Config) -> LossLike:
    """Add the loss of a teacher's predictions, if there is one, to the only loss."""
    if not config.teacher:
        refuse_alone(config, "distill_weight temperature", "--teacher")
        return loss
    (output, entry), *rest = loss.items() if isinstance(loss, Mapping) else [(None, (1.0, loss))]
    weight, own = entry if isinstance(entry, tuple) else (1.0, entry)
    if rest or weight != 1 or not isinstance(own, (str, Loss)):
        raise ArgumentError(
            "--teacher needs one --loss, without a weight.", hint="--distill-weight is that of the teacher."
        )
    return distillation(own, weight=config.distill_weight, temperature=config.temperature, output=output)


def _one_loss(name: str, settings: Mapping[str, Any]) -> LossLike:
    if not settings:
        return name
    check_names([name], list(LOSSES), "loss with loss-options:")
    loss: Loss = made(LOSSES[name], settings, "loss-options")
    return loss


def optimizer(config: Config, rate: Schedule, updates: int) -> Optimizer:
    """Make the optimizer; an epoch has this many `updates`."""
    kind = optimizer_named(config.optimizer)
    chosen = {
        name: getattr(config, name) for name in ("momentum", "weight_decay", "clip_norm", "layer_decay", "decay_filter")
    }
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


def privacy_of(config: Config, updates: int) -> Privacy | None:
    """The options of private training; `None` without `--private`. An epoch has this many `updates`."""
    if not config.private:
        refuse_alone(config, "noise epsilon max_norm delta", "--private")
        return None
    if (config.noise is None) == (config.epsilon is None):
        raise ArgumentError("--private needs one of --noise and --epsilon.", hint="For example --epsilon 8.")
    if config.noise is not None:
        return Privacy(config.noise, config.max_norm, config.delta)
    checked = Privacy(0.0, config.max_norm, config.delta)
    positive(config.epsilon, "--epsilon", zero=False)
    noise = noise_for(config.epsilon or 0.0, config.delta, 1 / updates, updates * config.epochs)
    return replace(checked, noise=noise)
