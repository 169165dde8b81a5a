"""The float64 kernels agree with ONNX Runtime's float32 kernels, and compute in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_convgrad.checking.float64_kernels import KERNELS, Unavailable
from onnx_convgrad.checking.float64_session import Float64Session
from onnx_convgrad.runtime import session

IMAGE = (2, 4, 9, 7)
WINDOW = {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]}
CASES: list[tuple[str, list[tuple[int, ...]], dict[str, Any]]] = [
    ("AveragePool", [IMAGE], WINDOW),
    ("AveragePool", [IMAGE], {**WINDOW, "ceil_mode": 1}),
    ("AveragePool", [IMAGE], {**WINDOW, "count_include_pad": 1, "dilations": [2, 1]}),
    ("ConvTranspose", [IMAGE, (4, 2, 3, 3), (4,)], {"strides": [2, 2], "pads": [1, 0, 1, 1], "group": 2}),
    ("ConvTranspose", [(2, 4, 5), (4, 3, 3)], {"strides": [2], "dilations": [2], "output_padding": [1]}),
    ("Erf", [(3, 4)], {}),
    ("Gelu", [(3, 4)], {}),
    ("Gelu", [(3, 4)], {"approximate": "tanh"}),
    ("GlobalMaxPool", [IMAGE], {}),
    ("GlobalMaxPool", [(2, 3, 5)], {}),
    ("GroupNormalization", [IMAGE, (4,), (4,)], {"num_groups": 2}),
    ("LRN", [IMAGE], {"size": 3, "alpha": 0.3}),
    ("Shrink", [(3, 4)], {"lambd": 0.3, "bias": 0.1}),
]


def _model(op: str, count: int, attributes: dict[str, Any], dtype: type) -> onnx.ModelProto:
    names = [f"x{i}" for i in range(count)]
    node = helper.make_node(op, names, ["y"], **attributes)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = [helper.make_tensor_value_info(name, element, None) for name in names]
    graph = helper.make_graph([node], "g", inputs, [helper.make_empty_tensor_value_info("y")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(("op", "shapes", "attributes"), CASES, ids=str)
def test_kernels_agree_with_the_runtime(op: str, shapes: list[tuple[int, ...]], attributes: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    feed = {f"x{i}": rng.standard_normal(shape) for i, shape in enumerate(shapes)}
    (wide,) = Float64Session(_model(op, len(feed), attributes, np.float64)).run(["y"], feed)
    narrow_feed = {name: array.astype(np.float32) for name, array in feed.items()}
    narrow = session(_model(op, len(feed), attributes, np.float32)).run(["y"], narrow_feed)[0]
    assert wide.dtype == np.float64
    np.testing.assert_allclose(wide, narrow, rtol=1e-5, atol=1e-5)
    assert np.any(wide != wide.astype(np.float32))


def test_cases_of_the_reference_evaluator() -> None:
    with pytest.raises(Unavailable):
        KERNELS["AveragePool"]({"kernel_shape": [2], "auto_pad": b"SAME_UPPER"}, np.zeros((1, 1, 4)))
    (mean,) = Float64Session(_model("GlobalAveragePool", 1, {}, np.float64)).run(["y"], {"x0": np.eye(3)[None, None]})
    np.testing.assert_allclose(mean, [[[[1 / 3]]]], rtol=1e-15)
