"""Views of early values: ONNX Runtime does not merge what reads them, and large floating values alone get one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.ir.nodes import is_op
from onnx_convgrad.memory.late_views import late_zero, read_late
from onnx_convgrad.runtime import run
from tests.support.optimizer import optimized

# The last three nodes compute b, i and c a second time.
MODEL = """<ir_version: 10, opset_import: ["": 21]>
g (float[64,64] x, float[64,64] w, float[2] small, int64[64,64] whole) => (float[64,64] y, float[2] z, int64[64,64] i) {
    a = Exp (x)
    b = MatMul (a, w)
    i = Neg (whole)
    c = Neg (small)
    b2 = MatMul (a, w)
    i2 = Neg (whole)
    c2 = Neg (small)
    y = Mul (b, b2)
    z = Add (c, c2)
}"""


def late() -> tuple[ir.Model, ir.Graph]:
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(MODEL)))
    graph = model.graph
    nodes, e = list(graph), Emitter(graph)
    e.anchor = nodes[4]
    zero = late_zero(e, [nodes[1].outputs[0]])
    read_late(e, nodes[4:7], zero, keep={graph.inputs[1]})
    return model, graph


def test_the_runtime_merges_equal_nodes_but_not_those_that_read_views(tmp_path: Path) -> None:
    for model, products in ((onnx.parser.parse_model(MODEL), 1), (ir.to_proto(late()[0]), 2)):
        assert [n.op_type for n in optimized(model, tmp_path).graph.node].count("MatMul") == products


def test_large_floating_values_get_a_view() -> None:
    _, graph = late()
    product, whole, small = (n for n in graph if n.outputs[0].name in ("b2", "i2", "c2"))
    view, kept = product.inputs
    assert view is not None
    assert is_op(view.producer(), "Reshape")
    assert view.shape == ir.Shape([64, 64])
    assert [v and v.name for v in (kept, whole.inputs[0], small.inputs[0])] == ["w", "whole", "small"]


def test_the_results_are_the_same() -> None:
    draw = np.random.default_rng(0)
    feed = {
        name: draw.standard_normal(shape).astype(np.float32)
        for name, shape in {"x": (64, 64), "w": (64, 64), "small": (2,)}.items()
    }
    feed["whole"] = draw.integers(0, 9, (64, 64))
    expected, found = run(onnx.parser.parse_model(MODEL), feed), run(ir.to_proto(late()[0]), feed)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_a_view_does_not_take_its_sizes_from_itself() -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[N,4096] x) => (float[N,4096] y) { y = Exp (x) }'
    model = ir.from_proto(onnx.parser.parse_model(text))
    graph, e = model.graph, Emitter(model.graph)
    (y,) = graph.outputs
    zero, start = late_zero(e, [y]), len(e.emitted)
    graph.outputs.append(e.op("Expand", e.op("ReduceMax", y, e.ints([0]), keepdims=1), e.shape(y)))
    read_late(e, e.emitted[start:], zero)
    for i, node in enumerate(graph):
        node.outputs[0].name = f"v{i}"
    x = np.random.default_rng(0).standard_normal((3, 4096), np.float32)
    first, highest = run(ir.to_proto(model), {"x": x}).values()
    np.testing.assert_array_equal(highest, np.broadcast_to(first.max(0), (3, 4096)))


@pytest.mark.parametrize("shape", [[], [2, 3], None], ids=str)
def test_the_zero_of_any_shape(shape: list[int] | None) -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> g (float[2,3] x) => (float[2,3] y) { y = Neg (x) }'
    graph = (model := ir.from_proto(onnx.parser.parse_model(text))).graph
    e = Emitter(graph)
    value = e.op("ReduceMax", graph.outputs[0], keepdims=0) if shape == [] else e.op("Neg", graph.inputs[0])
    value.shape = None if shape is None else ir.Shape(shape)
    graph.outputs[:] = [late_zero(e, [value, value])]
    for i, node in enumerate(graph):
        node.outputs[0].name = f"v{i}"
    (found,) = run(ir.to_proto(model), {"x": np.full((2, 3), np.nan, np.float32)}).values()
    assert found.tolist() == [0]
