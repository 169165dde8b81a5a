"""SortByDepth: the runtime holds less, and computes the same."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from onnx_convgrad.memory.timeline import SortByDepth, runtime_order, timeline
from onnx_convgrad.runtime import run

# Each weight is transposed by a node that stands after the data of its product, so ONNX Runtime runs all of them first.
MODEL = """<ir_version: 10, opset_import: ["": 21]>
g (float[1,64] x, float[64,64] v, float[64,64] w) => (float[1,64] y) {
    a = Exp (x)
    s = Transpose (v)
    b = MatMul (a, s)
    c = Exp (b)
    t = Transpose (w)
    y = MatMul (c, t)
}"""


def _model() -> ir.Model:
    return ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(MODEL)))


def _order(model: ir.Model) -> list[str | None]:
    return [node.outputs[0].name for node in runtime_order(model.graph)]


def test_what_needs_few_steps_is_made_when_it_is_read() -> None:
    model = _model()
    before = timeline(model.graph).peak
    assert _order(model).index("t") < _order(model).index("c")
    assert SortByDepth()(model).modified
    assert _order(model)[-3:] == ["c", "t", "y"]
    assert timeline(model.graph).peak < before


def test_the_results_are_the_same() -> None:
    draw = np.random.default_rng(0)
    feed = {
        name: draw.standard_normal(shape).astype(np.float32)
        for name, shape in {"x": (1, 64), "v": (64, 64), "w": (64, 64)}.items()
    }
    model = _model()
    expected = run(ir.to_proto(model), feed)["y"]
    SortByDepth()(model)
    np.testing.assert_array_equal(run(ir.to_proto(model), feed)["y"], expected)


def test_a_graph_that_holds_no_less_is_left_alone() -> None:
    model = _model()
    SortByDepth()(model)
    assert not SortByDepth()(model).modified
