"""AveragePool and LpPool: every attribute, zeros, empty batches, sizes known only at run time."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onnx_convgrad import api
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, make_model, rand
from tests.support.operators import WINDOWS, autograd, gradient, rule_test

average, lp = partial(Case, "AveragePool"), partial(Case, "LpPool")
X = [rand(2, 3, 6, 5)]
HALVES = {"kernel_shape": [2, 2], "strides": [2, 2]}
PADDED = {"kernel_shape": [3, 2], "pads": [1, 0, 1, 0]}

AVERAGE = [
    *(average(X, {**w, "count_include_pad": include}) for w, include in itertools.product(WINDOWS, (0, 1))),
    average(X, {"kernel_shape": [1, 2], "strides": [4, 1], "auto_pad": "SAME_UPPER"}),
    average([rand(2, 3, 1)], {"kernel_shape": [2], "strides": [2]}, name="partly covered"),
    average([rand(1, 2, 2, 3)], {"kernel_shape": [3, 3], "strides": [2, 2]}, name="partly covered"),
    average(
        [rand(1, 2, 3)],
        {"kernel_shape": [3], "strides": [3], "dilations": [2], "pads": [0, 1], "count_include_pad": 1},
        name="partly covered",
    ),
    average([rand(2, 3, 7)], {"kernel_shape": [3], "strides": [2], "pads": [1, 0]}),
    average([rand(1, 2, 4, 5, 4)], {"kernel_shape": [3, 2, 2], "strides": [2, 1, 2], "pads": [1, 0, 1, 1, 1, 0]}),
    *(average(X, window, dtype=np.float16) for window in (HALVES, PADDED)),
    *(average([rand(0, 3, 6, 5)], window) for window in (PADDED, HALVES)),
]

LP = [
    *(
        lp([rand(1, 2, 4, 5)], {**w, "p": p})
        for w in (HALVES, {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 0, 1]})
        for p in (1, 2, 3)
    ),
    lp([rand(2, 3, 7)], {"kernel_shape": [3]}),
    lp(X, {"kernel_shape": [2, 2]}, opset=11),
]

test_rule = rule_test([*AVERAGE, *LP])


@pytest.mark.parametrize("opset", [7, 11])
def test_average_of_old_opsets(opset: int) -> None:
    """Their forward kernel is another one, whose result may differ in the last bit."""
    old = average(X, {"kernel_shape": [2, 2]}, opset=opset)
    seed = np.random.default_rng(0).uniform(-1, 1, (2, 3, 5, 4)).astype(np.float32)
    new = average(old.arrays, {"kernel_shape": [2, 2]})
    np.testing.assert_allclose(gradient(old, seed), gradient(new, seed), rtol=1e-6)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_average_of_doubles(window: dict[str, Any]) -> None:
    """The CPU provider has no float64 AveragePool, but runs its gradient, which does not need the primal."""
    generator = np.random.default_rng(5)
    x = generator.uniform(-1, 1, (2, 3, 6, 5))
    model, narrow = (make_model(average([x], window), [x.astype(dtype)]) for dtype in (np.float64, np.float32))
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
    """For attributes with which ONNX's reference evaluator and ONNX Runtime differ in the forward value."""
    case = lp([rand(2, 3, 6)], {"kernel_shape": [3], "p": p, **attributes})
    x, stride = case.arrays[0], attributes["strides"][0]
    y = lp_pool(torch.tensor(x, dtype=torch.float64), 3, stride, pads, p)
    seed = np.random.default_rng(1).uniform(-1, 1, tuple(y.shape)).astype(np.float32)
    np.testing.assert_allclose(run(make_model(case, case.arrays), {"x0": x})["y0"], y, rtol=1e-4)
    (want,) = autograd(lambda v: lp_pool(v, 3, stride, pads, p), x, seed=seed)
    np.testing.assert_allclose(gradient(case, seed), want, rtol=1e-4, atol=1e-5)


def test_lp_pool_of_zeros_has_gradient_zero() -> None:
    case = lp([np.zeros((1, 1, 4), np.float32)], {"kernel_shape": [2], "strides": [2]})
    assert not gradient(case, np.ones((1, 1, 2), np.float32)).any()


@pytest.mark.parametrize("pads", [[1, 1, 1, 1], [0, 2, 2, 0]])
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_adjoint_of_sliding_means_is_a_pool(pads: list[int], target: str) -> None:
    """CUDA's pools do not support asymmetric padding."""
    case = average([rand(2, 16, 6, 5)], {"kernel_shape": [3, 3], "pads": pads, "count_include_pad": 1})
    arrays = case.arrays
    model = api.vjp(make_model(case, arrays), wrt=["x0"], of=["y0"], target=target)
    operators = [node.op_type for node in model.graph.node]
    assert (operators == ["AveragePool"]) == (pads == [1, 1, 1, 1] or target == "cpu")
    seed = np.random.default_rng(0).standard_normal((2, 16, 6, 5)).astype(np.float32)
    around = (pads[1], pads[3], pads[0], pads[2])
    (want,) = autograd(lambda x: F.avg_pool2d(F.pad(x, around), 3, 1), np.zeros((2, 16, 6, 5)), seed=seed)
    given = {"x0": arrays[0], "y0_grad": seed}
    got = run(model, {i.name: given[i.name] for i in model.graph.input})
    np.testing.assert_allclose(got["x0_grad"], want, rtol=1e-5, atol=1e-6)
