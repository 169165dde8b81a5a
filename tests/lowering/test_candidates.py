"""The choice among lowerings: predicted time, memory held, number of nodes, chunks that fit the cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import onnx_convgrad as og
from onnx_convgrad.ir import targets
from onnx_convgrad.lowering import candidates
from onnx_convgrad.lowering.sketch import Sketch
from onnx_convgrad.pipeline import built as pipeline
from onnx_convgrad.pipeline import option_text
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import build
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


LAYERS = [
    case((2, 3, 224, 224), 64, (7, 7), strides=2, begin=3),
    case((8, 64, 56, 56), 64, (3, 3), begin=1),
    case((2, 64, 56, 56), 128, (3, 3), strides=2, begin=1),
    case((2, 512, 7, 7), 512, (3, 3), begin=1),
    case((4, 256, 14, 14), 1024, (1, 1)),
    case((16, 96, 28, 28), 96, (7, 7), begin=3, groups=96),
    case((2, 144, 56, 56), 144, (3, 3), strides=2, begin=1, groups=144),
    case((4, 128, 28, 28), 128, (3, 3), begin=1, groups=32),
    case((4, 512, 2, 66), 512, (2, 2)),
    case((4, 512, 32, 32), 256, (3, 3), begin=18, dilations=18),
    case((2, 3, 224, 224), 96, (4, 4), strides=4),
    case((2, 1, 16000), 128, (80,), strides=4),
    case((4, 96, 4096), 48, (2,), begin=[128], end=[0], dilations=128),
    case((2, 16, 16, 24, 24), 32, (3, 3, 3), begin=1),
    case((6, 5, 9, 8), 7, (3, 2), strides=[2, 1], begin=1, end=[0, 2]),
]


def _choices(g: Geometry, *, compare: bool) -> list[str]:
    options = Options(wrt=["x", "w"], training=True, compare=compare)
    return [choice.way for choice in build(conv_model(g), options).choices]


@pytest.mark.parametrize("g", LAYERS, ids=str)
def test_what_is_not_priced_would_not_be_chosen(g: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    """No lowering takes less than what it is given up for: the nodes emitted so far, and its whole in the cache."""
    for cache in ("_SKETCHES", "_CANDIDATES"):
        monkeypatch.setattr(candidates, cache, {})
    quick, priced = _choices(g, compare=False), len(candidates._SKETCHES)
    sketch, sketched, least = candidates.sketch, candidates._sketched, candidates._least

    def again(*arguments: Any, most: float, **options: Any) -> Sketch:
        whole = sketch(*arguments, **options)
        assert sketch(*arguments, **options, most=whole.seconds * (1 + 1e-9)) == whole
        return whole

    def compared(entry: Any, node: Any, query: Any, chunks: int, *most: float) -> Sketch:
        found = sketched(entry, node, query, chunks, *most)
        if chunks != 1:
            assert found.seconds >= least(sketched(entry, node, query, 1), chunks, query), (entry.name, chunks)
        return found

    monkeypatch.setattr(candidates, "sketch", again)
    monkeypatch.setattr(candidates, "_sketched", compared)
    monkeypatch.setattr(candidates, "_least", lambda *_: 0.0)
    monkeypatch.setattr(candidates, "_SKETCHES", {})
    assert _choices(g, compare=True) == quick
    assert len(candidates._SKETCHES) > priced


@pytest.mark.parametrize(("text", "count"), [("100", 100), ("64MB", 64_000_000), ("1.5g", 1_500_000_000)])
def test_sizes_on_the_command_line(text: str, count: int) -> None:
    assert option_text.size_in_bytes(text) == count


@pytest.mark.parametrize("text", ["", "many", "5TB", "MB"])
def test_bad_sizes_on_the_command_line(text: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match="is not a size"):
        option_text.size_in_bytes(text)
