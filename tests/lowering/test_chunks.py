"""The workspace budget: what a lowering holds, and batches cut into chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper

import onnx_convgrad as og
from onnx_convgrad.ir import targets
from onnx_convgrad.lowering import candidates
from onnx_convgrad.lowering import table as lowering
from onnx_convgrad.lowering.sketch import Sketch
from onnx_convgrad.pipeline import stages as pipeline
from onnx_convgrad.pipeline.option_text import size_in_bytes
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


_TALL = ((2, 4, 64, 8), (1, 0, 1, 0), (1, 1))
_STRIDED = ((1, 3, 95, 9), (0, 1, 2, 1), (2, 1))
_DEEP = ((2, 2, 32, 5, 6), (1, 1, 1, 1, 1, 1), (1, 1, 1))


@pytest.mark.parametrize(
    ("name", "x_shape", "pads", "strides"),
    [
        *(
            (name, *case)
            for case in (_TALL, _DEEP)
            for name in ("im2col_gemm", "row_shift", "split_shift", "winograd_4")
        ),
        ("im2col_gemm", *_STRIDED),
    ],
)
def test_bands_of_rows_give_the_same_gradient(
    name: str, x_shape: tuple[int, ...], pads: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """Where a single sample holds more than the budget; also the gradient of the weight gradient with respect to x."""
    rank, batch = len(x_shape) - 2, x_shape[0]
    w_shape = (6, x_shape[1], *[3] * rank)
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", pads=list(pads), strides=list(strides))
    inputs = [helper.make_tensor_value_info(v, TensorProto.FLOAT, s) for v, s in (("x", x_shape), ("w", w_shape))]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    forced = {"ConvWeightGrad": name}
    whole = _candidate(og.explain(model, wrt=["w"], lowering=forced), "ConvWeightGrad", name)
    budget = int(whole["workspace"] / (1.6 * batch))
    cut = _candidate(og.explain(model, wrt=["w"], lowering=forced, max_workspace=budget), "ConvWeightGrad", name)
    assert cut["chunks"] > batch
    assert cut["workspace"] <= budget
    augmented = og.augment(model, wrt=["w"], lowering=forced, max_workspace=budget)
    assert "Scan" in {n.op_type for n in augmented.graph.node}

    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in (x_shape, w_shape))
    tx, tw = (torch.from_numpy(v).double().requires_grad_() for v in (x, w))
    both = [amount for axis in reversed(range(rank)) for amount in (pads[axis], pads[rank + axis])]
    conv = {2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}[rank]
    ty = conv(torch.nn.functional.pad(tx, both), tw, stride=strides)
    seed = rng.standard_normal(tuple(ty.shape)).astype(np.float32)
    (want,) = torch.autograd.grad(ty, tw, torch.from_numpy(seed).double(), create_graph=True)
    got = run(augmented, {"x": x, "w": w, "y_grad": seed})["w_grad"]
    tolerance = 1e-4 if name.startswith("winograd") else 1e-5
    assert np.linalg.norm(got - want.detach().numpy()) < tolerance * torch.linalg.norm(want)

    (second,) = torch.autograd.grad(want.sum(), tx)
    twice = og.augment(augmented, wrt=["x"], of="w_grad", seed="ones")
    found = run(twice, {"x": x, "w": w, "y_grad": seed})
    assert np.linalg.norm(found["x_grad"] - second.numpy()) < tolerance * torch.linalg.norm(second)


def _candidate(report: og.Report, op_type: str, name: str) -> dict:
    row = next(r for r in report.rows if r["operator"] == op_type)
    return _named(row, name)


def test_a_budget_that_nothing_fits_names_the_smallest_that_suffices() -> None:
    with pytest.raises(og.LoweringError, match=r"The smallest max_workspace that suffices is (\d+)\.") as failed:
        og.augment(_model(2), wrt=["w"], max_workspace=1)
    least = int(str(failed.value).split("suffices is ")[1].split(".")[0])
    assert og.augment(_model(2), wrt=["w"], max_workspace=least).graph.node


@pytest.mark.parametrize("limit", [0, -5, "64MB", 1.5])
def test_a_budget_is_a_positive_number_of_bytes(limit: object) -> None:
    with pytest.raises(og.ArgumentError, match="max_workspace must be a positive number of bytes"):
        og.augment(_model(2), wrt=["w"], max_workspace=limit)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "count"), [("100", 100), ("64MB", 64_000_000), ("1.5g", 1_500_000_000)])
def test_sizes_on_the_command_line(text: str, count: int) -> None:
    assert size_in_bytes(text) == count


@pytest.mark.parametrize("text", ["", "many", "5TB", "MB"])
def test_bad_sizes_on_the_command_line(text: str) -> None:
    with pytest.raises(og.ArgumentError, match="is not a size"):
        size_in_bytes(text)


def _explained(x: list[int], w: list[int], wrt: str, **attributes: object) -> dict:
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", **attributes)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", x), ("w", w))]
    graph = helper.make_graph([node], "g", inputs, [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return og.explain(model, wrt=[wrt]).rows[-1]


def test_a_data_gradient_is_the_cheapest_form_though_one_node_is_nearly_as_cheap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a convolution that the model or a derivative has as a node stays one unless much is gained."""
    prices = {"conv_transpose": Sketch(0.0100, 0), "flipped_conv": Sketch(0.0085, 0)}

    def ways(entry: lowering.Lowering, *_: object, **__: object) -> Iterator[tuple[int, Sketch]]:
        yield 1, prices.get(entry.name, Sketch(1.0, 0))

    monkeypatch.setattr(candidates, "_ways", ways)
    monkeypatch.setattr(candidates, "_FOUND", {})
    assert _explained([8, 3, 28, 28], [8, 3, 3, 3], "x", pads=[1, 1, 1, 1])["chosen"] == "flipped_conv"


