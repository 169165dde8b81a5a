"""Operators of ai.onnx.ml against their kernels, and a pipeline as converters of scikit-learn write it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, make_model, rand
from tests.support.operators import rule_test

DOMAIN = "ai.onnx.ml"
THREE: dict[str, Any] = {"coefficients": [0.5, 0.3, -0.2]}
SIX: dict[str, Any] = {"coefficients": [0.5, 0.3, -0.2, -0.4, 0.1, 0.7], "intercepts": [0.1, -0.2]}
VECTORS: dict[str, Any] = {
    "coefficients": [0.5, -0.3],
    "rho": [0.1],
    "n_supports": 2,
    "support_vectors": [1.0, 0.5, -0.3, 0.2, -1.0, 0.4],
    "kernel_params": [0.3, 0.2, 3.0],
}


def ml(op: str, attributes: dict[str, Any], *operands: Any, step: float = 1e-2, **options: Any) -> Case:
    """A case whose numeric derivatives are those of the kernel, which computes in float32."""
    shapes = operands or (rand(4, 3),)
    return Case(f"{DOMAIN}::{op}", shapes, attributes, step=step, tolerance=2e-3, **options)


scores = partial(ml, "LinearClassifier", outputs=2, of=[1])
machine = partial(ml, "SVMClassifier", outputs=2, of=[1])
TWO_CLASSES = {
    "classlabels_ints": [0, 1],
    "vectors_per_class": [2, 1],
    "support_vectors": [1.0, 0.5, -0.3, 0.2, -1.0, 0.4, 0.7, 0.1, -0.6],
    "coefficients": [0.8, 0.4, -1.2],
    "rho": [0.1],
    "kernel_params": [0.3, 0.2, 3.0],
}
THREE_CLASSES = {
    **TWO_CLASSES,
    "classlabels_ints": [0, 1, 2],
    "vectors_per_class": [1, 1, 1],
    "coefficients": [0.8, -0.4, 1.2, 0.3, 0.9, -0.7],
    "rho": [0.1, -0.2, 0.3],
}
CASES = [
    *(ml("Scaler", {"offset": [1.0, 2.0, 3.0], "scale": [0.5, 2.0, -1.0]}, x) for x in (rand(4, 3), rand(3))),
    ml("Scaler", {"offset": [1.0], "scale": [2.0]}),
    *(ml("Normalizer", {"norm": norm}, rand(4, 3, low=0.5)) for norm in ("MAX", "L1", "L2")),
    ml("Imputer", {"imputed_value_floats": [1.0, 2.0, 3.0], "replaced_value_float": float("nan")}),
    ml("Imputer", {"imputed_value_floats": [5.0], "replaced_value_float": 9.0}),
    ml("FeatureVectorizer", {"inputdimensions": [3, 2]}, rand(4, 3), rand(4, 2)),
    ml("FeatureVectorizer", {"inputdimensions": [2, 4]}, rand(4, 3), rand(4, 3)),
    ml("LinearRegressor", {**THREE, "intercepts": [0.1]}),
    ml("LinearRegressor", {**SIX, "targets": 2}),
    *(ml("SVMRegressor", {**VECTORS, "kernel_type": kind}) for kind in ("LINEAR", "POLY", "RBF", "SIGMOID")),
    *(machine({**TWO_CLASSES, "kernel_type": kind}) for kind in ("LINEAR", "POLY", "RBF", "SIGMOID")),
    machine({**TWO_CLASSES, "kernel_type": "RBF"}, rand(3)),
    machine({**TWO_CLASSES, "post_transform": "LOGISTIC"}),
    *(machine({**THREE_CLASSES, "post_transform": kind}) for kind in ("NONE", "LOGISTIC", "SOFTMAX")),
]

test_rule = rule_test(CASES)


BY_KERNEL = [
    *(ml("Normalizer", {"norm": norm}, rand(3, low=0.5)) for norm in ("MAX", "L1", "L2")),
    ml("LinearRegressor", {**SIX, "targets": 2}, rand(3)),
    ml("LinearRegressor", {**THREE, "post_transform": "LOGISTIC"}),
    *(
        ml("LinearRegressor", {**SIX, "targets": 2, "post_transform": kind})
        for kind in ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO")
    ),
    *(
        scores({**SIX, "classlabels_ints": [0, 1], "post_transform": kind})
        for kind in ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO")
    ),
    *(
        scores({**THREE, "intercepts": [0.1], "classlabels_strings": ["a", "b"], "post_transform": kind})
        for kind in ("NONE", "SOFTMAX", "LOGISTIC")
    ),
]
"""Cases that ONNX's reference evaluator computes otherwise than ONNX Runtime, or not at all."""


