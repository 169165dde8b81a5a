"""Optimizers: each emits its update rule per parameter as plain nodes, equal to PyTorch's optimizer of the same name.

In the formulas p is the parameter, g its gradient (after clipping), t = 1, 2, ... the number of the step, eta the
learning rate. Values that depend on t alone are computed once per graph, in float64: 1 - beta^t would lose digits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self

import onnx_ir as ir

from onnx_convgrad.base.names import check_names, literal, matches
from onnx_convgrad.base.numbers import Check, above_zero, check_fields, natural, positive, share
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.programs.optim.schedules import Schedule, as_schedule


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of the update rule of one parameter. Scalars of the step are emitted once for all parameters.

    Attributes:
        state: Slot -> value.
        done: Number of finished steps, int64.
        lr: The learning rate of the step, float32.
        scale: The group's factor of the learning rate.
        premultiplied: Whether the gradient is already multiplied by the learning rate (without `scale`).
    """

    e: Emitter
    parameter: ir.Value
    gradient: ir.Value
    state: Mapping[str, ir.Value]
    done: ir.Value
    lr: ir.Value
    scale: float = 1.0
    premultiplied: bool = False

    def cast(self, scalar: ir.Value) -> ir.Value:
        """Cast a scalar to the parameter's dtype."""
        return self.e.cast_like(scalar, self.parameter)

    @property
    def steps(self) -> ir.Value:
        """Number of finished steps, t - 1, in float64."""
        return self.e.cast(self.done, ir.DataType.DOUBLE)

    @property
    def t(self) -> ir.Value:
        """Number of this step, counted from 1, in float64."""
        return self.e.add(self.steps, 1)

    def correction(self, beta: float) -> ir.Value:
        """1 - beta^t, in float64."""
        return self.e.sub(1, self.e.op("Pow", self.e.scalar(beta, self.t), self.t))

    @property
    def eta(self) -> ir.Value:
        """The learning rate of this parameter, float64."""
        return self.e.mul(self.e.cast(self.lr, ir.DataType.DOUBLE), self.scale)

    @property
    def rate(self) -> ir.Value:
        """The learning rate of this parameter, in its dtype."""
        return self.cast(self.lr if self.scale == 1 else self.eta)

    def kept(self, weight_decay: float) -> ir.Value:
        """The parameter after decoupled weight decay: (1 - eta weight_decay) p."""
        if not weight_decay:
            return self.parameter
        return self.e.mul(self.parameter, self.cast(self.e.sub(1, self.e.mul(self.eta, weight_decay))))


Step = tuple[ir.Value, dict[str, ir.Value]]
"""The next parameter, and the next state by slot."""


