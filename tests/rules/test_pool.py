"""MaxPool, MaxUnpool, AveragePool, LpPool: every attribute, ties, empty windows, sizes known only at run time."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from onnx_convgrad import api
from onnx_convgrad.checking.check import check as check_gradients
from onnx_convgrad.runtime import run, session
from onnx_convgrad.testing import Case, check, make_model, rand

WINDOWS: list[dict[str, Any]] = [
    {"kernel_shape": [2, 2], "strides": [2, 2]},
    {"kernel_shape": [2, 2]},
    {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 0, 1]},
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1},
    {"kernel_shape": [2, 3], "strides": [1, 2], "dilations": [2, 1], "pads": [1, 1, 0, 2]},
    {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    {"kernel_shape": [3, 2], "strides": [2, 2], "dilations": [2, 1], "auto_pad": "SAME_UPPER"},
    {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_LOWER", "ceil_mode": 1},
    {"kernel_shape": [3, 2], "auto_pad": "SAME_LOWER"},
    {"kernel_shape": [3, 2], "strides": [3, 2], "auto_pad": "VALID", "ceil_mode": 1},
    {"kernel_shape": [2, 2], "strides": [3, 3], "ceil_mode": 1},
    {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [2, 2, 2, 2], "ceil_mode": 1},
    {"kernel_shape": [2, 2], "dilations": [4, 4], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [1, 1], "strides": [2, 2]},
]

WHOLE = [(2, 3, 4, 6), (1, 2, 2, 44), (0, 3, 4, 6)]

MAX = [
    *(Case("MaxPool", [rand(2, 3, 6, 5)], w) for w in WINDOWS),
    Case("MaxPool", [rand(2, 3, 7)], {"kernel_shape": [3], "strides": [2], "pads": [1, 0]}),
    Case(
        "MaxPool", [rand(1, 2, 4, 5, 4)], {"kernel_shape": [3, 2, 2], "strides": [2, 1, 2], "pads": [1, 0, 1, 1, 1, 0]}
    ),
    Case("MaxPool", [rand(2, 3, 6, 5)], {"kernel_shape": [2, 3], "storage_order": 1}),
    Case("MaxPool", [rand(2, 3, 6, 5)], {"kernel_shape": [2, 3], "storage_order": 1}, outputs=2),
    Case("MaxPool", [rand(2, 3, 6, 5)], {"kernel_shape": [2, 3]}, outputs=2),
    Case("MaxPool", [rand(2, 3, 6, 5)], {"kernel_shape": [2, 2], "strides": [2, 2]}, dtype=np.float64),
    Case("MaxPool", [rand(2, 3, 6, 5)], {"kernel_shape": [3, 3], "strides": [2, 2]}, dtype=np.float64),
    *(Case("MaxPool", [rand(*shape)], {"kernel_shape": [2, 2], "strides": [2, 2]}) for shape in WHOLE),
    Case("MaxPool", [rand(0, 3, 6, 5)], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    Case("MaxPool", [rand(0, 3, 6, 5)], {"kernel_shape": [3, 3]}),
    Case("MaxPool", [rand(2, 3, 6, 5)], {"kernel_shape": [2, 2]}, opset=8),
]

AVERAGE = [
    *(
        Case("AveragePool", [rand(2, 3, 6, 5)], {**w, "count_include_pad": include})
        for w, include in itertools.product(WINDOWS, (0, 1))
    ),
    Case("AveragePool", [rand(2, 3, 6, 5)], {"kernel_shape": [1, 2], "strides": [4, 1], "auto_pad": "SAME_UPPER"}),
    Case("AveragePool", [rand(2, 3, 1)], {"kernel_shape": [2], "strides": [2]}, dynamic=False, name="partly covered"),
    Case("AveragePool", [rand(2, 3, 7)], {"kernel_shape": [3], "strides": [2], "pads": [1, 0]}),
    Case(
        "AveragePool",
        [rand(1, 2, 4, 5, 4)],
        {"kernel_shape": [3, 2, 2], "strides": [2, 1, 2], "pads": [1, 0, 1, 1, 1, 0]},
    ),
    Case("AveragePool", [rand(2, 3, 6, 5)], {"kernel_shape": [2, 2], "strides": [2, 2]}, dtype=np.float16),
    Case("AveragePool", [rand(2, 3, 6, 5)], {"kernel_shape": [3, 2], "pads": [1, 0, 1, 0]}, dtype=np.float16),
    Case("AveragePool", [rand(0, 3, 6, 5)], {"kernel_shape": [3, 2], "pads": [1, 0, 1, 0]}),
    Case("AveragePool", [rand(0, 3, 6, 5)], {"kernel_shape": [2, 2], "strides": [2, 2]}),
]

LP = [
    *(
        Case("LpPool", [rand(1, 2, 4, 5)], {**w, "p": p})
        for w, p in itertools.product(
            (
                {"kernel_shape": [2, 2], "strides": [2, 2]},
                {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 0, 1]},
            ),
            (1, 2, 3),
        )
    ),
    Case("LpPool", [rand(2, 3, 7)], {"kernel_shape": [3]}),
    Case("LpPool", [rand(2, 3, 6, 5)], {"kernel_shape": [2, 2]}, opset=11),
]

DISTINCT = np.array([0, 3, 9, 10, 17, 18, 24, 31]).reshape(1, 2, 2, 2)
UNPOOL = [
    Case("MaxUnpool", [rand(1, 2, 2, 2), DISTINCT], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    Case("MaxUnpool", [rand(1, 2, 2, 2), DISTINCT], {"kernel_shape": [2, 2], "strides": [2, 2]}, feed_integers=True),
    Case("MaxUnpool", [rand(1, 1, 2), np.array([[[1, 2]]])], {"kernel_shape": [2], "strides": [2]}),
]


@pytest.mark.parametrize("case", [*MAX, *AVERAGE, *LP, *UNPOOL], ids=str)
def test_rule(case: Case) -> None:
    check(case)


def gradient(case: Case, seed: np.ndarray, target: str = "cpu") -> np.ndarray:
    arrays = case.arrays
    model = api.augment(make_model(case, arrays), wrt=["x0"], of=["y0"], target=target)
    feed = {i.name: arrays[int(i.name[1:])] for i in model.graph.input if i.name != "y0_grad"}
    return np.asarray(run(model, {**feed, "y0_grad": seed})["x0_grad"])


@pytest.mark.parametrize(
    "window", [{"kernel_shape": [2, 2], "strides": [2, 2]}, {"kernel_shape": [3, 3], "strides": [2, 2]}]
)
@pytest.mark.parametrize("target", ["cpu", "cuda", "web", "portable"])
@pytest.mark.parametrize("size", [(7, 6), (8, 6)], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_ties_go_to_the_first_element_as_in_pytorch(
    window: dict[str, Any], target: str, size: tuple[int, int], dtype: type
) -> None:
    """Half of the elements are zero, as after a Relu; on every target, and in half precision too."""
    generator = np.random.default_rng(3)
    x = np.maximum(generator.integers(-3, 3, (2, 3, *size)), 0).astype(dtype)
    reference = torch.tensor(x.astype(np.float64), requires_grad=True)
    y = F.max_pool2d(reference, window["kernel_shape"], window["strides"])
    seed = generator.integers(-4, 5, tuple(y.shape)).astype(dtype)
    y.backward(torch.tensor(seed.astype(np.float64)))
    assert reference.grad is not None
    np.testing.assert_array_equal(gradient(Case("MaxPool", [x], window), seed, target), reference.grad.numpy())


def test_window_of_padding_only_gets_nothing() -> None:
    """With dilation a window may see no element at all; ONNX Runtime's index for it is meaningless."""
    case = Case("MaxPool", [rand(1, 2, 1, 5)], {"kernel_shape": [2, 1], "dilations": [2, 1], "pads": [1, 0, 1, 0]})
    assert not gradient(case, np.ones((1, 2, 1, 5), np.float32)).any()


