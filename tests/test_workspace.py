"""The workspace budget: what a lowering holds, and batches cut into chunks."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import onnx_convgrad as og
from onnx_convgrad import options
from onnx_convgrad.runtime import run


def _model(batch: int, group: int = 1) -> onnx.ModelProto:
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", pads=[1, 1, 0, 2], strides=[2, 1], group=group)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 4, 9, 8])
    w = helper.make_tensor_value_info("w", TensorProto.FLOAT, [6, 4 // group, 3, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", [x, w], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("op_type", "name"), [("ConvWeightGrad", "im2col_gemm"), ("ConvInputGrad", "col2im_gemm")])
def test_chunks_give_the_same_gradient_within_the_budget(op_type: str, name: str, group: int) -> None:
    model = _model(6, group)
    forced = {op_type: name}
    whole = _candidate(og.explain(model, wrt=["x", "w"], lowering=forced), op_type, name)
    assert whole["chunks"] == 1
    budget = whole["workspace"] // 2
    cut = _candidate(og.explain(model, wrt=["x", "w"], lowering=forced, max_workspace=budget), op_type, name)
    assert cut["chunks"] in (2, 3, 6)
    assert cut["workspace"] <= budget

    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 4, 9, 8)).astype(np.float32)
    w = rng.standard_normal((6, 4 // group, 3, 3)).astype(np.float32)
    tx, tw = (torch.from_numpy(v).double().requires_grad_() for v in (x, w))
    ty = torch.nn.functional.conv2d(torch.nn.functional.pad(tx, (1, 2, 1, 0)), tw, stride=(2, 1), groups=group)
    seed = rng.standard_normal(tuple(ty.shape)).astype(np.float32)
    ty.backward(torch.from_numpy(seed).double())
    augmented = og.augment(model, wrt=["x", "w"], lowering=forced, max_workspace=budget)
    got = run(augmented, {"x": x, "w": w, "y_grad": seed})
    for result, want in ((got["x_grad"], tx.grad), (got["w_grad"], tw.grad)):
        assert want is not None
        assert np.linalg.norm(result - want.numpy()) < 1e-5 * np.linalg.norm(want.numpy())


def _candidate(report: og.Report, op_type: str, name: str) -> dict:
    row = next(r for r in report.rows if r["operator"] == op_type)
    return next(c for c in row["candidates"] if c["name"] == name)


def test_a_budget_that_nothing_fits_names_the_smallest_that_suffices() -> None:
    with pytest.raises(og.LoweringError, match=r"The smallest max_workspace that suffices is (\d+)\.") as failed:
        og.augment(_model(2), wrt=["w"], max_workspace=1)
    least = int(str(failed.value).split("suffices is ")[1].split(".")[0])
    assert og.augment(_model(2), wrt=["w"], max_workspace=least).graph.node


@pytest.mark.parametrize("limit", [0, -5, "64MB", 1.5])
def test_a_budget_is_a_positive_number_of_bytes(limit: object) -> None:
    with pytest.raises(og.ArgumentError, match="max_workspace must be a positive number of bytes"):
        og.augment(_model(2), wrt=["w"], max_workspace=limit)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "count"), [("100", 100), ("64MB", 64_000_000), ("1.5g", 1_500_000_000), (None, None)])
def test_sizes_on_the_command_line(text: str | None, count: int | None) -> None:
    assert options.size_in_bytes(text) == count


@pytest.mark.parametrize("text", ["", "many", "5TB", "MB"])
def test_bad_sizes_on_the_command_line(text: str) -> None:
    with pytest.raises(og.ArgumentError, match="is not a size"):
        options.size_in_bytes(text)


def test_of_two_that_are_as_fast_the_one_that_holds_less_is_taken() -> None:
    """A long 1-D convolution: patches by slices and by a one-hot convolution take about as long."""
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", pads=[8, 8])
    shapes = {"x": [16, 64, 4096], "w": [128, 64, 17], "y": [16, 128, 4096]}
    values = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()}
    graph = helper.make_graph([node], "g", [values["x"], values["w"]], [values["y"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (row,) = [r for r in og.explain(model, wrt=["w"]).rows if r["operator"] == "ConvWeightGrad"]
    found = {c["name"]: c for c in row["candidates"] if c["seconds"] is not None}
    chosen = found[row["chosen"]]
    close = [c for c in found.values() if c["seconds"] < 1.02 * chosen["seconds"]]
    assert len(close) > 1
    assert chosen["workspace"] == min(c["workspace"] for c in close)
