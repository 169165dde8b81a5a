"""A short hunt with the fuzzer: every damaged model gets a typed error or the right answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from hypothesis import given, settings

import onnx_convgrad as og
from tests.fuzz.judge import failure
from tests.fuzz.strategies import operator_models

pytestmark = pytest.mark.fuzz


def test_damaged_models_get_a_typed_error_or_the_right_answer(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--count", "100", "--shrink", "1", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, timeout=150)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ok (compared)" in result.stdout and (tmp_path / "finds.md").exists()


@given(operator_models())
@settings(max_examples=100)
@pytest.mark.filterwarnings("ignore")
def test_nodes_of_any_operator_get_a_typed_error_or_gradients(model: onnx.ModelProto) -> None:
    try:
        og.augment(model, wrt="inputs")
    except Exception as problem:  # noqa: BLE001 - what is thrown is the question
        verdict = failure(problem)
    else:
        return
    assert not verdict.find, verdict
