"""Rewrites around faults of ONNX Runtime: the values stay, and nodes that are not concerned stay as they are."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.backends.runtime_faults import AvoidRuntimeFaults, SeparateTransposes, WriteFloat64
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
    "int8 input": (
        AvoidRuntimeFaults,
        "(int8[4,2] x) => (float[2,4] y) <float s={0.1}, int8 z={3}> { d = DequantizeLinear (x, s, z) y = Transpose (d) }",
        "Sub",
    ),
    "symmetric int8 input": (
        AvoidRuntimeFaults,
        "(int8[4,2] x) => (float[2,4] y) <float s={0.1}, int8 z={0}> { d = DequantizeLinear (x, s, z) y = Transpose (d) }",
        "DequantizeLinear",
    ),
    "a transpose times a vector": (
        SeparateTransposes,
        "(float[3, 4] x, float[3] v) => (float[4] y) { t = Transpose <perm = [1, 0]> (x) y = MatMul (t, v) }",
        "Squeeze",
    ),
    "a transpose by default times a vector": (
        SeparateTransposes,
        "(float[3, 4] x, float[3] v) => (float[4] y) { t = Transpose (x) y = MatMul (t, v) }",
        "Squeeze",
    ),
    "transposes times a vector": (
        SeparateTransposes,
        "(float[2, 3, 4] x, float[3] v) => (float[2, 4] y) { t = Transpose <perm = [0, 2, 1]> (x) y = MatMul (t, v) }",
        "Squeeze",
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
    assert not isinstance(refusal.value, og.errors.InternalError)


def test_a_float32_product_stays() -> None:
    text = "(float[3, 4] x) => (float[4, 4] y) { t = Transpose <perm = [1, 0]> (x) y = MatMul (t, x) }"
    proto = onnx.shape_inference.infer_shapes(
        onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {text}')
    )
    assert not run_passes(ir.from_proto(proto), [SeparateTransposes(TARGETS["cpu"])])


_PRODUCT = "t = Transpose <perm = [1, 0]> (w) p = MatMul (t, h)"
IN_BODIES = {
    "If": f"""(float[3, 3] w, float[3] x, bool yes) => (float[3] y) {{ h = Neg (x) y = If (yes) <
        then_branch = a () => (float[3] p) {{ {_PRODUCT} }}, else_branch = b () => (float[3] q) {{ q = Neg (x) }}> }}""",
    "Loop": f"""(float[3, 3] w, float[3] x, int64 n) => (float[3] y) <bool yes = {{1}}> {{ y = Loop (n, yes, x) <
        body = b (int64 i, bool on, float[3] h) => (bool next, float[3] p) {{ next = Identity (on) {_PRODUCT} }}> }}""",
    "Scan": f"""(float[3, 3] w, float[2, 3] x) => (float[2, 3] y) {{ y = Scan (x) <num_scan_inputs = 1,
        body = b (float[3] h) => (float[3] p) {{ {_PRODUCT} }}> }}""",
}


@pytest.mark.parametrize("name", IN_BODIES)
def test_products_in_bodies_are_not_fused(name: str) -> None:
    """The results, and the gradients that read them, are those of the model without fused kernels."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {IN_BODIES[name]}')
    drawn = np.random.default_rng(0)
    feed = {
        v.name: drawn.standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim]).astype(np.float32)
        for v in model.graph.input[:2]
    }
    feed |= {v.name: np.array(True) if v.name == "yes" else np.array(2) for v in model.graph.input[2:]}
    built = og.augment(model, wrt="inputs", cotangents="ones")
    want, got = run(built, feed, optimize=False), run(built, feed)
    np.testing.assert_allclose(got["y"], run(model, feed, optimize=False)["y"], rtol=1e-5)
    for output, array in want.items():
        np.testing.assert_allclose(got[output], array, rtol=1e-5, err_msg=output)


