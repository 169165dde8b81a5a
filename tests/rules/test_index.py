"""Gather, Scatter and related operators, with constant and with fed indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, make_model, rand
from tests.support.operators import autograd, both, indices, rule_test, text_model

X = rand(4, 3, 5)

GATHERS = [
    *both("Gather", [X, indices(1)], name="one"),
    *both("Gather", [X, indices(-1)], {"axis": 2}, name="last"),
    *both("Gather", [X, indices([-2])], {"axis": -2}),
    *both("Gather", [X, indices([1, 2])], name="run"),
    *both("Gather", [X, indices([-3, -2])], {"axis": -1}, name="run from the end"),
    *both("Gather", [X, indices([2, 0, 1])], {"axis": 1}, name="permutation"),
    *both("Gather", [X, indices([3, 0])], name="distinct"),
    *both("Gather", [X, indices([1, 1, -3, 0])], name="repeated"),
    *both("Gather", [X, indices([[1, 0, 1], [2, -1, 1]])], {"axis": 1}, name="repeated"),
    *both("Gather", [X, indices([[0, 3], [4, 1]])], {"axis": 2}, name="distinct"),
    *both("Gather", [X, indices([[0, 1], [2, 3]], np.int32)], name="int32 run"),
    *both("Gather", [X, indices([[0, 1, 2], [1, 2, 3]])], {"axis": 2}, name="windows"),
    *both("Gather", [X, indices([[1, 2], [3, 4]])], {"axis": -1}, name="dilated windows with a rest"),
    *both("Gather", [X, indices([[0, 2], [1, 3]])], name="windows with steps"),
    *both("Gather", [X, indices([[0, 1], [1, 2]])], {"axis": 1}, name="windows", dtype=np.float16),
    *both("Gather", [X, indices([[1, 0], [2, 1]])], {"axis": 1}, name="windows backwards"),
    *both("Gather", [rand(0, 4), indices([[0, 1], [1, 2]])], {"axis": 1}, name="empty windows"),
    *both("Gather", [X, indices([])], {"axis": 1}, name="none"),
    *both("Gather", [rand(5), indices([[4, 4], [0, 1]])], name="vector"),
    *both("Gather", [rand(0, 3), indices([1, 1])], {"axis": 1}, name="empty"),
    *both("Gather", [X, indices([1, 1, 2])], {"axis": 1}, name="repeated", dtype=np.float16),
    *both("Gather", [X, indices([1, 1, 2])], {"axis": 1}, name="repeated", dtype=np.float64),
    *both("GatherElements", [rand(3, 4), indices([[0, -1, 2, 1], [2, 2, 0, 0]])]),
    *both("GatherElements", [rand(3, 4), indices([[0, 0, -4], [2, 3, 2]])], {"axis": -1}),
    *both("GatherElements", [rand(3, 4), indices([[0, 0, 0]])], {"axis": 1}, dtype=np.float16),
    *both("GatherElements", [rand(3, 4), indices([[0, -1, 2, -3]])]),
    *both("GatherElements", [rand(2, 3, 4), indices([[[0, -1, 2, 1]], [[2, 2, 0, -3]]])], {"axis": -2}),
    *both("GatherElements", [rand(2, 3, 4), indices([[[0, 1, 2]]])], {"axis": 1}),
    *both("Compress", [X, np.asarray([True, False, True])], {"axis": 1}),
    *both("Compress", [X, np.asarray([True, False, True, True])], {"axis": -1}, name="short"),
    *both("Compress", [rand(2, 3), np.asarray([False, True, True, False, True])]),
    *both("Compress", [X, np.asarray([False, False, False])], {"axis": 1}),
    *both("Compress", [X, np.asarray([True, False, True])], {"axis": 1}, dtype=np.float16),
]

CHOICES = [
    *both("TopK", [rand(2, 5), indices([2])], outputs=2),
    *both("TopK", [rand(4, 3), indices([3])], {"axis": 0, "largest": 0, "sorted": 0}, outputs=2),
    *both("TopK", [rand(2, 5), indices([2])], {"axis": 1}, outputs=2, dtype=np.float16),
    *both("OneHot", [indices([[0, 2], [-1, 7]]), indices(3), rand(2)]),
    *both("OneHot", [indices([0, 2]), indices(3), rand(2)], {"axis": 0}),
]

FIRST_OF_EQUALS = [
    *(Case("Unique", [rand(7)], {"sorted": by}, order=2, name="all") for by in (0, 1)),
    Case("Unique", [rand(2, 3)], outputs=["y0", "", "y2", ""], of=[0]),
    Case("Unique", [rand(3, 2, 2)], {"axis": 1}, outputs=4, of=[0]),
    Case("Unique", [rand(3, 2)], {"axis": -1, "sorted": 0}),
    Case("Unique", [rand(4)], dtype=np.float64),
]

FEATURES = [
    *both("ai.onnx.ml::ArrayFeatureExtractor", [rand(3, 4), indices([1, 3, 1])]),
    *both("ai.onnx.ml::ArrayFeatureExtractor", [rand(2, 3, 4), indices([[0, 2]])]),
    *both("ai.onnx.ml::ArrayFeatureExtractor", [rand(5), indices([4, 0])]),
    Case("ai.onnx.ml::ArrayFeatureExtractor", [rand(2, 3), indices([2])], dtype=np.float64),
]

UNIQUE = indices([[0, 2, 1, 3], [2, 0, 3, 1]])
REPEATED = indices([[0, 2, -1, 1], [2, 2, 2, 1]])

SCATTERS = [
    *both("ScatterElements", [rand(3, 4), indices([[0, 2, 1, -1]]), rand(1, 4)]),
    *both("ScatterElements", [rand(3, 4), UNIQUE, rand(2, 4)], {"axis": 1}),
    *both("ScatterElements", [rand(3, 4), UNIQUE, rand(2, 4)], {"axis": -1}, dtype=np.float16),
    *(
        case
        for reduction in ("add", "mul", "max", "min")
        for case in (
            *both("ScatterElements", [rand(3, 4), REPEATED, rand(2, 4)], {"reduction": reduction}),
            *both("ScatterElements", [rand(3, 5), REPEATED, rand(2, 4)], {"axis": 1, "reduction": reduction}),
            *both("ScatterND", [X, indices([[0], [2], [0]]), rand(3, 3, 5)], {"reduction": reduction}),
            *both("ScatterND", [rand(3, 4), indices([[0, 1], [-1, 2], [0, 1]]), rand(3)], {"reduction": reduction}),
        )
    ),
    *both("ScatterND", [X, indices([[0], [2]]), rand(2, 3, 5)]),
    *both("ScatterND", [X, indices([[0, 1], [2, -1]]), rand(2, 5)], dtype=np.float16),
    *both("ScatterND", [X, indices([3, 0, 1]), rand()], name="one element"),
]

test_rule = rule_test(GATHERS + CHOICES + FIRST_OF_EQUALS + FEATURES + SCATTERS)


def gradients(op: str, operands: list[np.ndarray], reduction: str, seed: np.ndarray) -> list[np.ndarray]:
    """The gradients of data and updates, in their own dtype."""
    model = make_model(Case(op, operands, {"reduction": reduction}), operands)
    augmented = og.augment(model, wrt=["x0", "x2"], of=["y0"])
    results = run(augmented, {"x0": operands[0], "x2": operands[2], "y0_grad": seed})
    return [results["x0_grad"], results["x2_grad"]]


@pytest.mark.parametrize("op", ["ScatterElements", "ScatterND"])
@pytest.mark.parametrize("reduction", ["max", "min", "mul"])
def test_ties_and_zeros_are_as_in_pytorch(op: str, reduction: str) -> None:
    data = np.asarray([0, 2, 2, -1, 0], np.float32)
    index = np.asarray([0, 1, 1, 1, 3, 3, 4, 4, 2])
    updates = np.asarray([3, 2, 1, 2, 0, 5, 0, 7, -3], np.float32)
    seed = np.asarray([1, 2, 3, 5, 7], np.float32)
    where = index if op == "ScatterElements" else index[:, None]
    got = gradients(op, [data, where, updates], reduction, seed)
    how, places = {"max": "amax", "min": "amin", "mul": "prod"}[reduction], torch.tensor(index)
    wanted = autograd(lambda x, u: x.scatter_reduce(0, places, u, how), data, updates, seed=seed)
    for result, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(result, want)


@pytest.mark.parametrize("fed", [False, True], ids=["constant", "fed"])
@pytest.mark.parametrize(
    ("op", "shape", "index"),
    [
        ("ScatterElements", (4,), [1, 1, 3, -1]),
        ("ScatterElements", (3, 4), [[0, -2, 2, 2], [0, 1, 1, 2]]),
        ("ScatterND", (4,), [[1], [3], [-3]]),
        ("ScatterND", (3, 4), [[0, 1], [2, -1], [0, -3], [2, 3]]),
        ("ScatterND", (3, 2), [[2], [2]]),
    ],
)
def test_of_updates_of_one_element_the_last_gets_the_gradient(
    op: str, shape: tuple[int, ...], index: list[Any], *, fed: bool
) -> None:
    """It overwrites the others: the derivatives are those of the runtime's kernel, which is linear in its operands."""
    where = np.asarray(index)
    width = where.shape if op == "ScatterElements" else (*where.shape[:-1], *shape[where.shape[-1] :])
    rng = np.random.default_rng(0)
    data, updates, seed = (rng.standard_normal(s).astype(np.float32) for s in (shape, width, shape))
    case = Case(op, [data, where, updates], feed_integers=fed)
    feed = {"x0": data, "x2": updates} | ({"x1": where} if fed else {})
    result = run(og.augment(make_model(case, case.arrays), wrt=["x0", "x2"], of=["y0"]), {**feed, "y0_grad": seed})
    forward = make_model(case, case.arrays)
    for name in ("x0", "x2"):
        want = np.zeros_like(feed[name])
        for at in np.ndindex(want.shape):
            unit = np.zeros_like(want)
            unit[at] = 1
            moved = {**feed, "x0": np.zeros_like(data), "x2": np.zeros_like(updates), name: unit}
            want[at] = (run(forward, moved)["y0"] * seed).sum()
        np.testing.assert_allclose(result[f"{name}_grad"], want, rtol=1e-6)


