"""The provider of each node: reported by the runtime, or predicted by the table of CUDA's kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import onnx_convgrad as og
from onnx_convgrad.backends.cuda.cuda_kernels import Lack
from onnx_convgrad.cli.placement import _placed, placement, predicted_placement
from onnx_convgrad.runtime.providers import CPU, CUDA
from tests.support.command_line import invoke
from tests.support.one_input import graph_of

MODEL = graph_of(
    "(float[N,3,5] x) => (float[N,a] y)"
    " <int64[1] minus = {-1}, int64[1] zero = {0}>"
    " { [shape] s = Shape (x) [gather] n = Gather (s, zero) [concat] to = Concat <axis = 0> (n, minus)"
    " [celu] c = Celu (x) [reshape] y = Reshape (c, to) }",
    opset=21,
)


def test_on_the_cpu_everything_is_on_the_cpu() -> None:
    found = placement(MODEL)
    assert found.wanted == CPU
    assert found.counts == {CPU: 5}
    assert found.fallen == ()
    assert "fell back" not in str(found)


def test_fallen_nodes_are_distinguished_from_size_arithmetic() -> None:
    """The runtime records one group per node; Gather and Concat are on the CPU because they compute a shape."""
    groups = [
        (CUDA, [("shape", "Shape")]),
        (CPU, [("gather", "Gather")]),
        (CPU, [("concat", "Concat")]),
        (CPU, [("celu", "Celu")]),
        (CUDA, [("reshape", "Reshape")]),
    ]
    found = _placed(MODEL, groups, CUDA, "a test")
    assert found.counts == {CUDA: 2, CPU: 3}
    assert found.arithmetic == 2
    assert found.fallen == (Lack("celu", "Celu", "CUDA has no such operator", arithmetic=False),)
    assert str(found).splitlines() == [
        "Placement (a test)",
        "provider  nodes",
        "cuda          2",
        "cpu           3  1 fell back, 2 compute sizes",
        "",
        "fell back to the CPU  operator  because",
        "celu                  Celu      CUDA has no such operator",
    ]


def test_the_table_of_kernels_predicts_it() -> None:
    found = predicted_placement(MODEL)
    assert found.fallen == (Lack("celu", "Celu", "CUDA has no such operator", arithmetic=False),)
    assert found.counts == {CUDA: 4, CPU: 1}


def test_an_old_runtime_that_reports_no_placement_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx_convgrad.cli import placement as module

    monkeypatch.setattr(module, "session", lambda *_, **__: object())
    with pytest.raises(og.errors.ExecutionError, match=r"Install 1\.24 or later"):
        placement(MODEL)


def test_explain_shows_the_placement(digits_cnn: Path) -> None:
    assert "Placement (ONNX Runtime " in invoke("explain", digits_cnn, "--placement").stdout
    result = invoke("explain", digits_cnn, "--placement", "--target", "cuda")
    assert "Placement (predicted from the provider's kernels)" in result.stdout
    assert "0 fell back" in result.stdout


def test_explain_gives_the_placement_as_json(digits_cnn: Path) -> None:
    result = invoke("explain", digits_cnn, "--target", "cuda", "--placement", "--json")
    placed = json.loads(result.stdout)["placement"]
    assert placed["wanted"] == CUDA
    assert placed["fallen"] == []
    assert placed["nodes"][CUDA] > 50
    assert "placement" not in json.loads(invoke("explain", digits_cnn, "--json").stdout)


def test_explain_reports_a_missing_cuda_provider(digits_cnn: Path) -> None:
    import onnxruntime

    if CUDA in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    result = invoke("explain", digits_cnn, "--providers", "cuda", status=2)
    assert result.stdout == ""
    assert f"has no {CUDA} here" in result.stderr
