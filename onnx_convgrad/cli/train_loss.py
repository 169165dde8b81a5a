"""Make the loss of a training run from its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnx_convgrad.base.names import check_names
from onnx_convgrad.cli.train_config import Config, refuse_alone, share_of
from onnx_convgrad.cli.train_optimizer import made
from onnx_convgrad.data.mixing import MIXINGS
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.losses.elementwise import Loss
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
        output, equals, name = entry.partition("=")
        if not equals:
            raise ArgumentError(f"--loss {entry!r} names no output.", hint="Write OUTPUT=NAME.")
        weight, star, name = name.rpartition("*")
        factor = share_of(weight)
        if star and factor is None:
            raise ArgumentError(f"--loss {entry!r}: {weight!r} is not a number.", hint="Write OUTPUT=0.5*NAME.")
        several[output] = (1.0 if factor is None else factor, _one_loss(name, config.loss_options))
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
