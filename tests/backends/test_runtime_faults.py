"""Rewrites around faults of ONNX Runtime: the values stay, and nodes that are not concerned stay as they are."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.backends.runtime_faults import AvoidRuntimeFaults, SeparateTransposes
from onnx_convgrad.ir.passes import NodePass, run_passes
from onnx_convgrad.ir.targets import TARGETS
from onnx_convgrad.runtime import run

_LEVELS = """(float[4,2] x) => (float[2,4] y) <float s = {0.1}, int8 z = {3}>
{ q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) y = Transpose (d) }"""

CASES = {
    "expand to nothing": (
        AvoidRuntimeFaults,
        "(float[1, 3] x) => (float[0, 3] y) <int64[2] s = {0, 3}> { y = Expand (x, s) }",
        "ConstantOfShape",
    ),
    "pad of a weight": (
        AvoidRuntimeFaults,
        "(float[1,1,5,5] d, float[1,1,2,2] x) => (float[1,1,3,3] y) <int64[8] p={0,0,0,0,0,0,1,1}> {w=Pad(x,p) y=Conv(d,w)}",
        "Pad",
    ),
    "int8 levels": (
        AvoidRuntimeFaults,
        _LEVELS,
        "QuantizeLinear",
    ),
    "float64 product of a transpose": (
        SeparateTransposes,
        "(double[3, 4] x) => (double[4, 4] y) { t = Transpose <perm = [1, 0]> (x) y = MatMul (t, x) }",
        "Squeeze",
    ),
}


@pytest.mark.parametrize(("kind", "text", "operator"), CASES.values(), ids=CASES)
def test_values_stay(kind: type[NodePass], text: str, operator: str) -> None:
    proto = onnx.shape_inference.infer_shapes(
        onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {text}')
    )
    generator = np.random.default_rng(0)
    types = {v.name: v.type.tensor_type for v in proto.graph.input}
    feed = {
        name: generator.standard_normal([d.dim_value for d in t.shape.dim]).astype(
            onnx.helper.tensor_dtype_to_np_dtype(t.elem_type)
        )
        for name, t in types.items()
    }
    model = ir.from_proto(proto)
    assert run_passes(model, [kind(TARGETS["cpu"])])
    assert operator in {node.op_type for node in model.graph}
    got, want = run(ir.to_proto(model), feed)["y"], run(proto, feed, optimize=False)["y"]
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "(float[3, 4] x, float[0, 0, 2] w) => (float[] y) { y = PRelu (x, w) }",
        "(float x) => (float[] y) { y = LpNormalization (x) }",
    ],
)
def test_nodes_of_impossible_shapes_stay(text: str) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 17]> g {text}')
    with pytest.raises(og.ConvGradError) as refusal:
        og.augment(model, wrt="all")
    assert not isinstance(refusal.value, og.InternalError)


def test_a_float32_product_stays() -> None:
    text = "(float[3, 4] x) => (float[4, 4] y) { t = Transpose <perm = [1, 0]> (x) y = MatMul (t, x) }"
    proto = onnx.shape_inference.infer_shapes(
        onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {text}')
    )
    assert not run_passes(ir.from_proto(proto), [SeparateTransposes(TARGETS["cpu"])])