def test_distinct_indices_take_no_search_for_the_last_update() -> None:
    operands = [np.zeros((3, 4), np.float32), indices([[0, 1, 2, 0]]), np.zeros((1, 4), np.float32)]
    made = og.augment(make_model(Case("ScatterElements", operands, {"axis": 0}), operands), wrt=["x2"], of=["y0"])
    assert "Equal" not in {node.op_type for node in made.graph.node}


@pytest.mark.parametrize("pick", ["GatherElements <axis = 1> (p, i)", "Gather <axis = 1> (p, j)"])
def test_infinite_cotangents_of_few_entries_stay_with_theirs(pick: str) -> None:
    """The logarithm of a probability of 0 has an infinite derivative, and a mask's 0 times infinity is NaN."""
    model = text_model(f"""(float[2,3] p) => (float[2,A] y) <int64[2,1] i = {{1, 0}}, int64[2] j = {{1, 1}}> {{
        q = {pick} y = Log (q) }}""")
    p = np.array([[0.5, 0, 0.5], [0.5, 0, 0.5]], np.float32)
    got = run(og.vjp(model, wrt="p", of="y", cotangents="ones"), {"p": p})["p_grad"]
    wanted = [[0, np.inf, 0], [2, 0, 0]] if "Elements" in pick else [[0, np.inf, 0]] * 2
    np.testing.assert_array_equal(got, np.array(wanted, np.float32))


