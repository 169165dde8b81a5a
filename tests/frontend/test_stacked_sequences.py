"""Sequences that loops read and extend, against PyTorch's gradients of the same program."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.operators import text_model

X = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)

_BODY = """body = turn (int64 i, bool go, {state}seq(float[3]) old) => (bool on, {result}seq(float[3]) new) {{
    on = Identity (go) {nodes} new = SequenceInsert (old, t)
}}"""


def _loop(
    nodes: str, after: str, *, rows: str = "4", state: str = "", before: str = "", n: str = ""
) -> onnx.ModelProto:
    body = _BODY.format(
        nodes=nodes, state=f"float[3] {state}, " if state else "", result="float[3] last, " if state else ""
    )
    first, last = (f"{state}0, ", "end, ") if state else ("", "")
    text = f"""(float[{rows},3] x{n}) => (float[a,b] y) <bool go0 = {{1}}> {{
        {before} count = SequenceLength (parts) empty = SequenceEmpty ()
        {last}list = Loop <{body}> (count, go0, {first}empty) {after}
    }}"""
    return text_model(text)


SPLIT = "parts = SplitToSequence <axis = 0, keepdims = 0> (x)"
CARRY = "u = SequenceAt (parts, i) v = Add (u, s) t = Tanh (v) last = Identity (t)"
STATE = f"{SPLIT} z = Constant <value = int64 {{0}}> () s0 = Gather (x, z)"


def _carried(x: torch.Tensor) -> torch.Tensor:
    s, made = x[0], []
    for row in x:
        s = torch.tanh(row + s)
        made.append(s)
    return torch.stack(made)


Program = Callable[[torch.Tensor], torch.Tensor]

PROGRAMS: dict[str, tuple[str, str, str, str, Program]] = {
    "mapped and stacked": (
        "u = SequenceAt (parts, i) t = Mul (u, u)",
        "y = ConcatFromSequence <axis = 0, new_axis = 1> (list)",
        "",
        SPLIT,
        lambda x: x * x,
    ),
    "carried, stacked last": (
        CARRY,
        "y = ConcatFromSequence <axis = -1, new_axis = 1> (list)",
        "s",
        STATE,
        lambda x: _carried(x).T,
    ),
    "concatenated": (
        CARRY,
        "c = ConcatFromSequence <axis = 0> (list) k = Constant <value = int64[2] {2, 6}> () y = Reshape (c, k)",
        "s",
        STATE,
        lambda x: _carried(x).reshape(2, 6),
    ),
    "one member": (
        CARRY,
        (
            "j = Constant <value = int64 {-2}> () r = SequenceAt (list, j) w = SequenceLength (list) f = Cast <to = 1> (w)"
            " p = Mul (r, f) q = Mul (p, end) h = Constant <value = int64[1] {0}> () y = Unsqueeze (q, h)"
        ),
        "s",
        STATE,
        lambda x: (4 * _carried(x)[-2] * _carried(x)[-1])[None],
    ),
}


def _check(model: onnx.ModelProto, program: Program, **more: np.ndarray) -> None:
    x = torch.tensor(X, dtype=torch.float64, requires_grad=True)
    y = program(x)
    seed = np.random.default_rng(1).standard_normal(tuple(y.shape)).astype(np.float32)
    y.backward(torch.tensor(seed, dtype=torch.float64))
    augmented = og.augment(model, wrt=["x"])
    got = run(augmented, {"x": X, "y_grad": seed, **more})
    np.testing.assert_allclose(got["y"], run(model, {"x": X, **more})["y"], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got["y"], y.detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["x_grad"], x.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", ["4", "rows"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_lists_in_loops(name: str, rows: str) -> None:
    nodes, after, state, before, program = PROGRAMS[name]
    _check(_loop(nodes, after, state=state, before=before, rows=rows), program)


def test_parts_of_several_rows() -> None:
    before = "two = Constant <value = int64 {2}> () parts = SplitToSequence <axis = 0> (x, two)"
    nodes = "u = SequenceAt (parts, i) t = ReduceSumSquare <keepdims = 0> (u, ax)"
    model = _loop(
        nodes,
        "y = ConcatFromSequence <axis = 0, new_axis = 1> (list)",
        before=f"{before} ax = Constant <value = int64[1] {{0}}> ()",
    )
    _check(model, lambda x: (x.reshape(2, 2, 3) ** 2).sum(1))


@pytest.mark.parametrize("rows", ["4", "rows"])
def test_sequence_map(rows: str) -> None:
    body = "m (float[3] u, float[3] w) => (float[3] p, float[3] q) { p = Mul (u, w) q = Exp (u) }"
    text = f"""(float[{rows},3] x) => (float[a,b] y) {{
        parts = SplitToSequence <axis = 0, keepdims = 0> (x) z = Constant <value = int64 {{1}}> () w = Gather (x, z)
        a, b = SequenceMap <body = {body}> (parts, w)
        s = ConcatFromSequence <axis = 1, new_axis = 1> (a) t = ConcatFromSequence <axis = 1, new_axis = 1> (b)
        y = Add (s, t)
    }}"""
    model = text_model(text)
    x = torch.tensor(X, dtype=torch.float64, requires_grad=True)
    y = (x * x[1] + x.exp()).T
    seed = np.random.default_rng(1).standard_normal(tuple(y.shape)).astype(np.float32)
    y.backward(torch.tensor(seed, dtype=torch.float64))
    got = run(og.augment(model, wrt=["x"]), {"x": X, "y_grad": seed})
    np.testing.assert_allclose(got["y"], y.detach(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["x_grad"], x.grad, rtol=1e-4, atol=1e-5)


def test_a_list_of_members_of_different_sizes_stays() -> None:
    """Members of unknown sizes may differ, so that they cannot be stacked to be concatenated."""
    nodes = "u = SequenceAt (parts, i) c = Greater (u, zero) t = Compress (u, c)"
    model = _loop(
        nodes, "y = ConcatFromSequence <axis = 0> (list)", before=f"{SPLIT} zero = Constant <value = float {{0}}> ()"
    )
    with pytest.raises(og.DifferentiationError, match=r"(ConcatFromSequence|Loop).* opset 21"):
        og.augment(model, wrt=["x"])