def test_unpool_to_a_larger_shape() -> None:
    """ONNX Runtime reads the indices in the shape that is asked for."""
    indices = np.array([[[[0, 6], [18, 20]]]])
    attributes = {"kernel_shape": [2, 2], "strides": [2, 2]}
    case = Case("MaxUnpool", [rand(1, 1, 2, 2), indices, np.array([1, 1, 5, 5])], attributes)
    seed = np.arange(25, dtype=np.float32).reshape(1, 1, 5, 5)
    np.testing.assert_array_equal(gradient(case, seed), indices)


@pytest.mark.parametrize("opset", [7, 11])
def test_average_of_old_opsets(opset: int) -> None:
    """Another kernel computes the forward value there, which may differ in the last bit."""
    old = Case("AveragePool", [rand(2, 3, 6, 5)], {"kernel_shape": [2, 2]}, opset=opset)
    seed = np.random.default_rng(0).uniform(-1, 1, (2, 3, 5, 4)).astype(np.float32)
    new = Case("AveragePool", old.arrays, {"kernel_shape": [2, 2]})
    np.testing.assert_allclose(gradient(old, seed), gradient(new, seed), rtol=1e-6)


def test_repeated_indices_of_unpool_belong_to_the_last() -> None:
    indices = np.array([[[0, 3, 3, 7]]])
    case = Case("MaxUnpool", [rand(1, 1, 4), indices], {"kernel_shape": [3], "strides": [2]})
    check(case)
    seed = np.arange(1, 10, dtype=np.float32).reshape(1, 1, 9)
    np.testing.assert_array_equal(gradient(case, seed), [[[1, 0, 4, 8]]])


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_average_of_doubles(window: dict[str, Any]) -> None:
    """The CPU provider has no float64 AveragePool, but its gradient runs, since it does not need the primal."""
    generator = np.random.default_rng(5)
    x = generator.uniform(-1, 1, (2, 3, 6, 5))
    model = make_model(Case("AveragePool", [x], window), [x])
    narrow = make_model(Case("AveragePool", [x], window), [x.astype(np.float32)])
    v = generator.uniform(-1, 1, x.shape)
    y = run(narrow, {"x0": v.astype(np.float32)})["y0"]
    seed = generator.uniform(-1, 1, y.shape)
    gx = run(api.vjp(model, wrt=["x0"], of=["y0"]), {"x0": x, "y0_grad": seed})["x0_grad"]
    assert gx.dtype == np.float64
    np.testing.assert_allclose(np.vdot(gx, v), np.vdot(seed, y), rtol=1e-4)