def test_unknown_reduction_is_refused_by_name() -> None:
    operands = [np.ones(3, np.float32), indices([[0]]), np.ones(1, np.float32)]
    with pytest.raises(og.ConvGradError, match="'median' is unknown"):
        gradients("ScatterND", operands, "median", operands[0])


@pytest.mark.parametrize(("classes", "axis", "scatters"), [(5, 1, False), (300, 1, True), (5, 3, True)])
def test_the_gradient_of_one_of_few_entries_is_a_product(classes: int, axis: int, scatters: bool) -> None:
    """A product is faster, unless the axis is long or the last one."""
    shape = [2, 3, 4, 6]
    shape[axis] = classes
    index = np.random.default_rng(0).integers(-classes, classes, [1 if i == axis else d for i, d in enumerate(shape)])
    x = np.zeros(shape, np.float32)
    model = make_model(Case("GatherElements", [x, index], {"axis": axis}, feed_integers=True), [x, index])
    made = og.augment(model, wrt=[model.graph.input[0].name], cotangents="ones")
    assert ("ScatterElements" in {node.op_type for node in made.graph.node}) == scatters
    want = np.zeros_like(x)
    np.put_along_axis(want, index, 1, axis)
    got = run(made, dict(zip((i.name for i in model.graph.input), (x, index), strict=True)))
    np.testing.assert_array_equal(got[made.graph.output[-1].name], want)


@pytest.mark.parametrize(
    ("rows", "width", "scatters"), [(3, 1, False), (20, 1, True), (20, 16, False), (300, 400, True)]
)
def test_the_gradient_of_a_short_table_is_a_product(rows: int, width: int, scatters: bool) -> None:
    """A product with a 0/1 matrix is faster than a scatter if the table has few rows."""
    generator = np.random.default_rng(0)
    x, index = np.zeros((rows, width), np.float32), generator.integers(-rows, rows, (5, 40))
    model = make_model(Case("Gather", [x, index], feed_integers=True), [x, index])
    made = og.augment(model, wrt=[model.graph.input[0].name])
    assert ("ScatterElements" in {node.op_type for node in made.graph.node}) == scatters
    seed = generator.standard_normal((5, 40, width)).astype(np.float32)
    want = np.zeros((rows, width))
    np.add.at(want, index, seed)
    got = run(made, dict(zip((i.name for i in made.graph.input), (x, index, seed), strict=True)))
    np.testing.assert_allclose(got[made.graph.output[-1].name], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", [None, 0])
def test_the_first_of_equal_elements_gets_the_gradient(axis: int | None) -> None:
    x = np.array([[2, 1], [3, 1], [2, 1]], np.float32)
    case = Case("Unique", [x], {} if axis is None else {"axis": axis})
    seed = np.array([10, 20, 30] if axis is None else [[10, 20], [30, 40]], np.float32)
    got = run(og.augment(make_model(case, [x]), wrt=["x0"], of=["y0"]), {"x0": x, "y0_grad": seed})["x0_grad"]
    want = [[20, 10], [30, 0], [0, 0]] if axis is None else [[10, 20], [30, 40], [0, 0]]
    np.testing.assert_array_equal(got, np.array(want, np.float32))
