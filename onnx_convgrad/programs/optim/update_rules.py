"""The update rules of the optimizers but Muon, each equal to PyTorch's or the paper's of the same name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from onnx_convgrad.base.numbers import below_one, flag, positive
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.optim.optimizers import Operands, Optimizer, Step, squares_of
from onnx_convgrad.programs.optim.schedules import Schedule


def check_betas(betas: Sequence[float], name: str) -> None:
    """Raise `ArgumentError` unless these are two numbers from 0 to below 1."""
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ArgumentError(f"{name} must be two numbers, not {betas!r}.")
    for i, beta in enumerate(betas):
        below_one(beta, f"{name}[{i}]")


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

    checks: ClassVar = {"momentum": positive, "dampening": positive, "weight_decay": positive}

    def check(self) -> None:
        super().check()
        if flag(self.nesterov, "nesterov") and (self.momentum == 0 or self.dampening != 0):
            raise ArgumentError("nesterov needs a momentum above 0 and no dampening.")

    def is_linear(self) -> bool:
        momenta = [self.momentum, *(options.get("momentum", 0) for options in self.groups.values())]
        clipped = self.clip_value is not None or self.clip_norm is not None
        return not any(momenta) and not clipped and type(self).step is SGD.step

    def state(self) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if self.momentum else {}

    def step(self, p: Operands) -> Step:
        if p.premultiplied:  # p <- (1 - eta weight_decay) p - eta g, from eta g: one pass over the parameters fewer
            return descend(p, p.kept(self.weight_decay), p.e.mul(p.gradient, p.scale)), {}
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

    checks: ClassVar = {"betas": check_betas, "eps": positive, "weight_decay": positive}

    def state(self) -> dict[str, float]:
        return dict.fromkeys(("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if self.amsgrad else [])), 0.0)

    def step(self, p: Operands) -> Step:
        return self._adam(p, decayed(p, self.weight_decay), p.parameter)

    def _adam(self, p: Operands, g: ir.Value, parameter: ir.Value) -> Step:
        """p - eta mhat / (sqrt(vhat) + eps); `parameter` is p, after decoupled weight decay if there is one."""
        ratio, factor, state = self._moments(p, g)
        return descend(p, parameter, p.e.mul(ratio, p.cast(p.e.mul(p.eta, factor)))), state

    def _moments(self, p: Operands, g: ir.Value) -> tuple[ir.Value, ir.Value, dict[str, ir.Value]]:
        """mhat / (sqrt(vhat) + eps) as a value and a float64 factor of it, and the next state.

        With c1 and c2 the corrections, these are m / (sqrt(v) + eps sqrt(c2)) and sqrt(c2) / c1.
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
        return self._adam(p, p.gradient, p.kept(self.weight_decay))


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

    checks: ClassVar = {"alpha": below_one, "eps": positive, "weight_decay": positive, "momentum": positive}

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

    checks: ClassVar = dict.fromkeys(("lr_decay", "weight_decay", "initial_accumulator_value", "eps"), positive)

    def state(self) -> dict[str, float]:
        return {"sum": self.initial_accumulator_value}

    def step(self, p: Operands) -> Step:
        e, g = p.e, decayed(p, self.weight_decay)
        total = e.add(p.state["sum"], e.square(g))
        rate = p.rate
        if self.lr_decay:
            rate = p.cast(e.div(p.eta, e.add(e.mul(p.steps, self.lr_decay), 1)))
        return descend(p, p.parameter, e.mul(e.div(g, e.add(e.op("Sqrt", total), self.eps)), rate)), {"sum": total}


@dataclass(frozen=True)
class Lion(Optimizer):
    """p <- (1 - eta weight_decay) p - eta sign(beta1 m + (1 - beta1) g);  m <- beta2 m + (1 - beta2) g.

    Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2; equal to the package lion-pytorch. The
    paper recommends a learning rate of a third to a tenth of AdamW's, and a weight decay as many times larger.

    Args:
        lr: Learning rate, or a `Schedule`.
        betas: beta1, of the step, and beta2, of the stored average.
        weight_decay: Share of the parameter that each step takes away, times the learning rate.
    """

    lr: float | Schedule = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    checks: ClassVar = {"betas": check_betas, "weight_decay": positive}

    def state(self) -> dict[str, float]:
        return {"exp_avg": 0.0}

    def step(self, p: Operands) -> Step:
        e, (beta1, beta2) = p.e, self.betas
        parameter = p.kept(self.weight_decay)
        move = e.op("Sign", average(p, "exp_avg", p.gradient, beta1))
        state = {"exp_avg": average(p, "exp_avg", p.gradient, beta2)}
        return descend(p, parameter, e.mul(move, p.rate)), state


@dataclass(frozen=True)
class LAMB(Adam):
    """u = mhat / (sqrt(vhat) + eps) + weight_decay p;  p <- p - eta |p| / |u| u, with mhat and vhat as in `Adam`.

    You et al., "Large Batch Optimization for Deep Learning" (2020), algorithm 2, with phi the identity. Where |p| or |u| is
    0, the ratio is 1, as in timm and NVIDIA's Apex. These clip all gradients to a joint norm of 1 by default; here that is
    `clip_norm=1`.

    Args:
        eps: Added to the denominator.
        weight_decay: Factor of the parameter that is added to the step, before it is rescaled.
    """

    eps: float = 1e-6
    weight_decay: float = 1e-2

    def step(self, p: Operands) -> Step:
        e = p.e
        ratio, factor, state = self._moments(p, p.gradient)
        move = e.mul(ratio, p.cast(factor))
        if self.weight_decay:
            move = e.add(move, e.mul(p.parameter, self.weight_decay))
        own, new = (squares_of(e, [value])[0] for value in (p.parameter, move))
        usable = e.op("And", e.compare("Greater", own, 0), e.compare("Greater", new, 0))
        trust = e.where(usable, e.op("Sqrt", e.div(own, new)), 1)
        rate = e.mul(p.eta, e.cast(trust, ir.DataType.DOUBLE))
        return descend(p, p.parameter, e.mul(move, p.cast(rate))), state