def lp_pool(x: torch.Tensor, size: int, stride: int, pads: tuple[int, int], p: int) -> torch.Tensor:
    return F.pad(x.abs() ** p, pads).unfold(2, size, stride).sum(-1) ** (1 / p)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize(
    ("attributes", "pads"),
    [
        ({"strides": [2], "ceil_mode": 1}, (0, 1)),
        ({"strides": [2], "auto_pad": "SAME_UPPER"}, (0, 1)),
        ({"strides": [2], "auto_pad": "SAME_LOWER"}, (1, 0)),
        ({"strides": [3], "pads": [1, 1]}, (1, 0)),
    ],
    ids=str,
)
def test_lp_pool_against_pytorch(attributes: dict[str, Any], pads: tuple[int, int], p: int) -> None:
    """Where ONNX's reference evaluator and ONNX Runtime disagree on the forward value."""
    case = Case("LpPool", [rand(2, 3, 6)], {"kernel_shape": [3], "p": p, **attributes})
    x = torch.tensor(case.arrays[0], dtype=torch.float64, requires_grad=True)
    y = lp_pool(x, 3, attributes["strides"][0], pads, p)
    seed = np.random.default_rng(1).uniform(-1, 1, tuple(y.shape)).astype(np.float32)
    np.testing.assert_allclose(run(make_model(case, case.arrays), {"x0": case.arrays[0]})["y0"], y.detach(), rtol=1e-4)
    y.backward(torch.tensor(seed, dtype=torch.float64))
    assert x.grad is not None
    np.testing.assert_allclose(gradient(case, seed), x.grad, rtol=1e-4, atol=1e-5)


