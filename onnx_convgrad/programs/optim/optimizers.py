"""Optimizers: each emits its update rule per parameter as plain nodes, equal to PyTorch's optimizer of the same name.

In the formulas p is the parameter, g its gradient (after clipping), t = 1, 2, ... the number of the step, eta the
learning rate. Values that depend on t alone are computed once per graph, in float64: 1 - beta^t would lose digits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self

import onnx_ir as ir

from onnx_convgrad.base.names import check_names, literal, matches
from onnx_convgrad.base.numbers import flag, positive, share, whole
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
        return self.e.cast(scalar, self.parameter.dtype or ir.DataType.FLOAT)

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
            biases and the scales of normalizations have none.
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

    group_options: ClassVar[Mapping[str, Callable[[Any, str], object]]] = {
        "lr_scale": positive,
        "start": partial(whole, least=0),
    }
    """Options that only groups have -> a check that takes the value and the name."""

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
        for name in ("clip_value", "clip_norm"):
            limit = getattr(self, name)
            if limit is not None:
                positive(limit, name, zero=False)
        if self.layer_decay is not None:
            positive(self.layer_decay, "layer_decay", zero=False)
            share(self.layer_decay, "layer_decay")
        if self.decay_filter is not None:
            check_names([self.decay_filter], ["weights"], "decay_filter")

    def _check_positive(self, *names: str) -> None:
        for name in names:
            positive(getattr(self, name), name)

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


def check_betas(betas: Sequence[float]) -> None:
    """Raise `ArgumentError` unless these are two numbers from 0 to below 1."""
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ArgumentError(f"betas must be two numbers, not {betas!r}.")
    for i, beta in enumerate(betas):
        share(beta, f"betas[{i}]", one=False)


def decayed(p: Operands, weight_decay: float) -> ir.Value:
    """g + weight_decay p."""
    return p.e.add(p.gradient, p.e.mul(p.parameter, weight_decay)) if weight_decay else p.gradient


def descend(p: Operands, parameter: ir.Value, move: ir.Value) -> ir.Value:
    """The parameter minus a move, in the parameter's dtype and shape."""
    return p.e.typed(p.e.sub(parameter, move), p.parameter)


def average(p: Operands, slot: str, value: ir.Value, beta: float) -> ir.Value:
    """beta slot + (1 - beta) value."""
    return p.e.add(p.e.mul(p.state[slot], beta), p.e.mul(value, 1 - beta))


