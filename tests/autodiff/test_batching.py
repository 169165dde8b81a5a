"""`vmap` against single runs: every case of the rule checker, networks of several operators, and PyTorch's own."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.autodiff.registry import rules
from onnx_convgrad.checking.case import Case, is_float, make_model
from onnx_convgrad.errors import ArgumentError, ExecutionError
from onnx_convgrad.runtime import run
from tests.autodiff.test_registry import cases

COUNT = 3


def _cases() -> Iterator[Any]:
    """Every case of every module of rule tests."""
    for path in sorted((Path(__file__).parents[1] / "rules").glob("test_*.py")):
        module = importlib.import_module(f"tests.rules.{path.stem}")
        for entry in getattr(module, "CASES", ()):
            case = entry.values[0] if hasattr(entry, "values") else entry
            if isinstance(case, Case):
                yield pytest.param(case, id=f"{path.stem}-{case}")


def _stacked(model: onnx.ModelProto, feed: dict[str, np.ndarray], mapped: list[str]) -> dict[str, np.ndarray]:
    """Several variations of each mapped input."""
    draw = np.random.default_rng(0)
    return {
        name: np.stack([array, *(array * draw.uniform(0.8, 1, array.shape) for _ in range(COUNT - 1))]).astype(
            array.dtype
        )
        if name in mapped
        else array
        for name, array in feed.items()
    }


def _check(model: onnx.ModelProto, feed: dict[str, np.ndarray], mapped: list[str], **options: Any) -> None:
    stacked = _stacked(model, feed, mapped)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        many = og.vmap(model, in_axes=dict.fromkeys(mapped, 0), **options)
    try:
        singles = [
            run(model, {n: np.asarray(a[i]) if n in mapped else a for n, a in stacked.items()}) for i in range(COUNT)
        ]
    except ExecutionError as refusal:
        pytest.skip(f"ONNX Runtime has no kernel: {refusal.message:.80}")
    found = run(many, stacked)
    for index, single in enumerate(singles):
        for name, value in single.items():
            assert found[name].shape == (COUNT, *value.shape)
            close = {"rtol": 2e-3, "atol": 1e-3} if value.dtype == np.float16 else {"rtol": 2e-5, "atol": 2e-6}
            np.testing.assert_allclose(found[name][index], value, err_msg=name, **close)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*_cases()])
@pytest.mark.parametrize("size", [None, COUNT], ids=["free", "fixed"])
def test_every_case_of_the_rules(case: Case, size: int | None) -> None:
    arrays = case.arrays
    model = make_model(case, arrays)
    feed = {i.name: arrays[int(i.name[1:])] for i in model.graph.input}
    mapped = [name for name, array in feed.items() if is_float(array)]
    if not mapped or not all(array.size for array in feed.values()):
        pytest.skip("nothing to stack")
    _check(model, feed, mapped, axis_size=size)


LOOPED = {
    "AffineGrid": "its operand `size` counts the samples",
    "EyeLike": "its result is a matrix",
    "GRU": "the samples are not first, except in a layout that ONNX Runtime lacks",
    "LSTM": "as GRU",
    "MaxRoiPool": "its regions name their images by numbers",
    "MaxUnpool": "its indices count through the whole batch",
    "OneHot": "of its floating operands, the two values",
    "RNN": "as GRU",
    "Range": "its result is a vector",
    "RoiAlign": "as MaxRoiPool",
    "ScatterND": "its indices have no axis of a batch",
}
"""Operators with factors that run in a loop in all cases."""


@pytest.mark.slow
def test_operators_with_factors_run_as_one_node() -> None:
    looped, alone = set(), set()
    for case in cases():
        if case.body or case.op in alone:
            continue
        arrays = case.arrays
        model = make_model(case, arrays)
        mapped = [value.name for value in model.graph.input if is_float(arrays[int(value.name[1:])])]
        for names in (mapped, mapped[:1]) if mapped else ():
            try:
                many = og.vmap(model, in_axes=dict.fromkeys(names, 0), axis_size=COUNT)
            except og.errors.DifferentiationError:  # of fed axes the number of those that are removed may be unknown
                continue
            (looped if "Scan" in {node.op_type for node in many.graph.node} else alone).add(case.op)
    declared = {rule.name for rule in rules() if rule.factors is not None and not rule.unnoted}
    assert (looped - alone) & declared == LOOPED.keys()


# -- options that count axes -----------------------------------------------------------------------------------------------

COUNTED = {
    "a scalar reduced": "(float x) => (float y) { y = ReduceL2 <keepdims = 0> (x) }",
    "a scalar reduced, with kept axes": "(float x) => (float y) { y = ReduceSumSquare (x) }",
    "all axes": "(float[2,3] x) => (float y) { y = ReduceSum <keepdims = 0> (x) }",
    "no axes": "(float[2,3] x) => (float[2,3] y) { y = ReduceMean <noop_with_empty_axes = 1> (x) }",
    "axes from the end": "(float[2,3] x) => (float[2,1] y) { y = ReduceMax (x, last) }",
    "fed axes": "(float[2,3] x, int64[1] axes) => (float[2] y) { y = ReduceSum <keepdims = 0> (x, axes) }",
    "a slice of the first axes": "(float[3,3] x) => (float[2,1] y) { y = Slice (x, ones, threes, , steps) }",
    "padding of every axis": "(float[3] x) => (float[5] y) { y = Pad (x, ones) }",
    "squeezed without axes": "(float[1,3,1] x) => (float[3] y) { y = Squeeze (x) }",
    "new axes": "(float[3] x) => (float[3,1,1] y) { y = Unsqueeze (x, behind) }",
    "a sum along an axis": "(float[2,3] x) => (float[2,3] y) { y = CumSum (x, one) }",
    "a layer normalized": "(float[2,3] x) => (float[2,3] y) { y = LayerNormalization <axis = 1> (x, scale) }",
    "a vector normalized": "(float[3] x) => (y) { y = BatchNormalization (x, half, half, half, half) }",
    "two vectors gathered": "(float[2,3] x) => (float[2,2] y) { y = Gather <axis = 1> (x, ones) }",
    "copies": "(float[2,3] x, int64[2] copies) => (float[2,6] y) { y = Tile (x, copies) }",
    "a smaller operand expanded": "(float[3] x) => (float[2,3] y) { y = Expand (x, sizes) }",
}
STORED = {"last": [-1], "ones": [1, 1], "threes": [3, 3], "steps": [1, 2], "behind": [-1, 1], "one": 1, "sizes": [2, 3]}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("size", [None, COUNT], ids=["free", "fixed"])
def test_options_that_count_axes_are_shifted(name: str, size: int | None) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> net {COUNTED[name]}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.array(v), k) for k, v in STORED.items())
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 2, 3], np.float32), "scale"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0.5], np.float32), "half"))
    (x, *_) = model.graph.input
    shape = [d.dim_value for d in x.type.tensor_type.shape.dim]
    feed = {"x": np.random.default_rng(2).standard_normal(shape).astype(np.float32)}
    fed = {"axes": np.array([1]), "copies": np.array([1, 2])}
    feed |= {v.name: fed[v.name] for v in model.graph.input if v.name in fed}
    _check(model, feed, ["x"], axis_size=size)
    many = og.vmap(model, in_axes={"x": 0}, axis_size=size)
    assert "Scan" not in {node.op_type for node in many.graph.node}


def test_labels_and_scores_of_a_classifier_need_no_declared_types() -> None:
    options = "classlabels_ints = [0, 1], coefficients = [0.5, 0.3, -0.2, 0.1], intercepts = [0.1, -0.2]"
    text = f"(float[3,2] x) => (label, y) {{ label, y = ai.onnx.ml.LinearClassifier <{options}> (x) }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 3]> net {text}')
    _check(model, {"x": np.random.default_rng(3).standard_normal((3, 2)).astype(np.float32)}, ["x"], axis_size=None)


@pytest.mark.parametrize("slope", ["float", "float[3]", "float[2,1]", "float[2,3]"])
def test_slopes_of_each_example_for_one_operand(slope: str) -> None:
    text = f"(float[2,3] x, {slope} k) => (float[2,3] y) {{ y = PRelu (x, k) }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> net {text}')
    shape = [d.dim_value for d in model.graph.input[1].type.tensor_type.shape.dim]
    draw = np.random.default_rng(4)
    feed = {"x": draw.standard_normal((2, 3)).astype(np.float32), "k": draw.uniform(size=shape).astype(np.float32)}
    _check(model, feed, ["k"])
    assert "Scan" not in {node.op_type for node in og.vmap(model, in_axes={"k": 0}).graph.node}


def test_a_loop_over_no_examples() -> None:
    text = "(float[1,3,4,4] x, float[2,3,3,3] w) => (float[1,2,2,2] y) { y = Conv (x, w) }"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> net {text}')
    looped = og.vmap(model, in_axes={"w": 0})
    assert "Scan" in {node.op_type for node in looped.graph.node}
    found = run(looped, {"x": np.zeros((1, 3, 4, 4), np.float32), "w": np.zeros((0, 2, 3, 3, 3), np.float32)})
    assert found["y"].shape == (0, 1, 2, 2, 2)


# -- networks --------------------------------------------------------------------------------------------------------------

PARSED = """<ir_version: 10, opset_import: ["": 21]>
net (float[N,3,8,8] x, float[4,3,3,3] w, float[4] b) => (float[N,4] y, int64[4] sizes) {
    c = Conv <pads = [1, 1, 1, 1]> (x, w, b)
    r = Relu (c)
    sizes = Shape (r)
    first = Gather <axis = 0> (sizes, zero)
    rest = Constant <value = int64[1] {-1}> ()
    shape = Concat <axis = 0> (first, four, rest)
    f = Reshape (r, shape)
    y = ReduceMean <keepdims = 0> (f, two)
}"""


@pytest.fixture
def net() -> onnx.ModelProto:
    model = onnx.parser.parse_model(PARSED)
    stored = {"zero": [0], "four": [4], "two": [2]}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.array(v), k) for k, v in stored.items())
    return model


def _feed() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    shapes = {"x": (2, 3, 8, 8), "w": (4, 3, 3, 3), "b": (4,)}
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("mapped", [["x"], ["w"], ["x", "w", "b"], ["b"]], ids="-".join)
@pytest.mark.parametrize("size", [None, COUNT], ids=["free", "fixed"])
def test_a_network_with_sizes_known_at_run_time(net: onnx.ModelProto, mapped: list[str], size: int | None) -> None:
    _check(net, _feed(), mapped, axis_size=size)


def test_convolutions_of_many_weights_run_in_groups(net: onnx.ModelProto) -> None:
    grouped = og.vmap(net, in_axes={"w": 0}, axis_size=COUNT)
    looped = og.vmap(net, in_axes={"w": 0})
    assert "Scan" not in {node.op_type for node in grouped.graph.node}
    assert "Scan" in {node.op_type for node in looped.graph.node}


def test_one_axis_for_all_inputs_a_list_and_negative_axes(net: onnx.ModelProto) -> None:
    feed = _feed()
    stacked = _stacked(net, feed, ["x", "w", "b"])
    expected = run(og.vmap(net), stacked)
    moved = {"x": np.moveaxis(stacked["x"], 0, 2), "w": np.moveaxis(stacked["w"], 0, -1), "b": stacked["b"]}
    found = run(og.vmap(net, in_axes=[2, -1, 0]), moved)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6)


def test_outputs_that_no_example_differs_in_are_repeated() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (float[2] x, float[2] z) => (float[2] a, float[2] b, float[2] z2) {
            a = Neg (x)
            b = Exp (z)
            z2 = Identity (z)
        }"""
    )
    x, z = np.array([[1, 2], [3, 4]], np.float32), np.array([0, 1], np.float32)
    found = run(og.vmap(model, in_axes={"x": 0}), {"x": x, "z": z})
    np.testing.assert_array_equal(found["a"], -x)
    np.testing.assert_allclose(found["b"], np.exp([z, z]), rtol=1e-6)
    np.testing.assert_array_equal(found["z2"], [z, z])
    found = run(og.vmap(model, in_axes=None, axis_size=2), {"x": x[0], "z": z})
    np.testing.assert_array_equal(found["a"], [-x[0], -x[0]])


