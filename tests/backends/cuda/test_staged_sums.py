"""Sums over axes on both sides of others become two sums for CUDA, with equal results; others are left alone."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from onnx_convgrad.backends.cuda.staged_sums import StageSums
from onnx_convgrad.ir.passes import run_passes
from onnx_convgrad.ir.targets import TARGETS
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of


def _model(op_type: str, axes: list[int], keepdims: int, shape: str) -> ir.Model:
    listed = ", ".join(map(str, axes))
    return ir.from_proto(
        graph_of(
            f"(float[{shape}] x) => (float y) <int64[{len(axes)}] a = {{{listed}}}>"
            f" {{ [total] y = {op_type} <keepdims = {keepdims}> (x, a) }}",
            opset=21,
        )
    )


def _axes(model: ir.Model) -> list[list[int]]:
    """The axes of every reduction, in order."""
    nodes = [node for node in model.graph if node.op_type.startswith("Reduce")]
    constants = [node.inputs[1].const_value for node in nodes if node.inputs[1] is not None]
    return [constant.numpy().tolist() for constant in constants if constant is not None]


@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean", "ReduceSumSquare"])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize(("axes", "stages"), [([0, 2, 3], [[2, 3], [0]]), ([-1, 0], [[3], [0]]), ([1, 3], [[3], [1]])])
def test_the_last_axes_come_first(op_type: str, keepdims: int, axes: list[int], stages: list[list[int]]) -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 5, 6)).astype(np.float32)
    want = run(_model(op_type, axes, keepdims, "3, 4, 5, 6"), {"x": x})["y"]
    for shape in ("3, 4, 5, 6", "n, 4, h, w"):
        model = _model(op_type, axes, keepdims, shape)
        assert run_passes(model, [StageSums(TARGETS["cuda"])])
        assert _axes(model) == stages
        got = run(model, {"x": x})["y"]
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [[2, 3], [0], [0, 1], [1], [0, 1, 2, 3]])
def test_axes_at_one_end_stay(axes: list[int]) -> None:
    model = _model("ReduceSum", axes, 1, "3, 4, 5, 6")
    assert not run_passes(model, [StageSums(TARGETS["cuda"])])
    assert _axes(model) == [axes]


def test_axes_of_size_one_do_not_part_others() -> None:
    model = _model("ReduceSum", [0, 3], 1, "3, 4, 5, 1")
    assert not run_passes(model, [StageSums(TARGETS["cuda"])])


def test_other_targets_keep_their_sums() -> None:
    model = _model("ReduceSum", [0, 2, 3], 1, "3, 4, 5, 6")
    assert not run_passes(model, [StageSums(TARGETS["cpu"])])
