"""GridSample in every mode with every padding, and AffineGrid."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch.nn.functional as F

from onnx_convgrad import api
from onnx_convgrad.errors import DifferentiationError
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, make_model, rand
from tests.support.operators import autograd, rule_test, text_model

X, GRID = rand(2, 2, 4, 5), rand(2, 3, 4, 2, low=-1.6, high=1.6)
VOLUME, POINTS = rand(1, 2, 3, 4, 3), rand(1, 2, 2, 3, 3, low=-1.4, high=1.4)

sample = partial(Case, "GridSample")
CASES = [
    *(
        sample(
            [X, GRID],
            {"mode": m, "padding_mode": p, "align_corners": a},
            dynamic=m == "cubic" and p == "zeros",  # the other modes need the rank: tested below
            order=1 if m == "cubic" and (p != "border" or a) else 2,  # 16 taps: one is enough
        )
        for m, p, a in itertools.product(("linear", "nearest", "cubic"), ("zeros", "border", "reflection"), (0, 1))
    ),
    sample([VOLUME, POINTS], {"padding_mode": "border"}, dynamic=False),
    sample([VOLUME, POINTS], {"mode": "nearest"}, dynamic=False),
    sample([X, GRID], dtype=np.float64, dynamic=False),
    sample([X, GRID], dtype=np.float16, dynamic=False, wrt=[0], tolerance=2e-2),
    sample([rand(0, 2, 4, 5), rand(0, 3, 4, 2)], dynamic=False),
    sample([rand(1, 2, 1, 5), rand(1, 3, 4, 2)], {"padding_mode": "reflection", "align_corners": 1}, dynamic=False),
    Case("AffineGrid", [rand(2, 2, 3), np.array([2, 3, 4, 5])]),
    Case("AffineGrid", [rand(2, 2, 3), np.array([2, 3, 4, 5])], {"align_corners": 1}),
    Case("AffineGrid", [rand(2, 3, 4), np.array([2, 3, 4, 5, 3])]),
    Case("AffineGrid", [rand(2, 2, 3), np.array([2, 3, 4, 5])], feed_integers=True, dynamic=False),
]

test_rule = rule_test(CASES)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border"])
def test_symbolic_sizes_against_pytorch(mode: str, padding: str) -> None:
    """In float64, with the modes that the runtime and PyTorch define alike."""
    names = {"linear": "bilinear", "cubic": "bicubic"}
    case = Case("GridSample", [X, GRID], {"mode": mode, "padding_mode": padding}, dtype=np.float64)
    seed = np.random.default_rng(0).uniform(-1, 1, (2, 2, 3, 4))
    oracle = partial(F.grid_sample, mode=names[mode], padding_mode=padding, align_corners=False)
    wanted = autograd(oracle, *case.arrays, seed=seed)
    model = api.augment(make_model(case, case.arrays, shapes="symbolic"), wrt=["x0", "x1"], of=["y0"])
    got = run(model, {"x0": case.arrays[0], "x1": case.arrays[1], "y0_grad": seed})
    for name, want in zip(("x0_grad", "x1_grad"), wanted, strict=True):
        np.testing.assert_allclose(got[name], want, rtol=1e-6, atol=1e-9)


def test_older_names_of_modes() -> None:
    old, new = sample([X, GRID], {"mode": "bilinear"}, opset=16), sample([X, GRID], {"mode": "linear"})
    feed = {**dict(zip(("x0", "x1"), new.arrays, strict=True)), "y0_grad": np.ones((2, 2, 3, 4), np.float32)}
    results = [run(api.augment(make_model(c, new.arrays), wrt=["x0", "x1"], of=["y0"]), feed) for c in (old, new)]
    np.testing.assert_array_equal(results[0]["x1_grad"], results[1]["x1_grad"])


def test_a_grid_of_another_dtype_is_refused() -> None:
    text = "(float[1,1,3,2] x, float16[1,2,4,2] grid) => (float[1,1,2,4] y) { y = GridSample (x, grid) }"
    with pytest.raises(DifferentiationError, match="its data and its grid have different dtypes"):
        api.augment(text_model(text), wrt="inputs")


def test_unknown_rank_is_refused() -> None:
    case = sample([X, GRID])
    model = make_model(case, case.arrays, shapes="absent")
    with pytest.raises(DifferentiationError, match="rank of 'x1' is unknown"):
        api.augment(model, wrt=["x0"], of=["y0"])
