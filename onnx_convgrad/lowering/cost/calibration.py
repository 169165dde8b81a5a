"""The speeds of this machine: measured by `bench --calibrate`, else shipped for its processor.

One JSON file in the user's cache folder, `rates.json`, holds an entry per ONNX Runtime version, provider, number of
threads and processor. The environment variable `ONNX_CONVGRAD_CACHE` names another folder; an empty value turns all of
this off, so that every machine builds the same models.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from onnx_convgrad.base.drafts import write_text
from onnx_convgrad.base.warn import warn
from onnx_convgrad.ir.targets import Rates, TargetInfo
from onnx_convgrad.runtime.providers import PROVIDERS

_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX"}
_FILE = "rates.json"


def cores() -> int:
    """Processor cores available to this process: ONNX Runtime's default number of threads."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _cpuinfo() -> Mapping[str, str]:
    """The fields of Linux's `/proc/cpuinfo`; empty on other systems."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    pairs = (line.partition(":") for line in path.read_text(encoding="utf-8").splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


@cache
def processor() -> str:
    """Model of the processor and its widest vector unit, which decides the kernels."""
    cpuinfo = _cpuinfo()
    if not cpuinfo:
        return platform.processor() or platform.machine()
    width = next((text for flag, text in _VECTORS.items() if flag in cpuinfo.get("flags", "").split()), "")
    numbers = [f"{key.removeprefix('cpu ')} {cpuinfo[key]}" for key in ("cpu family", "model") if key in cpuinfo]
    kind = f"({', '.join(numbers)})" if numbers else ""  # some names do not tell the generation
    return " ".join(part for part in (cpuinfo.get("model name", platform.machine()), kind, width) if part)


_KNOWN = {
    # Zen 5: vector units of the full 512 bits, so that products are twice as fast with the same memory
    ("AuthenticAMD", "26"): Rates(
        gemm=5e11,
        small=18,
        cached=1.5e11,
        memory=6.5e10,
        cache=3.2e7,
        node=8.7e-7,
        item=9e-10,
        run=6e-9,
        tap=4e-11,
        alone=2.0,
    ),
}
"""Speeds, on two cores, of processors that differ from the default, by vendor and family."""


def shipped(target: TargetInfo, cpuinfo: Mapping[str, str] | None = None) -> TargetInfo:
    """The target with the shipped speeds of this processor, or of that of `cpuinfo`; unchanged if there are none."""
    cpuinfo = _cpuinfo() if cpuinfo is None else cpuinfo
    rates = _KNOWN.get((cpuinfo.get("vendor_id", ""), cpuinfo.get("cpu family", "")))
    return target if rates is None or target.name != "cpu" else replace(target, rates=rates)


@cache
def accelerator(folder: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """Model of the first GPU, from NVIDIA's driver on Linux."""
    for info in sorted(folder.glob("*/information")):
        for line in info.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "Model":
                return value.strip()
    return "GPU"


def key(target: str, threads: int | None = None) -> str:
    """Key of an entry: runtime version, provider, and the processor with its threads or the GPU."""
    where = accelerator() if target == "cuda" else f"{threads or cores()} threads; {processor()}"
    return f"onnxruntime {_runtime()}; {PROVIDERS[target]}; {where}"


@cache
def _runtime() -> str:
    """The installed version of ONNX Runtime, without importing it, which takes a second."""
    for package in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "none"


class Store:
    """The file of measured speeds. A damaged file counts as empty, with a warning."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Use `folder`, else the environment's, else the user's cache folder."""
        if folder is None:
            folder = os.environ.get("ONNX_CONVGRAD_CACHE")
        if folder is None:
            from platformdirs import user_cache_dir

            folder = user_cache_dir("onnx_convgrad", appauthor=False)
        self.path = Path(folder) / _FILE if str(folder) else None

    def read(self) -> dict[str, dict[str, float]]:
        """Every entry: key -> rate -> number."""
        if self.path is None or not self.path.is_file():
            return {}
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            return {name: {rate: float(value) for rate, value in rates.items()} for name, rates in stored.items()}
        except (ValueError, AttributeError, TypeError, OSError) as problem:
            warn(f"{self.path} is not readable and is ignored: {problem}.")
            return {}

    def write(self, name: str, rates: Rates) -> Path:
        """Add or replace an entry; the file is replaced atomically.

        Raises:
            OSError: The folder cannot be written, or the store is turned off.
        """
        if self.path is None:
            raise OSError("the store is turned off by an empty ONNX_CONVGRAD_CACHE")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        entries: dict[str, Any] = {**self.read(), name: asdict(rates)}
        write_text(self.path, json.dumps(entries, indent=2))
        return self.path


def source(target: TargetInfo, store: Store | None = None) -> str:
    """The origin of the speeds of `calibrated`: `"measured"` here, `"shipped"` for this processor, or `"default"`."""
    found, without = calibrated(target, store).rates, shipped(target).rates
    return "measured" if found not in (without, target.rates) else "default" if found == target.rates else "shipped"


def calibrated(target: TargetInfo, store: Store | None = None) -> TargetInfo:
    """The target with the speeds measured on this machine, else shipped for its processor, else unchanged."""
    store = store or Store()
    if target.name not in PROVIDERS or store.path is None:
        return target
    measured: Mapping[str, float] | None = store.read().get(key(target.name))
    names = {f.name for f in fields(Rates)}
    if measured is not None and set(measured) == names and all(v > 0 for k, v in measured.items() if k != "wave"):
        return replace(target, rates=Rates(**measured))
    return shipped(target)
