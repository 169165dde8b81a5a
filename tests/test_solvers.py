"""The programs of the page about solvers find the same angles."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.peers
def test_scipy_and_casadi_agree() -> None:
    pytest.importorskip("casadi", reason="casadi is not installed")
    page = (ROOT / "docs/how_to/solvers.md").read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert re.findall(r"angles \[(.*?)\]", done.stdout) == ["0.202 1.349"] * 2
