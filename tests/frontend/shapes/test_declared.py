"""The shapes of the caller, of the file and of inference, and which of them count."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import parser

import onnx_convgrad as og
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.frontend.shapes.declared import CleanDimensions, ForgetShapes, OverrideShapes, RecallShapes
from onnx_convgrad.ir.passes import run_passes


def _model() -> ir.Model:
    text = '<ir_version: 8, opset_import: ["" : 21]> g (float[N, 3] x) => (float[N, 3] y) <float[N, 3] t> {'
    return ir.from_proto(parser.parse_model(f"{text} t = Neg (x) y = Neg (t) }}"))


def test_a_forgotten_shape_is_recalled_unless_inference_finds_one() -> None:
    model, declared = _model(), {}
    t, y = (node.outputs[0] for node in model.graph)
    assert run_passes(model, [ForgetShapes(declared)])
    assert t.shape is None
    assert y.shape is None
    y.shape = ir.Shape([2, 3])  # as inference would
    assert run_passes(model, [RecallShapes(declared)])
    assert str(t.shape) == "[N,3]"
    assert str(y.shape) == "[2,3]"
    assert not run_passes(model, [RecallShapes(declared)])


def test_placeholders_become_anonymous_and_symbols_stay() -> None:
    model = _model()
    model.graph.inputs[0].shape = ir.Shape(["?", "N", -1, 3])
    assert run_passes(model, [CleanDimensions()])
    dims = list(model.graph.inputs[0].shape or ())
    assert [getattr(d, "value", d) for d in dims] == [None, "N", None, 3]
    assert not run_passes(model, [CleanDimensions()])


@pytest.mark.parametrize("name", ["0", "-1", "N-N", "9**9**9"])
def test_names_that_are_numbers_are_unknown_sizes(name: str) -> None:
    model = _model()
    model.graph.inputs[0].shape = ir.Shape([ir.SymbolicDim(name), 3])
    assert run_passes(model, [CleanDimensions()])
    assert [getattr(d, "value", d) for d in model.graph.inputs[0].shape or ()] == [None, 3]


def test_a_stored_value_has_its_own_shape() -> None:
    text = '<ir_version: 8, opset_import: ["" : 21]> g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul (x, w) }'
    proto = parser.parse_model(text)
    declared = proto.graph.value_info.add(name="w")
    declared.type.tensor_type.elem_type = 7
    declared.type.tensor_type.shape.dim.add().dim_param = "2**2**40"
    model = ir.from_proto(proto)
    assert run_passes(model, [CleanDimensions()])
    w = model.graph.initializers["w"]
    assert str(w.shape) == "[2]" and w.dtype == ir.DataType.FLOAT
    assert not run_passes(model, [CleanDimensions()])


def test_shapes_of_the_caller_replace_those_of_inputs() -> None:
    model = _model()
    assert run_passes(model, [OverrideShapes({"x": [5, 3]})])
    assert list(model.graph.inputs[0].shape or ()) == [5, 3]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": [1]}, "Unknown input"),
        ({"x": [1]}, "has rank 2, but 1 sizes were given"),
        ({"x": "13"}, "must be a list of sizes, symbols and None"),
        ({"x": [2**31, 3]}, "sizes are from 0 to"),
    ],
)
def test_unusable_shapes_are_refused(shapes: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        run_passes(_model(), [OverrideShapes(shapes)])  # type: ignore[arg-type]


def test_reshapes_follow_a_batch_that_the_caller_frees() -> None:
    text = """<ir_version: 8, opset_import: ["" : 21]> g (float[1,2,3] x) => (float[1,6] y, float[6] z, float[1,2] w)
    <int64[2] flat = {1, 6}, int64[1] all = {-1}, int64[2] pair = {1, 2}, float[2] stored = {5, 7}> {
        y = Reshape (x, flat)  z = Reshape (x, all)  w = Reshape (stored, pair) }"""
    x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    for batch in ("N", 2):
        loaded = og.load(parser.parse_model(text), input_shapes={"x": [batch, 2, 3]})
        y, z, w = og.session(og.vjp(loaded, wrt="x", of="y", outputs=True)).run(
            ["y", "z", "w"], {"x": x, "y_grad": np.ones((2, 6), np.float32)}
        )
        assert y.tolist() == x.reshape(2, 6).tolist() and z.shape == (12,) and w.shape == (1, 2)