def derivatives(case: Case, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The derivative of the last result along a direction: a central difference of the kernel's results, and ours."""
    model = make_model(case, [x])
    name = model.graph.output[-1].name
    forward = og.jvp(model, wrt="x0", of=name)
    v = np.random.default_rng(1).uniform(-1, 1, x.shape).astype(x.dtype)
    h = 1e-2
    ends = [run(model, {"x0": (x + s * h * v).astype(x.dtype)})[name].astype(float) for s in (1, -1)]
    feed = {i.name: v if "tangent" in i.name else x for i in forward.graph.input}
    return (ends[0] - ends[1]) / (2 * h), run(forward, feed)[f"{name}_tangent"]


@pytest.mark.parametrize("shapes", ["static", "symbolic", "absent"])
@pytest.mark.parametrize("case", BY_KERNEL, ids=str)
def test_slopes_are_those_of_the_kernel(case: Case, shapes: str) -> None:
    x, name = case.arrays[0], ("y1" if "Classifier" in case.op else "y0")
    assert x is not None
    numeric, tangent = derivatives(case, x)
    np.testing.assert_allclose(tangent, numeric, rtol=2e-2, atol=2e-3)
    seed = np.random.default_rng(2).uniform(-1, 1, numeric.shape).astype(np.float32)
    v = np.random.default_rng(1).uniform(-1, 1, x.shape).astype(x.dtype)
    gradient = og.vjp(make_model(case, [x], shapes=shapes), wrt="x0", of=name)
    got = run(gradient, {i.name: {"x0": x, f"{name}_grad": seed}[i.name] for i in gradient.graph.input})["x0_grad"]
    np.testing.assert_allclose((got * v).sum(), (seed * tangent).sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        ml("Scaler", {"offset": [1.0, 2.0, 3.0], "scale": [0.5, 2.0, -1.0]}),
        *(ml("Normalizer", {"norm": norm}) for norm in ("MAX", "L1", "L2")),
        ml("LinearClassifier", {**SIX, "classlabels_ints": [0, 1], "post_transform": "SOFTMAX"}, outputs=2, of=[1]),
    ],
    ids=str,
)
def test_operands_in_double(case: Case) -> None:
    """The results are float32, and the gradient has the type of the operand."""
    x = np.random.default_rng(0).uniform(0.5, 2, (4, 3))
    numeric, got = derivatives(case, x)
    np.testing.assert_allclose(got, numeric, rtol=2e-2, atol=2e-3)
    model = make_model(case, [x])
    gradient = og.vjp(model, wrt="x0", of=model.graph.output[-1].name, cotangents="ones")
    assert run(gradient, {"x0": x})["x0_grad"].dtype == np.float64


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_rows_of_zeros_stay_and_have_a_gradient(norm: str) -> None:
    """The kernel does not divide such rows."""
    x = np.array([[0, 0, 0], [1, 2, 4]], np.float32)
    gradient = og.vjp(make_model(ml("Normalizer", {"norm": norm}), [x]), wrt="x0", of="y0", cotangents="ones")
    got = run(gradient, {"x0": x})["x0_grad"]
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got[0], np.ones(3, np.float32))


def test_imputed_values_have_no_gradient() -> None:
    x = np.array([[np.nan, 1, 2], [3, np.nan, np.nan]], np.float32)
    attributes = {"imputed_value_floats": [7.0, 8.0, 9.0], "replaced_value_float": float("nan")}
    gradient = og.vjp(make_model(ml("Imputer", attributes), [x]), wrt="x0", of="y0", cotangents="ones")
    np.testing.assert_array_equal(run(gradient, {"x0": x})["x0_grad"], np.float32([[0, 1, 1], [1, 0, 0]]))


def test_a_one_class_machine_is_piecewise_constant() -> None:
    x = np.ones((2, 3), np.float32)
    model = make_model(ml("SVMRegressor", {**VECTORS, "kernel_type": "RBF", "one_class": 1}), [x])
    with pytest.warns(UserWarning, match="derivative is zero"):
        gradient = og.vjp(model, wrt="x0", of="y0", cotangents="ones")
    assert not run(gradient, {i.name: x for i in gradient.graph.input})["x0_grad"].any()


AFTER = {
    "NONE": lambda p: p,
    "LOGISTIC": lambda p: 1 / (1 + np.exp(-p)),
    "SOFTMAX": lambda p: np.exp(p) / np.exp(p).sum(-1, keepdims=True),
}


