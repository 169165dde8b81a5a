"""Sequences of known members, and those that loops read and extend, against PyTorch's gradients of the same program."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.one_input import ROWS, of_rows, rows_gradient
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
    with pytest.raises(og.errors.DifferentiationError, match=r"(ConcatFromSequence|Loop).* opset 21"):
        og.augment(model, wrt=["x"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_embeddings_of_the_newer_exporter(
    mode: str, tmp_path: Path, *, offsets: bool, padding: int | None
) -> None:
    """A Loop inserts one row per bag, and ConcatFromSequence joins the rows along the axis that they share.

    With padding another Loop inside grows a list of the places that are none.
    """
    torch.manual_seed(0)
    bag = torch.nn.EmbeddingBag(20, 8, mode=mode, padding_idx=padding)
    args = (torch.randint(20, (7,)), torch.tensor([0, 2, 5])) if offsets else (torch.randint(20, (3, 5)),)
    names = ["x", "o"][: len(args)]
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(bag, args, tmp_path / "bag.onnx", dynamo=True, optimize=False, input_names=names,
                          output_names=["y"], verbose=False)  # fmt: skip
    made = og.augment(onnx.load(tmp_path / "bag.onnx"), wrt="parameters")
    y = bag(*args)
    seed = torch.randn_like(y)
    y.backward(seed)
    found = run(made, {**{name: arg.numpy() for name, arg in zip(names, args, strict=True)}, "y_grad": seed.numpy()})
    assert bag.weight.grad is not None
    np.testing.assert_allclose(found["weight_grad"], bag.weight.grad.numpy(), rtol=1e-5, atol=1e-6)


LIST_OF_ROWS = """(float[T,8] w, int64 n) => (float[a,8] y) <int64[1] one = {1}, int64[1] l = {-1}, int64[1] z = {0}> {
    e = SequenceEmpty ()
    q = Loop (n, , e) <body = b (int64 i, bool c, seq(float[1,d]) s) => (bool k, seq(float[1,d]) r) {
        k = Identity (c) u = Reshape (i, l) v = Add (u, one)
        p = Slice (w, u, v) h = Tanh (p) t = ReduceSum <keepdims = 1> (h, z) r = SequenceInsert (s, t)
    }>
    y = ConcatFromSequence <axis = 0> (q) }"""


@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_one_size_along_the_joined_axis_are_stacked(count: int) -> None:
    """The size along other axes is not known, but the same for all members."""
    made = og.augment(text_model(LIST_OF_ROWS), wrt="w")
    w = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    found = run(made, {"w": w, "n": np.array(count), "y_grad": np.ones((count, 8), np.float32)})
    want = np.where(np.arange(4)[:, None] < count, 1 - np.tanh(w) ** 2, 0)
    np.testing.assert_allclose(found["w_grad"], want, rtol=1e-5, atol=1e-6)


# -- known members -----------------------------------------------------------------------------------------------------


def test_sequences_of_known_members() -> None:
    """PyTorch's exporter writes `stack`, `cat` and an index of a list like this."""
    model = of_rows(
        """<int64 first = {0}, int64 last = {-1}> {
        h = Tanh (x)  s = SequenceConstruct (x, h)  a = ConcatFromSequence <axis = 1, new_axis = 1> (s)
        n = SequenceEmpty ()  n1 = SequenceInsert (n, x)  n2 = SequenceInsert (n1, h, first)  n3 = SequenceInsert (n2, a)
        c = SequenceErase (n3)  b = ConcatFromSequence <axis = -1> (c)  y = SequenceAt (c, last)
        q = ReduceSumSquare <keepdims = 0> (a)  r = ReduceSumSquare <keepdims = 0> (b)  z = Add (q, r)
        }"""
    )
    model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, []))
    want = 1 + 4 * ROWS + 4 * np.tanh(ROWS) * (1 - np.tanh(ROWS) ** 2)
    np.testing.assert_allclose(rows_gradient(model), want, rtol=1e-5)
    result = run(og.augment(model, wrt="inputs", cotangents="ones"), {"x": ROWS})
    np.testing.assert_array_equal(result["y"], ROWS)


def test_sequence_map_of_members_of_different_sizes() -> None:
    body = "m (float[n,3] u, float[n,3] w, float[3] b) => (float[n,3] p) { q = Mul (u, w) p = Add (q, b) }"
    model = text_model(f"""(float[4,3] x, float[3] b) => (float[4,3] y) <int64[2] sizes = {{1, 3}}> {{
        s = SplitToSequence (x, sizes) h = Exp (x) t = SplitToSequence (h, sizes)
        m = SequenceMap <body = {body}> (s, t, b) y = ConcatFromSequence <axis = 0> (m)
    }}""")
    x, seed = np.random.default_rng(2).standard_normal((2, 4, 3)).astype(np.float32)
    got = run(og.augment(model, wrt=["x", "b"]), {"x": x, "b": np.ones(3, np.float32), "y_grad": seed})
    np.testing.assert_allclose(got["y"], x * np.exp(x) + 1, rtol=1e-5)
    np.testing.assert_allclose(got["x_grad"], seed * (1 + x) * np.exp(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["b_grad"], seed.sum(0), rtol=1e-5, atol=1e-6)
