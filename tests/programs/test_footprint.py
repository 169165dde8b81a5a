"""The cost of a step: operations and bytes counted by hand, by layer, for several batches, and the measured peak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import onnx_convgrad as og
from onnx_convgrad.programs.footprint import Footprint, LayerFootprint, footprint
from tests.support.command_line import invoke
from tests.support.one_input import graph_of

BODY = "[conv] c = Conv <pads=[1,1,1,1]> (x, w, b) [relu] r = Relu (c) [flat] f = Flatten (r) [fc] y = Gemm (f, a)"


def model() -> onnx.ModelProto:
    m = graph_of(f"(float[N,3,8,8] x) => (float[N,5] y) {{ {BODY} }}", opset=21)
    draw = np.random.default_rng(0)
    for name, shape in {"w": (4, 3, 3, 3), "b": (4,), "a": (256, 5)}.items():
        array = draw.standard_normal(shape).astype(np.float32)
        m.graph.initializer.append(numpy_helper.from_array(array, name))
    return m


def program() -> og.TrainingProgram:
    optimizer = og.optim.SGD(0.1, momentum=0.9)
    return og.build_training(model(), loss="mse", optimizer=optimizer, target=og.Target(lowering={"Conv": "conv"}))


def layers(f: Footprint) -> dict[str, LayerFootprint]:
    return {layer.layer: layer for layer in f.layers}


def test_operations_and_bytes_of_each_layer() -> None:
    f = footprint(program(), {"x": (16, 3, 8, 8)})
    assert f.sizes == {"x": (16, 3, 8, 8), "target": (16, 5)}
    assert f.typical == {}
    found = layers(f)
    conv, relu, dense = found["conv"], found["relu"], found["fc"]
    assert conv.forward == 2 * 16 * 4 * 64 * 27
    assert conv.backward >= conv.forward  # of the weights alone: the data need no gradient
    assert (conv.parameters, conv.state) == (4 * (108 + 4), 4 * (108 + 4))
    assert dense.forward == 2 * 16 * 256 * 5
    assert dense.backward >= 2 * dense.forward
    assert (dense.parameters, dense.state) == (4 * 1280, 4 * 1280)
    assert relu.forward == 16 * 256
    assert conv.kept + relu.kept >= 4 * 16 * 256  # the result of the Relu, or its operand
    stored = 2 * 4 * (108 + 4 + 1280)
    assert f.inputs == stored + 4 * 16 * (192 + 5) + 4 + 8  # and learning rate and counter
    assert f.peak > f.inputs + f.constants + 4 * 16 * 256
    assert f.flops == sum(layer.forward + layer.backward for layer in f.layers)


def test_it_grows_with_the_batch_and_a_typical_one_is_named() -> None:
    built = program()
    small, large = (footprint(built, {"x": (n, 3, 8, 8)}) for n in (8, 80))
    assert footprint(built).typical == {"N": 8}
    assert footprint(built).peak == small.peak
    assert layers(large)["conv"].forward == 10 * layers(small)["conv"].forward
    assert 8 < (large.peak - large.inputs) / (small.peak - small.inputs) <= 10


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": (1,)}, "has no input 'z'"),
        ({"x": (4, 3, 9, 8)}, "'x' has the shape"),
        ({"x": (4, 3)}, "'x' has the shape"),
        ({"x": (4, 3, 8, 8), "target": (5, 5)}, "'target' has the shape"),
    ],
)
def test_shapes_that_contradict_the_program_are_refused(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        footprint(program(), shapes)


def test_the_command_reports_a_saved_program(tmp_path: Path) -> None:
    program().save(tmp_path / "program")
    text = invoke("explain", "--training", tmp_path / "program", "--input-shape", "x:16,3,8,8").output
    assert "Counted for x 16x3x8x8, target 16x5\n" in text
    assert "memory, at its peak" in text
    assert "step.onnx" in text
    report = json.loads(invoke("explain", tmp_path / "program", "--json").output)
    assert report["typical"] == {"N": 8}
    assert report["files"]["step.onnx"] == (tmp_path / "program" / "step.onnx").stat().st_size
    assert [row["layer"] for row in report["layers"]][:3] == ["conv", "relu", "fc"]
    (tmp_path / "empty").mkdir()
    assert "is not a training program" in invoke("explain", tmp_path / "empty", status=2).output


MEASURE = """
import re, sys
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.enable_mem_pattern = options.enable_mem_reuse = False
options.intra_op_num_threads, options.log_severity_level = 1, 4
session = onnxruntime.InferenceSession(sys.argv[1], options)
x, target = numpy.ones((8192, 3, 8, 8), numpy.float32), numpy.ones((8192, 5), numpy.float32)
session.run(None, {"x": x[:1], "target": target[:1]})
def peak():
    with open("/proc/self/status") as file:
        return 1024 * int(re.search("VmHWM:\\s+(\\d+) kB", file.read())[1])
before = peak()
session.run(None, {"x": x, "target": target})
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Only Linux tells the peak of a process in /proc.")
def test_the_peak_is_that_of_onnx_runtime(tmp_path: Path) -> None:
    built = program()
    built.save(tmp_path / "program")
    f = footprint(built, {"x": (8192, 3, 8, 8)})
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "program" / "step.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) == pytest.approx(f.peak - f.inputs, rel=0.15)
