"""The Scan of opset 8 against ONNX Runtime, which still runs it, and its gradient against PyTorch's."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.old_models import assert_same, upgraded
from tests.support.operators import text_model

BODY = """
    turn (float[2] s, float[2] u, float w) => (float[2] next, float[2] twice, float total) {
        p = Mul(u, w)
        q = Add(s, p)
        next = Tanh(q)
        twice = Add(next, next)
        total = ReduceSum <keepdims = 0> (p)
    }
"""


def _model(given: str, *, directions: str = "[0, 0]") -> onnx.ModelProto:
    lengths = "int64[3] n, " if given else ""
    return text_model(
        f"({lengths}float[3,2] s, float[3,4,2] u, float[3,4] w) => (float[3,2] last, float[3,4,2] z, float[3,4] t) {{"
        f" last, z, t = Scan <num_scan_inputs = 2, directions = {directions}, body = {BODY}> ({given}, s, u, w) }}",
        8,
    )


def _feed(lengths: list[int] | None) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(3)
    feed = {k: draw.standard_normal(s).astype(np.float32) for k, s in (("s", (3, 2)), ("u", (3, 4, 2)), ("w", (3, 4)))}
    return feed if lengths is None else {**feed, "n": np.array(lengths)}


def _reference(
    s: torch.Tensor, u: torch.Tensor, w: torch.Tensor, lengths: list[int], backwards: tuple[int, int]
) -> list[torch.Tensor]:
    lasts, zs, ts = [], [], []
    for i, length in enumerate(lengths):
        state, z, t = s[i], [], []
        for k in range(length):
            p = u[i, length - 1 - k if backwards[0] else k] * w[i, length - 1 - k if backwards[1] else k]
            state = torch.tanh(state + p)
            z.append(2 * state)
            t.append(p.sum())
        lasts.append(state)
        zs.append(torch.cat([torch.stack(z), torch.zeros(4 - length, 2, dtype=s.dtype)]))
        ts.append(torch.cat([torch.stack(t), torch.zeros(4 - length, dtype=s.dtype)]))
    return [torch.stack(lasts), torch.stack(zs), torch.stack(ts)]


@pytest.mark.parametrize("lengths", [None, [4, 1, 3]], ids=str)
@pytest.mark.parametrize("backwards", [(0, 0), (1, 0)], ids=str)
def test_values_and_gradients(lengths: list[int] | None, backwards: tuple[int, int]) -> None:
    model, feed = _model("n" if lengths else "", directions=str(list(backwards))), _feed(lengths)
    before = list(run(model, feed, optimize=False).values())
    assert_same(before, list(run(upgraded(model), feed, optimize=False).values()), exact=False)
    leaves = {k: torch.tensor(feed[k], dtype=torch.float64, requires_grad=True) for k in ("s", "u", "w")}
    results = _reference(*leaves.values(), lengths or [4, 4, 4], backwards)
    for got, want in zip(before, results, strict=True):
        np.testing.assert_allclose(got, want.detach(), rtol=1e-5, atol=1e-6)
    draw = np.random.default_rng(4)
    seeds = {
        f"{k}_grad": draw.standard_normal(r.shape).astype(np.float32)
        for k, r in zip(("last", "z", "t"), results, strict=True)
    }
    torch.autograd.backward(results, [torch.tensor(g, dtype=torch.float64) for g in seeds.values()])
    got = run(og.augment(model, wrt=list(leaves)), {**feed, **seeds})
    for name, leaf in leaves.items():
        np.testing.assert_allclose(got[f"{name}_grad"], leaf.grad, rtol=1e-4, atol=1e-5)


def test_sequences_must_be_among_the_operands() -> None:
    model = _model("")
    for attribute in model.graph.node[0].attribute:
        if attribute.name == "num_scan_inputs":
            attribute.i = 7
    with pytest.raises(og.errors.ModelError, match="it has 7 sequences among 3 operands"):
        upgraded(model)
