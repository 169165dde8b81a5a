"""Emitted graphs avoid forms that older ONNX Runtimes compute wrongly or refuse, since files are used with any version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.conv_geometry import model_of
from tests.support.one_input import dims, graph_of, node_of


def _conv(
    size: tuple[int, ...], dtype: type = np.float32, *, unknown: Iterable[int] = (), **window: Any
) -> onnx.ModelProto:
    w = np.zeros((6, 4 // window.get("group", 1), 3, 3), dtype)
    return model_of("Conv", {"x": np.zeros(size, dtype), "w": w}, {*unknown}, **window)


@pytest.mark.parametrize("unknown", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_no_pad_trims_a_whole_axis(unknown: tuple[int, ...], stride: int) -> None:
    """Taps that reach x in no window; see quirks.PAD_TRIMS_ALL."""
    window = {"pads": [6, 1, 6, 1], "dilations": [6, 1], "strides": [stride] * 2}
    made = og.vjp(
        _conv((2, 4, 5, 4), unknown=unknown, **window),
        wrt=["x"],
        target=og.Target(lowering={"ConvInputGrad": "col2im_gemm"}),
    )
    pads = [node for node in made.graph.node if node.op_type == "Pad"]
    assert pads
    for index, node in enumerate(pads):
        made.graph.node.append(helper.make_node("Shape", [node.input[0]], [f"size_{index}"]))
        made.graph.node.append(helper.make_node("Identity", [node.input[1]], [f"amounts_{index}"]))
        for name in (f"size_{index}", f"amounts_{index}"):
            made.graph.output.append(helper.make_tensor_value_info(name, TensorProto.INT64, None))
    rng = np.random.default_rng(0)
    count = {1: (5, 4), 2: (3, 2)}[stride]
    sizes = {"x": (2, 4, 5, 4), "w": (6, 4, 3, 3), "y_grad": (2, 6, *count)}
    feed = {i.name: rng.standard_normal(sizes[i.name]).astype(np.float32) for i in made.graph.input}
    got = run(made, feed)
    for index in range(len(pads)):
        low, high = np.split(np.minimum(got[f"amounts_{index}"], 0), 2)
        assert (got[f"size_{index}"] + low + high > 0).all()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "window",
    [
        {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1]},
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]},
        {"kernel_shape": [3, 3, 3], "pads": [1, 1, 1, 1, 1, 1]},
        {"kernel_shape": [3, 3, 3], "pads": [1, 0, 1, 1, 0, 1], "count_include_pad": 1},
    ],
    ids=str,
)
def test_counted_padding_is_written_for_every_version(window: dict[str, Any], training: bool) -> None:
    """See quirks.POOL_PADDING_AXES."""
    rank = len(window["kernel_shape"])
    shape = [2, 16, *(20, 22, 24)[:rank]]
    pool = node_of("AveragePool", "s", **window)
    text = f"(float[{dims(shape)}] x) => (float[] y) {{ s = Mul (x, x) [pool] y = {pool} }}"
    model = graph_of(text, opset=21)
    made = og.augment(model, wrt=["x"], training=training)
    pools = [node for node in made.graph.node if node.op_type == "AveragePool" and (training or node.name != "pool")]
    assert pools
    for node in pools:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        pads = attributes.get("pads")
        if attributes.get("count_include_pad") and pads:
            begin, end = pads[: len(pads) // 2], pads[len(pads) // 2 :]
            read = [begin[1], end[1]] if len(begin) == 2 else [begin[1], end[0], end[2]]
            assert all(have >= want for have, want in zip(read, end, strict=True)), pads


@pytest.mark.parametrize("group", [1, 2])
def test_no_float64_product_reads_a_transpose(group: int) -> None:
    """See quirks.FLOAT64_FUSED_MATMUL."""
    made = og.vjp(_conv((2, 4, 7, 5), np.float64, group=group, pads=[1, 0, 1, 2]), wrt=["x", "w"])
    makers = {name: node.op_type for node in made.graph.node for name in node.output}
    products = [node for node in made.graph.node if node.op_type == "MatMul"]
    assert products
    assert "Transpose" in makers.values()
    assert all(makers.get(name) != "Transpose" for node in products for name in node.input)
