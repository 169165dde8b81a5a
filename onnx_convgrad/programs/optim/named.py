"""Optimizers by name."""

from __future__ import annotations

from onnx_convgrad.base.names import check_names
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.optim.muon import Muon
from onnx_convgrad.programs.optim.optimizers import Optimizer
from onnx_convgrad.programs.optim.update_rules import LAMB, SGD, Adagrad, Adam, AdamW, Lion, RMSprop

OPTIMIZERS: dict[str, type[Optimizer]] = {
    kind.__name__.lower(): kind for kind in (SGD, Adam, AdamW, RMSprop, Adagrad, Lion, LAMB, Muon)
}
"""Name in small letters -> class."""

OptimizerLike = Optimizer | type[Optimizer] | str
"""An optimizer; its class or name stands for one with the default options."""


def optimizer_named(name: str) -> type[Optimizer]:
    """The class called `name`, ignoring case."""
    check_names([name.lower()], list(OPTIMIZERS), "optimizer")
    return OPTIMIZERS[name.lower()]


def as_optimizer(optimizer: OptimizerLike) -> Optimizer:
    """Return an optimizer; one with the default options for a name or a class."""
    if isinstance(optimizer, str):
        optimizer = optimizer_named(optimizer)
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        optimizer = optimizer()
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"optimizer must be a name or a member of onnx_convgrad.optim, not {optimizer!r}.",
            hint=f"Optimizers by name: {', '.join(OPTIMIZERS)}.",
        )
    return optimizer
