"""If with a condition known only at run time, differentiated by another If, against PyTorch in double precision."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper
from torch import Tensor

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.operators import text_model

CONVOLUTIONS = """(float[N,3,6,6] x, bool p) => (float[N,C,6,6] y) <float[4,3,3,3] w, float[4] b> {
    a = Sin (x)
    y = If (p) <
        then_branch = one () => (float[N,4,6,6] z) {
            c = Conv <auto_pad = "SAME_UPPER"> (a, w, b)  r = Relu (c)  z = Mul (r, r) },
        else_branch = two () => (float[N,3,6,6] z) {
            q = MaxPool <kernel_shape = [3,3], pads = [1,1,1,1]> (a)  t = Tanh (q)  z = Mul (t, x) }>
}"""

NESTED = """(float[2,3] x, bool p, bool q) => (float[2,3] y, float[2,3] e) <float[4,3,3,3] w, float[4] b> {
    k = Gather <axis = 0> (b, zero)
    y, e = If (p) <
        then_branch = one () => (float[2,3] z, float[2,3] f) {
            s = Sigmoid (x)
            u = If (q) <then_branch = three () => (float[2,3] v) { t = Mul (s, k)  v = Exp (t) },
                        else_branch = four () => (float[2,3] v) { t = Add (s, x)  v = Mul (t, s) }>
            z = Mul (u, s)
            f = Identity (u) },
        else_branch = two () => (float[2,3] z, float[2,3] f) { z = Neg (x)  f = Identity (x) }>
}"""


def convolutions(x: Tensor, w: Tensor, b: Tensor, p: bool, _: bool) -> tuple[Tensor, ...]:
    a = x.sin()
    return (F.conv2d(a, w, b, padding=1).relu() ** 2 if p else F.max_pool2d(a, 3, 1, 1).tanh() * x,)


def nested(x: Tensor, _: Tensor, b: Tensor, p: bool, q: bool) -> tuple[Tensor, ...]:
    if not p:
        return -x, x
    s = x.sigmoid()
    u = (s * b[0]).exp() if q else (s + x) * s
    return u * s, u


PROGRAMS = {"convolutions": (CONVOLUTIONS, convolutions, (2, 3, 6, 6)), "nested": (NESTED, nested, (2, 3))}
RANDOM = np.random.default_rng(0)
W, B = (RANDOM.standard_normal(s).astype(np.float32) for s in ((4, 3, 3, 3), (4,)))


def model_of(text: str) -> onnx.ModelProto:
    text = text.replace("float[4,3,3,3] w, float[4] b", "int64 zero = {0}")
    model = text_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(v, name) for v, name in ((W, "w"), (B, "b")))
    onnx.checker.check_model(model)
    return model


Program = Callable[..., tuple[Tensor, ...]]


@pytest.mark.filterwarnings("ignore:The derivative is zero")  # of w, which one of the programs does not read
@pytest.mark.parametrize(("p", "q"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_reverse_and_forward_mode(name: str, p: bool, q: bool) -> None:
    text, program, shape = PROGRAMS[name]
    model = model_of(text)
    x, tangent = (RANDOM.standard_normal(shape).astype(np.float32) for _ in range(2))
    exact = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (x, W, B)]
    results = program(*exact, p, q)
    seeds = [RANDOM.standard_normal(tuple(y.shape)).astype(np.float32) for y in results]
    want = torch.autograd.grad(results, exact, [torch.tensor(s).double() for s in seeds], allow_unused=True)
    feeds = {"x": x, "p": np.array(p), **({"q": np.array(q)} if name == "nested" else {})}
    names = [v.name for v in model.graph.output]

    got = run(
        og.augment(model, wrt=["x", "w", "b"]), feeds | {f"{y}_grad": s for y, s in zip(names, seeds, strict=True)}
    )
    for value, array, g in zip("xwb", (x, W, B), want, strict=True):
        expected = np.zeros_like(array) if g is None else g.numpy()
        np.testing.assert_allclose(got[f"{value}_grad"], expected, rtol=1e-5, atol=2e-5)
    pushed = run(og.jvp(model, wrt="x"), feeds | {"x_tangent": tangent})
    slope = sum(float((pushed[f"{y}_tangent"] * s).sum()) for y, s in zip(names, seeds, strict=True))
    assert slope == pytest.approx(float((want[0].numpy() * tangent).sum()), rel=1e-4)


def test_second_derivatives() -> None:
    text = NESTED.replace("(float[2,3] y, float[2,3] e)", "(float total)").replace(
        "            f = Identity (u) }", "            f = Mul (u, u) }"
    )
    text = text.removesuffix("\n}") + "  m = Mul (y, e)  total = ReduceSum <keepdims = 0> (m) }"
    model = model_of(text)
    x, v = (RANDOM.standard_normal((2, 3)).astype(np.float32) for _ in range(2))
    for p, q in ((True, True), (True, False), (False, True)):

        def total(x: Tensor, p: bool = p, q: bool = q) -> Tensor:
            y, e = nested(x, torch.tensor(W).double(), torch.tensor(B).double(), p, q)
            return (y * (e * e if p else e)).sum()

        _, want = torch.autograd.functional.hvp(total, torch.tensor(x).double(), torch.tensor(v).double())
        for composition in ("forward_over_reverse", "reverse_over_reverse", "reverse_over_forward"):
            hvp = og.hvp(model, of="total", wrt="x", composition=composition)
            got = run(hvp, {"x": x, "x_tangent": v, "p": np.array(p), "q": np.array(q)})
            np.testing.assert_allclose(got["x_grad_tangent"], want.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2])
def test_branches_of_different_ranks(rows: int) -> None:
    """PyTorch's exporter writes a squeeze of an axis of unknown size like this."""
    text = """(float[N,3] x) => (float y) <int64[1] first = {0}, int64 zero = {0}, int64 one = {1}> {
        sizes = Shape (x)  n = Gather (sizes, zero)  single = Equal (n, one)
        z = If (single) <
            then_branch = a () => (float[3] s) {
                again = Equal (n, one)
                s = If (again) <then_branch = c () => (float[3] t) { t = Squeeze (x, first) },
                                else_branch = d () => (float[N,3] t) { t = Identity (x) }> },
            else_branch = b () => (float[N,3] s) { s = Sin (x) }>
        q = Mul (z, z)  y = ReduceSum <keepdims = 0> (q) }"""
    x = RANDOM.standard_normal((rows, 3)).astype(np.float32)
    got = run(og.grad(text_model(text), of="y", wrt="x"), {"x": x})
    np.testing.assert_allclose(got["x_grad"], 2 * x if rows == 1 else np.sin(2 * x), rtol=1e-5)


