"""A headless Chromium, driven by Node: that of the system (`CHROMIUM`, or on the path), or one from npm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onnx_convgrad.cli.web import site_server

_DRIVER = Path(__file__).parents[1] / "browser" / "drive.mjs"


def chromium() -> str:
    """The browser of the system, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), "")


def served(site: Path) -> Iterator[str]:
    """The address of a site while it is served."""
    server = site_server(site)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join()


def drive(node_modules: Path, address: str, scenario: str, *, seconds: int = 170, **options: Any) -> dict[str, Any]:
    """Run a scenario of `drive.mjs`; skips the test if the browser cannot be started."""
    script = shutil.copy(_DRIVER, node_modules.parent)
    command = ["node", str(script), address, scenario, json.dumps({"browser": chromium(), **options}, default=str)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    if "browserType.launch" in done.stderr:
        pytest.skip(f"Chromium cannot be started: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["problems"] == []
    return result
