"""Batches cut into chunks, samples and bands of rows: the same gradients, within the workspace budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import onnx_convgrad as og
from onnx_convgrad.ir.geometry import ConvSpec
from onnx_convgrad.lowering import candidates
from onnx_convgrad.lowering.chunks import cut_of
from onnx_convgrad.lowering.sketch import Sketch
from onnx_convgrad.lowering.table import Lowering, Query, lowerings
from onnx_convgrad.pipeline.report import Report
from onnx_convgrad.runtime import run
from tests.support.conv_geometry import (
    CONV,
    Geometry,
    arrays_of,
    case,
    check_built,
    conv_model,
    cotangent,
    error,
    oracle,
)
from tests.support.one_input import graph_of

UNEVEN = case((6, 4, 9, 8), 6, (3, 3), strides=[2, 1], begin=1, end=[0, 2])


def candidate(report: Report, op_type: str, name: str) -> dict:
    """The candidate `name` of an operator in a report."""
    row = next(r for r in report.rows if r["operator"] == op_type)
    return next(c for c in row["candidates"] if c["name"] == name)


def _budget(model: onnx.ModelProto, op_type: str, name: str, part: float) -> tuple[int, int]:
    """This part of the workspace of a lowering, and the number of chunks that stays within it."""
    forced = {op_type: name}
    whole = candidate(og.explain(model, wrt=["x", "w"], target=og.Target(lowering=forced)), op_type, name)
    assert whole["chunks"] == 1
    budget = int(whole["workspace"] * part)
    cut = candidate(
        og.explain(model, wrt=["x", "w"], target=og.Target(lowering=forced, max_workspace=budget)), op_type, name
    )
    assert cut["workspace"] <= budget
    return budget, cut["chunks"]


@pytest.mark.parametrize("g", [UNEVEN, {**UNEVEN, "groups": 2}], ids=["dense", "groups"])
@pytest.mark.parametrize(("op_type", "name"), [("ConvWeightGrad", "im2col_gemm"), ("ConvInputGrad", "col2im_gemm")])
def test_chunks_give_the_same_gradient_within_the_budget(op_type: str, name: str, g: Geometry) -> None:
    model = conv_model(g)
    budget, chunks = _budget(model, op_type, name, 0.5)
    assert chunks in (2, 3, 6)
    built = og.augment(model, wrt=["x", "w"], target=og.Target(lowering={op_type: name}, max_workspace=budget))
    check_built(built, g)


_TALL = case((2, 4, 64, 8), 6, (3, 3), begin=[1, 0])
_STRIDED = case((1, 3, 95, 9), 6, (3, 3), strides=[2, 1], begin=[0, 1], end=[2, 1])
_DEEP = case((2, 2, 32, 5, 6), 6, (3, 3, 3), begin=1)


@pytest.mark.parametrize(
    ("name", "g"),
    [
        *((name, g) for g in (_TALL, _DEEP) for name in ("im2col_gemm", "row_shift", "split_shift", "winograd_4")),
        ("im2col_gemm", _STRIDED),
    ],
)
def test_bands_of_rows_give_the_same_gradient(name: str, g: Geometry) -> None:
    """A single sample holds more than the budget; also for the gradient of the weight gradient with respect to x."""
    model, arrays, batch = conv_model(g), arrays_of(g, bias=False), g["batch"]
    feed = {**arrays, "y_grad": cotangent(oracle("Conv", arrays, g)["y"])}
    budget, chunks = _budget(model, "ConvWeightGrad", name, 1 / (1.6 * batch))
    assert chunks > batch
    augmented = og.augment(model, wrt=["w"], target=og.Target(lowering={"ConvWeightGrad": name}, max_workspace=budget))
    assert "Scan" in {n.op_type for n in augmented.graph.node}
    bound = 1e-4 if name.startswith("winograd") else 1e-5
    check_built(augmented, g, bound)

    twice = og.augment(augmented, wrt=["x"], of="w_grad", cotangents="ones")
    x, w, seed = (torch.tensor(feed[k], dtype=torch.float64, requires_grad=k != "y_grad") for k in ("x", "w", "y_grad"))
    pads = [p for pair in reversed(list(zip(g["begin"], g["end"], strict=True))) for p in pair]
    y = CONV[g["rank"]](torch.nn.functional.pad(x, pads), w, stride=g["strides"])
    (first,) = torch.autograd.grad(y, w, seed, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert error(run(twice, feed)["x_grad"], second.numpy()) < bound


def test_a_budget_for_windows_that_see_nothing_but_padding() -> None:
    """No part of the batch is read, so there is no loop over parts."""
    proto = graph_of("""(float[5, 4, 1, 1] x, float[1, 4, 2, 1] w) => (float[5, 1, 2, 3] y) {
            y = Conv <pads = [2, 1, 2, 1], strides = [3, 1]> (x, w)
        }""")
    built = og.augment(proto, wrt=["x"], cotangents="ones", training=True, target=og.Target(max_workspace=8))
    got = run(built, {"x": np.ones((5, 4, 1, 1), np.float32), "w": np.ones((1, 4, 2, 1), np.float32)})
    assert {name: value.shape for name, value in got.items()} == {"y": (5, 1, 2, 3), "x_grad": (5, 4, 1, 1)}
    assert not any(value.any() for value in got.values())
    with pytest.raises(og.errors.LoweringError, match="it holds 40 bytes"):
        og.augment(proto, wrt=["x"], training=True, target=og.Target(max_workspace=8, lowering={"Conv": "boxes"}))


@pytest.mark.parametrize("shapes", ["static", "dynamic size"])
@pytest.mark.parametrize("name", ["im2col_gemm", "split_shift", "winograd_4"])
def test_parts_of_a_batch_become_one_loop(name: str, shapes: str) -> None:
    """Values that a lowering computes from the weights alone are computed once, in front of the loop."""
    g = case((6, 4, 9, 8), 5, (3, 3), begin=1)
    model = conv_model(g, set() if shapes == "static" or name == "winograd_4" else {2})
    forced = {"ConvWeightGrad": name, "ConvInputGrad": "winograd_4" if name == "winograd_4" else "col2im_gemm"}
    report = og.explain(model, wrt=["x", "w"], target=og.Target(lowering=forced))
    budget = max(candidate(report, op, chosen)["workspace"] for op, chosen in forced.items()) // 2
    cut = og.augment(model, wrt=["x", "w"], target=og.Target(lowering=forced, max_workspace=budget))
    whole = og.augment(model, wrt=["x", "w"], target=og.Target(lowering=forced))
    assert ["Scan" in {n.op_type for n in m.graph.node} for m in (cut, whole)] == [True, False]
    for built in (cut, whole):
        check_built(built, g)


@pytest.mark.parametrize(
    ("g", "chunks"),
    [
        (case((6, 4, 9, 8), 6, (3, 3), begin=1), 3),
        (case((6, 4, 9, 8), 8, (3, 3), begin=1, groups=4), 3),
        (case((6, 4, 9, 8), 5, (1, 1)), 3),
        (case((6, 4, 9, 8), 6, (3, 3), strides=2, begin=1, groups=2), 6),
    ],
    ids=["dense", "depthwise", "pointwise", "strided groups, sample by sample"],
)
def test_every_lowering_gives_the_same_in_chunks(g: Geometry, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def ways(entry: Lowering, node: ir.Node, query: Query, *_: Any) -> Iterator[tuple[int, Sketch]]:
        yield chunks, candidates._sketched(entry, node, query, chunks)

    monkeypatch.setattr(candidates, "_ways", ways)
    monkeypatch.setattr(candidates, "_CANDIDATES", {})
    model, used = conv_model(g), 0
    for operator in ("Conv", "ConvInputGrad", "ConvWeightGrad"):
        for choice in lowerings()[operator]:
            try:
                built = og.augment(model, wrt=["x", "w"], training=True, target=og.Target(lowering={operator: choice}))
            except og.errors.LoweringError:
                continue
            check_built(built, g, 3e-5)
            used += any(n.op_type == "Scan" for n in built.graph.node)
    assert used >= 12


@pytest.mark.parametrize(
    ("op_type", "operands", "added"),
    [
        ("Conv", (0,), False),
        ("ConvGradSquaredNorm", (0, 1), False),
        ("ConvInputGrad", (0, 2), False),
        ("ConvPerSampleGrad", (0, 1), False),
        ("ConvTranspose", (0,), False),
        ("ConvWeightGrad", (0, 1), True),
    ],
)
def test_what_is_cut_follows_from_the_factors(op_type: str, operands: tuple[int, ...], added: bool) -> None:
    lowerings()
    spec = ConvSpec(None, 4, 6, (8, 8), (3, 3), (6, 6), (1, 1), (1, 1), (0, 0), (0, 0))
    cut = cut_of(op_type, spec)
    assert cut is not None
    assert (cut.operands, cut.added) == (operands, added)


def test_statistics_of_a_batch_are_not_cut() -> None:
    assert cut_of("Covariance", ConvSpec(2, 4, 6, (8,), (3,), (6,), (1,), (1,), (0,), (0,))) is None
