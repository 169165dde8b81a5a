"""Execution providers in packages of their own, which ONNX Runtime loads from a shared library.

Such a package has functions `get_library_path()` and `get_ep_names()`:
https://onnxruntime.ai/docs/execution-providers/plugin-ep-libraries/
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from typing import Any

from onnx_convgrad.base.optional import installing
from onnx_convgrad.errors import ExecutionError

PACKAGES = {
    "openvino": "onnxruntime-ep-openvino",
    "webgpu": "onnxruntime-ep-webgpu",
    "nv-tensorrt-rtx": "onnxruntime-ep-nv-tensorrt-rtx",
    "mlx": "onnxruntime-ep-mlx",
    "qnn": "onnxruntime-qnn",
    "ggml": "onnxruntime-ggml",
    "directml": "onnxruntime-directml",
    "migraphx": "onnxruntime-migraphx",
}
"""Short name of a provider -> the package that has it."""

BUILDS = ("onnxruntime-directml", "onnxruntime-migraphx")
"""Packages that are builds of ONNX Runtime: they replace the package `onnxruntime`."""

_OTHER_NAMES = {"dml": "directml"}
"""Name in ONNX Runtime -> name of the package, where they differ."""

_found: dict[str, Any] = {}
"""Provider -> its package, where that was found by another name."""

_registered: set[str] = set()


def known_to_runtime(short: str) -> str | None:
    """The provider of this short name that the installed ONNX Runtime, in any build, has a name for."""
    with contextlib.suppress(ImportError):
        import onnxruntime

        return next((full for full in onnxruntime.get_all_providers() if _plain(full) == _plain(short)), None)
    return None


def named(short: str) -> str | None:
    """The first provider of the installed package of this short name."""
    module = _module(short)
    if module is None:
        return None
    name = _names(module)[0]
    _found[name] = module
    return name


def package_of(name: str) -> str | None:
    """The package that has a provider."""
    return next((package for short, package in PACKAGES.items() if _plain(short) == _plain(name)), None)


def register(ort: Any, name: str) -> bool:
    """Register a provider with ONNX Runtime if a package that has it is installed; return whether it is.

    Raises:
        ExecutionError: Its library does not load, or finds no device.
    """
    module = _found.get(name) or _module(name)
    if module is None or name not in _names(module):
        return False
    package = module.__name__.replace("_", "-")
    if name not in _registered:
        find = getattr(module, "get_library_path", None) or module.library_path  # the second in onnxruntime_ggml
        try:
            ort.register_execution_provider_library(name, str(find()))
        except Exception as problem:
            raise ExecutionError(
                f"The provider of {package} does not load in ONNX Runtime {ort.__version__}: {f'{problem}'.rstrip('.')}.",
                hint=f"{installing('-U onnxruntime ' + package)} brings versions that fit.",
            ) from problem
        _registered.add(name)
    if name not in {device.ep_name for device in ort.get_ep_devices()}:
        raise ExecutionError(
            f"{name} of {package} finds no device that it can use here.",
            hint=f"`python -m pip show {package}` names its home page, which lists devices, drivers and libraries.",
        )
    return True


def _module(name: str) -> Any:
    """The installed package of a provider, such as `onnxruntime_ep_openvino`; `None` if there is none."""
    for found in pkgutil.iter_modules():
        if found.name.startswith("onnxruntime_") and _plain(found.name) == _plain(name):
            module = importlib.import_module(found.name)
            return module if _names(module) else None
    return None


def _names(module: Any) -> tuple[str, ...]:
    """The providers of a package."""
    if hasattr(module, "get_ep_names"):
        return tuple(module.get_ep_names())
    return (module.EP_NAME,) if hasattr(module, "EP_NAME") else ()


def _plain(name: str) -> str:
    """A name in lower case without affixes and dashes, so that those of packages and providers compare: `nvtensorrtrtx`."""
    bare = name.removesuffix("ExecutionProvider").lower().replace("-", "_")
    bare = bare.removeprefix("onnxruntime_").removeprefix("ep_").replace("_", "")
    return _OTHER_NAMES.get(bare, bare)
