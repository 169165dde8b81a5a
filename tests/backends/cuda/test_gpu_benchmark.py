"""The GPU benchmark on the CPU: every part runs; without a GPU it says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.rows import Clock, Row, show
from onnx_convgrad.runtime import import_runtime
from onnx_convgrad.runtime.providers import CUDA


@pytest.mark.slow
def test_every_part_runs_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "rows.json"
    assert main(["--provider", "cpu", "--quick", "--jobs", "2", "--json", str(saved)]) == 0
    table = capsys.readouterr().out
    assert "0 failed" in table
    assert "ConvWeightGrad by im2col_gemm" in table
    rows = json.loads(saved.read_text())["rows"]
    timed = [row for row in rows if row["seconds"][1]]
    assert {row["precision"] for row in timed} == {"float32", "float16"}
    assert any("MobileNetV2" in row["what"] for row in timed)
    assert sum(row["error"] is not None for row in rows) > 20


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if CUDA in import_runtime().get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    assert main([]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("Nothing is measured: ONNX Runtime ")


def test_a_failure_is_one_row() -> None:
    def broken() -> Row:
        raise ValueError("no memory\nleft")

    (row,) = Clock(1.0).row("a layer", "float32", broken)
    assert row.failed
    assert row.note == "failed: no memory left"
    assert Row(what="x", error=2e-5, limit=1e-4).failed is False
    assert Row(what="x", error=2e-3, limit=1e-4).failed


def test_nothing_starts_after_the_time_limit() -> None:
    (row,) = Clock(0.0).row("a layer", "float16", lambda: pytest.fail("it began"))
    assert row.note == "left out: 0 minutes are over"
    assert not row.failed


def test_only_the_wanted_rows_are_measured() -> None:
    clock = Clock(1.0, ["unet, batch 16, PyTorch float16"])
    names = [("unet, batch 16, PyTorch", "float32"), ("unet, batch 16, PyTorch", "float16"), ("a layer", "float16")]
    rows = [
        row for name, kind in names for row in clock.row(name, kind, lambda kind: Row(what="row", precision=kind), kind)
    ]
    assert [row.precision for row in rows] == ["float16"]


def test_the_table_shows_pairs_and_ratios() -> None:
    row = Row(what="net", seconds=(0.010, 0.005), memory=(2_000_000, None), launches=(120, 240), error=1e-6, limit=1e-4)
    cells = [cell.strip() for cell in show([row]).splitlines()[2].split("|")][1:-1]
    assert cells == ["net", "float32", "1.0e-06", "10.00", "5.00", "0.50", "2 / -", "120 / 240", ""]
