"""Odd command lines end in a result or one paragraph, with exit status 0, 2 or 3."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.fuzz
def test_odd_command_lines(root: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.command_lines", "40", "0"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, timeout=150)
    assert result.returncode == 0, result.stdout + result.stderr
