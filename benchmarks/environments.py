"""Virtual environments for the peers that cannot share ours, made on first use in the user's cache folder."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "onnx_convgrad" / "benchmarks"

# onnxruntime-training imports PyTorch: install the version that we have.
TORCH = version("torch").split("+")[0]
PACKAGES = {
    "ort-training": [
        "onnxruntime-training-cpu==1.19.2",
        "onnx==1.16.2",
        "numpy<2",
        f"torch=={TORCH}",
    ],
    "jax": ["jax==0.8.1", "torchax==0.0.14.dev20261026", f"torch=={TORCH}", "onnx", "numpy"],
    "onnxsim": ["onnxsim==0.8.1", "onnxruntime", "onnx-shape-inference", "numpy"],
    "onnx-ad": ["onnx-ad==0.3.0"],
    "peft": [
        "peft==0.21.2",
        "transformers==5.24.0",
        "bitsandbytes==0.50.2",
        "onnxruntime-genai==0.18.0",
        "onnx-ir",
        f"torch=={TORCH}",
    ],
}


def environment(name: str) -> Path | None:
    """The Python of an environment; if it cannot be made, print the reason and return None."""
    folder = CACHE / name
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    done = folder / "complete"
    if done.exists():
        return python
    print(f"Making an environment for {', '.join(PACKAGES[name])} in {folder}", file=sys.stderr)
    venv.create(folder, with_pip=True, clear=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[name]]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        print(f"{name} is left out: {(result.stderr.strip() or 'pip failed').splitlines()[-1]}", file=sys.stderr)
        return None
    done.touch()
    return python
