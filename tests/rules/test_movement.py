"""GatherND, whose adjoint is found by the positions of elements, and the helpers for such adjoints."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.rules.movement import extent
from onnx_convgrad.testing import rand
from tests.support.operators import both, indices, rule_test

X = rand(4, 3, 5)

CASES = [
    *both("GatherND", [X, indices([[0, 1], [-1, 2], [0, 1]])]),
    *both("GatherND", [X, indices([[0, 1, 2], [3, -1, -1]])]),
    *both("GatherND", [X, indices([3])]),
    *both("GatherND", [X, indices([[[0], [1]], [[2], [-1]], [[0], [0]], [[1], [2]]])], {"batch_dims": 1}),
    *both("GatherND", [rand(2, 2, 3), indices([[[1], [0]], [[2], [2]]])], {"batch_dims": 2}),
    *both("GatherND", [X, indices([[0], [0]])], dtype=np.float16),
]

test_rule = rule_test(CASES)


def _emitter() -> Emitter:
    return Emitter(ir.Graph([], [], nodes=[], opset_imports={"": 21}))


@pytest.mark.parametrize(("count", "step"), [(0, 1), (5, 1), (4, 3)])
def test_known_ranges_are_constants(count: int, step: int) -> None:
    e = _emitter()
    np.testing.assert_array_equal(e.constant_of(e.arange(count, step)), np.arange(count) * step)


def test_known_extents_are_numbers() -> None:
    e, x = _emitter(), ir.Value(name="x", shape=ir.Shape([2, 3, "n"]), type=ir.TensorType(ir.DataType.FLOAT))
    assert extent(e, x, 0, 2) == 6
    assert isinstance(extent(e, x, 1), ir.Value)
