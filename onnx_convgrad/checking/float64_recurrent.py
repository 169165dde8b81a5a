"""RNN, GRU and LSTM in NumPy, step by step and sample by sample, as specified.

ONNX Runtime has no float64 kernels for them, and ONNX's reference evaluator ignores their attributes and
`sequence_lens`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Attributes = Mapping[str, Any]
Array = np.ndarray


def rnn(a: Attributes, x: Array, w: Array, r: Array, *rest: Array | None) -> tuple[Array, ...]:
    """Y and Y_h."""

    def cell(d: int, functions: Sequence[Any], wx: Array, rb: Array, h: Array, c: Array) -> tuple[Array, Array]:
        return functions[0](wx + r[d] @ h + rb), c

    return _run(a, ["Tanh"], cell, x, w, r, rest)[:2]


def gru(a: Attributes, x: Array, w: Array, r: Array, *rest: Array | None) -> tuple[Array, ...]:
    """Y and Y_h."""

    def cell(d: int, functions: Sequence[Any], wx: Array, rb: Array, h: Array, c: Array) -> tuple[Array, Array]:
        f, g = functions
        wz, wr, wh = np.split(wx, 3)
        (rz, rr, rh), (bz, br, bh) = np.split(r[d], 3), np.split(rb, 3)
        z, reset = f(wz + rz @ h + bz), f(wr + rr @ h + br)
        inner = reset * (rh @ h + bh) if a.get("linear_before_reset") else rh @ (reset * h) + bh
        return (1 - z) * g(wh + inner) + z * h, c

    return _run(a, ["Sigmoid", "Tanh"], cell, x, w, r, rest)[:2]


def lstm(a: Attributes, x: Array, w: Array, r: Array, *rest: Array | None) -> tuple[Array, ...]:
    """Y, Y_h and Y_c."""
    p = rest[4] if len(rest) > 4 else None

    def cell(d: int, functions: Sequence[Any], wx: Array, rb: Array, h: Array, c: Array) -> tuple[Array, Array]:
        f, g, last = functions
        i, o, forget, new = np.split(wx + r[d] @ h + rb, 4)
        pi, po, pf = np.zeros((3, r.shape[2])) if p is None else np.split(p[d], 3)
        i = f(i + pi * c)
        forget = 1 - i if a.get("input_forget") else f(forget + pf * c)
        c = forget * c + i * g(new)
        return f(o + po * c) * last(c), c

    return _run(a, ["Sigmoid", "Tanh", "Tanh"], cell, x, w, r, rest)


def _run(
    a: Attributes,
    default: list[str],
    cell: Callable[..., tuple[Array, Array]],
    x: Array,
    w: Array,
    r: Array,
    rest: Sequence[Array | None],
) -> tuple[Array, Array, Array]:
    """Run the `cell` from (direction, activations, W x + b of W, b of R, h, c) to the next h and c."""
    b, lengths, *starts = (*rest, *[None] * 4)[:4]
    steps, batch = x.shape[:2]
    direction = a.get("direction", b"forward").decode()
    ways = ["forward", "reverse"] if direction == "bidirectional" else [direction]
    functions = _functions(a, default * len(ways))
    biases = np.zeros((len(ways), 2 * w.shape[1]), x.dtype) if b is None else b
    y = np.zeros((steps, len(ways), batch, r.shape[2]), x.dtype)
    finals = [np.zeros(y.shape[1:], x.dtype) if v is None else v.copy() for v in starts]
    for d, n in np.ndindex(len(ways), batch):
        order = range(steps if lengths is None else int(lengths[n]))
        chosen = functions[d * len(default) : (d + 1) * len(default)]
        wb, rb = np.split(biases[d], 2)
        if not order:  # ONNX Runtime does not give the initial state
            finals[0][d, n] = finals[1][d, n] = 0
        for t in order if ways[d] == "forward" else reversed(order):
            h, c = cell(d, chosen, w[d] @ x[t, n] + wb, rb, finals[0][d, n], finals[1][d, n])
            y[t, d, n] = h
            finals[0][d, n], finals[1][d, n] = h, c
    return y, finals[0], finals[1]


_FUNCTIONS: dict[str, Callable[[Array, float, float], Array]] = {
    "relu": lambda v, *_: np.maximum(v, 0),
    "tanh": lambda v, *_: np.tanh(v),
    "sigmoid": lambda v, *_: 1 / (1 + np.exp(-v)),
    "softsign": lambda v, *_: v / (1 + np.abs(v)),
    "softplus": lambda v, *_: np.logaddexp(v, 0),
    "affine": lambda v, alpha, beta: alpha * v + beta,
    "scaledtanh": lambda v, alpha, beta: alpha * np.tanh(beta * v),
    "hardsigmoid": lambda v, alpha, beta: np.clip(alpha * v + beta, 0, 1),
    "leakyrelu": lambda v, alpha, _: np.where(v < 0, alpha * v, v),
    "thresholdedrelu": lambda v, alpha, _: np.where(v > alpha, v, 0),
    "elu": lambda v, alpha, _: np.where(v < 0, alpha * np.expm1(v), v),
}
_ALPHA = {"affine": 1.0, "scaledtanh": 1.0, "hardsigmoid": 0.2, "leakyrelu": 0.01, "thresholdedrelu": 1.0, "elu": 1.0}
_BETA = {"affine": 0.0, "scaledtanh": 1.0, "hardsigmoid": 0.5}


def _functions(a: Attributes, default: Sequence[str]) -> list[Callable[[Array], Array]]:
    names = [n.decode().lower() for n in a.get("activations", [n.encode() for n in default])]
    alphas, betas = (list(a.get(name, ())) for name in ("activation_alpha", "activation_beta"))
    clip = a.get("clip") or np.inf
    made = []
    for i, name in enumerate(names):
        alpha = (alphas.pop(0) if alphas else _ALPHA[name]) if name in _ALPHA else 0.0
        beta = (betas.pop(0) if betas else _BETA[name]) if name in _BETA else 0.0
        limit = np.inf if len(default) % 3 == 0 and i % 3 == 2 else clip  # the output of the cell is not clipped
        made.append(_clipped(_FUNCTIONS[name], alpha, beta, limit))
    return made


def _clipped(
    f: Callable[[Array, float, float], Array], alpha: float, beta: float, limit: float
) -> Callable[[Array], Array]:
    return lambda v: f(np.clip(v, -limit, limit), alpha, beta)
