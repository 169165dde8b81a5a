"""GridSample in every mode with every padding, and AffineGrid."""

from __future__ import annotations

import itertools
import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from onnx_convgrad import api
from onnx_convgrad.errors import DifferentiationError
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, make_model, rand
from tests.support.operators import autograd, rule_test, text_model

X, GRID = rand(2, 2, 4, 5), rand(2, 3, 4, 2, low=-1.6, high=1.6)
PYTORCH_MODES = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}
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
    case = Case("GridSample", [X, GRID], {"mode": mode, "padding_mode": padding}, dtype=np.float64)
    seed = np.random.default_rng(0).uniform(-1, 1, (2, 2, 3, 4))
    oracle = partial(F.grid_sample, mode=PYTORCH_MODES[mode], padding_mode=padding, align_corners=False)
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


EDGES = (-1, 1, -0.75, 0.75, -1.25, 1.25, -2, 2, -3, 3, -5, 5, 0, 1 / 3, 1.1, -1001.3, 1001.3, 2.0**33, -1e20, 1e20)
"""Coordinates at and between the borders of images of 3 and 4 elements, and far outside of them."""

SWEPT = [
    (rank, mode, padding, aligned)
    for rank, mode, padding, aligned in itertools.product(
        (2, 3), ("linear", "nearest", "cubic"), ("zeros", "border", "reflection"), (0, 1)
    )
    if rank == 2 or mode != "cubic"
]


def _gradients(
    mode: str, padding: str, aligned: int, x: np.ndarray, grid: np.ndarray, seed: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The cotangents of x and of the grid, and PyTorch's."""
    case = sample([x, grid], {"mode": mode, "padding_mode": padding, "align_corners": aligned})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # with mode "nearest" no result depends on the grid
        model = api.augment(make_model(case, case.arrays), wrt=["x0", "x1"], of=["y0"])
    got = run(model, {"x0": x, "x1": grid, "y0_grad": seed})
    oracle = partial(F.grid_sample, mode=PYTORCH_MODES[mode], padding_mode=padding, align_corners=bool(aligned))
    leaves = [torch.tensor(v, requires_grad=True) for v in (x, grid)]  # in float32: roundings decide far outside
    wanted = torch.autograd.grad(oracle(*leaves), leaves, torch.tensor(seed))
    return [got["x0_grad"], got["x1_grad"]], [np.asarray(v) for v in wanted]


@pytest.mark.parametrize(("rank", "mode", "padding", "aligned"), SWEPT)
def test_slopes_at_borders_and_far_outside_are_those_of_pytorch(
    rank: int, mode: str, padding: str, aligned: int
) -> None:
    """Wherever the runtime reads the elements that PyTorch reads."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 2, *(3, 4, 4)[-rank:])).astype(np.float32)
    grid = np.array([*itertools.product(EDGES, (0.3, *EDGES[:8]))], np.float32)
    grid = np.concatenate([grid, grid[:, ::-1]])
    if rank == 3:
        grid = np.concatenate([grid, np.roll(grid[:, :1], 7, axis=0)], axis=1)
    grid = grid.reshape(1, *[1] * (rank - 1), -1, rank)
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": aligned}
    forward = run(make_model(sample([x, grid], attributes), [x, grid]), {"x0": x, "x1": grid})["y0"]
    theirs = F.grid_sample(*map(torch.tensor, (x, grid)), PYTORCH_MODES[mode], padding, bool(aligned)).numpy()
    same = np.isclose(forward, theirs, rtol=1e-4, atol=1e-4).all(axis=1, keepdims=True)
    assert same.mean() > 0.6
    got, want = _gradients(
        mode, padding, aligned, x, grid, (rng.uniform(-1, 1, forward.shape) * same).astype(np.float32)
    )
    for ours, pytorch in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, pytorch, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("padding", ["zeros", "border"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_coordinates_that_are_not_finite_have_the_gradients_of_pytorch(mode: str, padding: str, bad: float) -> None:
    """PyTorch's own gradient ends the process for NaN with other padding than zeros."""
    if np.isnan(bad) and padding != "zeros":
        pytest.skip("PyTorch reads outside of the image")
    x = np.random.default_rng(0).standard_normal((1, 2, 4, 5)).astype(np.float32)
    grid = np.array([[[[0.2, 0.4], [bad, 0.3], [0.3, bad], [-0.9, 0.9]]]], np.float32)
    got, want = _gradients(mode, padding, 0, x, grid, np.ones((1, 2, 1, 4), np.float32))
    for ours, pytorch in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, pytorch, rtol=1e-4, atol=1e-4)


def test_elements_outside_of_the_image_are_zero_beside_infinite_ones() -> None:
    """A weight of 0 times an infinite element would be NaN."""
    x = np.full((1, 1, 2, 2), np.inf, np.float32)
    grid, seed = np.full((1, 1, 2, 2), 4, np.float32), np.ones((1, 1, 1, 2), np.float32)
    got, want = _gradients("linear", "zeros", 0, x, grid, seed)
    for ours, pytorch in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, pytorch)
        np.testing.assert_array_equal(ours, 0)
