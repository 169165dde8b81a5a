"""Gradients on an execution provider are compared with the CPU's; falling back, failing and wrong numbers are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from onnx_convgrad.checking import check as module
from onnx_convgrad.checking.check import compare_with_cpu
from onnx_convgrad.errors import ExecutionError
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import build
from onnx_convgrad.runtime.providers import CPU
from tests.support.command_line import invoke
from tests.support.one_input import graph_of

_WEIGHT = ", ".join(f"{v:.4f}" for v in np.random.default_rng(0).standard_normal(54))
MODEL = graph_of(
    f"(float[N,3,6,6] x) => (float[N,2,a,b] y) <float[2,3,3,3] w = {{{_WEIGHT}}}>"
    " { c = Conv (x, w) r = Relu (c) y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r) }",
    opset=21,
)


def built() -> Built:
    return build(MODEL, Options(wrt="all", outputs=False))


def test_the_cpu_agrees_with_itself() -> None:
    report = compare_with_cpu(built(), CPU, seed=3)
    assert report.passed
    assert [row.value for row in report.rows] == ["x", "w"]
    assert max(row.error for row in report.rows) < 1e-5
    assert json.loads(json.dumps(report.to_dict()))["inputs"] == {"x": [2, 3, 6, 6]}
    assert compare_with_cpu(built(), "cpu", seed=3).rows == report.rows


def test_wrong_numbers_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = module.run_gradients, []

    def run(b: Built, opened: Any, feed: Any) -> dict[str, np.ndarray]:
        calls.append(1)
        got = real(b, opened, feed)
        return {k: v * (1.01 if k == "w" and len(calls) == 2 else 1) for k, v in got.items()}

    monkeypatch.setattr(module, "run_gradients", run)
    report = compare_with_cpu(built(), CPU)
    assert not report.passed
    assert [row.verdict for row in report.rows] == ["ok", "FAIL"]
    assert report.rows[1].error == pytest.approx(0.01, rel=1e-3)


def test_a_provider_that_fails_is_a_failed_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real, calls = module.run_gradients, []

    def run(b: Built, opened: Any, feed: Any) -> dict[str, np.ndarray]:
        calls.append(1)
        if len(calls) == 2:
            raise ExecutionError("The Indices output is not supported yet.")
        return real(b, opened, feed)

    monkeypatch.setattr(module, "run_gradients", run)
    onnx.save(MODEL, tmp_path / "model.onnx")
    text = invoke("check", tmp_path / "model.onnx", "--provider", "cpu", status=1).output
    assert "FAIL: The Indices output is not supported yet." in text
    assert "0 of 2 gradients on CPUExecutionProvider agree with the CPU." in text


def test_the_command_compares_with_the_cpu(tmp_path: Path) -> None:
    onnx.save(MODEL, tmp_path / "model.onnx")
    text = invoke("check", tmp_path / "model.onnx", "--provider", "CPU").output
    assert "2 of 2 gradients on CPUExecutionProvider agree with the CPU." in text
    report = json.loads(invoke("check", tmp_path / "model.onnx", "--provider", "cpu", "--json").output)
    assert (report["passed"], report["target"], report["placement"]["fallen"]) == (True, "cpu", [])


def test_nodes_that_fall_back_fail_the_check(tmp_path: Path) -> None:
    if "AzureExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("This ONNX Runtime has no provider without kernels.")
    onnx.save(MODEL, tmp_path / "model.onnx")
    text = invoke("check", tmp_path / "model.onnx", "--provider", "azure", status=1).output
    assert "target portable" in text
    assert "nodes fell back to the CPU." in text
