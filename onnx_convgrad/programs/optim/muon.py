"""Muon: momentum, orthogonalized; for matrices and kernels, with AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, Self

import onnx_ir as ir

from onnx_convgrad.base.names import one_of
from onnx_convgrad.base.numbers import factors, flag, positive, share, whole
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.programs.optim.optimizers import COMMON, Assigned, Operands, Optimizer, Step
from onnx_convgrad.programs.optim.schedules import Schedule
from onnx_convgrad.programs.optim.update_rules import AdamW, average, descend


@dataclass(frozen=True)
class Muon(Optimizer):
    """b <- momentum b + (1 - momentum) g;  p <- (1 - eta weight_decay) p - eta r O(d).

    d is b or, with `nesterov`, (1 - momentum) g + momentum b. O is the nearest orthogonal matrix, approximated by `ns_steps`
    Newton-Schulz iterations in the dtype of p (`torch.optim.Muon`, which is equal otherwise, iterates in bfloat16). For a
    matrix of A rows and B columns, r is sqrt(max(1, A / B)), or 0.2 sqrt(max(A, B)) with
    `adjust_lr_fn="match_rms_adamw"`, which suits the learning rates of AdamW. Jordan et al. (2024); Liu et al. (2025).

    A kernel of a convolution is flattened to a matrix with a row for each entry of its first axis, as in Jordan's own code.
    Parameters with fewer axes, and those of groups with `orthogonal=False` (best: embeddings and the last layer), are
    trained by AdamW. The options of their groups count, where AdamW has them.

    Args:
        others: `AdamW` with options of its own for the other parameters, by default one with the `lr` and `weight_decay` of
            Muon. Its `lr` keeps its ratio to Muon's under a schedule.
        weight_decay: Share of the parameter that each step takes away, times the learning rate.
        momentum: Share of the buffer b that is kept in each step.
        nesterov: Whether to take Nesterov's step.
        ns_coefficients: Coefficients a, b and c of the iteration.
        eps: Least norm that a matrix is divided by.
        ns_steps: Number of iterations, below 100.
        adjust_lr_fn: `"original"` (also `None`) or `"match_rms_adamw"`: the factor r.
    """

    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    others: AdamW | None = None

    group_options: ClassVar = {**Optimizer.group_options, "orthogonal": flag}

    checks: ClassVar = {
        "weight_decay": positive,
        "eps": positive,
        "momentum": share,
        "adjust_lr_fn": one_of("original", "match_rms_adamw"),
    }

    def check(self) -> None:
        super().check()
        if factors(self.ns_coefficients, "ns_coefficients").shape != (3,):
            raise ArgumentError(f"ns_coefficients must be three numbers, not {self.ns_coefficients!r}.")
        if whole(self.ns_steps, "ns_steps") >= 100:
            raise ArgumentError(f"ns_steps must be below 100, not {self.ns_steps}.")
        if self.others is None:
            return
        if not isinstance(self.others, AdamW):
            raise ArgumentError(
                f"others takes an AdamW, not {self.others!r}.",
                hint="For example others=AdamW(1e-3, betas=(0.9, 0.95)).",
            )
        if isinstance(self.others.lr, Schedule):
            raise ArgumentError(
                "The lr of others is a schedule.", hint="Give a number: its ratio to Muon's lr is kept."
            )
        shared = [name for name in ("groups", "maximize", *COMMON) if getattr(self.others, name)]
        if shared:
            raise ArgumentError(f"others sets {shared[0]}, which is one for all parameters.", hint="Give it to Muon.")

    def of(self, parameter: str) -> Assigned:
        muon, scale, start = assigned = super().of(parameter)
        options = self._options_of(parameter)
        if options.get("orthogonal", True) or not isinstance(muon, Muon):
            return assigned
        others = muon.others or AdamW(muon.lr, weight_decay=muon.weight_decay)
        if muon.others is not None and "lr" not in options:
            scale *= self._ratio(muon.others.schedule(0), parameter)
        own = {name: value for name, value in options.items() if name in {f.name for f in fields(others)}}
        return Assigned(replace(others, **{"maximize": muon.maximize, **own}), scale, start)

    def fitted(self, layers: Sequence[Mapping[str, Sequence[int]]]) -> Self:
        vectors = [name for layer in layers for name, shape in layer.items() if len(shape) < 2]
        return super().fitted(layers).regrouped({name: {"orthogonal": False} for name in vectors})

    def state(self) -> dict[str, float]:
        return {"momentum_buffer": 0.0}

    def step(self, p: Operands) -> Step:
        e = p.e
        buffer = average(p, "momentum_buffer", p.gradient, self.momentum)
        direction = buffer
        if self.nesterov:
            direction = e.add(e.mul(p.gradient, 1 - self.momentum), e.mul(buffer, self.momentum))
        rows, *rest = (d for d in p.parameter.shape or () if isinstance(d, int))
        columns = math.prod(rest)
        matrix = e.reshape(direction, [rows, columns])
        move = e.reshape(self._orthogonalized(p, matrix, rows > columns), [rows, *rest])
        ratio = math.sqrt(max(1, rows / columns))
        if self.adjust_lr_fn == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(rows, columns))
        return descend(p, p.kept(self.weight_decay), e.mul(move, p.cast(e.mul(p.eta, ratio)))), {
            "momentum_buffer": buffer
        }

    def _orthogonalized(self, p: Operands, matrix: ir.Value, tall: bool) -> ir.Value:
        """x <- a x + (b x x' + c (x x')^2) x, from x = matrix / |matrix|; a tall matrix is transposed meanwhile."""
        e, (a, b, c) = p.e, self.ns_coefficients
        half = matrix.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        x = e.cast(matrix, ir.DataType.FLOAT) if half else matrix
        x = e.transpose(x, [1, 0]) if tall else x
        norm = e.op("Sqrt", e.op("ReduceSumSquare", x, keepdims=0))
        x = e.div(x, e.op("Max", norm, e.scalar(self.eps, norm)))
        for _ in range(self.ns_steps):
            gram = e.op("Gemm", x, x, transB=1)
            x = e.op("Gemm", e.op("Gemm", gram, gram, gram, alpha=c, beta=b), x, x, beta=a)
        return p.cast(e.transpose(x, [1, 0]) if tall else x)