@pytest.mark.parametrize(("seconds", "chosen"), [(0.0105, "im2col_conv"), (0.0130, "im2col_gemm")])
def test_of_two_that_are_about_as_fast_the_one_that_holds_less_is_taken(
    seconds: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory costs half a pass over it, which a form that is much faster is worth."""
    prices = {"im2col_gemm": Sketch(0.0100, 200_000_000), "im2col_conv": Sketch(seconds, 20_000_000)}

    def ways(entry: lowering.Lowering, *_: object, **__: object) -> Iterator[tuple[int, Sketch]]:
        yield 1, prices.get(entry.name, Sketch(1.0, 0))

    monkeypatch.setattr(candidates, "_ways", ways)
    monkeypatch.setattr(candidates, "_FOUND", {})
    assert _explained([8, 3, 224, 224], [64, 3, 3, 3], "w", pads=[1, 1, 1, 1])["chosen"] == chosen


@pytest.mark.parametrize(("seconds", "chosen"), [(101.5e-6, "conv_swap"), (105e-6, "im2col_gemm")])
def test_of_two_that_are_about_as_fast_the_shorter_is_taken(
    seconds: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prices = {"im2col_gemm": Sketch(100e-6, 0, nodes=12), "conv_swap": Sketch(seconds, 0, nodes=4)}
    monkeypatch.setattr(candidates, "_ways", lambda entry, *_, **__: [(1, prices.get(entry.name, Sketch(1.0, 0)))])
    monkeypatch.setattr(candidates, "_FOUND", {})
    assert _explained([1, 3, 8, 8], [4, 3, 3, 3], "w")["chosen"] == chosen


@pytest.mark.parametrize(("wrt", "operator"), [("x", "ConvInputGrad"), ("w", "ConvWeightGrad")])
def test_the_batch_is_cut_where_the_cache_holds_a_part_of_it(
    wrt: str, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not where it holds all, or where memory is as fast as the cache."""

    def chunks(**changes: float) -> int:
        target = targets.TARGETS["cpu"]
        changed = dataclasses.replace(target, rates=dataclasses.replace(target.rates, **changes))
        monkeypatch.setattr(pipeline, "calibrated", lambda _: changed)
        row = _explained([16, 64, 56, 56], [64, 64, 3, 3], wrt, pads=[1, 1, 1, 1])
        assert row["operator"] == operator
        return _named(row, "winograd_4")["chunks"]

    default = targets.TARGETS["cpu"].rates
    assert chunks() > 1
    assert chunks(cache=1e10) == 1
    assert chunks(memory=default.cached, cached=default.cached) == 1
    assert chunks(node=1e-4) == 1  # for every part takes some time to begin
    assert 1 < chunks(cache=2 * default.cache) <= chunks()


def test_a_budget_for_windows_that_see_nothing_but_padding() -> None:
    """No part of the batch is read, so there is no loop over parts."""
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 17]>
        g (float[5, 4, 1, 1] x, float[1, 4, 2, 1] w) => (float[5, 1, 2, 3] y) {
            y = Conv <pads = [2, 1, 2, 1], strides = [3, 1]> (x, w)
        }""")
    built = og.augment(proto, wrt=["x"], max_workspace=8, seed="ones", training=True)
    found = run(built, {"x": np.ones((5, 4, 1, 1), np.float32), "w": np.ones((1, 4, 2, 1), np.float32)})
    assert {name: value.shape for name, value in found.items()} == {"y": (5, 1, 2, 3), "x_grad": (5, 4, 1, 1)}
    assert not any(value.any() for value in found.values())
    with pytest.raises(og.LoweringError, match="it holds 40 bytes"):
        og.augment(proto, wrt=["x"], max_workspace=8, lowering={"Conv": "boxes"}, training=True)


def _named(row: dict, name: str) -> dict:
    return next(c for c in row["candidates"] if c["name"] == name)


@pytest.mark.parametrize("shapes", ["static", "dynamic size"])
@pytest.mark.parametrize("name", ["im2col_gemm", "split_shift", "winograd_4"])
def test_parts_of_a_batch_become_one_loop(name: str, shapes: str) -> None:
    """What a lowering makes of the weights alone is made once, in front of it; a graph around the loop stays valid."""
    size: list[int | str] = [9, 8] if shapes == "static" or name == "winograd_4" else ["h", 8]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, 4, *size])
    w = helper.make_tensor_value_info("w", TensorProto.FLOAT, [5, 4, 3, 3])
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", pads=[1, 1, 1, 1])
    graph = helper.make_graph([node], "g", [x, w], [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    forced = {"ConvWeightGrad": name, "ConvInputGrad": "winograd_4" if name == "winograd_4" else "col2im_gemm"}
    rows = og.explain(model, wrt=["x", "w"], lowering=forced).rows
    budget = max(_named(r, forced[r["operator"]])["workspace"] for r in rows if r["operator"] in forced) // 2
    augmented = og.augment(model, wrt=["x", "w"], lowering=forced, max_workspace=budget)
    loops = [n for n in augmented.graph.node if n.op_type == "Scan"]
    assert loops
    rng = np.random.default_rng(0)
    arrays = {k: rng.standard_normal(s).astype(np.float32) for k, s in (("x", (6, 4, 9, 8)), ("w", (5, 4, 3, 3)))}
    seed = rng.standard_normal((6, 5, 9, 8)).astype(np.float32)
    tx, tw = (torch.from_numpy(v).double().requires_grad_() for v in arrays.values())
    torch.nn.functional.conv2d(tx, tw, padding=1).backward(torch.from_numpy(seed).double())
    whole = og.augment(model, wrt=["x", "w"], lowering=forced)
    assert "Scan" not in {n.op_type for n in whole.graph.node}
    for got in (run(m, {**arrays, "y_grad": seed}) for m in (augmented, whole)):
        for result, want in (("x_grad", tx.grad), ("w_grad", tw.grad)):
            assert want is not None
            assert np.linalg.norm(got[result] - want.numpy()) < 1e-5 * np.linalg.norm(want.numpy())


@pytest.mark.parametrize(
    ("kernel", "stride", "chunks"),
    [((6, 4, 3, 3), 1, 3), ((8, 1, 3, 3), 1, 3), ((5, 4, 1, 1), 1, 3), ((6, 2, 3, 3), 2, 6)],
    ids=["dense", "depthwise", "pointwise", "strided groups, sample by sample"],
)
def test_every_lowering_gives_the_same_in_chunks(
    kernel: tuple[int, ...], stride: int, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ways(
        entry: lowering.Lowering, node: ir.Node, query: lowering.Query, _: int | None, *, near: bool
    ) -> Iterator[tuple[int, Sketch]]:
        yield chunks, candidates._sketched(entry, node, query, chunks)

    monkeypatch.setattr(candidates, "_ways", ways)
    monkeypatch.setattr(candidates, "_FOUND", {})
    group, pad = 4 // kernel[1], kernel[2] // 2
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", pads=[pad] * 4, group=group, strides=[stride] * 2)
    shapes = {"x": (6, 4, 9, 8), "w": kernel, "y": (6, kernel[0], -(-9 // stride), 8 // stride)}
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    graph = helper.make_graph([node], "g", [values["x"], values["w"]], [values["y"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    rng = np.random.default_rng(0)
    x, w, seed = (rng.standard_normal(shape).astype(np.float32) for shape in shapes.values())
    tx, tw = (torch.from_numpy(v).double().requires_grad_() for v in (x, w))
    ty = torch.nn.functional.conv2d(tx, tw, None, stride, pad, 1, group)
    ty.backward(torch.from_numpy(seed).double())
    used = 0
    for operator, (name, want) in {
        "Conv": ("y", ty.detach()),
        "ConvInputGrad": ("x_grad", tx.grad),
        "ConvWeightGrad": ("w_grad", tw.grad),
    }.items():
        for choice in lowering.lowerings()[operator]:
            try:
                built = og.augment(model, wrt=["x", "w"], training=True, lowering={operator: choice})
            except og.LoweringError:
                continue
            got = run(built, {"x": x, "w": w, "y_grad": seed})[name]
            assert np.linalg.norm(got - want.numpy()) < 3e-5 * np.linalg.norm(want.numpy()), (operator, choice)
            used += any(n.op_type == "Scan" for n in built.graph.node)
    assert used >= 12