@pytest.mark.parametrize("post", AFTER)
def test_probabilities_of_a_machine_for_two_classes(post: str) -> None:
    """The kernel finds them by an iteration that stops early, so that it is off by 0.005, and has no numeric derivative."""
    attributes = {**TWO_CLASSES, "kernel_type": "RBF", "prob_a": [-1.5], "prob_b": [0.2], "post_transform": post}
    vectors = np.reshape(TWO_CLASSES["support_vectors"], (3, 3))

    def probabilities(x: np.ndarray) -> np.ndarray:
        similar = np.exp(-0.3 * np.square(x[:, None] - vectors).sum(-1))
        p = 1 / (1 + np.exp(-1.5 * (similar @ TWO_CLASSES["coefficients"] + 0.1) + 0.2))
        return np.asarray(AFTER[post](np.stack([p, 1 - p], 1)))

    draw = np.random.default_rng(0)
    x, seed, v = (draw.standard_normal(shape).astype(np.float32) for shape in ((4, 3), (4, 2), (4, 3)))
    model = make_model(machine(attributes), [x])
    np.testing.assert_allclose(run(model, {"x0": x})["y1"], probabilities(x), atol=6e-3)
    numeric = ((probabilities(x + 1e-4 * v) - probabilities(x - 1e-4 * v)) / 2e-4 * seed).sum()
    got = run(og.vjp(model, wrt="x0", of="y1"), {"x0": x, "y1_grad": seed})["x0_grad"]
    np.testing.assert_allclose((got * v).sum(), numeric, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({**THREE_CLASSES, "prob_a": [-1.0] * 3, "prob_b": [0.0] * 3}, "3 classes come from an iteration"),
        ({**TWO_CLASSES, "post_transform": "SOFTMAX"}, "Convert it with post_transform NONE or LOGISTIC"),
        ({**TWO_CLASSES, "coefficients": [0.8, 0.4, 1.2]}, "Convert it with post_transform NONE or LOGISTIC"),
    ],
)
def test_machines_that_are_refused(attributes: dict[str, Any], message: str) -> None:
    model = make_model(machine(attributes), [np.ones((2, 3), np.float32)])
    with pytest.raises(og.errors.DifferentiationError, match=message):
        og.vjp(model, wrt="x0", of="y1")


def test_probit_is_refused() -> None:
    attributes = {**SIX, "classlabels_ints": [0, 1], "post_transform": "PROBIT"}
    model = make_model(scores(attributes), [np.ones((2, 3), np.float32)])
    with pytest.raises(og.errors.DifferentiationError, match=r"LinearClassifier.*no rule covers this operator"):
        og.vjp(model, wrt="x0", of="y1")


@pytest.mark.parametrize("batch", [3, "N"])
def test_a_pipeline_of_scalers_and_a_classifier(batch: int | str) -> None:
    """StandardScaler, Normalizer and LogisticRegression, with labels, and with a float64 input that is cast."""
    nodes = [
        helper.make_node("Cast", ["x"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Scaler", ["c"], ["s"], domain=DOMAIN, offset=[0.1, 0.2, 0.3], scale=[2.0, 0.5, 1.0]),
        helper.make_node("MatMul", ["s", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node(
            "LinearClassifier",
            ["r"],
            ["label", "p"],
            domain=DOMAIN,
            classlabels_ints=[0, 1],
            post_transform="SOFTMAX",
            **SIX,
        ),
        helper.make_node("Normalizer", ["p"], ["q"], domain=DOMAIN, norm="L1"),
    ]
    weight = np.random.default_rng(0).standard_normal((3, 3)).astype(np.float32)
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "pipeline",
            [helper.make_tensor_value_info("x", TensorProto.DOUBLE, [batch, 3])],
            [
                helper.make_tensor_value_info("label", TensorProto.INT64, [batch]),
                helper.make_tensor_value_info("q", TensorProto.FLOAT, [batch, 2]),
            ],
            [numpy_helper.from_array(weight, "w")],
        ),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 3)],
        ir_version=10,
    )
    onnx.checker.check_model(model)
    rng = np.random.default_rng(1)
    x, seed, v = (
        rng.standard_normal((3, 3)),
        rng.standard_normal((3, 2)).astype(np.float32),
        rng.standard_normal((3, 3)),
    )
    results = run(og.augment(model, wrt="x", of="q"), {"x": x, "q_grad": seed})
    h = 1e-3
    ends = [run(model, {"x": x + s * h * v})["q"].astype(float) for s in (1, -1)]
    numeric = ((ends[0] - ends[1]) / (2 * h) * seed).sum()
    assert abs((results["x_grad"] * v).sum() - numeric) < 1e-2 * max(abs(numeric), 0.1)
