"""The specs of convolution nodes: explicit padding from `auto_pad` and `output_shape`, with gradients to match."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad.ir.geometry import same_padding
from onnx_convgrad.runtime import run
from tests.support.conv_geometry import arrays_of, case, check_built, model_of


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [7, 8, 9])
def test_auto_pad(mode: str, stride: int, size: int) -> None:
    sizes, kernel = (size, size + 1), (3, 4)
    pairs = [(0, 0) if mode == "VALID" else same_padding(x, k, stride, upper=mode == "SAME_UPPER")
             for x, k in zip(sizes, kernel, strict=True)]  # fmt: skip
    begin, end = zip(*pairs, strict=True)
    g = case((2, 2, *sizes), 3, kernel, strides=stride, begin=begin, end=end)
    arrays = arrays_of(g)
    for shapes in ("static", "symbolic", "absent"):
        model = model_of("Conv", arrays, shapes, strides=g["strides"], auto_pad=mode)
        check_built(og.augment(model, wrt=["x", "w", "b"]), g)


@pytest.mark.parametrize("mode", ["NOTSET", "SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("grow", [-1, 0, 1])
@pytest.mark.parametrize("shapes", ["static", "symbolic", "absent"])
def test_conv_transpose_output_shape(mode: str, grow: int, shapes: str) -> None:
    """The oracle is the linear map itself: <y(x), seed> = <x, dx>, with y from the runtime."""
    rng = np.random.default_rng(0)
    arrays = {k: rng.standard_normal(s).astype(np.float32) for k, s in (("x", (1, 2, 5)), ("w", (2, 3, 4)))}
    for attributes in ({"output_shape": [12 + grow]}, {} if mode != "NOTSET" else {"output_shape": [11]}):
        model = model_of("ConvTranspose", arrays, shapes, strides=[2], auto_pad=mode, **attributes)
        y = run(model, arrays)["y"]
        seed = rng.standard_normal(y.shape).astype(np.float32)
        got = run(og.augment(model, wrt=["x", "w"]), {**arrays, "y_grad": seed})
        for name, array in arrays.items():
            assert got[f"{name}_grad"].shape == array.shape
            assert np.vdot(got[f"{name}_grad"], array) == pytest.approx(float(np.vdot(y, seed)), rel=1e-4)
            moved = array + rng.standard_normal(array.shape).astype(np.float32)
            change = run(model, {**arrays, name: moved})["y"] - y
            assert np.vdot(got[f"{name}_grad"], moved - array) == pytest.approx(float(np.vdot(change, seed)), rel=1e-3)
