"""The choice among lowerings: predicted time, memory held, number of nodes, chunks that fit the cache."""

from __future__ import annotations

import dataclasses

import pytest

import onnx_convgrad as og
from onnx_convgrad.ir import targets
from onnx_convgrad.lowering import candidates
from onnx_convgrad.lowering.sketch import Sketch
from onnx_convgrad.pipeline import built as pipeline
from onnx_convgrad.pipeline import option_text
from tests.lowering.test_chunks import candidate
from tests.support.conv_geometry import Geometry, case, conv_model

IMAGES = case((8, 3, 28, 28), 8, (3, 3), begin=1)
LARGE = case((8, 3, 224, 224), 64, (3, 3), begin=1)
SMALL = case((1, 3, 8, 8), 4, (3, 3))


@pytest.mark.parametrize(
    ("g", "wrt", "prices", "chosen"),
    [
        # a data gradient is the cheapest one, even if one node is nearly as cheap
        (IMAGES, "x", (("conv_transpose", 0.0100), ("flipped_conv", 0.0085)), 1),
        # memory costs half a pass over it, which a lowering that is much faster is worth
        (LARGE, "w", (("im2col_gemm", 0.0100, 200_000_000), ("im2col_conv", 0.0105, 20_000_000)), 1),
        (LARGE, "w", (("im2col_gemm", 0.0100, 200_000_000), ("im2col_conv", 0.0130, 20_000_000)), 0),
        # of two that are about as fast, the one with fewer nodes is taken
        (SMALL, "w", (("im2col_gemm", 100e-6, 0, 12), ("conv_swap", 101.5e-6, 0, 4)), 1),
        (SMALL, "w", (("im2col_gemm", 100e-6, 0, 12), ("conv_swap", 105e-6, 0, 4)), 0),
    ],
    ids=["cheapest", "less memory", "much faster", "fewer nodes", "faster"],
)
def test_the_cheapest_is_chosen(
    g: Geometry, wrt: str, prices: tuple[tuple, ...], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sketches = {name: Sketch(seconds, *(rest or [0])) for name, seconds, *rest in prices}
    monkeypatch.setattr(candidates, "_ways", lambda entry, *_, **__: [(1, sketches.get(entry.name, Sketch(1.0, 0)))])
    monkeypatch.setattr(candidates, "_CANDIDATES", {})
    assert og.explain(conv_model(g), wrt=[wrt]).rows[-1]["chosen"] == prices[chosen][0]


@pytest.mark.parametrize(("wrt", "operator"), [("x", "ConvInputGrad"), ("w", "ConvWeightGrad")])
def test_the_batch_is_cut_where_the_cache_holds_a_part_of_it(
    wrt: str, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not where it holds all, or where memory is as fast as the cache."""
    model = conv_model(case((16, 64, 56, 56), 64, (3, 3), begin=1))

    def chunks(**changes: float) -> int:
        target = targets.TARGETS["cpu"]
        changed = dataclasses.replace(target, rates=dataclasses.replace(target.rates, **changes))
        monkeypatch.setattr(pipeline, "calibrated", lambda _: changed)
        count: int = candidate(og.explain(model, wrt=[wrt]), operator, "winograd_4")["chunks"]
        return count

    default = targets.TARGETS["cpu"].rates
    assert chunks() > 1
    assert chunks(cache=1e10) == 1
    assert chunks(memory=default.cached, cached=default.cached) == 1
    assert chunks(node=1e-4) == 1  # for starting each part takes some time
    assert 1 < chunks(cache=2 * default.cache) <= chunks()


@pytest.mark.parametrize(("text", "count"), [("100", 100), ("64MB", 64_000_000), ("1.5g", 1_500_000_000)])
def test_sizes_on_the_command_line(text: str, count: int) -> None:
    assert option_text.size_in_bytes(text) == count


@pytest.mark.parametrize("text", ["", "many", "5TB", "MB"])
def test_bad_sizes_on_the_command_line(text: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match="is not a size"):
        option_text.size_in_bytes(text)
