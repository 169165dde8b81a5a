"""Adam, Adagrad and Momentum of `ai.onnx.preview.training`, replaced by plain operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.backend.test.case import node as standard
from onnx.backend.test.case.node import adagrad, adam, momentum
from onnx.reference import ReferenceEvaluator
from torch.nn import functional as F

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.preview_training import DOMAIN, close, drawn, lower, lowered, model, wide


def test_nodes_of_the_standard() -> None:
    assert all(m.expect is standard.expect for m in (adagrad, adam, momentum))  # importing them creates the cases
    cases = {c.name: c for c in standard._NodeTestCases if c.model.graph.node[0].domain == DOMAIN}
    assert len(cases) == 7
    for case in cases.values():
        done = lowered(case.model)
        for inputs, outputs in case.data_sets:
            got = run(done, dict(zip([v.name for v in done.graph.input], inputs, strict=True)))
            for result, want in zip(got.values(), outputs, strict=True):
                assert result.dtype == want.dtype and result.shape == want.shape, case.name
                np.testing.assert_allclose(result, want, rtol=2e-6, err_msg=case.name)


# -- optimizers --------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    # powers of two, because the reference evaluator rounds attributes to float32
    "Adam": (
        4,
        "alpha=0.75, beta=0.9375, epsilon=0.0009765625, norm_coefficient=0.03125, norm_coefficient_post=0.0078125",
    ),
    "Adam defaults": (4, ""),
    "Adagrad": (3, "decay_factor=0.25, epsilon=0.0009765625, norm_coefficient=0.03125"),
    "Adagrad defaults": (3, ""),
    "Momentum": (3, 'alpha=0.75, beta=0.25, norm_coefficient=0.03125, mode="standard"'),
    "Momentum nesterov": (3, 'alpha=0.75, beta=0.25, norm_coefficient=0.0, mode="nesterov"'),
}


def optimizer(name: str, dtypes: dict[str, str], *, rate: str = "float", shape: str = "") -> onnx.ModelProto:
    """One node that updates a tensor per entry of `dtypes`, without declared shapes."""
    kinds, attributes = OPTIMIZERS[name]
    operands = [f"{kind}{t}" for kind in "xgvh"[:kinds] for t in dtypes]
    results = [f"{kind}{t}_new" for kind in ("x", *"vh"[: kinds - 2]) for t in dtypes]
    declared = ", ".join(f"{dtypes[o[1:]]}[] {o}" for o in operands)
    outputs = ", ".join(f"{dtypes[r[1:-4]]}[] {r}" for r in results)
    operator = name.split(maxsplit=1)[0] + (f"<{attributes}>" if attributes else "")
    body = f"{', '.join(results)} = T.{operator}(r, t, {', '.join(operands)})"
    return model(body, f"{rate}{shape} r, int64{shape} t, {declared}", outputs, opset=12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_equal_the_reference(name: str) -> None:
    """Several tensors, of two dtypes, one of rank 0; the rate in float32 and float64."""
    shapes = {"a": (2, 3), "b": (), "c": (4,)}
    dtypes = {"a": "float", "b": "float", "c": "double"}
    kinds = OPTIMIZERS[name][0]
    given = optimizer(name, dtypes)
    done = lowered(given)
    assert not {"If", "Loop"} & {n.op_type for n in done.graph.node}
    reference = ReferenceEvaluator(given)
    for count in (0, 1, 2, 1000):
        arrays = drawn(**{f"{kind}{t}": shape for kind in "xgvh"[:kinds] for t, shape in shapes.items()})
        arrays = {k: a.astype(np.float64) if k.endswith("c") else a for k, a in arrays.items()}
        arrays |= {k: np.asarray(np.abs(a)) for k, a in arrays.items() if k[0] == "vh"[kinds - 3]}  # sums of squares
        feed = {"r": np.array(0.1, np.float32), "t": np.array(count), **arrays}
        vectors = {k: a.reshape(1) if k.endswith("b") else a for k, a in feed.items()}  # it does not support rank 0
        want = dict(zip(reference.output_names, reference.run(None, vectors), strict=True))
        for key, result in run(done, feed).items():
            assert result.dtype == arrays[key[:2]].dtype and result.shape == shapes[key[1]]
            np.testing.assert_allclose(result, want[key].reshape(result.shape), rtol=3e-6, atol=1e-6)
    double = lowered(optimizer(name, {"c": "double"}, rate="double", shape="[1]"))
    feed = {k: a for k, a in feed.items() if k.endswith("c")} | {"r": np.array([0.1]), "t": np.array([3])}
    want = ReferenceEvaluator(optimizer(name, {"c": "double"}, rate="double", shape="[1]")).run(None, feed)
    for result, expected in zip(run(double, feed).values(), want, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-12)


UPDATES: list[tuple[str, int, int, type[torch.optim.Optimizer], dict[str, Any]]] = [
    ('Momentum<alpha=0.75, beta=1.0, norm_coefficient=0.125, mode="nesterov">', 0, 2, torch.optim.SGD,
     {"momentum": 0.75, "weight_decay": 0.125, "nesterov": True}),
    ("Adagrad<decay_factor=0.25, epsilon=1e-10>", 0, 2, torch.optim.Adagrad, {"lr_decay": 0.25}),
    ("Adam<alpha=0.75, beta=0.875, epsilon=0.0>", 1, 3, torch.optim.Adam, {"betas": (0.75, 0.875), "eps": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("node", "first", "kinds", "kind", "options"), UPDATES, ids=[u[0] for u in UPDATES])
def test_training_steps_equal_pytorch(
    node: str, first: int, kinds: int, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """Four runs of a step with Gradient and an optimizer; `first` is the number of the first run."""
    states = [f"s{k}_{p}" for k in range(kinds - 1) for p in "wb"]
    body = f"""
        h = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w, b)
        p = Relu(h)
        d = Sub(p, goal)
        dd = Mul(d, d)
        loss = ReduceMean<keepdims=0>(dd)
        gw, gb = T.Gradient<xs=["w", "b"], zs=["x", "goal"], y="loss">(w, b, x, goal)
        w_next, b_next, {", ".join(f"{s}_next" for s in states)} = T.{node}(r, t, w, b, gw, gb, {", ".join(states)})
    """
    shapes = {"w": "[4,3,3,3]", "b": "[4]"}
    inputs = [f"float{shapes[n[-1]]} {n}" for n in ("w", "b", *states)]
    outputs = ", ".join(i + "_next" for i in inputs)
    inputs = ["float[N,3,8,8] x, float[N,4,4,4] goal, float r, int64 t", *inputs]
    done = lower(body, ", ".join(inputs), f"float loss, {outputs}")
    data = drawn(x=(2, 3, 8, 8), goal=(2, 4, 4, 4))
    feed = drawn(w=(4, 3, 3, 3), b=(4,))
    feed |= {s: np.zeros_like(feed[s[-1]]) for s in states}
    w, b = parameters = [torch.tensor(feed[k], dtype=torch.float64, requires_grad=True) for k in "wb"]
    oracle = kind(parameters, lr=0.1, **options)
    for count in range(4):
        got = run(done, data | feed | {"r": np.array(0.1, np.float32), "t": np.array(count + first)})
        oracle.zero_grad()
        x, goal = (torch.tensor(data[name]).double() for name in ("x", "goal"))
        loss = F.mse_loss(F.conv2d(x, w, b, 2, 1).relu(), goal)
        loss.backward()
        oracle.step()
        close(got["loss"], loss, 1e-5)
        close(got["w_next"], w, 1e-5)
        close(got["b_next"], b, 1e-5)
        feed = {name: got[f"{name}_next"] for name in feed}


def test_optimizers_are_differentiated() -> None:
    """The gradient through a step of an optimizer, also for T = 0."""
    given = optimizer("Adam", {"a": "float"})
    built = og.vjp(given, wrt=["r", "xa", "ga"], of="xa_new", cotangents="ones")
    arrays = drawn(xa=(5,), ga=(5,), va=(5,)) | {"ha": np.full(5, 0.5, np.float32)}
    for count in (0, 3):
        feed = arrays | {"r": np.array(0.1, np.float32), "t": np.array(count)}
        leaves = wide({k: a for k, a in feed.items() if k != "t"})
        g = leaves["xa"] / 32 + leaves["ga"]
        v, h = 0.75 * leaves["va"] + 0.25 * g, 0.9375 * leaves["ha"] + 0.0625 * g * g
        rate = leaves["r"] * ((1 - 0.9375**count) ** 0.5 / (1 - 0.75**count) if count else 1)
        total = ((1 - 1 / 128) * (leaves["xa"] - rate * v / (h.sqrt() + 1 / 1024))).sum()
        want = torch.autograd.grad(total, [leaves[k] for k in ("r", "xa", "ga")])
        for result, expected in zip(run(built, feed).values(), want, strict=True):
            close(result, expected, 1e-5)


def test_optimizers_in_a_loop() -> None:
    body = """w_last, v_last = Loop (n, , w, v) <body = step (int64 i, bool go, float[3] w0, float[3] v0)
        => (bool more, float[3] w1, float[3] v1) {
            more = Identity(go)
            w1, v1 = T.Momentum<alpha=0.5, beta=0.25, norm_coefficient=0.0, mode="standard">(r, i, w0, w0, v0) }>"""
    done = lower(body, "int64 n, float r, float[3] w, float[3] v", "float[3] w_last, float[3] v_last")
    feed = drawn(w=(3,), v=(3,)) | {"n": np.array(5), "r": np.array(0.1, np.float32)}
    w, v = feed["w"].astype(np.float64), feed["v"].astype(np.float64)
    for count in range(5):
        v = 0.5 * v + (0.25 if count else 1) * w
        w = w - 0.1 * v
    got = run(done, feed)
    np.testing.assert_allclose(got["w_last"], w, rtol=1e-5)
    np.testing.assert_allclose(got["v_last"], v, rtol=1e-5)


BROKEN_OPTIMIZERS = {
    'xn = T.Momentum<alpha=0.5, beta=0.5, mode="standard">(r, t, x, x, x)': "'norm_coefficient' is missing",
    'xn = T.Momentum<alpha=0.5, beta=0.5, norm_coefficient=0.0, mode="fast">(r, t, x, x, x)': "its mode is 'fast'",
    "xn = T.Adam(r, t, x, x, x)": "5 inputs, which is not 2 [+] 4 per tensor",
    "xn, a, b = T.Adagrad(r, t, x, x, x)": "3 outputs for 1 tensors, at most 2",
}


@pytest.mark.parametrize("body", BROKEN_OPTIMIZERS)
def test_broken_optimizers(body: str) -> None:
    with pytest.raises(og.errors.ModelError, match=BROKEN_OPTIMIZERS[body]):
        og.transforms.lower_gradient_ops(model(body, "float r, int64 t, float[3] x", "float[3] xn"))
