"""`bench --memory`: the gradients of a model at several memory budgets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onnx_convgrad.bench import memory_curve
from onnx_convgrad.bench.memory_curve import BUDGETS, MemoryPoint
from tests.support.command_line import invoke

SHAPE = ("--training", "--input-shape", "image:64,1,8,8")


@pytest.mark.slow
def test_budgets_are_timed_and_drawn(digits_cnn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, measured = memory_curve.memory_curve, []

    def once(*arguments: Any, **options: Any) -> list[MemoryPoint]:
        measured.append(measured[0] if measured else measure(*arguments, **options))
        return measured[0]

    monkeypatch.setattr(memory_curve, "memory_curve", once)
    picture = tmp_path / "memory.png"
    printed = invoke("bench", digits_cnn, *SHAPE, "--memory", "--repeat", 1, "--plot", picture).stdout
    assert max(map(len, printed.partition("\n\n")[0].splitlines())) <= 80
    assert "memory, predicted" in printed
    assert picture.stat().st_size > 1000
    points = json.loads(invoke("bench", digits_cnn, *SHAPE, "--memory", "--repeat", 1, "--json").stdout)["budgets"]
    assert [p["budget"] for p in points] == list(BUDGETS)
    timed = {str(p["budget"]): p for p in points if not p["refusal"]}
    assert {"None", "min"} <= timed.keys()
    assert all(p["seconds"] > 0 for p in timed.values())
    assert timed["min"]["memory"] == min(p["memory"] for p in timed.values())
    assert all("needs at least" in p["refusal"] for p in points if p["refusal"])


def test_it_excludes_the_other_measurements(digits_cnn: Path) -> None:
    assert "leave out --quick" in invoke("bench", digits_cnn, "--memory", "--quick", status=2).stderr
