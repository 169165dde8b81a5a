"""Run a command with SwiftShader, a graphics processor in software, which Chromium brings along.

    python -m tests.support.software_gpu python -m pytest tests/backends/test_webgpu.py

It is taken from the distribution's Chromium, or from the one that npm installs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.node import packages

_LIBRARY = "libvk_swiftshader.so"
_SYSTEM = ("/usr/lib/chromium", "/usr/lib/chromium-browser", "/usr/lib64/chromium-browser")
_EXTRACT = "import('@sparticuz/chromium').then(async c => console.log(await c.default.executablePath()))"


def folder() -> Path:
    """The folder with SwiftShader and the Vulkan loader; raises `pytest.skip.Exception` if there is none."""
    for system in map(Path, _SYSTEM):
        if (system / _LIBRARY).exists():
            return system
    modules = packages("@sparticuz/chromium")
    done = subprocess.run(
        ["node", "--input-type=module", "-e", _EXTRACT],
        capture_output=True,
        text=True,
        check=True,
        cwd=modules.parent,
        timeout=100,
    )
    return Path(done.stdout.strip()).parent


def main(command: list[str]) -> None:
    """Replace this process by the command."""
    try:
        found = folder()
    except pytest.skip.Exception as missing:
        sys.stderr.write(f"No graphics processor in software: {missing}\n")
    else:
        os.environ["VK_ICD_FILENAMES"] = str(found / "vk_swiftshader_icd.json")
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([str(found), os.environ.get("LD_LIBRARY_PATH", "")])
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
