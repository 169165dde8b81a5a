"""Forms that the CPU provider is faster at: sums of rows, PRelu, pieces of a tensor put side by side."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.runtime import run

Function = Callable[[torch.Tensor], torch.Tensor]


def _model(body: str, shape: str, *initializers: np.ndarray) -> onnx.ModelProto:
    """`body` computes y from x and the arrays a, b."""
    text = f'<ir_version: 10, opset_import: ["" : 21]> g (float[{shape}] x) => (y) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    model.graph.output[0].CopyFrom(onnx.helper.make_empty_tensor_value_info("y"))
    for name, array in zip("ab", initializers, strict=False):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def _ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def _gradient(function: Function, x: np.ndarray) -> np.ndarray:
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    function(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad.numpy()


# -- sums of rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "bias", "product"),
    [
        ((3, 16, 12), (12,), True),
        ((20, 3, 8), (3, 8), True),
        ((20, 3, 8), (1, 3, 8), True),
        ((3, 16, 12), (16, 1), False),
    ],
    ids=str,
)
def test_bias_gradients(shape: tuple[int, ...], bias: tuple[int, ...], product: bool) -> None:
    """Sums over the first axes are products with ones; others stay reductions."""
    x, b = _random(*shape), _random(*bias)
    model = _model("h = Add(x, a) y = Mul(h, h)", ", ".join(map(str, shape)), b)
    gradient = og.augment(model, wrt=["a"], seed="ones")
    assert ("MatMul" in _ops(gradient)) == product
    assert ("ReduceSum" in _ops(gradient)) != product
    want = _gradient(lambda leaf: (torch.tensor(x) + leaf).square(), b)
    np.testing.assert_allclose(run(gradient, {"x": x})["a_grad"], want, rtol=1e-5, atol=1e-5)


def test_sums_of_the_model_are_its_own() -> None:
    model = _model("axes = Constant<value_ints = [0]>() s = ReduceSum(x, axes) y = Mul(s, s)", "40, 8")
    assert _ops(og.augment(model, wrt=["x"], seed="ones")).count("ReduceSum") == 1


def test_columns_of_unknown_number() -> None:
    model = _model("h = Add(x, a) y = Mul(h, h)", "n, 16, 12", _random(12))
    gradient = og.augment(model, wrt=["a"], seed="ones")
    x = _random(3, 16, 12)
    want = _gradient(lambda leaf: (torch.tensor(x) + leaf).square(), _random(12))
    np.testing.assert_allclose(run(gradient, {"x": x})["a_grad"], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "scale", "product"),
    [
        ((3, 4, 32, 64), (4, 1, 1), True),
        ((3, 4, 32, 64), (1, 4, 1, 1), True),
        ((3, 4, 32, 64), (3, 4, 1, 1), True),
        ((3, 4, 32, 64), (3, 1, 1, 1), False),  # too few rows
        ((3, 4, 8, 8), (4, 1, 1), False),  # too short ones
        ((3, 4, 32, 64), (32, 1), False),
    ],
    ids=str,
)
def test_sums_of_products(shape: tuple[int, ...], scale: tuple[int, ...], product: bool) -> None:
    """Gradients of what scales whole rows are scalar products; the products of the elements are never written."""
    x, s = _random(*shape), _random(*scale)
    model = _model("h = Tanh(x) y = Mul(h, a)", ", ".join(map(str, shape)), s)
    gradient = og.augment(model, wrt=["a"])
    assert (_ops(gradient).count("Mul") == 1) == product
    assert ("Transpose" in _ops(gradient)) == product
    seed = _random(*shape)[::-1].copy()
    want = _gradient(lambda leaf: torch.tensor(x, dtype=torch.float64).tanh() * leaf * torch.tensor(seed), s)
    np.testing.assert_allclose(run(gradient, {"x": x, "y_grad": seed})["a_grad"], want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("rows", "copied"), [(2048, True), (8, False)], ids=str)
def test_copies_to_outputs(rows: int, copied: bool) -> None:
    """A large gradient that only changes its shape at the end is copied by all threads, bit by bit."""
    model = _model("shape = Constant<value_ints = [-1, 8]>() h = Reshape(x, shape) y = Mul(h, a)", f"{rows}, 4, 8")
    model.graph.input.append(onnx.helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, [4 * rows, 8]))
    gradient = og.vjp(model, wrt=["x"])
    assert ("LeakyRelu" in _ops(gradient)) == copied
    seed, a = _random(4 * rows, 8), _random(4 * rows, 8)
    seed.flat[:4] = -0.0, np.nan, np.inf, -np.inf
    got = run(gradient, {"x": _random(rows, 4, 8), "a": a, "y_grad": seed})["x_grad"]
    assert got.tobytes() == (seed * a).tobytes()


def test_means_of_products() -> None:
    """The variance and the moment of a normalization; no factor is next to a product, into which it would be moved."""
    x, seed = _random(4, 2, 64, 64), _random(4, 2, 64, 64)[::-1].copy()
    model = _model(
        "y = InstanceNormalization(x, a, b)", "4, 2, 64, 64", np.ones(2, np.float32), np.zeros(2, np.float32)
    )
    gradient = og.vjp(model, wrt=["x"])
    products = [node.output[0] for node in gradient.graph.node if node.op_type == "MatMul"]
    assert len(products) == 2
    assert {n.op_type for n in gradient.graph.node if set(n.input) & set(products)} == {"Reshape"}
    want = _gradient(lambda leaf: torch.nn.functional.instance_norm(leaf) * torch.tensor(seed), x)
    np.testing.assert_allclose(run(gradient, {"x": x, "y_grad": seed})["x_grad"], want, rtol=1e-4, atol=1e-5)


# -- gates -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "function", "added"),
    [
        ("s = Sigmoid(x) y = Mul(x, s)", torch.nn.functional.silu, ["Sub", "Mul", "Add", "Mul"]),
        ("s = Sigmoid(x) y = Mul(s, x)", torch.nn.functional.silu, ["Sub", "Mul", "Add", "Mul"]),
        ("s = Tanh(x) y = Mul(x, s)", lambda x: x * x.tanh(), ["Mul", "Sub", "Mul", "Add", "Mul"]),
    ],
    ids=["logistic", "the other way round", "another"],
)
def test_gates(body: str, function: Function, added: list[str]) -> None:
    x, seed = _random(4, 6), _random(6, 4).reshape(4, 6)
    x.flat[:4] = 0, 30, -30, -4
    model = _model(body, "4, 6")
    gradient = og.augment(model, wrt=["x"], training=True)
    assert _ops(gradient)[2:] == added
    want = _gradient(lambda leaf: function(leaf) * torch.tensor(seed), x)
    np.testing.assert_allclose(run(gradient, {"x": x, "y_grad": seed})["x_grad"], want, rtol=1e-5, atol=1e-6)


def test_a_gate_whose_parts_are_read_elsewhere() -> None:
    """What s sends back is wanted itself, so it stays."""
    model = _model("s = Sigmoid(x) y = Mul(x, s)", "4, 6")
    x = _random(4, 6)
    got = run(og.augment(model, wrt=["x", "s"], seed="ones", training=True), {"x": x})
    np.testing.assert_array_equal(got["s_grad"], x)
    np.testing.assert_allclose(got["x_grad"], _gradient(torch.nn.functional.silu, x), rtol=1e-5, atol=1e-6)


# -- PRelu -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slope", [(5, 1, 1), (1,), (4, 4)], ids=str)
def test_prelu_in_training(slope: tuple[int, ...]) -> None:
    x, a = _random(2, 5, 4, 4), _random(*slope)
    x[0, 0, 0, 0], a.flat[0] = 0.0, 1.5
    model = _model("h = PRelu(x, a) y = Mul(h, h)", "2, 5, 4, 4", a)
    trained = og.augment(model, wrt=["x", "a"], seed="ones", training=True)
    assert "PRelu" not in _ops(trained)
    assert _ops(trained).count("Clip") == 1
    assert "Min" not in _ops(trained)
    assert "PRelu" in _ops(og.augment(model, wrt=["x", "a"], seed="ones"))
    got = run(trained, {"x": x})
    np.testing.assert_array_equal(got["y"], run(model, {"x": x})["y"])

    def function(leaf: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return torch.where(leaf > 0, leaf, leaf * factor).square()

    fixed_x, fixed_a = torch.tensor(x, dtype=torch.float64), torch.tensor(a, dtype=torch.float64)
    np.testing.assert_allclose(got["x_grad"], _gradient(lambda v: function(v, fixed_a), x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["a_grad"], _gradient(lambda v: function(fixed_x, v), a), rtol=1e-5, atol=1e-6)


# -- Softplus and Mish -------------------------------------------------------------------------------------------------

MISH = "p = Softplus(x) t = Tanh(p) y = Mul(x, t)"


@pytest.mark.parametrize(
    ("body", "function"),
    [
        ("y = Softplus(x)", torch.nn.functional.softplus),
        (MISH, torch.nn.functional.mish),
        ("y = Mish(x)", torch.nn.functional.mish),
        (
            "p = Softplus(x) t = Tanh(p) y = Mul(p, t)",
            lambda x: torch.nn.functional.softplus(x) * torch.nn.functional.softplus(x).tanh(),
        ),
    ],
    ids=["Softplus", "its parts", "Mish", "both"],
)
def test_softplus_in_training(body: str, function: Function) -> None:
    x = np.concatenate([np.array([-120, -30, -1e-3, 0, 1e-3, 30, 120], np.float32), 4 * _random(500)]).astype(
        np.float32
    )
    model = _model(body, "507")
    trained = og.augment(model, wrt=["x"], seed="ones", training=True)
    assert not {"Softplus", "Mish"} & set(_ops(trained))
    assert {"Softplus", "Mish"} & set(_ops(og.augment(model, wrt=["x"], seed="ones")))
    got = run(trained, {"x": x})
    np.testing.assert_allclose(got["y"], run(model, {"x": x})["y"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["x_grad"], _gradient(function, x), rtol=1e-5, atol=1e-6)


# -- exponential units, bounds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "function"),
    [
        ("y = Elu(x)", torch.nn.functional.elu),
        ("y = Elu <alpha = 0.5> (x)", lambda x: torch.nn.functional.elu(x, 0.5)),
        ("y = Elu <alpha = -0.5> (x)", lambda x: torch.nn.functional.elu(x, -0.5)),
        ("y = Selu(x)", torch.selu),
        ("y = Celu(x)", torch.celu),
        ("y = Celu <alpha = 2.0> (x)", lambda x: torch.celu(x, 2.0)),
    ],
)
def test_exponential_units_in_training(body: str, function: Function) -> None:
    x = 3 * _random(8, 2048)
    x[0, :7] = [-200, -30, -1e-3, 1e-3, 30, 200, -1e-30]
    model = _model(body, "8, 2048")
    trained = og.augment(model, wrt=["x"], seed="ones", training=True)
    assert not {"Elu", "Selu", "Celu", "Min"} & set(_ops(trained))
    assert {"Elu", "Selu", "Celu"} & set(_ops(og.augment(model, wrt=["x"], seed="ones")))
    got = run(trained, {"x": x})
    np.testing.assert_allclose(got["y"], run(model, {"x": x})["y"], rtol=1e-6, atol=3e-7)
    np.testing.assert_allclose(got["x_grad"], _gradient(function, x), rtol=1e-5, atol=1e-6)
    x[0, :3] = [np.nan, np.inf, -np.inf]
    np.testing.assert_array_equal(run(trained, {"x": x})["y"][0, :3], run(model, {"x": x})["y"][0, :3])


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(("op", "function"), [("Min", torch.minimum), ("Max", torch.maximum)])
def test_bounds_in_training(
    op: str, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], small: bool
) -> None:
    """By one number, on either side: a Clip, where the result is as large as the tensor and worth it."""
    x, bound = _random(8, 8 if small else 2048), np.full((1, 1), 0.25, np.float32)
    x[0, 0] = np.nan
    model = _model(f"h = {op}(a, x) y = Mul(h, x)", f"8, {x.shape[1]}", bound)
    trained = og.augment(model, wrt=["x"], seed="ones", training=True)
    assert (op in _ops(trained)) == small
    assert ("Clip" in _ops(trained)) != small
    got = run(trained, {"x": x})
    np.testing.assert_array_equal(got["y"], run(model, {"x": x})["y"])
    want = _gradient(lambda v: function(torch.full((1, 1), 0.25, dtype=torch.float64), v) * v, x)
    np.testing.assert_allclose(got["x_grad"].flat[1:], want.flat[1:], rtol=1e-6, atol=1e-6)


def test_bounds_that_lengthen_stay() -> None:
    model = _model("s = Min(x, a) y = Mul(s, s)", "8, 2048", np.zeros((1, 1, 1), np.float32))
    assert "Min" in _ops(og.augment(model, wrt=["x"], seed="ones", training=True))


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize(
    ("shape", "axis", "own"), [("3, 5, 4, 2", 1, False), ("3, n, 1", -2, True), ("3, n", 0, False)]
)
def test_softmax_in_training(op: str, shape: str, axis: int, own: bool) -> None:
    """Over rows the runtime's own is faster."""
    model = _model(f"s = {op} <axis = {axis}> (x) y = Mul(s, s)", shape)
    trained = og.augment(model, wrt=["x"], seed="ones", training=True)
    assert (op in _ops(trained)) == own
    x = 40 * _random(*(int(size) if size.isdigit() else 7 for size in shape.split(", ")))
    function = torch.softmax if op == "Softmax" else torch.log_softmax
    got = run(trained, {"x": x})
    np.testing.assert_allclose(got["y"], run(model, {"x": x})["y"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got["x_grad"], _gradient(lambda v: function(v, axis).square(), x), rtol=1e-4, atol=1e-5)


# -- pieces ------------------------------------------------------------------------------------------------------------

SLICED = """
    zero = Constant<value_ints = [0]>() two = Constant<value_ints = [2]>() four = Constant<value_ints = [4]>()
    six = Constant<value_ints = [6]>() one = Constant<value_ints = [1]>()
"""
PIECES: dict[str, tuple[str, Function, list[str]]] = {
    "halves": (
        SLICED + "p = Slice(x, zero, two, one) q = Slice(x, two, six, one) s = Mul(p, p) t = Tanh(q)"
        " y = Concat<axis = 1>(t, s)",
        lambda x: torch.cat([x[:, 2:].tanh(), x[:, :2].square()], 1),
        ["Concat"],
    ),
    "a gap": (
        SLICED + "p = Slice(x, zero, two, one) q = Slice(x, four, six, one) s = Mul(p, p) t = Mul(q, q) y = Mul(s, t)",
        lambda x: x[:, :2].square() * x[:, 4:].square(),
        ["Pad", "Pad"],
    ),
    "an overlap": (
        SLICED + "p = Slice(x, zero, four, one) q = Slice(x, two, six, one) s = Mul(p, p) y = Mul(s, q)",
        lambda x: x[:, :4].square() * x[:, 2:],
        ["Pad", "Pad"],
    ),
    "touching, with an end left and another use": (
        SLICED + "p = Slice(x, zero, two, one) q = Slice(x, two, four, one) s = Mul(p, q) u = Tanh(x)"
        " y = Concat<axis = 1>(s, u)",
        lambda x: torch.cat([x[:, :2] * x[:, 2:4], x.tanh()], 1),
        ["Concat", "Pad"],
    ),
    "unbound": (
        (
            "i = Constant<value_int = 0>() j = Constant<value_int = 1>() k = Constant<value_int = 2>() "
            "q = Gather<axis = 0>(x, i) r = Gather<axis = 0>(x, j) v = Gather<axis = 0>(x, k)"
            " m = Mul(q, r) y = Mul(m, v)"
        ),
        lambda x: x[0] * x[1] * x[2],
        ["Concat"],
    ),
    "rolled on two axes": (
        SLICED + "p = Slice(x, two, six, one) q = Slice(x, zero, two, one) s = Concat<axis = 1>(p, q)"
        " axis = Constant<value_ints = [2]>() eight = Constant<value_ints = [8]>()"
        " u = Slice(s, six, eight, axis) v = Slice(s, zero, six, axis) w = Concat<axis = 2>(u, v)"
        " wx = Mul(w, x) y = Tanh(wx)",
        lambda x: (x.roll((-2, 2), (1, 2)) * x).tanh(),
        ["Concat", "Concat"],
    ),
}


@pytest.mark.parametrize("name", PIECES)
def test_pieces(name: str) -> None:
    """Cotangents of pieces that touch are put together, and those that do not are padded."""
    body, function, expected = PIECES[name]
    x = _random(3, 6, 8)
    model = _model(body, "3, 6, 8")
    gradient = og.augment(model, wrt=["x"], seed="ones")
    added = [op for op in ("Concat", "Pad") for _ in range(_ops(gradient).count(op) - _ops(model).count(op))]
    assert added == expected
    np.testing.assert_allclose(run(gradient, {"x": x})["x_grad"], _gradient(function, x), rtol=1e-5, atol=1e-6)


SQUARES: dict[str, tuple[str, Function, int]] = {
    "of rows, summed": (
        "m = ReduceMean(x, a) z = Sub(x, m) s = Mul(z, z) v = ReduceSum(s, a) w = Sqrt(v) y = Mul(x, w)",
        lambda x: x * (x - x.mean(1, keepdim=True)).square().sum(1, keepdim=True).sqrt(),
        2,
    ),
    "a sum with itself": ("s = Add(x, x) y = Tanh(s)", lambda x: (x + x).tanh(), 0),
    "a square of its own, and a third use": ("s = Mul(x, x) y = Mul(s, x)", lambda x: x**3, 1),
    "two squares": (
        "s = Mul(x, x) t = Mul(x, x) u = Tanh(t) y = Add(s, u)",
        lambda x: x.square() + x.square().tanh(),
        1,
    ),
}


@pytest.mark.parametrize("name", SQUARES)
def test_squares(name: str) -> None:
    """Send back one product, whose smaller factor is doubled, rather than the same one twice."""
    body, function, most = SQUARES[name]
    x = _random(4, 6)
    model = _model(body, "4, 6", np.array([1]))
    gradient = og.augment(model, wrt=["x"], seed="ones")
    assert _ops(gradient).count("Add") - _ops(model).count("Add") <= most
    np.testing.assert_allclose(run(gradient, {"x": x})["x_grad"], _gradient(function, x), rtol=1e-5, atol=1e-6)


# -- a matrix that many products share ---------------------------------------------------------------------------------

SHARED = "h = MatMul(x, a) s = Tanh(h) k = MatMul(s, a) t = Tanh(k) y = MatMul(t, a)"


@pytest.mark.parametrize(
    ("x", "weight", "shape", "products"),
    [
        ((3, 16), (16, 16), "3, 16", 1),
        ((3, 64), (64, 64), "n, 64", 1),
        ((5, 3, 16), (16, 16), "5, 3, 16", 3),
        ((2, 3, 16), (2, 16, 16), "2, 3, 16", 1),
        ((2, 30, 16), (2, 16, 16), "2, 30, 16", 3),
        ((2, 3, 16), (2, 16, 16), "b, 3, 16", 2),
    ],
    ids=str,
)
def test_a_shared_matrix_gets_one_product(
    x: tuple[int, ...], weight: tuple[int, ...], shape: str, products: int
) -> None:
    """Where its rows are fewer than make it worth to add up results."""
    data, a = _random(*x), 0.2 * _random(*weight)
    gradient = og.augment(_model(SHARED, shape, a), wrt=["a"], seed="ones")
    assert _ops(gradient).count("Add") == products - 1
    want = _gradient(lambda v: ((torch.tensor(data).double() @ v).tanh() @ v).tanh() @ v, a)
    np.testing.assert_allclose(run(gradient, {"x": data})["a_grad"], want, rtol=1e-5, atol=1e-5)


# -- the normal distribution function ----------------------------------------------------------------------------------


def test_half_of_one_and_erf_is_one_pass() -> None:
    """As in the slope of GELU, in either order of the operands."""
    x = np.linspace(-6, 6, 96, dtype=np.float32).reshape(4, 24)
    model = og.augment(_model("y = Gelu(x)", "4, 24"), wrt=["x"])
    assert "HardSigmoid" in _ops(model)
    assert _ops(model).count("Mul") == 4
    got = run(model, {"x": x, "y_grad": np.ones_like(x)})["x_grad"]
    np.testing.assert_allclose(got, _gradient(torch.nn.functional.gelu, x), rtol=1e-6, atol=1e-6)


def test_signs_are_steps() -> None:
    x = _random(4, 64, 80)
    x[0, 0, :3] = [0.0, -0.0, np.inf]
    model = og.augment(_model("y = Abs(x)", "4, 64, 80"), wrt=["x"])
    assert "Sign" not in _ops(model)
    got = run(model, {"x": x, "y_grad": np.full_like(x, 2)})["x_grad"]
    np.testing.assert_array_equal(got, 2 * np.sign(x))


def test_outputs_of_equal_nodes_keep_their_names() -> None:
    """Each form is written once; both names stay."""
    x = _random(4, 8)
    model = _model(
        "first = Softplus(x) second = Softplus(x) s = Add(first, second) y = Mul(s, a)", "4, 8", np.float32(2)
    )
    for name in ("first", "second"):
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    made = og.augment(model, wrt=["a"], of=["y"], training=True)
    assert "Softplus" not in _ops(made)
    got = run(made, {"x": x, "y_grad": np.ones_like(x)})
    for name in ("first", "second"):
        np.testing.assert_allclose(got[name], np.logaddexp(0, x), rtol=1e-6, atol=1e-6)
