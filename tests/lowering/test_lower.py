"""The stage that lowers a graph: workspace budgets and forced choices."""

from __future__ import annotations

import pytest

import onnx_convgrad as og
from tests.lowering.test_chunks import UNEVEN
from tests.support.conv_geometry import case, conv_model


def test_a_budget_that_nothing_fits_names_the_smallest_that_suffices() -> None:
    model = conv_model({**UNEVEN, "batch": 2})
    with pytest.raises(og.errors.LoweringError, match=r"The smallest max_workspace that suffices is (\d+)\.") as failed:
        og.augment(model, wrt=["w"], target=og.Target(max_workspace=1))
    least = int(str(failed.value).split("suffices is ")[1].split(".")[0])
    assert og.augment(model, wrt=["w"], target=og.Target(max_workspace=least)).graph.node


@pytest.mark.parametrize("limit", [0, -5, "64MB", 1.5])
def test_a_budget_is_a_positive_number_of_bytes(limit: object) -> None:
    with pytest.raises(og.errors.ArgumentError, match="max_workspace must be a positive number of bytes"):
        og.augment(conv_model(UNEVEN), wrt=["w"], target=og.Target(max_workspace=limit))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["ConvWeightGrad", "conv", "ConvWeightGrad:conv"])
def test_a_choice_by_operator_node_or_both(key: str) -> None:
    choices = og.explain(
        conv_model(case((2, 3, 5, 5), 4, (3, 3))), wrt="w", target=og.Target(lowering={key: "im2col_gemm"})
    ).choices
    assert [(c.op_type, c.chosen, c.forced) for c in choices] == [("ConvWeightGrad", "im2col_gemm", True)]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("quick", "Unknown lowering 'quick'"),
        ({"ConvWeightGrad": 3}, "must be a name"),
        ({"ConvWeightGrad": "winograd"}, "Unknown lowering for ConvWeightGrad: 'winograd'"),
        ({"ConvWeightGrad": "im2col_gem"}, "im2col_gemm"),
        ({"con": "im2col_gemm"}, "operator or node in lowering: 'con'"),
        (["im2col_gemm"], "must be 'auto', 'exact', 'fast' or a mapping"),
    ],
)
def test_bad_choices(choice: object, message: str) -> None:
    with pytest.raises(og.errors.ArgumentError) as failed:
        og.vjp(conv_model(case((2, 3, 5, 5), 4, (3, 3))), wrt="w", target=og.Target(lowering=choice))  # type: ignore[arg-type]
    assert message in str(failed.value)
