"""ReplaceMissingOperators: equal values from operators that WebGPU has."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.backends.missing_operators import _FORMS, ReplaceMissingOperators
from onnx_convgrad.backends.webgpu_kernels import webgpu_lacks
from onnx_convgrad.checking.case import Case, make_model, rand
from onnx_convgrad.cli.placement import predicted_placement
from onnx_convgrad.ir.kernels import CUDA_INLINED, CUDA_TYPES, WEBGPU_MISSING
from onnx_convgrad.ir.passes import run_passes
from onnx_convgrad.ir.targets import TARGETS
from onnx_convgrad.runtime import run
from onnx_convgrad.runtime.providers import WEBGPU

CASES = [
    Case("AveragePool", [rand(2, 3, 7, 6)], {"kernel_shape": [3, 2], "strides": [2, 1]}),
    Case("AveragePool", [rand(2, 3, 7, 6)], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    Case("AveragePool", [rand(2, 3, 7)], {"kernel_shape": [3], "pads": [1, 0], "count_include_pad": 1}),
    *(Case("LogSoftmax", [rand(2, 3, 4, high=90)], {"axis": axis}) for axis in (-1, 1)),
    *(Case(op, [rand(2, 3), rand(3), rand(2, 1)]) for op in ("Max", "Min", "Mean", "Sum")),
    *(Case(op, [rand(2, 3)], name="one operand") for op in ("Sum", "Max")),
    Case("PRelu", [rand(2, 3), rand(3)]),
    Case("Selu", [rand(2, 3)], {"alpha": 1.5, "gamma": 0.7}),
    Case("Selu", [rand(2, 3, high=200)], name="large"),
    Case("Sign", [np.array([-2, 0, 3], np.float32)]),
    Case("Softsign", [rand(2, 3)]),
]


def _replaced(case: Case) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    model = onnx.shape_inference.infer_shapes(make_model(case, case.arrays))
    m = ir.from_proto(model)
    for index, node in enumerate(m.graph):
        node.name = f"node_{index}"
    run_passes(m, [ReplaceMissingOperators(TARGETS["webgpu"])])
    return model, ir.to_proto(m)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_values_are_the_same(case: Case) -> None:
    model, plain = _replaced(case)
    assert not {node.op_type for node in plain.graph.node} & WEBGPU_MISSING
    feed = {f"x{i}": array for i, array in enumerate(case.arrays) if array is not None}
    np.testing.assert_allclose(run(plain, feed)["y0"], run(model, feed)["y0"], rtol=1e-5, atol=1e-6)


def test_every_form_has_a_case() -> None:
    assert {case.op for case in CASES} == set(_FORMS)


@pytest.mark.parametrize(
    "case",
    [
        Case("AveragePool", [rand(2, 3, 8, 8)], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
        Case("Sum", [np.array([1, 2]), np.array([3, 4])]),
    ],
    ids=str,
)
def test_what_has_no_equal_form_is_left_alone(case: Case) -> None:
    _, plain = _replaced(case)
    assert [node.op_type for node in plain.graph.node] == [case.op]


def test_other_targets_keep_their_operators() -> None:
    for name in TARGETS.keys() - {"webgpu"}:
        assert ReplaceMissingOperators(TARGETS[name]).operators == ()


def test_targets_lack_what_the_measured_tables_lack() -> None:
    assert TARGETS["webgpu"].missing >= WEBGPU_MISSING
    assert not TARGETS["cuda"].missing & (CUDA_TYPES.keys() | CUDA_INLINED)
    assert TARGETS["cuda"].missing >= {"Celu", "Col2Im", "MaxUnpool", "Mean"}


def test_only_the_counter_of_steps_leaves_the_device() -> None:
    model = make_model(Case("Softsign", [rand(2, 3)]), [np.zeros((2, 3), np.float32)])
    step = og.build_training(_classifier(), loss="mse", optimizer="sgd", target="webgpu").step
    lacks = [lack for lack in webgpu_lacks(step) if not lack.arithmetic]
    assert [lack.op_type for lack in lacks] in ([], ["Add"])
    assert [lack.op_type for lack in webgpu_lacks(model)] == ["Softsign"]
    placed = predicted_placement(step, "webgpu")
    assert placed.wanted == WEBGPU
    assert len(placed.fallen) == len(lacks)


def _classifier() -> onnx.ModelProto:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
    net (float[2,3,8,8] x) => (float[2,4,2,2] y) {
        c = Conv <pads = [1, 1, 1, 1]> (x, w)
        s = Softsign (c)
        y = MaxPool <kernel_shape = [4, 4], strides = [4, 4]> (s)
    }""")
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return model
