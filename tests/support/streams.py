"""Small models with states, as ONNX and in PyTorch."""

from __future__ import annotations

import numpy as np
import torch

from tests.support.one_input import graph_of

RNG = np.random.default_rng(3)
SIZE, HIDDEN = 3, 5
WEIGHTS = {n: (0.4 * RNG.standard_normal(s)).astype("f") for n, s in
           (("w", (4 * HIDDEN, SIZE)), ("u", (4 * HIDDEN, HIDDEN)), ("v", (HIDDEN, 1)))}  # fmt: skip
STATES = {"h": "hn", "c": "cn"}


def _onnx_order(weight: np.ndarray) -> np.ndarray:
    """The gates of PyTorch (i, f, g, o) in ONNX's order (i, o, f, c)."""
    i, f, g, o = np.split(weight, 4)
    return np.concatenate([i, o, f, g])[None]


LSTM = graph_of(
    """(float[N,T,3] x, float[1,N,5] h, float[1,N,5] c) => (float[N,T,1] y, float[1,N,5] hn, float[1,N,5] cn) {
        first = Transpose <perm = [1, 0, 2]> (x)
        every, hn, cn = LSTM <hidden_size = 5> (first, w, u, , , h, c)
        squeezed = Squeeze (every, one)
        turned = Transpose <perm = [1, 0, 2]> (squeezed)
        y = MatMul (turned, v)
    }""",
    w=_onnx_order(WEIGHTS["w"]),
    u=_onnx_order(WEIGHTS["u"]),
    v=WEIGHTS["v"],
    one=np.array([1]),
)
"""An LSTM over the entries of a part, whose states are inputs and outputs."""

CELL = graph_of(
    """(float[N,3] x, float[N,5] h) => (float[N,1] y, float[N,5] hn) {
        a = MatMul (x, w) b = MatMul (h, u) s = Add (a, b) hn = Tanh (s) y = MatMul (hn, v)
    }""",
    w=WEIGHTS["w"][:HIDDEN].T.copy(),
    u=WEIGHTS["u"][:HIDDEN].T.copy(),
    v=WEIGHTS["v"],
)
"""A recurrent network that takes one frame in a call."""


class TorchLSTM(torch.nn.Module):
    """`LSTM` in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(SIZE, HIDDEN, batch_first=True, bias=False)
        self.v = torch.nn.Parameter(torch.tensor(WEIGHTS["v"]))
        with torch.no_grad():
            self.lstm.weight_ih_l0.copy_(torch.tensor(WEIGHTS["w"]))
            self.lstm.weight_hh_l0.copy_(torch.tensor(WEIGHTS["u"]))

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, ...]:
        every, (h, c) = self.lstm(x, state)
        return every @ self.v, h, c


class TorchCell(torch.nn.Module):
    """`CELL` over an axis of time, in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        w, u = (torch.tensor(WEIGHTS[n][:HIDDEN].T.copy()) for n in ("w", "u"))
        self.w, self.u, self.v = map(torch.nn.Parameter, (w, u, torch.tensor(WEIGHTS["v"])))

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = []
        for frame in x.unbind(1):
            h = torch.tanh(frame @ self.w + h @ self.u)
            y.append(h @ self.v)
        return torch.stack(y, 1), h
