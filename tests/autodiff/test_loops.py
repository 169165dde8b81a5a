"""Scan differentiated by another Scan: the derivatives are those of the same Scan unrolled."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.operators import text_model

STEPS = [
    "Tanh (a)",
    "Mul (a, b)",
    "Add (a, b)",
    "Sub (b, c)",
    "MatMul (a, w)",
    "Gemm (a, w, c)",
    "Gemm <transB = 1, alpha = 0.5> (a, w, c)",
    "MatMul (a, wt)",
    "Mul (a, c)",
    "Mul (a, row)",
    "Add (a, cell)",
    "Sigmoid (a)",
    "Relu (a)",
    "Softmax (a)",
    "Where (positive, a, b)",
    "Max (a, b)",
    "Transpose <perm = [1, 0]> (square)",
    "Concat <axis = 1> (left, right)",
    "Div (a, spread)",
    "Identity (a)",
    "Add (c, w)",
]
"""Nodes of a body, of a and b, two [3,3] values made before; w and c are captured."""

BEFORE = {
    "wt": ["wt = Transpose <perm = [1, 0]> (w)"],
    "row": ["row = Gather <axis = 0> (w, k)"],
    "cell": ["cell = ReduceMean <keepdims = 1> (a)"],
    "positive": ["positive = Greater (a, b)"],
    "square": ["square = MatMul (a, b)"],
    "left": ["left, rest = Split <axis = 1> (a, cut)", "right = Exp (rest)"],
    "spread": ["product = Mul (a, b)", "size = Abs (product)", "spread = Add (size, one)"],
}
"""The nodes that compute the helper values of a node."""

OWN = {*BEFORE, "rest", "right", "product", "size"}
"""Names that get the number of their step."""


@dataclass(frozen=True)
class Body:
    """A Scan with two floating states, a counter k, and two scanned inputs; every value is [3,3]."""

    steps: tuple[tuple[int, int, int], ...]
    results: tuple[int, int, int, int]
    axes: tuple[int, int, int, int]
    directions: tuple[int, int, int, int]

    def text(self, turns: int | str) -> str:
        values, lines = ["s", "t", "p", "q"], ["k1 = Add (k, step)", "k2 = Mod (k1, three)"]
        for number, (step, i, j) in enumerate(self.steps):
            inner = {name: f"{name}_{number}" for name in OWN}
            inner |= {"a": values[i % len(values)], "b": values[j % len(values)]}
            node = STEPS[step % len(STEPS)]
            before = [line for name in BEFORE if re.search(rf"\b{name}\b", node) for line in BEFORE[name]]
            lines += [_renamed(line, inner) for line in (*before, f"v{number} = {node}")]
            values.append(f"v{number}")
        ends = [values[-1 - r % len(values)] for r in self.results]
        lines += [f"r{i} = Identity ({v})" for i, v in enumerate(ends)]
        (ap, aq, ay, az), (dp, dq, dy, dz) = self.axes, self.directions
        shapes = [_joined(turns, axis) for axis in self.axes]
        return f"""(float[3,3] s0, float[3,3] t0, float{shapes[0]} p0, float{shapes[1]} q0, float[3,3] w, float[3] c)
            => (float[3,3] s9, float[3,3] t9, float{shapes[2]} y, float{shapes[3]} z)
            <int64 zero = {{0}}, int64 step = {{1}}, int64 three = {{3}}, float one = {{1}}, int64[2] cut = {{1, 2}}> {{
            k9, s9, t9, y, z = Scan <num_scan_inputs = 2, scan_input_axes = [{ap}, {aq}], scan_output_axes = [{ay}, {az}],
                scan_input_directions = [{dp}, {dq}], scan_output_directions = [{dy}, {dz}],
                body = b (int64 k, float[3,3] s, float[3,3] t, float[3,3] p, float[3,3] q)
                => (int64 k2, float[3,3] r0, float[3,3] r1, float[3,3] r2, float[3,3] r3) {{
                {" ".join(lines)} }}> (zero, s0, t0, p0, q0) }}"""


def _joined(turns: int | str, axis: int) -> str:
    sizes: list[int | str] = [3, 3]
    sizes.insert(axis % 3, turns)
    return f"[{','.join(map(str, sizes))}]"


def _renamed(line: str, names: dict[str, str]) -> str:
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), line)


BODIES = st.builds(
    Body,
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6).map(tuple),
    st.tuples(*[st.integers(0, 3)] * 4),
    st.tuples(*[st.integers(-3, 2)] * 4),
    st.tuples(*[st.integers(0, 1)] * 4),
)
NAMES = ["s0", "t0", "p0", "q0", "w", "c"]


def _feed(model: onnx.ModelProto, turns: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {i.name: [d.dim_value or turns for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    return {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}


def _same(make: Callable[..., onnx.ModelProto], body: Body, turns: int) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    models = []
    for length in (turns, "n"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a zero gradient is legitimate here
            models.append(make(text_model(body.text(length))))
    _compare(*models, turns)
    return models[0], models[1]


def _compare(known: onnx.ModelProto, unknown: onnx.ModelProto, turns: int) -> None:
    feed = _feed(known, turns)
    want, got = (run(model, feed, optimize=False) for model in (known, unknown))
    assert want.keys() == got.keys()
    assume(all(np.isfinite(value).all() for value in want.values()))
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5 * max(1, np.abs(value).max()), err_msg=name)


@settings(max_examples=20, phases=[Phase.generate])
@given(
    BODIES, st.integers(1, 7), st.sets(st.sampled_from(NAMES), min_size=1), st.sets(st.sampled_from("yz"), min_size=0)
)
def test_reverse_mode_equals_the_unrolled_form(body: Body, turns: int, wrt: set[str], of: set[str]) -> None:
    targets = sorted(of) or ["s9", "t9", "y", "z"]
    _same(lambda m: og.augment(m, wrt=sorted(wrt), of=targets), body, turns)


@settings(max_examples=20, phases=[Phase.generate])
@given(BODIES, st.integers(1, 7), st.sets(st.sampled_from(NAMES), min_size=1))
def test_forward_mode_equals_the_unrolled_form(body: Body, turns: int, wrt: set[str]) -> None:
    _same(lambda m: og.jvp(m, wrt=sorted(wrt)), body, turns)


@settings(max_examples=20, phases=[Phase.generate])
@given(BODIES, st.integers(1, 3))
def test_second_order_equals_the_unrolled_form(body: Body, turns: int) -> None:
    known, unknown = _same(lambda m: og.augment(m, wrt=["s0", "p0", "w"], of=["t9", "y"]), body, turns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        again = [og.vjp(m, wrt=["s0", "p0", "w", "y_grad"], of=["p0_grad", "w_grad"]) for m in (known, unknown)]
    _compare(again[0], again[1], turns)
