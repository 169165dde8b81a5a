"""Three operators of CONTRIBUTING.md, each declared once: everything that follows from a declaration works with them.

The runtime has no kernels for them, so the models that are built get function bodies before they run. The references are
built from a model with these functions, which are replaced by their standard operators before anything is derived.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.attacks import certify
from onnx_convgrad.autodiff import registry
from onnx_convgrad.ir import call
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.runtime import run

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"

BODIES = """
<domain: "made.up", opset_import: ["": 21]> Ramp (X) => (Y) { t = Tanh (X)  Y = Add (X, t) }
<domain: "made.up", opset_import: ["": 21]> HalfSum <axis: int = -1> (X) => (Y) {
    axis = Constant <value_int: int = @axis> ()
    one = Constant <value_ints = [1]> ()
    axes = Reshape (axis, one)
    s = ReduceSum (X, axes)
    half = Constant <value_float = 0.5> ()
    Y = Mul (s, half)
}
<domain: "made.up", opset_import: ["": 21]> Blend (X, W) => (Y) { Y = MatMul (X, W) }
"""
FUNCTIONS = [onnx.parser.parse_function(text) for text in re.split(r"\n(?=<domain)", BODIES.strip())]

NET = """<ir_version: 10, opset_import: ["": 21, "made.up": 1]>
net (float[N,4] x) => (float[N,2] y, float total) <float[N,3] h, float[N,3] r, float[N,2] z, float[N,1] c> {
    h = made.up.Blend (x, w)
    r = made.up.Ramp (h)
    c = made.up.HalfSum <axis = 1> (r)
    z = made.up.Blend (r, v)
    y = Add (z, c)
    total = ReduceSum <keepdims = 0> (y)
}"""
RNG = np.random.default_rng(5)
STORED = {"w": RNG.standard_normal((4, 3)), "v": RNG.standard_normal((3, 2))}
X = RNG.standard_normal((5, 4)).astype(np.float32)


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    """The declarations of the guide, for one test."""
    lowerings()  # their modules declare rules, too
    tables = (registry._RULES, registry._PER_SAMPLE, call.SIGNATURES)
    before = [dict(table) for table in tables]
    section = GUIDE.read_text(encoding="utf-8").split("## How to add an operator")[1]
    (block, *_) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    call.signature.cache_clear()
    exec(compile(block, str(GUIDE), "exec", dont_inherit=True), {"__name__": "made_up"})
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)  # type: ignore[arg-type]
    call.signature.cache_clear()


def net(*, functions: bool = False) -> onnx.ModelProto:
    model = onnx.parser.parse_model(NET)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a.astype(np.float32), k) for k, a in STORED.items())
    return runnable(model) if functions else model


def runnable(model: onnx.ModelProto) -> onnx.ModelProto:
    model.functions.extend(FUNCTIONS)
    return model


def compare(change: Callable[[onnx.ModelProto], onnx.ModelProto], **feed: np.ndarray) -> onnx.ModelProto:
    """Assert that a transformation gives the same results by the declarations as by standard operators; return its model."""
    built = change(net())
    assert any(node.domain == "made.up" for node in built.graph.node)
    found, wanted = run(runnable(built), feed), run(change(net(functions=True)), feed)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
    return built


ALL = ("x", "w", "v")


def drawn(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def test_the_gradient_in_both_modes() -> None:
    compare(lambda m: og.augment(m, wrt=ALL, of="y"), x=X, y_grad=drawn((5, 2)))
    tangents = {"x_tangent": drawn(X.shape), **{f"{k}_tangent": drawn(a.shape) for k, a in STORED.items()}}
    compare(lambda m: og.jvp(m, wrt=ALL, of="y"), x=X, **tangents)


@pytest.mark.parametrize("composition", ["forward_over_reverse", "reverse_over_reverse", "reverse_over_forward"])
def test_second_derivatives(composition: str) -> None:
    tangents = {"x_tangent": drawn(X.shape), **{f"{k}_tangent": drawn(a.shape) for k, a in STORED.items()}}
    compare(lambda m: og.hvp(m, wrt=ALL, of="total", composition=composition), x=X, **tangents)


def test_gradients_per_sample() -> None:
    compare(lambda m: og.augment(m, wrt=("w", "v"), of="y", per_sample=True), x=X, y_grad=drawn((5, 2)))


@pytest.mark.parametrize("size", [None, 3], ids=["free", "fixed"])
def test_vmap_without_a_loop(size: int | None) -> None:
    built = compare(lambda m: og.vmap(m, in_axes=0, axis_size=size), x=drawn((3, 5, 4)))
    assert "Scan" not in {node.op_type for node in built.graph.node}


def test_vmap_over_weights() -> None:
    compare(lambda m: og.vmap(m, in_axes={"w": 0}, axis_size=3), x=X, w=drawn((3, 4, 3)))


def test_bounds() -> None:
    compare(lambda m: certify(m, 0.1, method="interval", bounds=(-5, 5), of="y"), x=X)


MIXED = """<ir_version: 10, opset_import: ["": 21, "made.up": 1]>
net (float[N,4] x) => (float[1,3] y) <float[N,3] h, float[1,3] s> {
    h = made.up.Blend (x, w)  s = made.up.HalfSum <axis = 0> (h)  y = made.up.Ramp (s)
}"""


def test_operators_that_mix_samples_are_refused_by_name() -> None:
    model = onnx.parser.parse_model(MIXED)
    model.graph.initializer.append(onnx.numpy_helper.from_array(STORED["w"].astype(np.float32), "w"))
    with pytest.raises(
        og.errors.DifferentiationError, match=r"made.up::Ramp.*it mixes samples: an operand is already a sum"
    ):
        og.augment(model, wrt="w", per_sample=True)
