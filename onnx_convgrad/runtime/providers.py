"""Resolve names and options of execution providers, register those in packages of their own, check that CUDA can run.

If ONNX Runtime cannot load a provider, it prints a line on stderr and creates a session on the CPU. Here that is an error
that names the missing libraries and the packages that provide them.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onnx_convgrad.base.names import unknown
from onnx_convgrad.base.optional import install, installing
from onnx_convgrad.errors import ArgumentError, ExecutionError
from onnx_convgrad.runtime import plugins
from onnx_convgrad.runtime.session_options import SessionOptions, cuda_options

Provider = str | tuple[str, Mapping[str, Any]]
Providers = Provider | Sequence[Provider]
"""`"cpu"`, `"cuda"`, `"cuda:1"`, `"webgpu"`, `"openvino"` and the like, ONNX Runtime's own names, pairs `(name, options)`,
or a sequence of these."""

CPU, CUDA, WEBGPU = "CPUExecutionProvider", "CUDAExecutionProvider", "WebGpuExecutionProvider"
PROVIDERS = {"cpu": CPU, "cuda": CUDA, "webgpu": WEBGPU}

_INSTALL = install("onnxruntime-gpu")
_PACKAGES = {
    "libcudart": "nvidia-cuda-runtime",
    "libcublasLt": "nvidia-cublas",
    "libcublas": "nvidia-cublas",
    "libcurand": "nvidia-curand",
    "libcudnn": "nvidia-cudnn-cu{major}",
    "libcuda": "the NVIDIA driver",
}
_DRIVER = "libcuda.so.1"


def resolve_providers(
    given: Providers | None, options: SessionOptions | None = None
) -> list[tuple[str, dict[str, str]]]:
    """Convert to ONNX Runtime's `(name, options)` pairs; options in a pair override `options`.

    Raises:
        ArgumentError: A member is neither a name nor a pair of a name and options.
        ExecutionError: The package of a provider is not installed, or does not load.
    """
    if given is None:
        given = "cpu"
    single = isinstance(given, str) or _is_pair(given) or not isinstance(given, Iterable)
    members = [given] if single else list(given)
    resolved: dict[str, dict[str, str]] = {}
    for member in members:
        name, specified = _split(member)
        base = cuda_options(options or SessionOptions()) if name == CUDA else {}
        resolved[name] = {**base, **specified}
    if not resolved:
        raise ArgumentError("providers is empty.", hint='Name at least one, for example providers=["cpu"].')
    return list(resolved.items())


def _is_pair(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)


def _split(member: Any) -> tuple[str, dict[str, str]]:
    name, options = member if _is_pair(member) else (member, {})
    if not isinstance(name, str):
        raise ArgumentError(
            f"A provider is a name or a pair (name, options), not {member!r}.",
            hint='For example providers=["cuda"] or providers=[("cuda", {"device_id": 1})].',
        )
    short, _, device = name.partition(":")
    if device:
        if short.lower() != "cuda" or not device.isdecimal():
            raise ArgumentError(f"Unknown provider {name!r}.", hint='A device is given as "cuda:1".')
        options = {"device_id": device, **options}
    known = short if short.endswith("ExecutionProvider") else full_name(short)
    return known, {key: str(int(value) if isinstance(value, bool) else value) for key, value in options.items()}


def full_name(short: str) -> str:
    """ONNX Runtime's name of a provider, from the part before `ExecutionProvider` or the name of its package.

    Raises:
        ArgumentError: There is no such provider.
        ExecutionError: Its package is not installed, or does not load.
    """
    found = PROVIDERS.get(short.lower()) or plugins.known_to_runtime(short) or plugins.named(short)
    if found is not None:
        return found
    package = plugins.package_of(short)
    if package is not None:
        raise ExecutionError(f"The provider {short!r} is not installed.", hint=f"{installing(package)}.")
    names = dict.fromkeys([*PROVIDERS, *plugins.PACKAGES])
    raise unknown(short, list(names), "provider", "ONNX Runtime's own names are taken, too.")


def short_name(name: str) -> str:
    """The part of a provider's name before `ExecutionProvider`, in lower case."""
    return name.removesuffix("ExecutionProvider").lower()


# -- availability ------------------------------------------------------------------------------------------------------


def check_available(ort: Any, wanted: Sequence[str]) -> None:
    """Raise `ExecutionError` if a provider cannot run here, since ONNX Runtime would silently fall back to the CPU."""
    available = ort.get_available_providers()
    for name in wanted:
        if name not in available and not plugins.register(ort, name):
            raise ExecutionError(
                f"ONNX Runtime {ort.__version__} has no {name} here; it has {', '.join(available)}.",
                hint=_source(name),
            )
    if CUDA in wanted:
        _check_cuda(ort)


def _source(name: str) -> str:
    """The commands that install a provider; empty if unknown."""
    package = plugins.package_of(name)
    if name == CUDA:
        build = _INSTALL
    elif package in plugins.BUILDS:
        build = installing(package)
    else:
        return f"{installing(package)} brings it." if package else ""
    if not _cpu_only():
        return ""
    return f"`python -m pip uninstall -y onnxruntime`, then {build}: the two packages share a folder."


def _cpu_only() -> bool:
    from importlib.metadata import PackageNotFoundError, version

    with contextlib.suppress(PackageNotFoundError):
        return bool(version("onnxruntime"))
    return False


def _check_cuda(ort: Any) -> None:
    if hasattr(ort, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):  # it prints messages on missing libraries
            ort.preload_dlls()
    version = str(getattr(ort, "cuda_version", "") or "13").partition(".")[0]
    major = int(version) if version.isdecimal() else 13
    missing = missing_libraries(major)
    if missing:
        sources = (_PACKAGES[name.partition(".")[0]].format(major=major) for name in missing)
        listed = "; ".join(f"{name} ({source})" for name, source in zip(missing, sources, strict=True))
        hint = f"{_INSTALL} installs them."
        if _DRIVER in missing:
            hint = f"Install the NVIDIA driver{'' if len(missing) == 1 else f'; {_INSTALL} installs the rest'}."
        raise ExecutionError(f"ONNX Runtime's CUDA provider cannot be loaded: missing {listed}.", hint=hint)
    if _devices() == 0:
        raise ExecutionError(
            "The CUDA libraries are here, but the NVIDIA driver shows no GPU.",
            hint='See `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use providers=["cpu"].',
        )


def missing_libraries(major: int) -> list[str]:
    """The shared libraries of CUDA `major` that ONNX Runtime needs and that cannot be loaded; on Linux only."""
    if sys.platform != "linux":
        return []
    needed = [f"libcudart.so.{major}", f"libcublasLt.so.{major}", f"libcublas.so.{major}", "libcurand.so.10"]
    return [name for name in (*needed, "libcudnn.so.9", _DRIVER) if not _loads(name)]


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _devices() -> int | None:
    """Number of GPUs that the driver reports; `None` if unknown."""
    if sys.platform != "linux":
        return None
    driver = ctypes.CDLL(_DRIVER)
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0:
        return 0
    return count.value if driver.cuDeviceGetCount(ctypes.byref(count)) == 0 else 0
