"""Gradients of each sample of convolutions over random geometry, against float64 autograd, with every lowering forced."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings

import onnx_convgrad as og
from onnx_convgrad.autodiff.reverse import backward
from onnx_convgrad.ir.emit import DOMAIN, Emitter
from onnx_convgrad.lowering.lower import lower
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.runtime import run
from tests.support.conv_geometry import (
    Geometry,
    arrays_of,
    attributes_of,
    case,
    conv_model,
    error,
    geometry,
    model_of,
    oracle,
)

SETTINGS = settings(max_examples=8, suppress_health_check=list(HealthCheck))

FORCED = ["auto", *({"ConvPerSampleGrad": name} for name in lowerings()["ConvPerSampleGrad"])]
FORCED_NORMS = ["auto", *({"ConvGradSquaredNorm": name} for name in lowerings()["ConvGradSquaredNorm"])]


def test_norms_know_every_form() -> None:
    """Norms cost no more than gradients: the results of every lowering of these may be squared."""
    forms = {name if name == "zeros" else f"{name}_squares" for name in lowerings()["ConvPerSampleGrad"]}
    assert forms < set(lowerings()["ConvGradSquaredNorm"])


def _check(op: str, g: Geometry, **more: object) -> None:
    arrays, attributes = arrays_of(g, transposed=op == "ConvTranspose"), attributes_of(g) | more
    y = oracle(op, arrays, g)["y"]
    seed = np.random.default_rng(1).standard_normal(y.shape).astype(np.float32)
    samples = [oracle(op, {**arrays, "x": arrays["x"][i : i + 1]}, g, seed[i : i + 1]) for i in range(g["batch"])]
    want = {
        name: np.stack([s[f"{name}_grad"] for s in samples]) if samples else np.zeros((0, *arrays[name].shape))
        for name in "wb"
    }
    squares = {n: (v.reshape(g["batch"], v[:1].size) ** 2).sum(1) for n, v in want.items()}
    feed = {**arrays, "y_grad": seed}
    for shapes in ("static", "symbolic"):
        model = model_of(op, arrays, shapes, **attributes)
        for form, forced, end, results in (
            (True, FORCED, "_grad", want),
            ("squared_norm", FORCED_NORMS, "_grad_squared_norm", squares),
        ):
            for choice in forced if shapes == "static" else ["auto"]:
                got = _run(model, feed, y.size, choice, per_sample=form)
                for name, value in results.items() if got else ():
                    assert error(got[name + end], value) < 1e-5, (name, form, shapes, choice)


def _run(model: object, feed: dict, size: int, choice: object, **arguments: object) -> dict:
    try:
        augmented = og.augment(model, wrt=["w", "b"], target=og.Target(lowering=choice), **arguments)
    except og.errors.LoweringError:
        assert choice != "auto"
        return {}
    names = {i.name for i in augmented.graph.input}
    if size == 1 and "y_grad" not in names:  # seeded with one
        return {}
    return run(augmented, {name: v for name, v in feed.items() if name in names})


@pytest.mark.slow
@SETTINGS
@given(geometry(batch=(0, 3)))
def test_conv(g: Geometry) -> None:
    _check("Conv", g)


@pytest.mark.slow
@SETTINGS
@given(geometry(transposed=True, batch=(0, 3)))
def test_conv_transpose(g: Geometry) -> None:
    _check("ConvTranspose", g, output_padding=g["extra"])


@pytest.mark.parametrize(("stride", "features"), [(1, 3), (2, 3), (1, 6)])
def test_depthwise(stride: int, features: int) -> None:
    """The lowerings of depthwise weight gradients apply to the samples as groups."""
    sizes = {"strides": stride, "dilations": [1, 2], "begin": [1, 0], "end": [1, 2]}
    g = case((2, 3, 7, 8), features, (3, 2), **sizes, groups=3)
    _check("Conv", g)
    chosen = {"grouped_conv", "grouped_placed_windows", "grouped_batch_windows"}
    if features == g["groups"]:
        chosen |= {"grouped_bands"} | ({"grouped_masked_windows"} if stride == 1 else set())
    for name in chosen:
        og.augment(
            conv_model(g, bias=True), wrt=["w"], per_sample=True, target=og.Target(lowering={"ConvPerSampleGrad": name})
        )


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("stride", [1, 2])
def test_auto_pad(mode: str, stride: int) -> None:
    arrays = arrays_of(case((3, 2, 7, 8), 4, (3, 4)))
    models = [model_of("Conv", arrays, s, strides=[stride] * 2, auto_pad=mode) for s in ("static", "symbolic")]
    single = og.augment(models[1], wrt=["w", "b"], cotangents="ones")
    for model in models:
        each = run(og.augment(model, wrt=["w", "b"], per_sample=True, cotangents="ones"), arrays)
        for i in range(3):
            alone = run(single, {**arrays, "x": arrays["x"][i : i + 1]})
            for name in ("w_grad", "b_grad"):
                assert error(each[name][i], alone[name]) < 1e-5


# -- the abstract operators have derivatives too -----------------------------------------------------------------------


def _graph(shapes: dict[str, list]) -> tuple[ir.Model, Emitter, list[ir.Value]]:
    kind = ir.TensorType(ir.DataType.FLOAT)
    inputs = [ir.Value(name=name, shape=ir.Shape(shape), type=kind) for name, shape in shapes.items()]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 21, DOMAIN: 1}, name="g")
    return ir.Model(graph, ir_version=10), Emitter(graph), inputs


@pytest.mark.parametrize("batch", [3, "N"], ids=["static", "symbolic"])
@pytest.mark.parametrize("op", ["ConvPerSampleGrad", "ConvGradSquaredNorm", "ProductSquaredNorm"])
def test_second_order(op: str, batch: int | str) -> None:
    """<u, f(x, dy)> for a fixed u: its derivatives against differences of f itself, along one direction."""
    if op == "ProductSquaredNorm":
        shapes: dict[str, list] = {"A": [batch, 3, 4], "B": [batch, 4, 2]}
        attributes: dict = {}
    else:
        shapes = {"X": [batch, 4, 7], "dY": [batch, 6, 4], "W_like": [6, 2, 3]}
        attributes = {"strides": (2,), "dilations": (1,), "pads": (1, 1), "group": 2}
    model, e, inputs = _graph(shapes)
    y = e.op(op, *inputs, domain=DOMAIN, **attributes)
    y.shape = ir.Shape([batch, 6, 2, 3] if op == "ConvPerSampleGrad" else [batch])
    y.name = "y"
    seed = ir.Value(name="u", shape=y.shape, type=ir.TensorType(ir.DataType.FLOAT))
    model.graph.inputs.append(seed)
    found = backward(e, {y: seed}, inputs[:2])
    for value, gradient in found.items():
        gradient.name = f"{value.name}_grad"
    model.graph.outputs.extend([y, *found.values()])
    e.graph.sort()
    lower(model.graph, e.target)
    model.opset_imports.pop(DOMAIN)
    rng = np.random.default_rng(0)
    feed = {
        n: rng.standard_normal([3 if d in (batch, "N") else d for d in s]).astype(np.float32) for n, s in shapes.items()
    }
    proto = ir.to_proto(model)
    plain = run(proto, {**feed, "u": np.zeros([3, *list(y.shape)[1:]], np.float32)})
    u = rng.standard_normal(plain["y"].shape).astype(np.float32)
    got = run(proto, {**feed, "u": u})
    for name in list(shapes)[:2]:
        direction = rng.standard_normal(feed[name].shape).astype(np.float32)
        ends = [run(proto, {**feed, name: feed[name] + h * direction, "u": u})["y"] for h in (0.5, -0.5)]
        change = float(np.vdot(u, ends[0] - ends[1]))  # exact: f is of degree two in each operand
        assert float(np.vdot(got[f"{name}_grad"], direction)) == pytest.approx(change, rel=1e-4)
