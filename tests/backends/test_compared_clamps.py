"""Clamps written with comparisons: the same numbers, and no clamp left in a program for WebAssembly."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.backends.compared_clamps import CompareInsteadOfClamping
from onnx_convgrad.ir.passes import run_passes
from onnx_convgrad.runtime import run
from tests.support.operators import text_model

X = np.float32([-np.inf, -3, -1e-30, -0.0, 0, 1e-30, 2, np.inf])


@pytest.mark.parametrize(
    "node",
    [
        "Relu (x)",
        "HardSigmoid <alpha = 2e37, beta = 0.0> (x)",
        "HardSigmoid <alpha = -2e37, beta = 0.0> (x)",
        "HardSigmoid <alpha = -2e37, beta = 1.0> (x)",
        "HardSigmoid <alpha = 2e37, beta = 1.0> (x)",
    ],
)
def test_the_numbers_are_the_same(node: str) -> None:
    proto = text_model(f"(float[8] x) => (float[8] y) {{ y = {node} }}")
    model = ir.from_proto(proto)
    assert run_passes(model, [CompareInsteadOfClamping()])
    changed = ir.to_proto(model)
    assert not {n.op_type for n in changed.graph.node} & {"Relu", "HardSigmoid"}
    np.testing.assert_array_equal(run(changed, {"x": X})["y"], run(proto, {"x": X})["y"])


def test_nan_passes_a_relu() -> None:
    model = ir.from_proto(text_model("(float[1] x) => (float[1] y) { y = Relu (x) }"))
    run_passes(model, [CompareInsteadOfClamping()])
    assert np.isnan(run(ir.to_proto(model), {"x": np.float32([np.nan])})["y"])


@pytest.mark.parametrize(
    "text",
    [
        "(float[8] x) => (float[8] y) { y = HardSigmoid (x) }",
        "(double[8] x) => (double[8] y) { y = Relu (x) }",
        "(float[1,2,4,4] x, float[2,2,1,1] w) => (float[1,2,4,4] y) { c = Conv (x, w) y = Relu (c) }",
    ],
)
def test_other_clamps_stay(text: str) -> None:
    """A ramp, another type, and a Relu that the runtime computes together with its convolution."""
    assert not run_passes(ir.from_proto(text_model(text)), [CompareInsteadOfClamping()])


@pytest.mark.parametrize(("target", "clamps"), [("web", False), ("cpu", True), ("webgpu", True)])
def test_only_webassembly_compares(target: str, clamps: bool) -> None:
    model = text_model("(float[N, 4] x) => (float[N, 4] y) { t = Tanh (x) r = Relu (t) y = Mul (r, t) }")
    made: onnx.ModelProto = og.augment(model, wrt="x", target=target)
    assert bool({n.op_type for n in made.graph.node} & {"Relu", "HardSigmoid"}) == clamps
