"""On WebGPU, where ONNX Runtime offers it (`onnxruntime-webgpu`): a step of each model family equals that of the CPU.

Without a graphics card: `python -m tests.support.software_gpu python -m pytest -m slow tests/backends/test_webgpu.py`.
"""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from onnx_convgrad.runtime.providers import WEBGPU
from tests.support.families import FAMILIES, Family, exported

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(WEBGPU not in onnxruntime.get_available_providers(), reason="needs onnxruntime-webgpu"),
]


@pytest.fixture(scope="module", autouse=True)
def _gpu() -> None:
    """Skip where WebGPU finds no graphics processor."""
    one = helper.make_tensor_value_info("x", 1, [4]), helper.make_tensor_value_info("y", 1, [4])
    graph = helper.make_graph([helper.make_node("Sqrt", ["x"], ["y"])], "g", [one[0]], [one[1]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    try:
        run(model, {"x": np.ones(4, np.float32)}, providers="webgpu")
    except og.ConvGradError as problem:
        pytest.skip(f"WebGPU finds no graphics processor: {problem}")


@pytest.mark.parametrize("target", ["web", "webgpu"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_step_of_each_family(family: Family, target: str) -> None:
    model = exported(family, dynamo=False, training=True, fold=False)
    optimizer = og.optim.SGD(0.01, momentum=0.9)
    program = og.build_training(model, loss="mse", optimizer=optimizer, target=target)
    rng = np.random.default_rng(0)
    ports = (*program.manifest.data, *program.manifest.targets)
    shapes = {p.name: [d if isinstance(d, int) else 2 for d in p.shape or ()] for p in ports}
    feed = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    want, got = run(program.step, feed), run(program.step, feed, providers="webgpu")
    largest = max(float(np.abs(want[s.next]).max()) for s in program.manifest.state if s.slot == "momentum_buffer")
    for name, value in want.items():
        scale = max(float(np.abs(value).max()), 1e-3 * largest)
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-4 * scale, err_msg=name)
