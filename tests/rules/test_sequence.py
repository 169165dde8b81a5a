"""SequenceAt of SplitToSequence, with constant and with fed sizes and positions."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, rand
from tests.support.operators import rule_test, text_model

X = np.random.default_rng(3).normal(size=(2, 7)).astype(np.float32)
END = 2**63 - 1


def model(
    split: np.ndarray | None, positions: list[int], attributes: dict[str, int], *, shapes: str, fed: bool
) -> onnx.ModelProto:
    """`y0 = x.split(...)[p0] ** 2`, `y1 = x.split(...)[p1] ** 2`, ..."""
    declared = {"static": "[2,7]", "symbolic": "[a,b]", "absent": "[]"}[shapes]
    operands = {} if split is None else {"split": split}
    operands |= {f"p{i}": np.asarray(p) for i, p in enumerate(positions)}
    inputs = "".join(f", int64{list(array.shape) or ''} {name}" for name, array in operands.items()) if fed else ""
    options = ", ".join(f"{name} = {value}" for name, value in attributes.items())
    body = f"parts = SplitToSequence <{options}> (x{'' if split is None else ', split'})"
    body += "".join(f" t{i} = SequenceAt (parts, p{i}) y{i} = Mul (t{i}, t{i})" for i in range(len(positions)))
    results = ", ".join(f"y{i}" for i in range(len(positions)))
    proto = text_model(f"(float{declared} x{inputs}) => ({results}) {{ {body} }}".replace("<> ", ""))
    if not fed:
        proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in operands.items())
    if shapes == "absent":
        proto.graph.input[0].type.tensor_type.ClearField("shape")
    return proto


def expected(bounds: list[slice], axis: int, seeds: list[np.ndarray]) -> np.ndarray:
    """d sum(seed part^2) / dx = 2 part seed, in place."""
    gradient = np.zeros_like(X)
    for bound, seed in zip(bounds, seeds, strict=True):
        index = (slice(None),) * axis + (bound,)
        gradient[index] += 2 * X[index] * seed.reshape(X[index].shape)
    return gradient


def _parts(split: object, axis: int, *positions: int) -> Case:
    at = "".join(
        f" i{j} = Constant<value = int64 {{{p}}}>() y{j} = SequenceAt(s, i{j})" for j, p in enumerate(positions)
    )
    operands = [rand(3, 7)] if split is None else [rand(3, 7), np.asarray(split)]
    given = "x0" if split is None else "x0, x1"
    body = f"s = SplitToSequence<axis = {axis}>({given}){at}"
    return Case("local::Parts", operands, outputs=len(positions), body=body, name=f"{split} of {axis} at {positions}")


CHECKED = [
    Case("OptionalGetElement", [rand(2, 3)]),
    Case("local::Given", [rand(2, 3)], body="o = Optional(x0) e = OptionalGetElement(o) y0 = Mul(e, e)"),
    *[_parts(3, 1, 0, -1), _parts([1, 4, 2], 1, 1, 1), _parts(None, 0, 2)],
]
"""Checked in both modes and to second order."""

test_rule = rule_test(CHECKED)


CASES = [
    (np.asarray(3), [0, 2], {"axis": 1}, [slice(0, 3), slice(6, 7)]),
    (np.asarray(3), [-1, -2], {"axis": 1}, [slice(6, 7), slice(3, 6)]),
    (np.asarray([1, 4, 2]), [1, 1], {"axis": -1}, [slice(1, 5), slice(1, 5)]),
    (np.asarray([1, 4, 2]), [-1, 0], {"axis": 1}, [slice(5, 7), slice(0, 1)]),
    (None, [3, -1], {"axis": 1}, [slice(3, 4), slice(6, 7)]),
    (None, [3, -1], {"axis": 1, "keepdims": 0}, [slice(3, 4), slice(6, 7)]),
    (None, [1], {}, [slice(1, 2)]),
]


@pytest.mark.parametrize(
    ("case", "shapes", "fed"),
    list(itertools.product(range(len(CASES)), ("static", "symbolic", "absent"), (False, True))),
)
def test_parts(case: int, shapes: str, fed: bool) -> None:
    split, positions, attributes, bounds = CASES[case]
    primal = model(split, positions, attributes, shapes=shapes, fed=fed)
    feed = {"x": X}
    if fed:
        feed |= {f"p{i}": np.asarray(p) for i, p in enumerate(positions)}
        feed |= {} if split is None else {"split": split}
    results = run(primal, feed)
    seeds = {f"{n}_grad": np.random.default_rng(1).normal(size=y.shape).astype(y.dtype) for n, y in results.items()}
    augmented = og.augment(primal, wrt=["x"], of=list(results))
    got = run(augmented, {**feed, **seeds})
    for name, value in results.items():
        np.testing.assert_array_equal(got[name], value)
    want = expected(bounds, attributes.get("axis", 0) % 2, list(seeds.values()))
    np.testing.assert_allclose(got["x_grad"], want, rtol=1e-6, atol=1e-6)


def test_another_sequence_is_refused() -> None:
    primal = text_model("""(float[2] x, int64 p) => (float[2] y) {
        parts = SequenceConstruct (x, x) y = SequenceAt (parts, p) }""")
    with pytest.raises(og.errors.DifferentiationError, match="not made by a SplitToSequence"):
        og.augment(primal, wrt=["x"], of=["y"])


def test_element_of_an_optional_value() -> None:
    text = "o = Optional(x) e = OptionalGetElement(o) h = OptionalHasElement(o) c = Cast<to = 1>(h)"
    text += " z = Mul(e, x) y = Mul(z, c)"
    x, seed = np.random.default_rng(8).standard_normal((2, 2, 3)).astype(np.float32)
    augmented = og.augment(text_model(f"(float[2,3] x) => (float[2,3] y) {{ {text} }}"), wrt=["x"])
    np.testing.assert_allclose(run(augmented, {"x": x, "y_grad": seed})["x_grad"], 2 * x * seed, rtol=1e-6)