def test_parameters_of_a_branch_are_trained() -> None:
    """A weight that a branch stores is a parameter like others."""
    branches = []
    for name, weight in (("then_branch", [[1.0, 2.0]]), ("else_branch", [[3.0, 4.0]])):
        stored = numpy_helper.from_array(np.float32(weight), "w")
        z = helper.make_tensor_value_info("z", 1, ["N", 2])
        node = helper.make_node("MatMul", ["x", "w"], ["z"])
        branches.append((name, helper.make_graph([node], name, [], [z], [stored])))
    node = helper.make_node("If", ["p"], ["y"], **dict(branches))
    inputs = [helper.make_tensor_value_info("x", 1, ["N", 1]), helper.make_tensor_value_info("p", 9, [])]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", 1, ["N", 2])])
    model = og.augment(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))
    seed = np.float32([[1, 0], [0, 1], [1, 1]])
    stored = {v.name: numpy_helper.to_array(v) for v in model.graph.initializer}
    first, second = sorted(("w", "w_1"), key=lambda name: stored[name][0, 0])
    for p, read, other in ((True, first, second), (False, second, first)):
        got = run(model, {"x": np.float32([[1], [2], [3]]), "p": np.array(p), "y_grad": seed})
        np.testing.assert_allclose(got[f"{read}_grad"], [[4, 5]])
        np.testing.assert_allclose(got[f"{other}_grad"], [[0, 0]])


def test_random_numbers_of_a_branch_are_those_of_its_gradient() -> None:
    text = """(float[3] x, bool p) => (float[3] y) { y = If (p) <
        then_branch = one () => (float[3] z) { r = RandomNormalLike (x)  z = Mul (r, x) },
        else_branch = two () => (float[3] z) { z = Neg (x) }> }"""
    model, x = og.augment(text_model(text), wrt="x", cotangents="ones"), np.float32([1, 2, 3])
    got = run(model, {"x": x, "p": np.array(True)})
    np.testing.assert_allclose(got["x_grad"], got["y"] / x, rtol=1e-6)
    np.testing.assert_allclose(run(model, {"x": x, "p": np.array(False)})["x_grad"], [-1, -1, -1])


def test_convolutions_of_a_branch_are_computed_once() -> None:
    """The forward If gives out what the gradient reads, so that its branches hold no Conv of the forward pass."""
    model = og.augment(model_of(CONVOLUTIONS), wrt=["x", "w", "b"], target=og.Target(lowering="exact"))
    first, second = (node for node in model.graph.node if node.op_type == "If")
    assert len(first.output) > 1
    forward = [n for a in first.attribute for n in a.g.node if n.op_type == "Conv"]
    assert [list(n.input) for n in forward] == [["a", "w", "b"]]
    backward = [n for a in second.attribute for n in a.g.node]
    assert not [n for n in backward if n.op_type == "Conv" and list(n.input[:2]) == ["a", "w"]]
