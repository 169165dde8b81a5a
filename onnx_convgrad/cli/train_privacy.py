"""The options of private training on the command line: noise, or the epsilon that it follows from."""

from __future__ import annotations

from onnx_convgrad.base.numbers import positive
from onnx_convgrad.cli.train_config import Config, refuse_alone
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.privacy import noise_for
from onnx_convgrad.programs.privacy import Privacy


def privacy_of(config: Config, updates: int) -> Privacy | None:
    """The options of private training; `None` without `--private`.

    Args:
        config: The options.
        updates: Number of updates in an epoch.

    Raises:
        ArgumentError: Options do not fit each other.
        ExecutionError: dp-accounting is not installed.
    """
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
    return Privacy(noise, checked.max_norm, checked.delta)
