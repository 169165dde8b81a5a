"""MaxPool and MaxUnpool: every attribute, ties, windows of padding, repeated indices."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F

import onnx_convgrad as og
from onnx_convgrad import api
from onnx_convgrad.runtime import run, session
from onnx_convgrad.testing import Case, check, rand
from tests.support.numeric import check as check_gradients
from tests.support.operators import WINDOWS, autograd, gradient, rule_test, text_model

WHOLE = [(2, 3, 4, 6), (1, 2, 2, 44), (0, 3, 4, 6)]

maximum, unpool = partial(Case, "MaxPool"), partial(Case, "MaxUnpool")
X = [rand(2, 3, 6, 5)]
HALVES = {"kernel_shape": [2, 2], "strides": [2, 2]}

MAX = [
    *(maximum(X, w) for w in WINDOWS),
    maximum([rand(2, 3, 7)], {"kernel_shape": [3], "strides": [2], "pads": [1, 0]}),
    maximum([rand(1, 2, 4, 5, 4)], {"kernel_shape": [3, 2, 2], "strides": [2, 1, 2], "pads": [1, 0, 1, 1, 1, 0]}),
    *(maximum(X, {"kernel_shape": [2, 3], "storage_order": 1}, outputs=outputs) for outputs in (1, 2)),
    maximum(X, {"kernel_shape": [2, 3]}, outputs=2),
    *(maximum(X, w, dtype=np.float64) for w in (HALVES, {"kernel_shape": [3, 3], "strides": [2, 2]})),
    *(maximum([rand(*shape)], HALVES) for shape in [*WHOLE, (0, 3, 6, 5)]),
    maximum([rand(0, 3, 6, 5)], {"kernel_shape": [3, 3]}),
    maximum(X, {"kernel_shape": [2, 2]}, opset=8),
]

DISTINCT = np.array([0, 3, 9, 10, 17, 18, 24, 31]).reshape(1, 2, 2, 2)
UNPOOL = [
    *(unpool([rand(1, 2, 2, 2), DISTINCT], HALVES, feed_integers=fed) for fed in (False, True)),
    unpool([rand(1, 1, 2), np.array([[[1, 2]]])], {"kernel_shape": [2], "strides": [2]}),
]

test_rule = rule_test([*MAX, *UNPOOL])


@pytest.mark.parametrize("window", [HALVES, {"kernel_shape": [3, 3], "strides": [2, 2]}])
@pytest.mark.parametrize("target", ["cpu", "cuda", "web", "portable"])
@pytest.mark.parametrize("size", [(7, 6), (8, 6)], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_ties_go_to_the_first_element_as_in_pytorch(
    window: dict[str, Any], target: str, size: tuple[int, int], dtype: type
) -> None:
    """On every target and in half precision. Half of the elements are zero, as after a Relu."""
    generator = np.random.default_rng(3)
    x = np.maximum(generator.integers(-3, 3, (2, 3, *size)), 0).astype(dtype)

    def pool(v: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(v, window["kernel_shape"], window["strides"])

    seed = generator.integers(-4, 5, tuple(pool(torch.tensor(x)).shape)).astype(dtype)
    (want,) = autograd(pool, x, seed=seed)
    np.testing.assert_array_equal(gradient(maximum([x], window), seed, target), want)


def test_window_of_padding_only_has_no_gradient() -> None:
    """With dilation a window may contain no element; ONNX Runtime's index for it is undefined."""
    case = maximum([rand(1, 2, 1, 5)], {"kernel_shape": [2, 1], "dilations": [2, 1], "pads": [1, 0, 1, 0]})
    assert not gradient(case, np.ones((1, 2, 1, 5), np.float32)).any()


def test_unpool_to_a_larger_shape() -> None:
    """ONNX Runtime interprets the indices in the requested shape."""
    indices = np.array([[[[0, 6], [18, 20]]]])
    case = unpool([rand(1, 1, 2, 2), indices, np.array([1, 1, 5, 5])], HALVES)
    seed = np.arange(25, dtype=np.float32).reshape(1, 1, 5, 5)
    np.testing.assert_array_equal(gradient(case, seed), indices)


@pytest.mark.parametrize("window", [3, 2], ids=["overlapping", "disjoint"])
@pytest.mark.parametrize("fed", [False, True])
def test_the_last_of_repeated_unpool_indices_gets_the_gradient(window: int, *, fed: bool) -> None:
    """Whatever the windows: the indices are any numbers."""
    indices = np.array([[[0, 3, 3, 7]]])
    case = unpool([rand(1, 1, 4), indices, np.array([1, 1, 9])], {"kernel_shape": [window], "strides": [2]})
    check(replace(case, feed_integers=fed, inputs=case.inputs if not fed else case.inputs[:2]))
    seed = np.arange(1, 10, dtype=np.float32).reshape(1, 1, 9)
    np.testing.assert_array_equal(gradient(case, seed), [[[1, 0, 4, 8]]])


def test_added_index_outputs_have_unique_names() -> None:
    model = text_model("""(float[1,1,6] x) => (float[1,1,5] y) {
        a = MaxPool <kernel_shape = [2]> (x) a_indices = MaxPool <kernel_shape = [3], pads = [0, 1]> (x)
        y = Mul (a, a_indices) }""")
    result = api.augment(model, wrt=["x"], of=["y"])
    onnx.checker.check_model(result, full_check=True)
    values = np.array([[[1, 5, 2, 4, 3, 6]]], np.float32)
    got = run(result, {"x": values, "y_grad": np.ones((1, 1, 5), np.float32)})["x_grad"]
    (want,) = autograd(lambda t: F.max_pool1d(t, 2, 1) * F.max_pool1d(F.pad(t, (0, 1), value=-100), 3, 1), values)
    np.testing.assert_array_equal(got, want)


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
def test_window_counts_that_shape_inference_gets_wrong(pool: str, batch: str) -> None:
    """ONNX's shape inference, which the runtime uses when it loads a model, counts one window too many."""
    nodes = f"p = {pool} (x) s = Sigmoid (p) y = Mul (p, s)"
    model = text_model(f"(float[{batch}, 2, 6, 8] x) => (float[A, B, C, D] y) {{ {nodes} }}")
    assert check_gradients(og.load(model, input_shapes={"x": [3, 2, 6, 8]})).passed
    twice = api.augment(api.augment(model, wrt="inputs"), wrt="x", of="x_grad")
    assert session(twice).get_outputs()[-1].name == "x_grad_1"
