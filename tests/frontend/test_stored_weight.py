"""A stored weight is found behind changes of layout and type, with what lies between."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnx_convgrad.frontend.stored_weight import read_dtype, stored_weight
from tests.support.one_input import graph_of

FLOATS, LEVELS = np.ones((2, 3, 4), np.float32), np.ones((2, 3, 4), np.int8)
SCALE = np.float32(0.5)

CASES = {
    "itself": ("y = Add (x, w)", FLOATS, (2, 3, 4), 2, False, False, ir.DataType.FLOAT),
    "transposed": ("t = Transpose <perm = [1, 2, 0]> (w) y = Add (x, t)", FLOATS, (3, 4, 2), 0, False, False, None),
    "reversed": ("t = Transpose (w) i = Identity (t) y = Add (x, i)", FLOATS, (4, 3, 2), 0, False, False, None),
    "twice": (
        "t = Transpose <perm = [1, 2, 0]> (w) u = Transpose <perm = [0, 2, 1]> (t) y = Add (x, u)",
        *(FLOATS, (3, 2, 4), 2, False, False, None),
    ),
    "cast": ("t = Cast <to = 10> (w) y = Add (x, t)", FLOATS, (2, 3, 4), 2, False, True, ir.DataType.FLOAT16),
    "levels": ("t = DequantizeLinear (w, s) y = Add (x, t)", LEVELS, (2, 3, 4), 2, True, True, ir.DataType.FLOAT),
    "integers": ("y = Add (x, w)", LEVELS, (2, 3, 4), 2, True, True, ir.DataType.INT8),
}


@pytest.mark.parametrize(("body", "array", "shape", "axis", "quantized", "changed", "dtype"), CASES.values(), ids=CASES)
def test_what_lies_between(
    body: str,
    array: np.ndarray,
    shape: tuple[int, ...],
    axis: int,
    quantized: bool,
    changed: bool,
    dtype: ir.DataType | None,
) -> None:
    """`axis`: the axis of what is stored that the reader has as its last."""
    graph = ir.from_proto(graph_of(f"(float[a, b, c] x) => (float[a, b, c] y) {{ {body} }}", w=array, s=SCALE)).graph
    operand = graph.outputs[0].producer().inputs[1]
    weight = stored_weight(operand)
    assert weight is not None
    assert (weight.root.name, weight.path[0], weight.shape) == ("w", operand, shape)
    assert (weight.stored_axis(2), weight.quantized, weight.changed) == (axis, quantized, changed)
    assert read_dtype(operand) == (dtype or ir.DataType.FLOAT)
    assert not weight.shared


def test_a_constant_and_a_second_reader() -> None:
    body = "w = Constant <value = float[2] {1, 2}> () t = Identity (w) y = Add (x, t) z = Mul (x, w)"
    graph = ir.from_proto(graph_of(f"(float[2] x) => (float[2] y, float[2] z) {{ {body} }}")).graph
    weight = stored_weight(graph.outputs[0].producer().inputs[1])
    assert weight is not None
    assert ([v.name for v in weight.path], weight.shape, weight.shared) == (["t", "w"], (2,), True)
    assert stored_weight(graph.inputs[0]) is None
    assert stored_weight(graph.outputs[0]) is None
    assert stored_weight(None) is None
