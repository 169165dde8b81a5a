"""The upgrade of whole graphs (nested graphs, functions, names), and its refusals."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import onnx_convgrad as og
from onnx_convgrad.errors import ModelError
from onnx_convgrad.frontend.opset.upgrade import NEWEST_OPSET, OLDEST_OPSET, upgrade
from onnx_convgrad.runtime import run
from tests.support.old_models import (
    Case,
    assert_same,
    compare,
    declare,
    floats,
    model_of,
    run_plainly,
    single,
    upgraded,
)
from tests.support.one_input import graph_of

X, C3 = floats(2, 3, 4, 5), floats(3)

# -- structure ---------------------------------------------------------------------------------------------------------


def test_nested_graphs() -> None:
    """Constants are stored in the graph that uses them, under names that no other graph has."""

    def branch(name: str, number: float) -> str:
        pad = f"Pad <pads = [0, 1, 0, 0, 0, 0], value = {number}>"
        return f"{name} () => (float[] r) {{ u = Unsqueeze <axes = [0]> (x) p = {pad} (u) r = Softmax (p) }}"

    once = f"If (go) <then_branch = {branch('a', 1.0)}, else_branch = {branch('b', 2.0)}>"
    text = f"(float[2,3] x, bool go) => (float[] z) {{ y = {once} z = ReduceSum <axes = [0], keepdims = 0> (y) }}"
    feeds = {"x": floats(2, 3), "go": np.array(True)}
    compare(graph_of(text, opset=10), feeds, {**feeds, "go": np.array(False)})


def test_loop_body() -> None:
    body = "b (int64 i, bool c, float[] s) => (bool d, float[] t, float[] scan)"
    body += " { d = Identity (c) t = Clip <min = -1.0, max = 1.0> (s) scan = Squeeze <axes = [0]> (t) }"
    text = f"(float[1,3] x) => (float[] y, float[] all) <int64 n = {{2}}> {{ y, all = Loop <body = {body}> (n, , x) }}"
    compare(graph_of(text, opset=9), {"x": floats(1, 3) * 3})


def test_foreign_domains_pass() -> None:
    text = "(float[1,3] x) => (float[] y) { g = com.microsoft.Gelu (x) y = Squeeze <axes = [0]> (g) }"
    compare(graph_of(text, opset=11, domains=', "com.microsoft": 1'), {"x": floats(1, 3)})


def test_names_metadata_and_values_stay() -> None:
    node = helper.make_node("Softmax", ["x"], ["y"], name="probabilities")
    node.metadata_props.add(key="namespace", value="head")
    model = ir.from_proto(model_of([node], {"x": X}, ["y"], 11))
    output = model.graph.outputs[0]
    upgrade(model)
    assert model.graph.outputs[0] is output
    last = output.producer()
    assert last is not None
    assert (last.name, last.op_type) == ("probabilities", "Reshape")
    assert all(node.metadata_props["namespace"] == "head" for node in model.graph)


@pytest.mark.parametrize(
    ("opset", "node", "changed"),
    [
        (17, "Relu (x)", False),
        (17, "ReduceMean <axes = [1]> (x)", True),
        (OLDEST_OPSET, "Relu (x)", True),  # inference has no rule for some operators of that opset
        (NEWEST_OPSET, "Relu (x)", False),
    ],
)
def test_a_change_is_a_node_that_means_something_else(opset: int, node: str, changed: bool) -> None:
    """Shapes are inferred again then."""
    model = ir.from_proto(graph_of(f"(float[2,3] x) => (float[] y) {{ y = {node} }}", opset=opset))
    assert upgrade(model) is changed
    assert model.opset_imports[""] == 21


def test_equal_constants_are_shared() -> None:
    means = " ".join(f"{b} = ReduceMean <axes = [1]> ({a})" for a, b in itertools.pairwise("xabcy"))
    model = ir.from_proto(graph_of(f"(float[2,3,4,5] x) => (float[] y) {{ {means} }}", opset=11))
    upgrade(model)
    assert len(model.graph.initializers) == 1


def test_names_do_not_collide() -> None:
    steps = "y_Shape = Identity (x) const_0 = Relu (y_Shape) u = Unsqueeze <axes = [0]> (const_0) y = Softmax (u)"
    compare(graph_of(f"(float[1,3] x) => (float[] y) {{ {steps} }}", opset=11), {"x": floats(1, 3)})


def test_old_ir_version() -> None:
    """Weights that had to be listed as inputs do not become feedable inputs."""
    text = "(float[3] x, float[1,3] w = {1, 2, 3}) => (float[3] y) { s = Squeeze <axes = [0]> (w) y = Add (x, s) }"
    model = graph_of(text, opset=7)
    model.ir_version = 3
    compare(model, {"x": C3})
    assert og.load(model).inputs == ("x",)


def test_new_ir_version() -> None:
    """Runtimes refuse versions that they do not know, even if the model needs none of their features."""
    model, feeds = single(Case("Relu", 21, [X]), declared=True)
    before = run_plainly(model, feeds)
    declare(model, before, shapes=True)
    model.ir_version = onnx.IR_VERSION
    assert_same(before, run_plainly(upgraded(model), feeds), exact=True)


def test_mask_that_is_read_is_a_mask() -> None:
    """Old Dropouts leave the mask undefined when testing; newer ones return all ones."""
    model = graph_of("(float[2,3,4,5] x) => (float[] y, float[] m) { d, m = Dropout (x) y = Mul (x, m) }", opset=7)
    declare(model, [X, X], shapes=True)
    y, mask = run_plainly(upgraded(model), {"x": X})
    np.testing.assert_array_equal(y, X)
    np.testing.assert_array_equal(mask, np.ones_like(X))


def test_idempotent() -> None:
    model, feeds = single(Case("Softmax", 11, [X]), declared=True)
    once = compare(model, feeds)
    assert upgraded(once) == once


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_published_models(name: str) -> None:
    """Whole networks of opset 9 as published in ONNX, with every weight listed as an input."""
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    model = onnx.load(folder / f"light_{name}.onnx")
    weights = {i.name for i in model.graph.initializer}
    inputs = [i for i in model.graph.input if i.name not in weights]
    compare(model, {i.name: floats(*(d.dim_value for d in i.type.tensor_type.shape.dim)) for i in inputs})


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refusal(model: onnx.ModelProto) -> str:
    with pytest.raises(ModelError, match="opset") as caught:
        upgrade(ir.from_proto(model))
    return str(caught.value)


def test_opset_too_old_or_too_new() -> None:
    model = model_of([helper.make_node("Relu", ["x"], ["y"])], {"x": X}, ["y"], OLDEST_OPSET - 1)
    assert "onnx.version_converter" in _refusal(model)
    model.opset_import[0].version = NEWEST_OPSET + 1
    assert str(NEWEST_OPSET) in _refusal(model)
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("local", 1))
    assert "without importing" in _refusal(model)


def test_all_problems_are_listed() -> None:
    nodes = "[bits] b = BitCast <to = 6> (x) [unknown] c = NoSuchOperator (b)"
    nodes += f" [tiny] y = Cast <to = {TensorProto.FLOAT8E8M0}> (c)"
    message = _refusal(graph_of(f"(float[2,3,4,5] x) => (float[] y) {{ {nodes} }}", opset=26))
    assert "3 node(s)" in message
    for text in ("bits (BitCast, opset 26)", "unknown (NoSuchOperator", "tiny (Cast", "E8M0"):
        assert text in message


def test_training_statistics() -> None:
    case = Case("BatchNormalization", 9, [X, C3, C3, C3, C3], {}, outputs=5)
    assert "saved_mean" in _refusal(single(case, declared=True)[0])
    case = Case("BatchNormalization", 7, [X, *[X[0]] * 4], {"spatial": 0}, outputs=5)
    assert "spatial=0" in _refusal(single(case, declared=True)[0])


def test_types_needed() -> None:
    case = Case("Attention", 23, [floats(2, 3, 4, 8) for _ in range(3)])
    assert "run shape inference first" in _refusal(single(case, declared=False)[0])


@pytest.mark.parametrize("rest", [(), (4,), (3,), (4, 3)])
def test_slopes_per_channel_of_an_old_prelu(rest: tuple[int, ...]) -> None:
    """Before opset 7 a vector of slopes went along the channels, not along the last axis."""
    dims = ", ".join(map(str, (2, 3, *rest)))
    graph = f"g (float[{dims}] x, float[3] w = {{0.1, 0.2, 0.3}}) => (float[{dims}] y) {{ y = PRelu (x, w) }}"
    model = onnx.parser.parse_model(f'<ir_version: 3, opset_import: ["": 6]> {graph}')
    x = np.random.default_rng(0).standard_normal((2, 3, *rest)).astype(np.float32)
    got = run(og.augment(model, cotangents="ones"), {"x": x})
    slopes = np.asarray([0.1, 0.2, 0.3], np.float32).reshape(3, *[1] * len(rest))
    np.testing.assert_allclose(got["y"], np.where(x > 0, x, x * slopes), rtol=1e-6)
    others = (0, *range(2, x.ndim))
    np.testing.assert_allclose(got["w_grad"], np.minimum(x, 0).sum(others), rtol=1e-5)
