"""Sizes in half types: float16 holds none above 65504 and no reciprocal of one above 16384 with all its digits."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.checking.case import is_float
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import make_model
from tests.support.half_sizes import sizes_in_halves
from tests.support.operators import text_model
from tests.support.rule_cases import rule_cases


@pytest.mark.slow
@pytest.mark.parametrize("shapes", ["symbolic", "absent"])
def test_no_gradient_casts_a_size_to_a_half_type(shapes: str) -> None:
    wrong, built = [], 0
    for case in rule_cases():
        arrays = [a.astype(np.float16) if a is not None and is_float(a) else a for a in case.arrays]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                graph = og.augment(make_model(case, arrays, shapes=shapes), wrt="inputs").graph
            except og.ConvGradError:  # the rule needs shapes
                continue
        built += 1
        wrong += [f"{case}: {name}" for name in sizes_in_halves(graph)]
    assert not wrong
    assert built > 700


@pytest.mark.parametrize("cast", [1, 10])
def test_the_search_finds_a_size_in_a_half_type(cast: int) -> None:
    nodes = f"s = Shape (x) d = Add (s, s) c = Cast <to = {cast}> (d) y = Cast <to = 10> (c)"
    text = f"(float16[N] x) => (float16[1] y) {{ {nodes} }}"
    assert sizes_in_halves(text_model(text).graph) == (["d"] if cast == 10 else [])


_NORM = {"s": (2,), "b": (2,)}

LARGE: dict[str, tuple[str, Mapping[str, tuple[int, ...]]]] = {
    "global mean": ("y = GlobalAveragePool (x)", {"x": (1, 2, 260, 270)}),
    "global norm": ("y = GlobalLpPool (x)", {"x": (1, 2, 260, 270)}),
    "mean": ("y = ReduceMean <keepdims = 0> (x)", {"x": (2, 260, 270)}),
    "mean over axes": ("y = ReduceMean (x, axes)", {"x": (3, 260, 270)}),
    "mean of millions": ("y = ReduceMean (x, last)", {"x": (2, 5_000_000)}),
    "L2": ("y = ReduceL2 (x, axes)", {"x": (3, 260, 270)}),
    "pool": ("y = AveragePool <kernel_shape = [260, 270]> (x)", {"x": (1, 2, 261, 271)}),
    "pool with padding": (
        "y = AveragePool <kernel_shape = [260, 270], pads = [9, 9, 9, 9], strides = [8, 8]> (x)",
        {"x": (1, 2, 261, 271)},
    ),
    "pool with a ceiling": (
        "y = AveragePool <kernel_shape = [260, 270], strides = [3, 3], ceil_mode = 1> (x)",
        {"x": (1, 2, 261, 274)},
    ),
    "instances": ("y = InstanceNormalization (x, s, b)", {"x": (1, 2, 260, 270), **_NORM}),
    "groups": ("y = GroupNormalization <num_groups = 1> (x, s, b)", {"x": (1, 2, 260, 270), **_NORM}),
    "layer": ("y = LayerNormalization <axis = 1> (x, s, b)", {"x": (2, 70000), "s": (70000,), "b": (70000,)}),
    "batch": (
        "y, m, v = BatchNormalization <training_mode = 1> (x, s, b, zero, one)",
        {"x": (3, 2, 160, 170), **_NORM},
    ),
    "mean and variance": ("y = MeanVarianceNormalization (x)", {"x": (2, 2, 260, 270)}),
    "grid": ("y = GridSample (x, g)", {"x": (1, 2, 3, 3000), "g": (1, 4, 5, 2)}),
    "deformed": (
        "y = DeformConv <strides = [1, 7]> (x, w, o)",
        {"x": (1, 1, 1, 7000), "w": (1, 1, 1, 1), "o": (1, 2, 1, 1000)},
    ),
}
"""Operators with a count above 65504 or, on an axis, with positions that float16 does not hold."""


def _large(name: str, kind: str, shapes: str) -> onnx.ModelProto:
    nodes, sizes = LARGE[name]
    dims = {i: size if shapes == "static" else [f"{i}{axis}" for axis in range(len(size))] for i, size in sizes.items()}
    inputs = ", ".join(f"{kind}[{','.join(map(str, d))}] {i}" for i, d in dims.items())
    constants = (
        f"int64[2] axes = {{-2, -1}}, int64[1] last = {{-1}}, {kind}[2] zero = {{0, 0}}, {kind}[2] one = {{1, 1}}"
    )
    model = text_model(f"({inputs}) => ({kind}[] y) <{constants}> {{ {nodes} }}")
    for value in (*model.graph.input, *model.graph.output):
        if shapes == "absent" or value.name == "y":
            value.type.tensor_type.ClearField("shape")
    return model


@pytest.mark.parametrize("shapes", ["static", "symbolic", "absent"])
@pytest.mark.parametrize("name", LARGE)
def test_gradients_of_large_counts_are_those_of_float32(name: str, shapes: str) -> None:
    """With a seed for which float16 holds the gradients with all their digits."""
    rng = np.random.default_rng(0)
    halves = {i: rng.uniform(0.5, 1.5, size).astype(np.float16) for i, size in LARGE[name][1].items()}
    if "g" in halves:
        halves["g"] -= np.float16(1)
    try:
        half, single = (og.vjp(_large(name, kind, shapes), wrt="inputs") for kind in ("float16", "float"))
    except og.errors.DifferentiationError:
        if shapes == "static":
            raise
        pytest.skip("the rule needs shapes")
    feed = {i: value.astype(np.float32) for i, value in halves.items()}
    y = run(_large(name, "float", shapes), feed)["y"]
    if "y_grad" in {i.name for i in half.graph.input}:  # not of a scalar
        feed["y_grad"] = np.cos(np.arange(y.size, dtype=np.float32)).reshape(y.shape)
        largest = max(np.abs(gradient).max() for gradient in run(single, feed).values())
        halves["y_grad"] = np.asarray(feed["y_grad"] * min(1000 / largest, 30_000), np.float16)
        feed["y_grad"] = halves["y_grad"].astype(np.float32)
    got = run(half, halves)
    for gradient, want in run(single, feed).items():
        error = np.linalg.norm(got[gradient].astype(np.float32) - want)
        assert error <= 0.005 * np.linalg.norm(want), (gradient, error / np.linalg.norm(want))