@dataclass(frozen=True)
class SGD(Optimizer):
    """d = g + weight_decay p;  b <- momentum b + (1 - dampening) d;  p <- p - eta b.

    In the first step b is d. With `nesterov`, p <- p - eta (d + momentum b).

    Args:
        momentum: Share of the buffer b that is kept in each step; 0 for none.
        nesterov: Whether to take Nesterov's step.
        weight_decay: Factor of the parameter that is added to its gradient.
        dampening: Share of the gradient that does not enter the buffer.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    dampening: float = 0.0

    def check(self) -> None:
        super().check()
        self._check_positive("momentum", "dampening", "weight_decay")
        if flag(self.nesterov, "nesterov") and (self.momentum == 0 or self.dampening != 0):
            raise ArgumentError("nesterov needs a momentum above 0 and no dampening.")

    def is_linear(self) -> bool:
        momenta = [self.momentum, *(options.get("momentum", 0) for options in self.groups.values())]
        clipped = self.clip_value is not None or self.clip_norm is not None
        return not any(momenta) and not clipped and type(self).step is SGD.step

    def state(self) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if self.momentum else {}

    def step(self, p: Operands) -> Step:
        if p.premultiplied:
            return self._premultiplied(p), {}
        e, d = p.e, decayed(p, self.weight_decay)
        if not self.momentum:
            return descend(p, p.parameter, e.mul(d, p.rate)), {}
        fresh = d
        if self.dampening:
            kept = e.where(e.compare("Equal", p.done, 0), e.scalar(1, p.t), 1 - self.dampening)
            fresh = e.mul(d, p.cast(kept))
        buffer = e.add(e.mul(p.state["momentum_buffer"], self.momentum), fresh)
        move = e.add(d, e.mul(buffer, self.momentum)) if self.nesterov else buffer
        return descend(p, p.parameter, e.mul(move, p.rate)), {"momentum_buffer": buffer}

    def _premultiplied(self, p: Operands) -> ir.Value:
        """p <- (1 - eta weight_decay) p - eta g, from eta g: one pass over the parameters fewer."""
        e, parameter = p.e, p.parameter
        if self.weight_decay:
            parameter = e.mul(parameter, p.cast(e.sub(1, e.mul(p.eta, self.weight_decay))))
        return descend(p, parameter, e.mul(p.gradient, p.scale))


@dataclass(frozen=True)
class Adam(Optimizer):
    """m <- beta1 m + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g^2;  p <- p - eta mhat / (sqrt(vhat) + eps).

    mhat = m / (1 - beta1^t), vhat = v / (1 - beta2^t); with `amsgrad`, v in vhat is the largest so far. Weight decay is
    added to the gradient. Kingma and Ba (2015); Reddi et al. (2018).

    Args:
        betas: beta1 and beta2, the shares of both averages that are kept in each step.
        eps: Added to the denominator.
        weight_decay: Factor of the parameter that is added to its gradient.
        amsgrad: Whether to divide by the largest vhat so far.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False

    def check(self) -> None:
        super().check()
        check_betas(self.betas)
        self._check_positive("eps", "weight_decay")

    def state(self) -> dict[str, float]:
        return dict.fromkeys(("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.amsgrad else [])), 0.0)

    def step(self, p: Operands) -> Step:
        return self.adam(p, decayed(p, self.weight_decay), p.parameter)

    def adam(self, p: Operands, g: ir.Value, parameter: ir.Value) -> Step:
        """p - eta mhat / (sqrt(vhat) + eps).

        Args:
            p: The operands of the update.
            g: The gradient.
            parameter: The parameter, after decoupled weight decay if there is one.
        """
        ratio, factor, state = self.moments(p, g)
        return descend(p, parameter, p.e.mul(ratio, p.cast(p.e.mul(p.eta, factor)))), state

    def moments(self, p: Operands, g: ir.Value) -> tuple[ir.Value, ir.Value, dict[str, ir.Value]]:
        """mhat / (sqrt(vhat) + eps) as a value and a float64 factor of it, and the next state.

        With c1 and c2 the corrections, these are m / (sqrt(v) + eps sqrt(c2)) and sqrt(c2) / c1.

        Args:
            p: The operands of the update.
            g: The gradient.
        """
        e, (beta1, beta2) = p.e, self.betas
        state = {"exp_avg": average(p, "exp_avg", g, beta1), "exp_avg_sq": average(p, "exp_avg_sq", e.square(g), beta2)}
        second = state["exp_avg_sq"]
        if self.amsgrad:
            second = state["max_exp_avg_sq"] = e.op("Max", p.state["max_exp_avg_sq"], second)
        root = e.op("Sqrt", p.correction(beta2))
        ratio = e.div(state["exp_avg"], e.add(e.op("Sqrt", second), p.cast(e.mul(root, self.eps))))
        return ratio, e.div(root, p.correction(beta1)), state


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: first p <- (1 - eta weight_decay) p. Loshchilov and Hutter (2019).

    Args:
        weight_decay: Share of the parameter that each step takes away, times the learning rate.
    """

    weight_decay: float = 1e-2

    def step(self, p: Operands) -> Step:
        kept = p.cast(p.e.sub(1, p.e.mul(p.eta, self.weight_decay)))
        return self.adam(p, p.gradient, p.e.mul(p.parameter, kept) if self.weight_decay else p.parameter)


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """v <- alpha v + (1 - alpha) g^2;  p <- p - eta g / (sqrt(v) + eps).

    With `centered`, the square of the averaged gradient is subtracted from v; with `momentum`, b <- momentum b + the
    quotient, and p <- p - eta b. Weight decay is added to the gradient.

    Args:
        alpha: Share of the average v that is kept in each step.
        eps: Added to the denominator.
        weight_decay: Factor of the parameter that is added to its gradient.
        momentum: Share of the buffer b that is kept in each step; 0 for none.
        centered: Whether to divide by the standard deviation of the gradient.
    """

    lr: float | Schedule = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False

    def check(self) -> None:
        super().check()
        share(self.alpha, "alpha", one=False)
        self._check_positive("eps", "weight_decay", "momentum")

    def state(self) -> dict[str, float]:
        extra = (["grad_avg"] if self.centered else []) + (["momentum_buffer"] if self.momentum else [])
        return dict.fromkeys(("square_avg", *extra), 0.0)

    def step(self, p: Operands) -> Step:
        e, g = p.e, decayed(p, self.weight_decay)
        state = {"square_avg": average(p, "square_avg", e.square(g), self.alpha)}
        spread = state["square_avg"]
        if self.centered:
            state["grad_avg"] = average(p, "grad_avg", g, self.alpha)
            spread = e.sub(spread, e.square(state["grad_avg"]))
        move = e.div(g, e.add(e.op("Sqrt", spread), self.eps))
        if self.momentum:
            move = state["momentum_buffer"] = e.add(e.mul(p.state["momentum_buffer"], self.momentum), move)
        return descend(p, p.parameter, e.mul(move, p.rate)), state


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """s <- s + g^2;  p <- p - eta / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps). Weight decay is added to the gradient.

    Args:
        lr_decay: Decay of the learning rate with the number of steps.
        weight_decay: Factor of the parameter that is added to its gradient.
        initial_accumulator_value: First value of s.
        eps: Added to the denominator.
    """

    lr: float | Schedule = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def check(self) -> None:
        super().check()
        self._check_positive("lr_decay", "weight_decay", "initial_accumulator_value", "eps")

    def state(self) -> dict[str, float]:
        return {"sum": self.initial_accumulator_value}

    def step(self, p: Operands) -> Step:
        e, g = p.e, decayed(p, self.weight_decay)
        total = e.add(p.state["sum"], e.square(g))
        rate = p.rate
        if self.lr_decay:
            rate = p.cast(e.div(p.eta, e.add(e.mul(p.steps, self.lr_decay), 1)))
        return descend(p, p.parameter, e.mul(e.div(g, e.add(e.op("Sqrt", total), self.eps)), rate)), {"sum": total}


def prepared(
    e: Emitter, gradients: Mapping[str, ir.Value], optimizer: Optimizer, done: ir.Value, *, measured: bool = False
) -> tuple[dict[str, ir.Value], ir.Value | None]:
    """Clip the gradients, and negate those of parameters to maximize; also return their joint norm, if it is needed.

    The norm, in float32, is that of before `clip_norm`; parameters that start after `done` steps do not count in it. It is
    needed to clip by it, and if it is to be `measured`.
    """
    clipped = dict(gradients)
    if optimizer.clip_value is not None:
        limit = optimizer.clip_value
        clipped = {k: e.op("Clip", g, e.scalar(-limit, g), e.scalar(limit, g)) for k, g in clipped.items()}
    norm = None
    if optimizer.clip_norm is not None or measured:
        starts = {k: optimizer.of(k).start for k in gradients}
        begun = {start: e.compare("GreaterOrEqual", done, start) for start in sorted({*starts.values()} - {0})}
        counted = {k: e.where(begun[starts[k]], g, 0) if starts[k] else g for k, g in clipped.items()}
        norm = e.op("Sqrt", joint_square(e, list(counted.values())))
    if optimizer.clip_norm is not None and norm is not None:
        clipped = counted
        factor = e.op("Min", e.div(e.scalar(optimizer.clip_norm, norm), e.add(norm, 1e-6)), e.scalar(1, norm))
        clipped = {k: e.mul(g, e.cast(factor, g.dtype or ir.DataType.FLOAT)) for k, g in clipped.items()}
    return {k: e.neg(g) if optimizer.of(k).optimizer.maximize else g for k, g in clipped.items()}, norm


def joint_square(e: Emitter, values: list[ir.Value]) -> ir.Value:
    """The sum of the squares of all entries of all values, a float32 scalar (float64 if any value is)."""
    wide = ir.DataType.DOUBLE if any(v.dtype == ir.DataType.DOUBLE for v in values) else ir.DataType.FLOAT
    return e.sum([e.op("ReduceSumSquare", e.cast(v, wide), keepdims=0) for v in values])
