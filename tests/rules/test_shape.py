"""Operators that change the shape or the order of elements, with constant and with fed operands."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad.testing import Case, make_model, rand
from tests.support.operators import fed, ints, rule_test

SHAPES = [
    Case("Identity", [rand(2, 3)]),
    Case("Identity", [rand()], name="scalar"),
    Case("Reshape", [rand(2, 3, 4), ints(4, 6)]),
    Case("Reshape", [rand(2, 3, 4), ints(0, -1)]),
    Case("Reshape", [rand(2, 3, 4), ints(-1)], dtype=np.float16),
    Case("Reshape", [rand(0, 3), ints(3, 0)], {"allowzero": 1}),
    fed("Reshape", [rand(2, 3, 4), ints(0, -1, 2)]),
    Case("Flatten", [rand(2, 3, 4)]),
    Case("Flatten", [rand(2, 3, 4)], {"axis": 0}),
    Case("Flatten", [rand(2, 3, 4)], {"axis": -1}, dtype=np.float64),
    Case("Squeeze", [rand(1, 3, 1, 4)]),
    Case("Squeeze", [rand(1, 3, 1, 4), ints(-2)]),
    fed("Squeeze", [rand(1, 3, 1, 4), ints(0, 2)]),
    Case("Unsqueeze", [rand(3, 4), ints(0, -1)]),
    Case("Unsqueeze", [rand(), ints(0)], name="scalar"),
    Case("Unsqueeze", [rand(3, 4), np.asarray(1)], name="axis as a scalar"),
    fed("Unsqueeze", [rand(3, 4), ints(2, 0)]),
    Case("Transpose", [rand(2, 3, 4)]),
    Case("Transpose", [rand(2, 3, 4)], {"perm": [1, 2, 0]}),
    Case("Transpose", [rand(4)], {"perm": [0]}),
    Case("Transpose", [rand(2, 3, 4, 5)], {"perm": [3, 0, 2, 1]}, dtype=np.float16),
    Case("DepthToSpace", [rand(2, 12, 2, 3)], {"blocksize": 2}),
    Case("DepthToSpace", [rand(2, 12, 2, 3)], {"blocksize": 2, "mode": "CRD"}),
    Case("DepthToSpace", [rand(0, 8, 2, 3)], {"blocksize": 2, "mode": "CRD"}, name="empty"),
    Case("DepthToSpace", [rand(1, 18, 1, 2)], {"blocksize": 3}, dtype=np.float16),
    Case("SpaceToDepth", [rand(2, 3, 4, 6)], {"blocksize": 2}),
    Case("SpaceToDepth", [rand(2, 2, 3, 6)], {"blocksize": 3}, dtype=np.float64),
    Case("ReverseSequence", [rand(4, 3, 2), ints(1, 4, 2)], {"batch_axis": 1, "time_axis": 0}),
    fed("ReverseSequence", [rand(3, 4, 2), ints(4, 1, 3)], {"batch_axis": 0, "time_axis": 1}),
    Case("Trilu", [rand(2, 3, 4)]),
    Case("Trilu", [rand(3, 4), np.asarray(-1)], {"upper": 0}),
    fed("Trilu", [rand(2, 4, 3), np.asarray(1)], {"upper": 1}),
    Case("Trilu", [rand(3, 3)], {"upper": 0}, dtype=np.float16),
]

JOINS = [
    Case("Concat", [rand(2, 3), rand(4, 3), rand(1, 3)], {"axis": 0}),
    Case("Concat", [rand(2, 3, 2), rand(2, 1, 2), rand(2, 2, 2)], {"axis": -2}),
    Case("Concat", [rand(2, 3, 2), rand(2, 1, 2), rand(2, 2, 2)], {"axis": 1}, constants=(1, 2), name="stored tail"),
    Case("Concat", [rand(2, 3), rand(2, 0)], {"axis": 1}, name="empty part"),
    Case("Concat", [rand(2, 3)], {"axis": 1}, name="single"),
    Case("Concat", [rand(2, 3), rand(2, 1)], {"axis": 1}, dtype=np.float16),
    Case("Split", [rand(6, 4)], {"num_outputs": 3}, outputs=3),
    Case("Split", [rand(2, 7)], {"num_outputs": 3, "axis": 1}, outputs=3, name="uneven"),
    Case("Split", [rand(2, 6), ints(1, 3, 2)], {"axis": -1}, outputs=3),
    Case("Split", [rand(2, 6), ints(1, 3, 2)], {"axis": -1}, outputs=3, of=[1], name="middle only"),
    Case("Split", [rand(2, 6), ints(1, 3, 2)], {"axis": 1}, outputs=3, of=[0, 2], name="ends only"),
    Case("Split", [rand(2, 6), ints(6, 0)], {"axis": 1}, outputs=2, name="empty part"),
    fed("Split", [rand(2, 6), ints(1, 3, 2)], {"axis": 1}, outputs=3, of=[2]),
    fed("Split", [rand(2, 6), ints(1, 3, 2)], {"axis": 1}, outputs=3, of=[1, 2]),
]

COPIES = [
    Case("Expand", [rand(3, 1), ints(2, 3, 4)]),
    Case("Expand", [rand(2, 3), ints(1, 1)], name="kept"),
    Case("Expand", [rand(), ints(2, 3)], name="scalar"),
    fed("Expand", [rand(2, 1, 3), ints(2, 4, 1)]),
    Case("Tile", [rand(2, 3), ints(2, 3)]),
    Case("Tile", [rand(2, 3, 2), ints(1, 2, 1)]),
    Case("Tile", [rand(2, 3), ints(1, 1)], name="kept"),
    Case("Tile", [rand(2, 3), ints(2, 0)], name="none"),
    Case("Tile", [rand(2, 3), ints(3, 1)], dtype=np.float16),
    fed("Tile", [rand(2, 3), ints(2, 3)]),
]

COL2IM = [
    Case("Col2Im", [rand(2, 12, 12), ints(4, 5), ints(2, 2)]),
    Case("Col2Im", [rand(1, 18, 6), ints(6, 5), ints(3, 3)], {"strides": [2, 3], "pads": [0, 1, 1, 1]}),
    Case("Col2Im", [rand(1, 4, 6), ints(6, 5), ints(2, 2)], {"dilations": [3, 2], "strides": [2, 1]}),
    Case("Col2Im", [rand(2, 6, 4), ints(6), ints(3)], name="1-D"),
    Case("Col2Im", [rand(1, 8, 4), ints(2, 3, 3), ints(2, 2, 2)], name="3-D"),
    fed("Col2Im", [rand(2, 12, 12), ints(4, 5), ints(2, 2)], {"strides": [1, 1], "pads": [0, 0, 0, 0]}),
]

test_rule = rule_test(SHAPES + JOINS + COPIES + COL2IM)


def test_col2im_needs_its_number_of_axes() -> None:
    case = fed("Col2Im", [rand(2, 12, 12), ints(4, 5), ints(2, 2)])
    with pytest.raises(og.errors.DifferentiationError, match="number of its spatial axes is unknown"):
        og.augment(make_model(case, case.arrays, shapes="absent"), wrt=["x0"], of=["y0"])