LAYOUTS = {
    "Transpose": "t = Transpose <perm = [0, 2, 1]> (d)",
    "Reshape": "t = Reshape (d, shape)",
    "Squeeze": "t = Squeeze (d, axis)",
    "Unsqueeze": "t = Unsqueeze (d, axis)",
    "Slice": "t = Slice (d, one, three, two)",
    "MaxPool": "t = MaxPool <kernel_shape = [2]> (d)",
    "Gather": "t = Gather <axis = 1> (d, one)",
    "Concat": "t = Concat <axis = 0> (d, d)",
    "Split": "t, u = Split <axis = 2, num_outputs = 2> (d)",
    "Resize": "t = Resize (d, , scales)",
    "Pad": "t = Pad (d, pads)",
    "Expand": "t = Expand (d, more)",
    "Tile": "t = Tile (d, more)",
    "Flatten": "t = Flatten (d)",
    "SpaceToDepth": "r = Unsqueeze (d, axis) t = SpaceToDepth <blocksize = 1> (r)",
    "two": "r = Transpose <perm = [0, 2, 1]> (d) t = Reshape (r, shape)",
}
_NUMBERS = """int64[3] shape = {1, 4, 3}, int64[1] axis = {0}, int64[1] one = {1}, int64[1] three = {3}, int64[1] two = {2},
float[3] scales = {1, 1, 2}, int64[6] pads = {0, 0, 0, 0, 0, 1}, int64[3] more = {2, 1, 1}"""
_ENDS = {
    "exp": "y = Exp (t)",
    "out": "y = Identity (t)",
    "q": "v = QuantizeLinear (t, s, z) y = DequantizeLinear (v, s, z)",
}


def quantized_layout(way: str, levels: str, layout: str, end: str, zero: int) -> onnx.ModelProto:
    """A model at opset 19 with a layout operator behind levels, and an operator that is differentiated."""
    source = {
        "input": f"({levels}[1,3,4] q, float[1,3,4] x)",
        "gather": "(int64[1] i, float[1,3,4] x)",
        "quantizer": "(float[1,3,4] f, float[1,3,4] x)",
    }
    made = {"input": "", "gather": "q = Gather (table, i)", "quantizer": "q = QuantizeLinear (f, s, z)"}
    nodes = f"{made[way]} d = DequantizeLinear (q, s, z) {LAYOUTS[layout]} {_ENDS[end]}"
    table = ", ".join(["1"] * 60)
    text = f"""g {source[way]} => (float[] y, float[] w) <float s = {{0.1}}, {levels} z = {{{zero}}}, {_NUMBERS},
        {levels}[5,3,4] table = {{{table}}}> {{ {nodes} w = Tanh (x) }}"""
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 19]> {text}')


@pytest.mark.parametrize("way", ["input", "gather", "quantizer"])
@pytest.mark.parametrize("levels", ["int8", "uint8"])
@pytest.mark.parametrize("zero", [0, 3])
def test_levels_before_any_layout_load_as_before(way: str, levels: str, zero: int) -> None:
    """A model that loads at its own opset loads at that of the result, with equal values."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((1, 3, 4)).astype(np.float32)
    feed = {"x": x, "f": x, "i": np.array([2]), "q": generator.integers(0, 100, (1, 3, 4)).astype(levels)}
    for layout in LAYOUTS:
        for end in _ENDS:
            model = quantized_layout(way, levels, layout, end, zero)
            result = og.augment(model, wrt="x", of="w")
            got = run(result, {k.name: {**feed, "w_grad": x}[k.name] for k in result.graph.input})
            want = run(model, {k.name: feed[k.name] for k in model.graph.input}, optimize=False)
            np.testing.assert_allclose(got["y"], want["y"], rtol=1e-5, atol=1e-6, err_msg=f"{layout} {end}")


@pytest.mark.parametrize("op_type", WriteFloat64.operators)
def test_functions_without_a_kernel_for_float64(op_type: str) -> None:
    """See quirks.FLOAT64_ACTIVATIONS."""
    numbers = np.random.default_rng(0).standard_normal((2, 3, 4, 5))
    operands = "x, s" if op_type == "PRelu" else "x"
    results = []
    for kind, dtype in (("float", np.float32), ("double", np.float64)):
        text = f"({kind}[2,3,4,5] x) => ({kind}[2,3,4,5] y) <{kind} s = {{0.25}}> {{ y = {op_type} ({operands}) }}"
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g {text}')
        augmented = og.augment(model, wrt="inputs", cotangents="ones")
        results.append(run(augmented, {"x": numbers.astype(dtype)}))
    for name, want in results[0].items():
        np.testing.assert_allclose(results[1][name], want, rtol=1e-4, atol=1e-5)
        assert results[1][name].dtype == np.float64
