"""The commands run in this process or in one of their own, and the model that they are given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
from typer.testing import CliRunner, Result

from onnx_convgrad.cli.app import app
from tests.support.one_input import graph_of


def invoke(*arguments: object, status: int = 0) -> Result:
    """Run a command in this process; it must end with this status."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    return result


def process(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own; it must end with this status."""
    command, environment = (
        [sys.executable, "-m", "onnx_convgrad", *map(str, arguments)],
        {**os.environ, "COLUMNS": "40"},
    )
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == status, result.stdout + result.stderr
    return result


def convs() -> onnx.ModelProto:
    """Two convolutions over a batch of images of any size."""
    text = """(float[N, 3, H, W] image) => (float[N, 4, P, Q] y) {
            a = Conv <pads = [1, 1, 1, 1]> (image, w1, b1) r = Relu (a) y = Conv <strides = [2, 2]> (r, w2)
        }"""
    generator = np.random.default_rng(0)
    shapes = {"w1": (4, 3, 3, 3), "b1": (4,), "w2": (4, 4, 3, 3)}
    return graph_of(text, **{name: generator.standard_normal(shape).astype("f") for name, shape in shapes.items()})


def stored(folder: Path) -> Path:
    """The file of `convs` in a folder."""
    path = folder / "convs.onnx"
    onnx.save(convs(), path)
    return path
