"""Packages that are not always there: the error says what needs them, why they are missing, and how to install them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import onnx_convgrad as og
from onnx_convgrad.base.optional import imported


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert imported("json.decoder", "This needs json", "json") is sys.modules["json.decoder"]
    with pytest.raises(og.errors.ExecutionError, match="Plots need plots_, which is not installed") as caught:
        imported("plots_.lines", "Plots need plots_", "onnx-convgrad[plots]")
    assert caught.value.hint == "Install it with `pip install onnx-convgrad[plots]`."
    monkeypatch.setitem(sys.modules, "colorsys", None)
    with pytest.raises(og.errors.ExecutionError, match="which is not installed"):
        imported("colorsys", "This needs colorsys", "colorsys")


def test_a_package_that_lacks_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lacking.py").write_text("import another_package_\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(og.errors.ExecutionError, match="which cannot be imported: No module named 'another_package_'"):
        imported("lacking", "This needs lacking", "lacking")
