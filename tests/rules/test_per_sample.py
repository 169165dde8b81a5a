"""Gradients per sample for weights of products, and for parts of a sequence, against a loop over the samples."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.runtime import run
from tests.support.per_sample import close, looped, model, random

PRODUCTS = {
    "transposed rows": ("y = Gemm <alpha = 0.5, beta = 2.0, transB = 1> (x, w, b)", "N, 4", (4, 4), (4,)),
    "a number as bias": ("y = Gemm (x, w, b)", "N, 4", (4, 3), (1,)),
    "higher rank": ("z = MatMul (x, w)  y = Add (z, b)", "N, 2, 5, 4", (4, 3), (3,)),
    "a matrix per head": ("z = MatMul (x, w)  y = Mul (z, b)", "N, 2, 5, 4", (2, 4, 3), (2, 1, 3)),
    "a matrix with an axis of one": ("z = MatMul (x, w)  y = Add (z, b)", "N, 5, 4", (1, 4, 3), (3,)),
    "a matrix with axes of one for a row": ("z = MatMul (x, w)  y = Add (z, b)", "N, 4", (1, 1, 4, 3), (3,)),
    "one of each head": ("z = MatMul (x, w)  y = Mul (z, b)", "N, 2, 5, 4", (1, 2, 4, 3), (2, 1, 3)),
    "one of each head on the left": ("z = MatMul (w, x)  y = Mul (z, b)", "N, 2, 5, 4", (1, 2, 3, 5), (2, 1, 4)),
    "an axis of one on the left": ("z = MatMul (w, x)  y = Mul (z, b)", "N, 5, 4", (1, 3, 5), (3, 1)),
    "a vector": ("z = MatMul (x, w)  y = Sub (z, b)", "N, 5, 4", (4,), (5,)),
    "on the left": ("z = MatMul (w, x)  y = Add (b, z)", "N, 5, 4", (3, 5), (3, 1)),
    "an equation": ('z = Einsum <equation = "nhqd,hdk->nqk"> (x, w)  y = Add (z, b)', "N, 2, 5, 4", (2, 4, 3), (3,)),
    "an ellipsis": ('z = Einsum <equation = "kj,...k->j..."> (w, x)  y = Mul (z, b)', "N, 5, 4", (4, 3), (1, 5)),
    "an index of its own": ('z = Einsum <equation = "nqk,jm->nqk"> (x, w)  y = Mul (z, b)', "N, 5, 4", (2, 3), (1, 4)),
    "an equation of three": (
        'z = Einsum <equation = "nq,nk,qkj->nj"> (x, x, w)  y = Mul (z, b)',
        "N, 4",
        (4, 4, 2),
        (2,),
    ),
    "a divisor": ("z = MatMul (x, w)  y = Div (z, b)", "N, 4", (4, 3), (3,)),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("batch", ["N", "3"], ids=["symbolic", "static"])
def test_products(name: str, batch: str) -> None:
    body, shape, w, b = PRODUCTS[name]
    weights = {"w": random(*w), "b": np.abs(random(*b)) + 1}
    dims = shape.replace("N", batch)
    proto = model(f"g (float[{dims}] x) => (float[] y) {{ {body} }}".replace("[] y", " y"), **weights)
    x = random(3, *(int(d) for d in shape.split(", ")[1:]))
    each = run(og.augment(proto, per_sample=True, cotangents="ones"), {"x": x})
    norms = run(og.vjp(proto, wrt="parameters", per_sample="squared_norm", cotangents="ones"), {"x": x})
    for way in lowerings()["ProductSquaredNorm"]:
        choice = {
            "target": og.Target(lowering={"ProductSquaredNorm": way}),
            "per_sample": "squared_norm",
            "cotangents": "ones",
        }
        try:
            forced = run(og.vjp(proto, wrt="parameters", **choice), {"x": x})
        except og.errors.LoweringError:
            assert way == "rank_one"  # a sample has several rows
            continue
        close(forced["w_grad_squared_norm"], norms["w_grad_squared_norm"], 0, way)
    dynamic = model(f"g (float[{shape}] x) => (float y) {{ {body} }}", **weights)
    want = looped(dynamic, {"x": x}, cotangents="ones")
    for key, value in want.items():
        close(each[key], value, 0, key)
        close(norms[f"{key}_squared_norm"], (value.reshape(3, -1) ** 2).sum(1), 0, key)


def test_parts_of_a_sequence() -> None:
    """PyTorch's exporter writes `chunk` so, unless it optimizes."""
    body = (
        "h = MatMul (x, w)  s = SplitToSequence <axis = 1> (h, two)  a = SequenceAt (s, zero)  b = SequenceAt (s, one)"
    )
    proto = model(f"g (float[N, 4] x) => (float[N, 2] y) {{ {body}  y = Mul (a, b) }}",
                  w=random(4, 4), two=np.array([2, 2]), zero=np.array(0), one=np.array(1))  # fmt: skip
    feed = {"x": random(3, 4), "y_grad": random(3, 2)}
    each = run(og.vjp(proto, wrt=["w"], per_sample=True), feed)["w_grad"]
    close(each, looped(proto, feed, wrt=["w"])["w_grad"], 0, "w")
