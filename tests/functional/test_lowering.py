"""`lowering=` chooses how a call is computed, and `explain` says which lowering it takes."""

from __future__ import annotations

import inspect
import json

import numpy as np
import pytest

import onnx_convgrad.functional as F
from onnx_convgrad.errors import ArgumentError, LoweringError
from onnx_convgrad.functional import plans
from onnx_convgrad.lowering.table import lowerings

RNG = np.random.default_rng(0)
X, W, G = (RNG.standard_normal(size).astype(np.float32) for size in ((2, 8, 9, 9), (8, 8, 3, 3), (2, 8, 9, 9)))
GRADIENTS = [name for name in F.__all__ if "lowering" in inspect.signature(getattr(F, name)).parameters]


def test_every_gradient_takes_a_lowering() -> None:
    forward = {f"conv{kind}{rank}d" for kind in ("", "_transpose") for rank in (1, 2, 3)}
    forward |= {"convolution", "convolution_relu", "convolution_add_relu", "explain"}
    assert set(F.__all__) - forward == set(GRADIENTS)


@pytest.mark.parametrize("operator", ["ConvInputGrad", "ConvWeightGrad"])
def test_forced_lowerings_agree(operator: str) -> None:
    """Every lowering that applies gives the same gradient, by its name alone or in a mapping."""
    of_weight = operator == "ConvWeightGrad"
    first, second = (X, W.shape) if of_weight else (X.shape, W)
    name = "conv2d_weight" if of_weight else "conv2d_input"
    function = getattr(F, name)
    expected = function(first, second, G, padding=1)
    rows = F.explain(name, first, second, G, padding=1, lowering="fast").rows
    assert [row["operator"] for row in rows] == [operator]
    usable = [c["name"] for c in rows[0]["candidates"] if c["rejected"] is None]
    assert rows[0]["chosen"] in usable
    assert len(usable) > 1
    for chosen in usable:
        found = function(first, second, G, padding=1, lowering={operator: chosen})
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
        report = F.explain(name, first, second, G, padding=1, lowering=chosen)
        assert (report.rows[0]["chosen"], report.rows[0]["forced"]) == (chosen, True)
        assert len(report.rows[0]["candidates"]) == len(lowerings()[operator])


def test_an_explanation_runs_nothing() -> None:
    """Arrays of any size can be asked about; the result is a report for people and programs."""
    before = plans.plan.cache_info().currsize
    x = np.broadcast_to(np.float32(0), (64, 256, 56, 56))
    report = F.explain("convolution_backward", x, x, np.broadcast_to(np.float32(0), (256, 256, 3, 3)), padding=1)
    assert plans.plan.cache_info().currsize == before
    assert [row["operator"] for row in report.rows] == ["ConvInputGrad", "ConvWeightGrad"]
    assert report.gradients == {"input": "result_input", "weight": "result_weight", "bias": "result_bias"}
    assert json.loads(report.to_json())["rows"] == report.rows
    assert "predicted" in str(report)
    assert "ConvWeightGrad -> " in str(report)
    assert F.explain("conv2d", X, W).rows == []
    assert F.explain("conv2d", X.astype(float), W.astype(float)).rows[0]["operator"] == "Conv"
    assert F.explain("conv2d_per_sample_grad", X, W, G, padding=1).rows


def test_refused() -> None:
    with pytest.raises(LoweringError, match="'pointwise_gemm' was asked for ConvWeightGrad"):
        F.conv2d_weight(X, W.shape, G, padding=1, lowering="pointwise_gemm")
    with pytest.raises(ArgumentError, match=r"Unknown lowering 'im2cole_gemm'.*'im2col_gemm'"):
        F.conv2d_weight(X, W.shape, G, padding=1, lowering="im2cole_gemm")
    with pytest.raises(ArgumentError, match="Unknown lowering for ConvWeightGrad"):
        F.conv2d_weight(X, W.shape, G, padding=1, lowering={"ConvWeightGrad": "x"})
    with pytest.raises(ArgumentError, match="lowering must be"):
        F.conv2d_weight(X, W.shape, G, padding=1, lowering=X)
    with pytest.raises(ArgumentError, match=r"Unknown function: 'conv2d_wieght'\. Did you mean 'conv2d_weight'"):
        F.explain("conv2d_wieght", X, W.shape, G)
    with pytest.raises(ArgumentError, match="Given groups=1"):
        F.explain("conv2d", X[:, 1:], W)
