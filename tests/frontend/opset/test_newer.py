"""Results keep the operators of newer opsets: outputs are bit-equal with and without gradients."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.backend.test.loader import load_model_tests

import onnx_convgrad as og
from onnx_convgrad.pipeline.passes import Differentiate
from onnx_convgrad.runtime import run, session
from tests.support.command_line import invoke

NORMALIZED = """<ir_version: 11, opset_import: ["": 23]>
net (float[2,3,4] x, float[4] scale) => (float[2,3,4] y, float[2,3] z) {
    n = RMSNormalization (x, scale)
    y = Tanh (n)
    z = ReduceLogSumExp <keepdims = 0> (n, axes)
}"""


@pytest.fixture
def model() -> onnx.ModelProto:
    parsed = onnx.parser.parse_model(NORMALIZED)
    parsed.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2]), "axes"))
    return parsed


def _feed() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    shapes = {"x": (2, 3, 4), "scale": (4,), "y_grad": (2, 3, 4), "z_grad": (2, 3)}
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _own(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return run(model, {name: _feed()[name] for name in ("x", "scale")})


def test_outputs_are_computed_by_the_operators_of_the_model(model: onnx.ModelProto) -> None:
    built = og.augment(model, wrt="inputs")
    assert [o.version for o in built.opset_import if o.domain == ""] == [23]
    assert [node.op_type for node in built.graph.node].count("RMSNormalization") == 1
    found, expected = run(built, _feed()), _own(model)
    for name, value in expected.items():
        assert found[name].tobytes() == value.tobytes()
    older = run(og.vjp(model, wrt="inputs"), _feed())
    for name in ("x_grad", "scale_grad"):
        np.testing.assert_allclose(found[name], older[name], rtol=1e-5, atol=1e-6)


def test_a_result_can_be_differentiated_again(model: onnx.ModelProto) -> None:
    first = og.augment(model, wrt="x", of="y")
    second = og.augment(first, wrt="x", of="x_grad")
    feed = {**{k: v for k, v in _feed().items() if k != "z_grad"}, "x_grad_grad": _feed()["x"]}
    found = run(second, feed)
    reference = run(og.vjp(og.vjp(model, wrt="x", of="y"), wrt="x", of="x_grad"), feed)
    name = next(name for name in reference if name.startswith("x_grad"))
    np.testing.assert_allclose(found[name], reference[name], rtol=1e-4, atol=1e-5)


def test_forward_mode_keeps_them_too(model: onnx.ModelProto) -> None:
    built = og.jvp(model, wrt="x", outputs=True)
    found = run(built, {"x": _feed()["x"], "scale": _feed()["scale"], "x_tangent": _feed()["y_grad"]})
    for name, value in _own(model).items():
        assert found[name].tobytes() == value.tobytes()


def test_the_pass_keeps_them_too(model: onnx.ModelProto) -> None:
    passed = ir.passes.PassManager([Differentiate(wrt="inputs")])(ir.from_proto(model)).model
    assert passed.opset_imports[""] == 23
    wanted = og.augment(model, wrt="inputs").graph.node
    assert [(n.op_type, n.name) for n in passed.graph] == [(n.op_type, n.name) for n in wanted]


def test_other_targets_and_training_use_opset_21(model: onnx.ModelProto) -> None:
    for options in ({"target": "cuda"}, {"training": True}):
        built = og.augment(model, wrt="inputs", **options)
        assert [o.version for o in built.opset_import if o.domain == ""] == [21]


def test_older_models_have_opset_21() -> None:
    text = '<ir_version: 8, opset_import: ["": 13]> net (float[3] x) => (float[3] y) { y = HardSwish (x) }'
    built = og.augment(onnx.parser.parse_model(text.replace("13", "14")), wrt="inputs")
    assert [o.version for o in built.opset_import if o.domain == ""] == [21]


@pytest.mark.parametrize("opset", [11, 18, 19])
def test_average_pools_keep_their_kernel(opset: int) -> None:
    text = f"""<ir_version: 8, opset_import: ["": {opset}]> net (float[2,8,16,16] x) => (float[2,8,8,8] y) {{
        y = AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x)
    }}"""
    model = onnx.parser.parse_model(text)
    x = np.random.default_rng(0).standard_normal((2, 8, 16, 16)).astype(np.float32)
    built = og.augment(model, wrt="inputs")
    assert [o.version for o in built.opset_import if o.domain == ""] == [18 if opset < 19 else 21]
    found = run(built, {"x": x, "y_grad": np.ones((2, 8, 8, 8), np.float32)})
    assert found["y"].tobytes() == run(model, {"x": x})["y"].tobytes()
    assert np.isfinite(found["x_grad"]).all()


def test_the_command_does_the_same(model: onnx.ModelProto, tmp_path: Any) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(model, path)
    invoke("augment", path, "--wrt", "inputs")
    found = run(onnx.load(tmp_path / "net.grad.onnx"), _feed())
    for name, value in _own(model).items():
        assert found[name].tobytes() == value.tobytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_outputs_of_every_operator_test_are_the_same() -> None:
    """Every model of ONNX's operator tests that both run: the same bits."""
    equal, different = 0, []
    for test in load_model_tests(kind="node"):
        try:
            model = test.model if test.model is not None else onnx.load(f"{test.model_dir}/model.onnx")
            inputs = test.data_sets[0][0]
            feed = {v.name: np.asarray(a) for v, a in zip(model.graph.input, inputs, strict=False)}
            expected = run(model, feed)
            built = og.augment(model, wrt="inputs", cotangents="ones")
        except Exception:  # noqa: BLE001 - refused by the runtime or by us, or without stored inputs
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opened = session(built)
        names = [name for name in expected if isinstance(expected[name], np.ndarray)]
        found = dict(zip(names, opened.run(names, feed), strict=True))
        same = all(found[name].tobytes() == expected[name].tobytes() for name in names)
        equal += same
        different += [] if same else [test.name]
    assert not different
    assert equal > 900
