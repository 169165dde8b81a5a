"""Packages of npm for tests: from `NODE_PATH`, or from a cache that npm fills."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import platformdirs
import pytest

VERSIONS = {
    "onnxruntime-node": "1.30.0",
    "onnxruntime-web": "1.30.0",
    "playwright-core": "1.65.1",
    "@sparticuz/chromium": "147.0.0",
}


@cache
def packages(name: str) -> Path:
    """A `node_modules` folder with the package; skips the test if it cannot be installed."""
    if shutil.which("node") is None:
        pytest.skip("Node.js is not installed.")
    for folder in map(Path, filter(None, os.environ.get("NODE_PATH", "").split(os.pathsep))):
        if (folder / name / "package.json").exists():
            return folder
    version = VERSIONS[name]
    cached = Path(platformdirs.user_cache_dir("onnx_convgrad")) / f"{name.replace('/', '+')}-{version}"
    if not (cached / "complete").exists():
        cached.mkdir(parents=True, exist_ok=True)
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(cached), f"{name}@{version}"]
        try:
            subprocess.run(
                [shutil.which("npm") or "npm", "install", *options], capture_output=True, check=True, timeout=100
            )
        except (subprocess.SubprocessError, OSError) as problem:
            pytest.skip(f"npm could not install {name}: {problem}")
        (cached / "complete").touch()
    return cached / "node_modules"
