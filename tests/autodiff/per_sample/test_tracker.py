"""Models that mix samples, or may mix them, are refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from tests.support.per_sample import model, random

REFUSED: dict[str, tuple[str, str, Mapping[str, Any]]] = {
    "batch normalization in training": (
        "z = Mul (x, w)  y, m, v = BatchNormalization <training_mode = 1> (z, one, one, one, one)",
        r"BatchNormalization.*training mode it normalizes with the mean and variance of the whole batch",
        {"w": random(4), "one": np.ones(4)},
    ),
    "a softmax over the batch": ("z = Mul (x, w)  y = Softmax <axis = 0> (z)", "normalizes along axis 0", {"w": random(4)}),
    "samples times samples": (
        "z = Mul (x, w)  t = Transpose (z)  y = MatMul (z, t)", "samples with one another", {"w": random(4)},
    ),
    "a maximum over the batch": ("z = Mul (x, w)  y = ReduceMax (z, first)", "reduces axis 0", {"w": random(4)}),
    "the data's own mean": (
        "m = ReduceMean (x, first)  c = Sub (x, m)  y = Mul (c, w)", "different axes|sum over the samples", {"w": random(4)},
    ),
    "a weight after the mean": (
        "m = ReduceMean (x, first)  y = Mul (m, w)", "a value that is already summed over the samples", {"w": random(4)},
    ),
    "a state that other samples see": (
        "s = Shape (x)  h = ConstantOfShape (s)  v = MatMul (h, w) q = ReduceSum (v, first)  a = Add (x, v)  y = Mul (a, q)",
        "its own rows along the axis of the samples", {"w": random(4, 4)},
    ),
    "no way known": ('z = Einsum <equation = "nk,jj->nk"> (x, w)  y = Relu (z)', "form per sample", {"w": random(4, 4)}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    body, reason, weights = REFUSED[name]
    proto = model(f"g (float[N, 4] x) => (float y) {{ {body} }}", first=np.array([0]), **weights)
    for node in proto.graph.node:
        node.name = f"my_{node.op_type}"
    with pytest.raises(og.errors.DifferentiationError, match=reason) as caught:
        og.augment(proto, wrt="w", per_sample=True)
    assert "my_" in str(caught.value)


def test_a_batch_norm_that_training_mode_turns_on_is_refused() -> None:
    proto = model("g (float[N, 4] x) => (float[N, 4] y) { y = BatchNormalization (x, w, b, m, v) }",
                  w=random(4), b=random(4), m=random(4), v=np.abs(random(4)))  # fmt: skip
    og.augment(proto, per_sample=True)
    with pytest.raises(og.errors.DifferentiationError, match="mixes samples"):
        og.augment(proto, per_sample=True, training=True)