@dataclass(frozen=True)
class Optimizer(ABC):
    """Base class of the optimizers; names and defaults of the options are PyTorch's.

    Args:
        groups: Glob over parameter names -> options that differ for them; later entries win. A group's `lr` keeps its
            ratio to the optimizer's `lr` under a schedule, and `lr_scale` is a further factor of it. `start` is the
            number of updates before the first one of a parameter: until then neither the parameter nor its state
            changes, and its gradient does not count in `clip_norm`. Layers are unfrozen one after another this way:
            Howard and Ruder, "Universal Language Model Fine-tuning" (2018).
        layer_decay: Factor of the learning rate for every layer further from the output, such as 0.8. As in ELECTRA (Clark
            et al., 2020) and BEiT (Bao et al., 2022); `programs.optim.layers` says what a layer is.
        decay_filter: With `"weights"`, only parameters of two or more axes have weight decay, except where a group sets one:
            biases and the scales of normalizations have none, whatever axes of size 1 they are stored with.
        clip_value: Clamp every entry of every gradient to [-clip_value, clip_value].
        clip_norm: Scale all gradients together so that their joint L2 norm is at most this. After `clip_value`.
        maximize: Move along the gradient instead of against it.
        lr: Learning rate. A number, or a `Schedule`.
    """

    lr: float | Schedule = field(default=1e-3)
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    clip_norm: float | None = field(default=None, kw_only=True)
    maximize: bool = field(default=False, kw_only=True)
    layer_decay: float | None = field(default=None, kw_only=True)
    decay_filter: Literal["weights"] | None = field(default=None, kw_only=True)

    checks: ClassVar[Mapping[str, Check]] = {
        "clip_value": above_zero,
        "clip_norm": above_zero,
        "layer_decay": partial(share, zero=False),
    }
    """Option -> its check."""

    group_options: ClassVar[Mapping[str, Check]] = {"lr_scale": positive, "start": natural}
    """Options that only groups have -> their checks."""

    def __post_init__(self) -> None:
        self.check()
        if not isinstance(self.groups, Mapping) or not all(isinstance(o, Mapping) for o in self.groups.values()):
            raise ArgumentError(
                f'groups takes options by glob, as in {{"*.bias": {{"lr": 0.1}}}}, not {self.groups!r}.'
            )
        allowed = {f.name for f in fields(self)} - {"groups", *COMMON} | {*self.group_options}
        for glob, options in self.groups.items():
            check_names(list(options), sorted(allowed), f"option of group {glob!r}:")
            if isinstance(options.get("lr"), Schedule):
                raise ArgumentError(
                    f"The lr of group {glob!r} is a schedule.",
                    hint="Give a number: its ratio to the optimizer's lr is kept.",
                )
            for name, check in self.group_options.items():
                if name in options:
                    check(options[name], name)
            self._changed(options).check()

    def check(self) -> None:
        """Raise `ArgumentError` for invalid options."""
        if not isinstance(self.lr, Schedule):
            if callable(self.lr):
                raise ArgumentError(
                    f"lr takes a number or a schedule, not {self.lr!r}.",
                    hint="Give one of onnx_convgrad.schedules, such as Cosine(0.1, 1000), Step or Warmup; a function of the "
                    "step goes to the trainer: Trainer(program, schedule=function).",
                )
            positive(self.lr, "lr")
        check_fields(self)
        if self.decay_filter is not None:
            check_names([self.decay_filter], ["weights"], "decay_filter")

    @property
    def schedule(self) -> Schedule:
        """Number of finished steps -> learning rate."""
        return as_schedule(self.lr)

    def to_json(self) -> dict[str, Any]:
        """Name and options, as JSON values."""
        plain = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name != "lr"}
        rate = {"lr": self.schedule(0), "schedule": self.schedule.to_json()}
        return {"name": type(self).__name__, **rate, **plain}

    def of(self, parameter: str) -> Assigned:
        """The optimizer of one parameter.

        Args:
            parameter: Its name.
        """
        options = self._options_of(parameter)
        scale = float(options.get("lr_scale", 1.0))
        if "lr" in options:
            scale *= self._ratio(options["lr"], parameter)
        return Assigned(self._changed(options), scale, options.get("start", 0))

    def _changed(self, options: Mapping[str, Any]) -> Self:
        """The optimizer with the options of a group."""
        return replace(self, **{name: v for name, v in options.items() if name not in self.group_options}, groups={})

    def _ratio(self, lr: float, parameter: str) -> float:
        """The learning rate of a parameter as a ratio to the optimizer's."""
        base = _base_rate(self.schedule)
        if base == 0:
            raise ArgumentError(
                f"A group sets the learning rate of {parameter!r}, but that of the optimizer is 0.",
                hint="Give the optimizer an lr above 0: the rate of a group is stored as a ratio to it.",
            )
        return float(lr) / base

    def _options_of(self, parameter: str) -> dict[str, Any]:
        """The options that the groups give for one parameter."""
        options: dict[str, Any] = {}
        for glob, changes in self.groups.items():
            if matches(glob, parameter):
                options.update(changes)
        return options

    def fitted(self, layers: Sequence[Mapping[str, Sequence[int]]]) -> Self:
        """The optimizer of the parameters of one model; their shapes by name, by layer, from the input to the output.

        Args:
            layers: Name of a parameter -> its shape, for each layer.
        """
        changes: dict[str, dict[str, float]] = {}
        for distance, layer in enumerate(reversed(layers)):
            for name, shape in layer.items():
                own = self._options_of(name)
                if self.layer_decay is not None:
                    scale = own.get("lr_scale", 1.0) * self.layer_decay**distance
                    changes.setdefault(name, {})["lr_scale"] = scale
                if self.decay_filter is not None and len(shape) < 2 and "weight_decay" not in own:
                    changes.setdefault(name, {})["weight_decay"] = 0.0
        return self.regrouped(changes) if changes else self

    def regrouped(self, changes: Mapping[str, Mapping[str, Any]]) -> Self:
        """Change the options of some parameters, whatever the groups say.

        Args:
            changes: Name of a parameter -> the options that change.
        """
        last = {literal(name): {**self._options_of(name), **changed} for name, changed in changes.items()}
        return replace(self, groups={**{k: v for k, v in self.groups.items() if k not in last}, **last})

    def is_linear(self) -> bool:
        """Whether every update is linear in the gradient, so that the loss may be multiplied by the learning rate."""
        return False

    @abstractmethod
    def state(self) -> dict[str, float]:
        """Slots of state per parameter -> initial number."""

    @abstractmethod
    def step(self, p: Operands) -> Step:
        """Emit the update of one parameter.

        Args:
            p: Parameter, gradient, state and learning rate, as values of the graph.
        """


