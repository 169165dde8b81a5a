"""Which provider runs each node, by the runtime's account and by the table of CUDA's kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import parser

import onnx_convgrad as og
from onnx_convgrad.cli.app import main
from onnx_convgrad.cli.placement import Fallen, _placed, placement, predicted_placement
from onnx_convgrad.runtime.providers import CPU, CUDA

MODEL = parser.parse_model(
    '<ir_version: 10, opset_import: ["" : 21]> g (float[N,3,5] x) => (float[N,a] y)'
    " <int64[1] minus = {-1}, int64[1] zero = {0}>"
    " { s = Shape (x) n = Gather (s, zero) to = Concat <axis = 0> (n, minus) c = Celu (x) y = Reshape (c, to) }"
)


def _named() -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.CopyFrom(MODEL)
    for node in model.graph.node:
        node.name = node.op_type.lower()
    return model


def test_on_the_cpu_everything_is_on_the_cpu() -> None:
    found = placement(MODEL)
    assert found.wanted == CPU
    assert found.counts == {CPU: 5}
    assert found.fallen == ()
    assert "fell back" not in str(found)


def test_what_fell_back_is_told_from_arithmetic_on_sizes() -> None:
    """As the runtime records it: one group per node, Gather and Concat on the CPU because they compute a shape."""
    groups = [
        (CUDA, [("shape", "Shape")]),
        (CPU, [("gather", "Gather")]),
        (CPU, [("concat", "Concat")]),
        (CPU, [("celu", "Celu")]),
        (CUDA, [("reshape", "Reshape")]),
    ]
    found = _placed(_named(), groups, CUDA, "a test")
    assert found.counts == {CUDA: 2, CPU: 3}
    assert found.arithmetic == 2
    assert found.fallen == (Fallen("celu", "Celu", "CUDA has no such operator"),)
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
    found = predicted_placement(_named())
    assert found.fallen == (Fallen("celu", "Celu", "CUDA has no such operator"),)
    assert found.counts == {CUDA: 4, CPU: 1}


def test_a_newer_runtime_is_asked_for_where_one_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnx_convgrad.cli import placement as module

    monkeypatch.setattr(module, "session", lambda *_, **__: object())
    with pytest.raises(og.ExecutionError, match=r"Install 1\.24 or later"):
        placement(MODEL)


def _explain(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["explain", *map(str, words)])
    told = capsys.readouterr()
    return int(caught.value.code or 0), told.out, told.err


def test_explain_shows_the_placement(digits_cnn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = _explain(capsys, digits_cnn, "--placement")
    assert status == 0
    assert "Placement (ONNX Runtime " in out
    status, out, _ = _explain(capsys, digits_cnn, "--placement", "--target", "cuda")
    assert status == 0
    assert "Placement (predicted from CUDA's kernels)" in out
    assert "0 fell back" in out


def test_explain_gives_the_placement_as_json(digits_cnn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = _explain(capsys, digits_cnn, "--target", "cuda", "--placement", "--json")
    found = json.loads(out)["placement"]
    assert found["wanted"] == CUDA
    assert found["fallen"] == []
    assert found["nodes"][CUDA] > 50
    _, out, _ = _explain(capsys, digits_cnn, "--json")
    assert "placement" not in json.loads(out)


def test_explain_says_when_there_is_no_cuda(digits_cnn: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import onnxruntime

    if CUDA in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    status, out, err = _explain(capsys, digits_cnn, "--providers", "cuda")
    assert status == 2
    assert out == ""
    assert f"has no {CUDA} here" in err
