"""Squared norms of gradients per sample: shared weights, half precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.per_sample import close, looped, model, random


def test_a_weight_used_twice_adds_up_before_the_norm() -> None:
    proto = model(
        "g (float[N, 4] x) => (float[N, 4] y) { z = MatMul (x, w)  r = Tanh (z)  y = MatMul (r, w) }", w=random(4, 4)
    )
    feed = {"x": random(3, 4)}
    want = looped(proto, feed, cotangents="ones")["w_grad"]
    close(run(og.augment(proto, per_sample=True, cotangents="ones"), feed)["w_grad"], want, 0, "w")
    norms = run(og.augment(proto, per_sample="squared_norm", cotangents="ones"), feed)["w_grad_squared_norm"]
    close(norms, (want.reshape(3, -1) ** 2).sum(1), 0, "w")


@pytest.mark.parametrize("way", [None, "gram", "gram_gemm", "im2col_gemm_squares", "im2col_conv_squares"])
@pytest.mark.parametrize("batch", ["3", "N"])
def test_norms_of_half_precision_are_taken_in_single(batch: str, way: str | None) -> None:
    """They are beyond what float16 holds, 65,504."""
    proto = model(f"""g (float16[{batch}, 3, 5, 5] x, float16[4, 3, 3, 3] w) => (float16[{batch}, 4, 3, 3] y) {{
        y = Conv (x, w) }}""")
    choice: Any = {} if way is None else {"target": og.Target(lowering={"ConvGradSquaredNorm": way})}
    feed = {
        "x": np.full((3, 3, 5, 5), 8, "e"),
        "y_grad": np.full((3, 4, 3, 3), 4, "e"),
        "w": np.ones((4, 3, 3, 3), "e"),
    }
    got = run(og.vjp(proto, wrt=["w"], per_sample="squared_norm", **choice), feed)
    norms = got["w_grad_squared_norm"]
    assert norms.dtype == np.float32
    np.testing.assert_allclose(norms, np.full(3, 108 * (9 * 8 * 4) ** 2), rtol=1e-3)


def test_norms_of_products_of_half_precision() -> None:
    proto = model("g (float16[N, 5, 4] x, float16[4, 3] w) => (float16[N, 5, 3] y) { y = MatMul (x, w) }")
    feed = {"x": np.full((2, 5, 4), 30, "e"), "w": np.ones((4, 3), "e"), "y_grad": np.full((2, 5, 3), 30, "e")}
    for way in ("product_squares", "product_gram"):
        got = run(
            og.vjp(proto, wrt=["w"], per_sample="squared_norm", target=og.Target(lowering={"ProductSquaredNorm": way})),
            feed,
        )
        np.testing.assert_allclose(got["w_grad_squared_norm"], np.full(2, 12 * 4500.0**2, np.float32), rtol=1e-3)
