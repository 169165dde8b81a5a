"""Measure the memory of a graph in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of a process in /proc")

PROGRAM = """
import re, sys
import numpy, onnxruntime

def bytes_of(what):
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(what + ":\\s+(\\d+) kB", file.read())[1])

options = onnxruntime.SessionOptions()
options.enable_mem_pattern = options.enable_mem_reuse = False
options.intra_op_num_threads, options.log_severity_level = 2, 4
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
kinds = {f"tensor({name})": name for name in ("int32", "int64", "bool")} | {"tensor(float)": "float32"}
feed = {i.name: numpy.full(i.shape, 0.5, kinds[i.type]) for i in session.get_inputs()}
before = bytes_of("VmRSS")
for _ in range(2):
    session.run(None, feed)
print(bytes_of("VmHWM") - before + sum(array.nbytes for array in feed.values()))
"""


def measured_bytes(path: Path) -> int:
    """The peak memory of two runs of a model: inputs, and what the runs add to a session."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=True, timeout=300
    )
    return int(done.stdout)
