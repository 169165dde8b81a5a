"""Typical numbers for sizes that are unknown while building."""

from __future__ import annotations

import json

import onnx
import pytest
from onnx import TensorProto, helper

import onnx_convgrad as og
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.frontend.files import read
from onnx_convgrad.lowering.cost.typical_sizes import TypicalSizes
from onnx_convgrad.pipeline.report import Report
from tests.support.conv_geometry import case, conv_model


def _model(shape: list) -> onnx.ModelProto:
    """Two strided convolutions."""
    rank = len(shape) - 2
    attributes = {"strides": [2] * rank, "pads": [1] * 2 * rank}
    nodes = [helper.make_node("Conv", [a, w], [b], **attributes) for a, w, b in (("x", "v", "h"), ("h", "w", "y"))]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    for name, channels in (("v", 3), ("w", 8)):
        inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, channels, *[3] * rank]))
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        (["n", 3, "h", "w"], [8, 8, 56, 56]),
        (["n", 3, None, "?"], [8, 8, 56, 56]),
        (["batch size", 3, 64, "w"], [8, 8, 16, 56]),
        ([2, 3, 32, 24], [2, 8, 8, 6]),
        (["n", 3, "l"], [8, 8, 256]),
        (["n", 3, "d", "h", "w"], [8, 8, 16, 16, 16]),
    ],
)
def test_sizes_follow_from_those_of_the_input(shape: list, sizes: list[int]) -> None:
    graph = canonicalize(read(_model(shape))).graph
    typical = TypicalSizes(graph)
    assert [typical.size(d) for d in graph.outputs[0].shape or ()] == sizes


def test_layers_are_priced_at_their_sizes() -> None:
    """As if the model had been given with them."""
    static, symbolic = (og.explain(_model(s), wrt="all").rows for s in ([8, 3, 224, 224], ["n", 3, "h", "w"]))
    known = {(r["node"], r["operator"], c["name"]): c["seconds"] for r in static for c in r["candidates"]}
    found = {(r["node"], r["operator"], c["name"]): c["seconds"] for r in symbolic for c in r["candidates"]}
    both = [key for key, seconds in found.items() if seconds and known[key]]
    assert len(both) > 8
    for key in both:
        assert found[key] == pytest.approx(known[key], rel=0.3), key  # the first chunks of a known batch may be faster


DILATED = case((8, 64, 224, 224), 64, (3, 3), dilations=2, begin=2)


def test_explain_states_the_gain_of_known_sizes() -> None:
    unknown = conv_model(DILATED, {0, 2, 3})
    report = og.explain(unknown, wrt="all")
    gain = report.gain
    assert gain is not None
    assert gain.shapes == {"x": (8, 64, 224, 224)}
    assert gain.gradients == 2
    known = og.explain(conv_model(DILATED), wrt="all")
    assert known.gain is None
    assert gain.seconds_known == pytest.approx(_predicted(known))
    assert gain.seconds == pytest.approx(_predicted(report))
    saved = round(100 * (1 - _predicted(known) / _predicted(report)))
    assert str(gain) == (
        f"Some input sizes are unknown. With --input-shape x:8,64,224,224, {gain.faster} of 2 gradients would get faster"
        f" lowerings: {saved} % less time is predicted."
    )
    assert str(gain) in str(report)
    assert json.loads(report.to_json())["with_known_sizes"]["faster"] == gain.faster
    assert og.explain(og.load(unknown, input_shapes={"x": [8, 64, 224, 224]}), wrt="all").gain is None


def _predicted(report: Report) -> float:
    rows = report.rows
    return sum(next(c["seconds"] for c in row["candidates"] if c["name"] == row["chosen"]) for row in rows)
