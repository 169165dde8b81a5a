"""BatchNormalization folded into convolutions: the same values without it."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from onnx_convgrad.quantization.insert import fold_batchnorm
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

_NORM = (
    "float[4] g = {1, -2, 0.5, 3}, float[4] b = {1, 2, 3, 4}, float[4] m = {0.5, 0, -1, 2}, float[4] v = {1, 2, 0.5, 4}"
)


def _weight(*shape: int) -> str:
    numbers = ",".join(str(i / 7) for i in range(math.prod(shape)))
    return f"float[{','.join(map(str, shape))}] w = {{{numbers}}}"


_CASES = {
    "conv": (_weight(4, 2, 2), "Conv (x, w)"),
    "bias": (f"{_weight(4, 2, 2)}, float[4] c = {{1, 0, 2, 5}}", "Conv (x, w, c)"),
    "transposed, grouped": (_weight(2, 2, 2), "ConvTranspose <group = 2> (x, w)"),
    "depthwise": (_weight(4, 1, 3), "Conv <group = 2> (x, w)"),
}


@pytest.mark.parametrize(("stored", "layer"), _CASES.values(), ids=_CASES)
def test_values_stay(stored: str, layer: str) -> None:
    proto = graph_of(
        f"(float[3,2,6] x) => (float[3,4,L] y) <{_NORM}, {stored}> {{ h = {layer} y = BatchNormalization (h, g, b, m, v) }}"
    )
    model = ir.from_proto(proto)
    assert fold_batchnorm(model.graph) == 1
    assert [node.op_type for node in model.graph] == [layer.split(maxsplit=1)[0]]
    assert all(value.uses() for value in model.graph.initializers.values())
    x = np.random.default_rng(0).normal(size=(3, 2, 6)).astype(np.float32)
    want = run(proto, {"x": x})["y"]
    np.testing.assert_allclose(run(ir.to_proto(model), {"x": x})["y"], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        "h = Conv (x, w) y = BatchNormalization (h, g, b, m, v) z = Neg (h)",
        "h = Neg (x) k = BatchNormalization (h, q, q, q, q) y = Conv (k, w) z = Neg (y)",
    ],
)
def test_others_stay(body: str) -> None:
    """A convolution that something else reads, and a normalization before one."""
    stored = f"<{_NORM}, {_weight(4, 2, 2)}, float[2] q = {{1, 2}}>"
    proto = graph_of(f"(float[3,2,6] x) => (float[3,4,5] y, float[3,4,5] z) {stored} {{ {body} }}")
    model = ir.from_proto(proto)
    assert fold_batchnorm(model.graph) == 0
    assert len(model.graph) == len(proto.graph.node)
