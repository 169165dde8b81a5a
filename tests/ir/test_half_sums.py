"""Sums of float16 per channel: by products, in float32, without overflow."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnx_convgrad.ir.emit import CANONICAL_OPSET, Emitter
from onnx_convgrad.ir.half_sums import channel_sum, sums_halves
from onnx_convgrad.ir.targets import TARGETS
from onnx_convgrad.runtime import run


def _summed(x: np.ndarray, target: str = "cuda") -> tuple[bool, ir.Model]:
    value = ir.Value(name="x", shape=ir.Shape(x.shape), type=ir.TensorType(ir.DataType.from_numpy(x.dtype)))
    graph = ir.Graph([value], [], nodes=[], opset_imports={"": CANONICAL_OPSET}, name="g")
    e = Emitter(graph, target=TARGETS[target])
    applies = sums_halves(e, value)
    if applies:
        total = channel_sum(e, value)
        total.name, total.shape, total.type = "y", ir.Shape([x.shape[1]]), ir.TensorType(ir.DataType.FLOAT)
        graph.outputs.append(total)
    return applies, ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("shape", [(4, 3, 5), (2, 3, 7, 9), (2, 3, 4, 5, 6)])
def test_sums_are_those_of_float32(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float16)
    applies, model = _summed(x)
    assert applies
    want = x.astype(np.float64).sum(axis=(0, *range(2, len(shape))))
    np.testing.assert_allclose(run(model, {"x": x})["y"], want, rtol=2e-3, atol=2e-2)


def test_large_sums_do_not_overflow() -> None:
    x = np.full((2, 1, 64, 64), 100, np.float16)  # the sum of a sample is 409,600
    _, model = _summed(x)
    np.testing.assert_allclose(run(model, {"x": x})["y"], [819200], rtol=1e-3)


def test_other_types_and_targets_are_not_for_it() -> None:
    x = np.zeros((2, 3, 4))
    assert not _summed(x.astype(np.float32))[0]
    assert not _summed(x.astype(np.float16), target="cpu")[0]
    assert not _summed(np.zeros((2, 3), np.float16))[0]
