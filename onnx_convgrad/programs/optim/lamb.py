"""LAMB: Adam's update, rescaled for each parameter to the norm of the parameter."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnx_convgrad.programs.optim.optimizers import Adam, Operands, Step, descend, joint_square


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
        ratio, factor, state = self.moments(p, p.gradient)
        move = e.mul(ratio, p.cast(factor))
        if self.weight_decay:
            move = e.add(move, e.mul(p.parameter, self.weight_decay))
        own, new = (joint_square(e, [value]) for value in (p.parameter, move))
        usable = e.op("And", e.compare("Greater", own, 0), e.compare("Greater", new, 0))
        trust = e.where(usable, e.op("Sqrt", e.div(own, new)), 1)
        rate = e.mul(p.eta, e.cast(trust, ir.DataType.DOUBLE))
        return descend(p, p.parameter, e.mul(move, p.cast(rate))), state