def test_a_stack_of_cotangents_gives_a_jacobian(net: onnx.ModelProto) -> None:
    feed = _feed()
    pulled = og.vjp(net, wrt=["x"], of="y")
    seeds = np.eye(8, dtype=np.float32).reshape(8, 2, 4)
    rows = run(og.vmap(pulled, in_axes={"y_grad": 0}), {**feed, "y_grad": seeds})["x_grad"]
    whole = run(og.jacobian(net, of="y", wrt="x"), feed)["y_x_jacobian"]
    np.testing.assert_allclose(rows.reshape(whole.shape), whole, rtol=1e-5, atol=1e-6)


def test_a_stack_of_inputs_gives_gradients_of_each_sample(net: onnx.ModelProto) -> None:
    feed, seed = _feed(), np.ones((2, 1, 4), np.float32)
    single = og.vmap(og.vjp(net, wrt=["w"], of="y"), in_axes={"x": 0, "y_grad": 0})
    found = run(single, {**feed, "x": feed["x"][:, None], "y_grad": seed})["w_grad"]
    each = og.vjp(net, wrt=["w"], of="y", per_sample=True)
    expected = run(each, {**feed, "y_grad": seed[:, 0]})["w_grad"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_derivative_of_a_stack_and_a_stack_of_stacks(net: onnx.ModelProto) -> None:
    feed = _feed()
    stacked = _stacked(net, feed, ["x"])
    many = og.vmap(net, in_axes={"x": 0})
    found = run(og.vjp(many, wrt=["w"], of="y"), {**stacked, "y_grad": np.ones((COUNT, 2, 4), np.float32)})["w_grad"]
    one = og.vjp(net, wrt=["w"], of="y")
    parts = [run(one, {**feed, "x": x, "y_grad": np.ones((2, 4), np.float32)})["w_grad"] for x in stacked["x"]]
    np.testing.assert_allclose(found, sum(parts), rtol=1e-4, atol=1e-5)
    twice = run(og.vmap(many, in_axes={"x": 0}), {**feed, "x": np.stack([stacked["x"], stacked["x"]])})["y"]
    np.testing.assert_allclose(twice[1], run(many, stacked)["y"], rtol=1e-5, atol=1e-6)


LOOP = """<ir_version: 10, opset_import: ["": 21]>
net (float[2] x, float[2] w, int64 turns) => (float[2] y) {
    going = Constant <value = bool {1}> ()
    y = Loop (turns, going, x) <body = turn (int64 i, bool before, float[2] s) => (bool after, float[2] t) {
        after = Identity (before)
        p = Mul (s, w)
        t = Tanh (p)
    }>
}"""


def test_nodes_with_bodies_run_in_a_loop_over_the_examples() -> None:
    model = onnx.parser.parse_model(LOOP)
    feed = {"x": np.array([0.5, -1], np.float32), "w": np.array([2, 0.3], np.float32), "turns": np.array(3)}
    for mapped in (["x"], ["w"], ["x", "w"]):
        _check(model, feed, mapped)


ENSEMBLE = """<ir_version: 10, opset_import: ["": 21]>
net (float[N,5] x) => (float[N,2] y) {
    h = Gemm <transB = 1> (x, w0, b0)
    t = Tanh (h)
    y = Gemm <transB = 1> (t, w2, b2)
}"""


def test_an_ensemble_of_initializers_equals_pytorch() -> None:
    torch = pytest.importorskip("torch")
    modules = [torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)) for _ in range(COUNT)]
    parameters, _ = torch.func.stack_module_state(modules)
    names = {f"{kind[0]}{layer}": f"{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")}
    stacked = {short: parameters[name].detach().numpy() for short, name in names.items()}
    model = onnx.parser.parse_model(ENSEMBLE)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array[0], name) for name, array in stacked.items())
    x = torch.randn(6, 5)

    def call(state: dict[str, Any]) -> Any:
        return torch.func.functional_call(modules[0], state, (x,))

    expected = torch.func.vmap(call)(parameters).detach().numpy()
    many = og.vmap(model, in_axes=dict.fromkeys(stacked, 0))
    np.testing.assert_allclose(run(many, {"x": x.numpy(), **stacked})["y"], expected, rtol=1e-5, atol=1e-6)


# -- arguments -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_axes": {"v": 0}}, "there is no input"),
        ({"in_axes": {"x": 5}}, "from -5 to 4"),
        ({"in_axes": {"x": 0.5}}, "must be an integer or None"),
        ({"in_axes": [0]}, "1 entries for 3 inputs"),
        ({"in_axes": 0.5}, "in_axes must be an axis, None, a sequence or a mapping of them, not 0.5"),
        ({"in_axes": None}, "give axis_size"),
        ({"axis_size": 0}, "axis_size"),
    ],
    ids=["unknown name", "out of range", "not an integer", "too few", "fraction", "nothing mapped", "no examples"],
)
def test_bad_arguments_are_named(net: onnx.ModelProto, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        og.vmap(net, **options)


def test_a_misspelt_argument_is_named(net: onnx.ModelProto) -> None:
    with pytest.raises(TypeError, match="in_axis"):
        og.vmap(net, in_axis=0)  # type: ignore[call-arg]


def test_results_without_an_axis_are_refused() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> net (float[2] x) => (seq(float[2]) y) { y = SequenceConstruct (x, x) }"""
    )
    with pytest.raises(og.ConvGradError, match="sequence"):
        og.vmap(model)