def test_lp_pool_of_zeros_has_gradient_zero() -> None:
    case = Case("LpPool", [np.zeros((1, 1, 4), np.float32)], {"kernel_shape": [2], "strides": [2]})
    assert not gradient(case, np.ones((1, 1, 2), np.float32)).any()


def test_two_pools_and_a_pool_whose_name_is_taken() -> None:
    """The index outputs that the rule adds do not clash with names that the model already has."""
    nodes = [
        helper.make_node("MaxPool", ["x"], ["a"], kernel_shape=[2]),
        helper.make_node("MaxPool", ["x"], ["a_indices"], kernel_shape=[3], pads=[0, 1]),
        helper.make_node("Mul", ["a", "a_indices"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 6])
    graph = helper.make_graph(nodes, "g", [x], [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    result = api.augment(model, wrt=["x"], of=["y"])
    onnx.checker.check_model(result, full_check=True)
    values = np.array([[[1, 5, 2, 4, 3, 6]]], np.float32)
    got = run(result, {"x": values, "y_grad": np.ones((1, 1, 5), np.float32)})["x_grad"]
    t = torch.tensor(values, requires_grad=True)
    (F.max_pool1d(t, 2, 1) * F.max_pool1d(F.pad(t, (0, 1), value=-100), 3, 1)).sum().backward()
    assert t.grad is not None
    np.testing.assert_array_equal(got, t.grad.numpy())


@pytest.mark.parametrize(
    "pool",
    [
        "MaxPool <kernel_shape = [1, 1], strides = [1, 3], ceil_mode = 1>",
        "MaxPool <kernel_shape = [2, 2], strides = [2, 3], pads = [0, 0, 1, 1], ceil_mode = 1>",
        "AveragePool <kernel_shape = [2, 1], strides = [3, 3], ceil_mode = 1>",
        'MaxPool <kernel_shape = [2, 2], dilations = [2, 2], auto_pad = "SAME_UPPER">',
    ],
)
@pytest.mark.parametrize("batch", ["3", "N"])
def test_sizes_that_inference_counts_otherwise(pool: str, batch: str) -> None:
    """ONNX's inference, which the runtime asks when it loads a model, has one window more here than the runtime makes."""
    text = f"g (float[{batch}, 2, 6, 8] x) => (float[A, B, C, D] y) {{ p = {pool} (x) s = Sigmoid (p) y = Mul (p, s) }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    assert check_gradients(model, input_shapes={"x": [3, 2, 6, 8]}).passed
    twice = api.augment(api.augment(model, wrt="inputs"), wrt="x", of="x_grad")
    assert session(twice).get_outputs()[-1].name == "x_grad_1"


@pytest.mark.parametrize("pads", [[1, 1, 1, 1], [0, 2, 2, 0]])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_means_of_sliding_windows_are_handed_back_by_a_pool(pads: list[int], target: str) -> None:
    """Windows at every row are their own adjoint; CUDA's pools take no uneven padding."""
    case = Case("AveragePool", [rand(2, 16, 6, 5)], {"kernel_shape": [3, 3], "pads": pads, "count_include_pad": 1})
    arrays = case.arrays
    model = api.vjp(make_model(case, arrays), wrt=["x0"], of=["y0"], target=target)
    operators = [node.op_type for node in model.graph.node]
    assert (operators == ["AveragePool"]) == (pads == [1, 1, 1, 1] or target == "cpu")
    seed = np.random.default_rng(0).standard_normal((2, 16, 6, 5)).astype(np.float32)
    x = torch.zeros(2, 16, 6, 5, requires_grad=True)
    begin, end = pads[:2], pads[2:]
    y = F.avg_pool2d(F.pad(x, (begin[1], end[1], begin[0], end[0])), 3, 1)
    y.backward(torch.tensor(seed))
    assert x.grad is not None
    given = {"x0": arrays[0], "y0_grad": seed}
    got = run(model, {i.name: given[i.name] for i in model.graph.input})
    np.testing.assert_allclose(got["x0_grad"], x.grad.numpy(), rtol=1e-5, atol=1e-6)
