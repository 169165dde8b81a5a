"""Execution providers in packages of their own are found by name and registered."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from onnx_convgrad.errors import ConvGradError, ExecutionError
from onnx_convgrad.runtime import plugins
from onnx_convgrad.runtime.providers import check_available, full_name, resolve_providers, short_name

NAME = "TinyExecutionProvider"
PACKAGE = f"""
def get_library_path():
    return "/nowhere/libtiny.so"

def get_ep_names():
    return ["{NAME}"]
"""


class _Runtime:
    """The parts of `onnxruntime` that registration uses."""

    __version__ = "1.32.0"

    def __init__(self, *devices: str, problem: str = "") -> None:
        self.devices, self.problem = devices, problem
        self.registered: list[tuple[str, str]] = []

    def get_available_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]

    def register_execution_provider_library(self, name: str, path: str) -> None:
        if self.problem:
            raise RuntimeError(self.problem)
        self.registered.append((name, path))

    def get_ep_devices(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(ep_name=name) for name in self.devices]


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with one provider, and one with another kind of library."""
    (tmp_path / "onnxruntime_ep_tiny_one.py").write_text(PACKAGE, encoding="utf-8")
    (tmp_path / "onnxruntime_operators.py").write_text("def get_library_path(): return ''", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "_registered", set())
    monkeypatch.setattr(plugins, "_found", {})
    for name in ("onnxruntime_ep_tiny_one", "onnxruntime_operators"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("given", ["tiny-one", "tiny_one", "TinyOne", ["tiny-one"], ("tiny-one", {"threads": 2})])
def test_an_installed_package_is_found_by_its_name(given: object) -> None:
    (found,) = resolve_providers(given)  # type: ignore[arg-type]
    assert found == (NAME, {"threads": "2"} if isinstance(given, tuple) else {})


def test_it_is_registered_once() -> None:
    runtime = _Runtime(NAME)
    name = full_name("tiny-one")
    for _ in range(2):
        check_available(runtime, [name])
    assert runtime.registered == [(NAME, "/nowhere/libtiny.so")]
    assert short_name(name) == "tiny"


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        (_Runtime(), "of onnxruntime-ep-tiny-one finds no device that it can use here"),
        (
            _Runtime(NAME, problem="too old"),
            r"does not load in ONNX Runtime 1.32.0: too old. `python -m pip install -U",
        ),
    ],
)
def test_a_provider_that_cannot_run_is_an_error(runtime: _Runtime, message: str) -> None:
    with pytest.raises(ExecutionError, match=message):
        check_available(runtime, [full_name("tiny-one")])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mlx", "'mlx' is not installed. `python -m pip install onnxruntime-ep-mlx`"),
        ("operators", "Unknown provider 'operators'. There are: cpu, cuda"),
    ],
)
def test_a_package_that_is_missing_is_named(name: str, message: str) -> None:
    with pytest.raises(ConvGradError, match=message):
        full_name(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("OpenVINOExecutionProvider", "`python -m pip install onnxruntime-ep-openvino` brings it"),
        ("DmlExecutionProvider", "uninstall -y onnxruntime`, then `python -m pip install onnxruntime-directml`"),
    ],
)
def test_what_brings_a_provider_is_named(name: str, message: str) -> None:
    with pytest.raises(ExecutionError, match=message):
        check_available(_Runtime(), [name])


def test_names_that_the_runtime_knows() -> None:
    assert [full_name(name) for name in ("CoreML", "directml", "MIGraphX")] == [
        "CoreMLExecutionProvider",
        "DmlExecutionProvider",
        "MIGraphXExecutionProvider",
    ]
