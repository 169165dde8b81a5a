"""Slice, Pad and CenterCropPad, with constant and with fed operands."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, rand
from tests.support.operators import fed, ints, rule_test, text_model

END = 2**63 - 1


def cut(start: int, end: int, step: int = 1, size: int = 7, **kwargs: Any) -> Case:
    """One slice of a vector."""
    return Case("Slice", [rand(size), *map(ints, (start, end, 0, step))], name=f"{start}:{end}:{step}", **kwargs)


X = rand(3, 5, 6)

SLICES = [
    *(cut(*bounds) for bounds in ((1, 4), (-3, END), (0, 7), (2, -2), (-20, 3), (5, 99), (3, 3), (9, 12))),
    *(cut(*bounds) for bounds in ((0, 7, 2), (1, 7, 2), (1, 6, 3), (-5, END, 4), (0, 7, 9), (6, 2, 2))),
    *(cut(*bounds) for bounds in ((-1, -END, -1), (5, 1, -2), (99, 0, -3), (-2, -99, -2), (3, 5, -1), (0, -END, -1))),
    cut(0, 3, size=0),
    cut(-1, -END, -1, size=0),
    Case("Slice", [X, ints(1), ints(3)], name="first axis"),
    Case("Slice", [X, ints(0, 1, 2), ints(2, 4, END)], name="no axes"),
    Case("Slice", [X, ints(1, -4), ints(END, -1), ints(-1, 0)]),
    Case("Slice", [X, ints(-1, END), ints(-END, -END), ints(2, 0), ints(-1, -1)], name="reversed"),
    Case("Slice", [X, ints(1, 4), ints(END, -9), ints(2, 1), ints(2, -2)], name="mixed steps"),
    Case("Slice", [X, ints(0, 1, 5), ints(3, 5, 0), ints(0, 1, 2), ints(2, 3, -2)], name="three steps"),
    Case("Slice", [X, ints(0, 1, 5), ints(3, 5, 0), ints(0, 1, 2), ints(2, 3, -2)], dtype=np.float16),
    Case("Slice", [X, ints(1), ints(5), ints(2), ints(2)], dtype=np.float64),
    Case("Slice", [X, np.asarray([1], np.int32), np.asarray([-1], np.int32), np.asarray([-2], np.int32)], name="int32"),
    fed("Slice", [X, ints(1), ints(3)]),
    fed("Slice", [X, ints(1, -4), ints(END, -1), ints(-1, 0)]),
    fed("Slice", [X, ints(0, 1, 5), ints(3, 5, 0), ints(0, 1, 2), ints(2, 3, -2)]),
    fed("Slice", [X, ints(0), ints(4), ints(1), ints(2)], dtype=np.float16),
    fed("Slice", [X, np.asarray([1], np.int32), np.asarray([-1], np.int32), np.asarray([-2], np.int32)], name="int32"),
]

PADS = [
    Case("Pad", [rand(2, 3), ints(1, 0, 2, 1)]),
    Case("Pad", [rand(2, 3), ints(0, 0, 0, 0)], name="nothing"),
    Case("Pad", [rand(2, 3), ints(1, 0, 2, 1), rand()], name="value"),
    Case("Pad", [rand(2, 3), ints(1, 0, 2, 1), rand(1)], name="value of one element", dynamic=False),
    Case("Pad", [rand(2, 3), ints(1, 2), rand(), ints(-1)]),
    Case("Pad", [rand(4, 5), ints(-1, 1, 2, -2), rand()], name="cut"),
    Case("Pad", [rand(4, 5), ints(2, -1), None, ints(1)], name="cut"),
    Case("Pad", [rand(2, 1), ints(3, -2), rand(), ints(1)], name="cut all"),
    Case("Pad", [rand(2, 3), ints(1, 2), rand(), ints(1)], dtype=np.float16),
    Case("Pad", [rand(2, 3), ints(1, 2), rand(), ints(1)], dtype=np.float64),
    Case("Pad", [rand(0, 3), ints(0, 1, 0, 1), rand()], name="empty batch"),
    fed("Pad", [rand(2, 3), ints(1, 0, 2, 1), rand()]),
    fed("Pad", [rand(4, 5), ints(-1, 2), rand(), ints(-2)]),
    fed("Pad", [rand(4, 5), ints(1, -2, 0, 1)], name="no value"),
    *(
        case
        for mode in ("reflect", "edge", "wrap")
        for case in (
            Case("Pad", [rand(2, 4, 5), ints(0, 1, 2, 0, 3, 1)], {"mode": mode}),
            Case("Pad", [rand(2, 4, 5), ints(2, 0), None, ints(-1)], {"mode": mode}),
            Case("Pad", [rand(2, 4, 5), ints(0, 3, 0, 3), None, ints(2, 1)], {"mode": mode}),
            Case("Pad", [rand(2, 4, 5), ints(-1, 2), None, ints(1)], {"mode": mode}, name="cut"),
            Case("Pad", [rand(2, 4), ints(2, 1), None, ints(1)], {"mode": mode}, dtype=np.float16),
            fed("Pad", [rand(2, 4, 5), ints(0, 1, 2, 0, 3, 1)], {"mode": mode}),
            fed("Pad", [rand(2, 4, 5), ints(2, 1), None, ints(-1)], {"mode": mode}),
            fed("Pad", [rand(2, 4), ints(2, 1), None, ints(1)], {"mode": mode}, dtype=np.float16),
        )
    ),
    Case("Pad", [rand(2, 2), ints(0, 5, 0, 4)], {"mode": "edge"}, name="far"),
    Case("Pad", [rand(2, 2), ints(0, 5, 0, 4)], {"mode": "wrap"}, name="far"),
    Case("Pad", [rand(2, 1), ints(0, 1, 0, 1)], {"mode": "wrap"}, name="one row"),
]

CROPS = [
    Case("CenterCropPad", [rand(n, 3), ints(m)], {"axes": [0]}) for n, m in itertools.product((4, 5), (3, 4, 5, 8, 9))
] + [
    Case("CenterCropPad", [rand(4, 7), ints(6, 4)]),
    Case("CenterCropPad", [rand(4, 7, 2), ints(7, 5)], {"axes": [-3, 1]}),
    Case("CenterCropPad", [rand(4, 7), ints(6, 4)], dtype=np.float16),
    fed("CenterCropPad", [rand(4, 7), ints(6, 4)]),
    fed("CenterCropPad", [rand(4, 7, 2), ints(7, 5)], {"axes": [2, 1]}),
]

test_rule = rule_test(SLICES + PADS + CROPS)


def test_pads_next_to_a_transpose() -> None:
    """No Pad has the operand `axes`: ONNX Runtime moves a Transpose through it, and fails."""
    model = text_model("""(float[2,3,5] x) => (float[2,2,3] y)
        <int64[1] zero = {0}, int64[1] one = {1}, int64[1] three = {3}> {
        t = Transpose <perm = [2, 0, 1]> (x) s = Slice (t, one, three, zero) y = Mul (s, s) }""")
    augmented = og.augment(model, wrt=["x"], of=["y"])
    assert all(len(node.input) < 4 for node in augmented.graph.node if node.op_type == "Pad")
    value = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    got = run(augmented, {"x": value, "y_grad": np.ones((2, 2, 3), np.float32)})["x_grad"]
    want = np.zeros_like(value)
    want[:, :, 1:3] = 2 * value[:, :, 1:3]
    np.testing.assert_array_equal(got, want)
