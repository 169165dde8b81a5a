"""The Global pools."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onnx_convgrad.testing import Case, rand
from tests.support.operators import autograd, gradient, rule_test

CASES = [
    *(Case("GlobalAveragePool", [rand(*x)]) for x in ((2, 3, 6, 5), (2, 3, 6), (2, 3, 2, 3, 4), (0, 3, 6, 5))),
    Case("GlobalAveragePool", [rand(2, 3, 6, 5)], dtype=np.float16),
    # evaluated in float32 only: a larger step
    *(Case("GlobalLpPool", [rand(2, 3, 4, 5)], {"p": p}, step=3e-3) for p in (1, 2, 3)),
    Case("GlobalLpPool", [rand(2, 3, 6)], step=3e-3),
    Case("GlobalMaxPool", [rand(2, 3, 6, 5)]),
    Case("GlobalMaxPool", [rand(0, 3, 6, 5)]),
]

test_rule = rule_test(CASES)


@pytest.mark.parametrize("shape", [(2, 3, 6), (2, 3, 4, 5), (2, 3, 2, 3, 2)])
def test_global_maximum_is_the_first_as_in_pytorch(shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(2)
    x = generator.integers(0, 3, shape).astype(np.float32)
    seed = generator.uniform(-1, 1, (2, 3, *(1 for _ in shape[2:]))).astype(np.float32)
    pool = {3: torch.nn.AdaptiveMaxPool1d, 4: torch.nn.AdaptiveMaxPool2d, 5: torch.nn.AdaptiveMaxPool3d}[len(shape)]
    np.testing.assert_array_equal(gradient(Case("GlobalMaxPool", [x]), seed), *autograd(pool(1), x, seed=seed))


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("shape", [(2, 3, 6), (2, 3, 4, 5)])
def test_global_lp_pool_against_pytorch(shape: tuple[int, ...], p: int) -> None:
    seed = np.random.default_rng(2).uniform(-1, 1, (2, 3, *(1 for _ in shape[2:]))).astype(np.float32)
    x = Case("GlobalLpPool", [rand(*shape)]).arrays[0].copy()
    x[0, 0] = 0  # the derivative of the norm is taken to be 0 here, as in PyTorch
    axes = tuple(range(2, len(shape)))
    (want,) = autograd(lambda t: torch.linalg.vector_norm(t, p, dim=axes, keepdim=True), x, seed=seed)
    np.testing.assert_allclose(gradient(Case("GlobalLpPool", [x], {"p": p}), seed), want, rtol=1e-4, atol=1e-6)