COMMON = ("clip_value", "clip_norm", "layer_decay", "decay_filter")
"""Options that concern all parameters together."""


class Assigned(NamedTuple):
    """The optimizer of one parameter, its factor of the learning rate, and the number of updates before its first."""

    optimizer: Optimizer
    scale: float
    start: int


def _plain(value: Any) -> Any:
    """An option as JSON values."""
    if isinstance(value, Optimizer):
        own = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in ("groups", "maximize", *COMMON)}
        return {"name": type(value).__name__, **own}
    return {key: _plain(v) for key, v in value.items()} if isinstance(value, Mapping) else value


def _base_rate(schedule: Schedule) -> float:
    """The rate to which those of groups are relative: the `lr` of the innermost schedule."""
    inner = getattr(schedule, "schedule", None)
    return _base_rate(inner) if isinstance(inner, Schedule) else float(getattr(schedule, "lr", schedule(0)))


def prepared(
    e: Emitter, gradients: Mapping[str, ir.Value], optimizer: Optimizer, done: ir.Value, groups: Groups = ()
) -> tuple[dict[str, ir.Value], list[ir.Value]]:
    """Clip the gradients, and negate those of parameters to maximize; also return the joint norm of each group.

    The norms, in float32, are those of before `clip_norm`; parameters that start after `done` steps do not count in them.
    """
    clipped = dict(gradients)
    if optimizer.clip_value is not None:
        limit = optimizer.clip_value
        clipped = {k: e.op("Clip", g, e.scalar(-limit, g), e.scalar(limit, g)) for k, g in clipped.items()}
    norms = []
    if optimizer.clip_norm is not None or groups:
        starts = {k: optimizer.of(k).start for k in gradients}
        begun = {start: e.compare("GreaterOrEqual", done, start) for start in sorted({*starts.values()} - {0})}
        counted = {k: e.where(begun[starts[k]], g, 0) if starts[k] else g for k, g in clipped.items()}
        squares = dict(zip(counted, squares_of(e, list(counted.values())), strict=True))
        norm, *norms = (e.op("Sqrt", e.sum([squares[k] for k in group])) for group in (gradients, *groups))
    if optimizer.clip_norm is not None:
        clipped = counted
        factor = e.op("Min", e.div(e.scalar(optimizer.clip_norm, norm), e.add(norm, 1e-6)), e.scalar(1, norm))
        clipped = {k: e.mul(g, e.cast_like(factor, g)) for k, g in clipped.items()}
    return {k: e.neg(g) if optimizer.of(k).optimizer.maximize else g for k, g in clipped.items()}, norms


Groups = Sequence[Collection[str]]
"""Names of the parameters of each group whose gradients have a norm."""


def squares_of(e: Emitter, values: Sequence[ir.Value]) -> list[ir.Value]:
    """The sum of the squares of the entries of each value, float32 scalars (float64 if any value is)."""
    wide = ir.DataType.DOUBLE if any(v.dtype == ir.DataType.DOUBLE for v in values) else ir.DataType.FLOAT
    return [e.op("ReduceSumSquare", e.cast(v, wide), keepdims=0) for v in values]
