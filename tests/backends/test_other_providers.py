"""On providers that some packages of ONNX Runtime have: a step of each model family equals that of the CPU.

OpenVINO: `python -m pip install onnxruntime-openvino==1.24.1` in place of `onnxruntime`. WebGPU without a graphics card:
`python -m tests.support.software_gpu python -m pytest -m slow tests/backends/test_other_providers.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from onnx_convgrad.training.sessions import defaults, fed_session
from tests.support.families import FAMILIES, Family, exported

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reasons() -> dict[str, str]:
    """Provider -> why it cannot run here; empty if it can."""
    one = helper.make_tensor_value_info("x", 1, [4]), helper.make_tensor_value_info("y", 1, [4])
    graph = helper.make_graph([helper.make_node("Sqrt", ["x"], ["y"])], "g", [one[0]], [one[1]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    found = {"webgpu": "", "openvino": ""}
    for provider in found:
        try:
            run(model, {"x": np.ones(4, np.float32)}, providers=provider)
        except og.ConvGradError as problem:
            found[provider] = str(problem)
    return found


@pytest.mark.parametrize(("provider", "target"), [("webgpu", "web"), ("webgpu", "webgpu"), ("openvino", "portable")])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_step_of_each_family(family: Family, provider: str, target: str, reasons: dict[str, str]) -> None:
    if reasons[provider]:
        pytest.skip(reasons[provider])
    shapes = {"x": (2, *family.input_shape[1:])} if provider == "openvino" else None  # it needs fixed sizes
    model = og.load(exported(family, dynamo=False, training=True, fold=False), input_shapes=shapes)
    optimizer = og.optim.SGD(0.01, momentum=0.9)
    program = og.build_training(model, loss="mse", optimizer=optimizer, target=target)
    rng = np.random.default_rng(0)
    ports = (*program.manifest.data, *program.manifest.targets)
    shapes = {p.name: [d if isinstance(d, int) else 2 for d in p.shape or ()] for p in ports}
    feed = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    step = program.model("step")
    fed = defaults(step, [value.name for value in step.graph.inputs])
    names = [value.name for value in step.graph.outputs]
    want, got = (  # OpenVINO takes defaults for constants, so the values are fed
        dict(zip(names, fed_session(step, fed, providers=name).run(names, {**fed, **feed}), strict=True))
        for name in ("cpu", provider)
    )
    largest = max(float(np.abs(want[s.next]).max()) for s in program.manifest.state if s.slot == "momentum_buffer")
    for name, value in want.items():
        scale = max(
            float(np.abs(value).max()), 2e-3 * largest
        )  # sums that cancel are exact to 2e-7 of the largest value
        np.testing.assert_allclose(got[name], value, rtol=0, atol=1e-4 * scale, err_msg=name)
