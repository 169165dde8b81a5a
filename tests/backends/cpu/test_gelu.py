"""In training graphs the forms of GELU that exporters write become one operator."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import check_by_torch, graph_of

W = np.linspace(-2, 2, 16).round(3).reshape(4, 4)


def model(nodes: str, *outputs: str) -> onnx.ModelProto:
    """`y = f(x w)`, with a weight, so that there is something to train."""
    text = f"""(float[5, 4] x) => (float[5, 4] y{"".join(f", float[5, 4] {o}" for o in outputs)})
    <float half = {{0.5}}, float one = {{1}}, float root = {{1.4142135}}, float inverse = {{0.70710677}},
     float three = {{3}}, float b = {{0.044715}}, float c = {{0.7978846}}, float other = {{0.6}}> {{
      h = MatMul(x, w)
      {nodes}
    }}"""
    return graph_of(text, opset=18, w=W.astype(np.float32))


ERF = {
    "half last": "u = Div(h, root) e = Erf(u) s = Add(e, one) p = Mul(h, s) y = Mul(p, half)",
    "half first": "u = Mul(inverse, h) e = Erf(u) s = Add(one, e) p = Mul(half, s) y = Mul(h, p)",
    "half on x": "k = Mul(h, half) u = Div(h, root) e = Erf(u) s = Add(e, one) y = Mul(k, s)",
}
TANH = {
    "powers by Mul": "q = Mul(h, h) t = Mul(h, q) v = Mul(b, t) a = Add(h, v) m = Mul(c, a) e = Tanh(m)"
    " s = Add(one, e) p = Mul(h, s) y = Mul(half, p)",
    "Pow": "t = Pow(h, three) v = Mul(b, t) a = Add(h, v) m = Mul(c, a) e = Tanh(m)"
    " s = Add(e, one) p = Mul(half, s) y = Mul(h, p)",
}


@pytest.mark.parametrize("form", [*ERF, *TANH])
def test_equals_pytorch(form: str) -> None:
    m = model({**ERF, **TANH}[form])
    g = og.augment(m, wrt="all", training=True)
    kinds = [n.op_type for n in g.graph.node]
    assert kinds.count("Gelu") == 1
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    dy = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    kind = "tanh" if form in TANH else "none"
    got = run(g, {"x": x, "y_grad": dy})
    check_by_torch(
        got, lambda v, w: torch.nn.functional.gelu(v @ w, approximate=kind), seed=dy, x=x, w=W, rtol=2e-5, atol=2e-5
    )
    assert got.keys() == {"y", "x_grad", "w_grad"}


@pytest.mark.filterwarnings("ignore:'other' may be parameters")
@pytest.mark.parametrize(
    "nodes",
    [
        "u = Div(h, root) e = Erf(u) s = Add(e, one) p = Mul(h, s) y = Mul(p, other)",
        "u = Mul(h, half) e = Erf(u) s = Add(e, one) p = Mul(h, s) y = Mul(p, half)",
        "u = Div(h, root) e = Erf(u) s = Add(e, half) p = Mul(h, s) y = Mul(p, half)",
        "u = Div(x, root) e = Erf(u) s = Add(e, one) p = Mul(h, s) y = Mul(p, half)",
        (
            "t = Pow(h, three) v = Mul(half, t) a = Add(h, v) m = Mul(c, a) e = Tanh(m)"
            " s = Add(e, one) p = Mul(half, s) y = Mul(h, p)"
        ),
    ],
    ids=["another scale", "another slope", "another shift", "of something else", "another cubic"],
)
def test_similar_expressions_stay(nodes: str) -> None:
    g = og.augment(model(nodes), wrt="all", training=True)
    assert "Gelu" not in [n.op_type for n in g.graph.node]


def test_visible_values_inside_stay() -> None:
    """An output in the middle, a differentiated value, and `lowering="exact"`."""
    m = model(ERF["half last"], "e")
    assert "Gelu" not in [n.op_type for n in og.augment(m, training=True).graph.node]
    m = model(ERF["half last"])
    assert "Gelu" not in [n.op_type for n in og.augment(m, wrt=["u"], training=True).graph.node]
    assert "Gelu" not in [
        n.op_type for n in og.augment(m, training=True, target=og.Target(lowering="exact")).graph.node
    ]
    assert "Gelu" not in [n.op_type for n in og.augment(m).graph.node]


def test_training_programs_fuse_it() -> None:
    program = og.build_training(model(ERF["half last"]), loss={"y": "mse"}, optimizer=og.optim.SGD(lr=0.1))
    assert [n.op_type for n in program.step.graph.node].count("Gelu") == 1
