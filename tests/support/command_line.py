"""The commands run in this process or in one of their own, and the model that they are given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper
from typer.testing import CliRunner, Result

from onnx_convgrad.cli.app import app


def invoke(*arguments: object, status: int = 0) -> Result:
    """Run a command in this process; it must end with this status."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    return result


def process(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onnx_convgrad", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "40"})


def convs() -> onnx.ModelProto:
    """Two convolutions over a batch of images of any size."""
    proto: onnx.ModelProto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 17]>
        g (float[N, 3, H, W] image) => (float[N, 4, P, Q] y) {
            a = Conv <pads = [1, 1, 1, 1]> (image, w1, b1)
            r = Relu (a)
            y = Conv <strides = [2, 2]> (r, w2)
        }""")
    generator = np.random.default_rng(0)
    for name, shape in {"w1": (4, 3, 3, 3), "b1": (4,), "w2": (4, 4, 3, 3)}.items():
        proto.graph.initializer.append(numpy_helper.from_array(generator.standard_normal(shape).astype("f"), name))
    return proto


def stored(folder: Path) -> Path:
    """The file of `convs` in a folder."""
    path = folder / "convs.onnx"
    onnx.save(convs(), path)
    return path
