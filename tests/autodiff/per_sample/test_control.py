"""Gradients per sample through If, Scan and Loop, against the ordinary gradient of each sample."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.per_sample import close, model, random

STEP = "(float[N,3] s, float[N,3] p) => (float[N,3] t, float[N,3] u)"
SCAN = "num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1]"

PROGRAMS: dict[str, str] = {
    "weights of a loop": """(float[N,3] x, int64 n) => (float[N,3] y) {
        go = Constant <value = bool {1}> ()
        y = Loop (n, go, x) <body = b (int64 i, bool c, float[N,3] s) => (bool c2, float[N,3] t) {
            m = MatMul (s, w)  a = Add (m, b)  t = Tanh (a)  c2 = Identity (c) }> }""",
    "state of zeros": f"""(float[N,T,3] x) => (float[N,3] y, float[N,T,3] z) {{
        zero = Constant <value_floats = [0.0]> ()  three = Constant <value_ints = [3]> ()
        n = Shape <start = 0, end = 1> (x)  size = Concat <axis = 0> (n, three)  h0 = Expand (zero, size)
        y, z = Scan <{SCAN}, body = b {STEP} {{
            m = MatMul (p, w)  q = MatMul (s, w)  o = Add (m, q)  a = Add (o, b)  t = Tanh (a)  u = Identity (t)
            }}> (h0, x) }}""",
    "learned state": f"""(float[N,T,3] x) => (float[N,3] y) {{
        three = Constant <value_ints = [3]> ()
        n = Shape <start = 0, end = 1> (x)  size = Concat <axis = 0> (n, three)  h0 = Expand (b, size)
        y, z = Scan <{SCAN}, body = b {STEP} {{
            q = MatMul (s, w)  o = Add (p, q)  t = Sin (o)  u = Identity (t) }}> (h0, x) }}""",
    "weights as state": """(float[N,3] x, int64 n) => (float[N,3] y) {
        go = Constant <value = bool {1}> ()
        v, y = Loop (n, go, w, x) <body = o
            (int64 i, bool c, float[3,3] v0, float[N,3] s) => (bool c2, float[3,3] v1, float[N,3] t) {
            p = Add (v0, b)  v1 = Tanh (p)  m = MatMul (s, v0)  t = Sin (m)  c2 = Identity (c) }> }""",
    "weights of each turn": """(float[N,3] x) => (float[N,3] y, float[N,20,3] z) {
        y, z = Scan <num_scan_inputs = 1, scan_output_axes = [1], body = o
            (float[N,3] s, float[3,3] v) => (float[N,3] t, float[N,3] u) {
            m = MatMul (s, v)  a = Add (m, b)  t = Sin (a)  u = Cos (a) }> (x, many) }""",
    "branches": """(float[N,3] x, bool p) => (float[N,3] y) {
        y = If (p) <then_branch = one () => (float[N,3] z) { m = MatMul (x, w)  z = Tanh (m) },
                    else_branch = two () => (float[N,3] z) { m = Mul (x, b)  z = Sin (m) }> }""",
    "copies in a branch": """(float[N,3] x, bool p) => (float[N,3] y) {
        size = Shape (x)
        y = If (p) <then_branch = one () => (float[N,3] z) { m = MatMul (x, w)  z = Tanh (m) },
                    else_branch = two () => (float[N,3] z) { e = Exp (b)  z = Expand (e, size) }> }""",
    "weights made by a branch": """(float[N,3] x, bool p) => (float[N,3] y) {
        v = If (p) <then_branch = one () => (float[3,3] z) { z = Tanh (w) },
                    else_branch = two () => (float[3,3] z) { z = Mul (w, b) }>
        m = MatMul (x, v)  y = Sin (m) }""",
    "convolutions": """(float[N,3,6,6] x, bool p) => (float[N,4,6,6] y) {
        y = If (p) <then_branch = one () => (float[N,4,6,6] z) { c = Conv <pads = [1,1,1,1]> (x, k)  z = Mul (c, c) },
                    else_branch = two () => (float[N,4,6,6] z) { a = Sin (x)  z = Conv <pads = [1,1,1,1]> (a, k) }> }""",
    "a loop in a branch in a loop": """(float[N,3] x, int64 n, bool p) => (float[N,3] y) {
        go = Constant <value = bool {1}> ()
        y = Loop (n, go, x) <body = o (int64 i, bool c, float[N,3] s) => (bool c2, float[N,3] t) {
            m = MatMul (s, w)
            h = If (p) <then_branch = one () => (float[N,3] z) {
                    z = Loop (n, c, m) <body = q (int64 j, bool d, float[N,3] f) => (bool d2, float[N,3] g) {
                        o = Mul (f, b)  g = Sin (o)  d2 = Identity (d) }> },
                else_branch = two () => (float[N,3] z) { z = Mul (m, b) }>
            t = Tanh (h)  c2 = Identity (c) }> }""",
}
WEIGHTS = {"w": random(3, 3), "b": random(3), "many": random(20, 3, 3) / 2, "k": random(4, 3, 3, 3)}
SHAPES = {"float[N,3] x": (4, 3), "float[N,T,3] x": (4, 5, 3), "float[N,3,6,6] x": (2, 3, 6, 6)}

WAYS = [(name, taken) for name, text in PROGRAMS.items() for taken in ([True, False] if "bool p" in text else [True])]
"""Each program, and which branch it takes."""


@pytest.mark.filterwarnings("ignore:The derivative is zero")
@pytest.mark.parametrize(("name", "taken"), WAYS)
def test_programs(name: str, taken: bool) -> None:
    text = PROGRAMS[name]
    read = {k: v for k, v in WEIGHTS.items() if any(f"{a}{k}{z}" in text for a in "( " for z in ",)")}
    proto = model(f"g {text}", **read)
    x = random(*next(v for k, v in SHAPES.items() if k in text))
    same: dict[str, np.ndarray] = {"p": np.array(taken)} if "bool p" in text else {}
    same |= {"n": np.array(3)} if "int64 n" in text else {}
    rows = {"x": x} | {f"{k}_grad": np.cos(v) for k, v in run(proto, {"x": x, **same}).items()}
    wrt = [*read, "x"]
    each = run(og.augment(proto, wrt=wrt, per_sample=True), {**rows, **same})
    norms = run(og.augment(proto, wrt=wrt, per_sample="squared_norm"), {**rows, **same})
    single = og.augment(proto, wrt=wrt)
    alone = [run(single, {k: v[i : i + 1] for k, v in rows.items()} | same) for i in range(len(x))]
    for parameter in wrt:
        want = np.stack([one[f"{parameter}_grad"] for one in alone])
        close(each[f"{parameter}_grad"], want[:, 0] if parameter == "x" else want, 1e-5, parameter)
        squares = (want.reshape(len(want), -1) ** 2).sum(1)
        close(norms[f"{parameter}_grad_squared_norm"], squares, 1e-5, parameter)


@pytest.mark.parametrize("gates", [("RNN", 1), ("GRU", 3), ("LSTM", 4)], ids=lambda pair: pair[0])
def test_recurrent_layers_of_any_length(gates: tuple[str, int]) -> None:
    op, count = gates
    weights = {"w": random(2, 3 * count, 4), "r": random(2, 3 * count, 3), "b": random(2, 6 * count)}
    text = f"""g (float[N,T,4] x) => (float[N,T,2,3] y) {{
        turns = Transpose <perm = [1,0,2]> (x)
        states = {op} <hidden_size = 3, direction = "bidirectional"> (turns, w, r, b)
        y = Transpose <perm = [2,0,1,3]> (states) }}"""
    proto, wrt = model(text, **weights), list(weights)
    augmented, single = og.augment(proto, wrt=wrt, per_sample=True), og.augment(proto, wrt=wrt)
    assert len(augmented.graph.node) < 300
    for length in (1, 40):
        rows = {"x": random(3, length, 4), "y_grad": random(3, length, 2, 3)}
        each = run(augmented, rows)
        for i in range(3):
            alone = run(single, {k: v[i : i + 1] for k, v in rows.items()})
            for parameter in wrt:
                close(each[f"{parameter}_grad"][i], alone[f"{parameter}_grad"], 1e-4, parameter)


REFUSED: dict[str, tuple[str, str]] = {
    "turns over the samples": (
        """(float[N,3] x) => (float[3] y) {
        y = Scan <num_scan_inputs = 1, body = o (float[3] s, float[3] p) => (float[3] t) { t = Mul (s, p) }> (b, x) }""",
        "its turns run over axis 0",
    ),
    "condition": (
        """(float[N,3] x) => (float[N,3] y) {
        s = ReduceMax <keepdims = 0> (x)  one = Constant <value = float {1}> ()  p = Greater (s, one)
        y = If (p) <then_branch = one () => (float[N,3] z) { z = Mul (x, b) },
                    else_branch = two () => (float[N,3] z) { z = Add (x, b) }> }""",
        "it mixes samples: ",
    ),
    "number of turns": (
        """(float[N,3] x, int64 n) => (float[N,3] y) {
        g = Constant <value = bool {1}> ()
        y = Loop (n, g, x) <body = o (int64 i, bool c, float[N,3] s) => (bool c2, float[N,3] t) {
            t = Mul (s, b)  m = Gather <axis = 0> (t, i)  o = Equal (m, m)  p = Cast <to = 6> (o)
            q = ReduceMin <keepdims = 0> (p)  c2 = Cast <to = 9> (q) }> }""",
        "it mixes samples",
    ),
    "mixed in a branch": (
        """(float[N,3] x, bool p) => (float[N,3] y) {
        y = If (p) <then_branch = one () => (float[N,3] z) { a = Mul (x, b)  z = Softmax <axis = 0> (a) },
                    else_branch = two () => (float[N,3] z) { z = Add (x, b) }> }""",
        "axis 0, which holds the samples",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_mixed_samples_are_refused(name: str) -> None:
    text, reason = REFUSED[name]
    with pytest.raises(og.errors.DifferentiationError, match="it mixes samples") as caught:
        og.augment(model(f"g {text}", b=random(3)), wrt="b", per_sample=True)
    assert reason in str(caught.value)
