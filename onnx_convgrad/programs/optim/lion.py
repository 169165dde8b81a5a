"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from dataclasses import dataclass

from onnx_convgrad.programs.optim.optimizers import Operands, Optimizer, Step, average, check_betas, descend
from onnx_convgrad.programs.optim.schedules import Schedule


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

    def check(self) -> None:
        super().check()
        check_betas(self.betas)
        self._check_positive("weight_decay")

    def state(self) -> dict[str, float]:
        return {"exp_avg": 0.0}

    def step(self, p: Operands) -> Step:
        e, (beta1, beta2) = p.e, self.betas
        parameter = e.mul(p.parameter, p.cast(e.sub(1, e.mul(p.eta, self.weight_decay))))
        move = e.op("Sign", average(p, "exp_avg", p.gradient, beta1))
        state = {"exp_avg": average(p, "exp_avg", p.gradient, beta2)}
        return descend(p, parameter if self.weight_decay else p.parameter, e.mul(move, p.rate)), state
