"""The public contract: inputs, outputs, names, seeds, kinds of model, errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import onnx_convgrad as og
from onnx_convgrad.errors import ModelError
from onnx_convgrad.ir.notes import CONSTANTS
from onnx_convgrad.pipeline.options import COMPOSITIONS
from onnx_convgrad.runtime import run
from tests.support.one_input import gradient_map, graph_of

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((3, 2, 3, 3)).astype(np.float32)
BIAS = RNG.standard_normal(3).astype(np.float32)


def small(*, opset: int = 17, ir_version: int = 8, weights: str = "initializer") -> onnx.ModelProto:
    """conv -> relu -> mean over everything ("loss"), with the activation and the loss as outputs."""
    tensors = [numpy_helper.from_array(a, name) for name, a in {"conv.weight": WEIGHT, "conv.bias": BIAS}.items()]
    model = onnx.parser.parse_model(f"""<ir_version: {ir_version}, opset_import: ["": {opset}]>
        small (float[N, 2, 6, 6] x) => (float[N, 3, 4, 4] a, float loss) {{
            [conv] h = Conv (x, weight, bias) [relu] a = Relu (h) [mean] loss = ReduceMean <keepdims = 0> (a)
        }}""")
    model.graph.node[0].input[1:] = [tensor.name for tensor in tensors]
    if weights == "constant":
        for tensor in reversed(tensors):
            model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
    else:
        model.graph.initializer.extend(tensors)
    if weights == "input":
        inputs = [helper.make_tensor_value_info(t.name, TensorProto.FLOAT, t.dims) for t in tensors]
        model.graph.input.extend(inputs)
    return model


def smooth() -> onnx.ModelProto:
    """conv -> tanh -> sum over everything ("loss")."""
    text = "(float[2, 2, 6, 6] x) => (float loss) { h = Conv (x, w) a = Tanh (h) loss = ReduceSum <keepdims = 0> (a) }"
    return graph_of(text, opset=21, w=WEIGHT)


X = RNG.standard_normal((2, 2, 6, 6)).astype(np.float32)


def oracle(of: str = "loss") -> dict[str, np.ndarray]:
    t = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in (("x", X), ("w", WEIGHT), ("b", BIAS))}
    h = torch.nn.functional.conv2d(t["x"], t["w"], t["b"])
    h.retain_grad()
    values = {"loss": torch.relu(h).mean(), "sum": torch.relu(h).sum()}
    values[of].backward()
    return {
        "x": t["x"].grad.numpy(),
        "conv.weight": t["w"].grad.numpy(),
        "conv.bias": t["b"].grad.numpy(),
        "h": h.grad.numpy(),
    }


def outputs(model: onnx.ModelProto) -> list[str]:
    return [o.name for o in model.graph.output]


def inputs(model: onnx.ModelProto) -> list[str]:
    return [i.name for i in model.graph.input]


def close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_outputs_then_gradients_and_a_map() -> None:
    model = og.augment(small(), wrt="all", of="loss")
    assert outputs(model) == ["a", "loss", "x_grad", "conv.weight_grad", "conv.bias_grad"]
    assert inputs(model) == ["x"]
    assert gradient_map(model) == {n: f"{n}_grad" for n in ("x", "conv.weight", "conv.bias")}
    result = run(model, {"x": X})
    for name in ("x", "conv.weight", "conv.bias"):
        close(result[f"{name}_grad"], oracle()[name])


@pytest.mark.parametrize("weights", ["initializer", "constant", "input"])
@pytest.mark.parametrize("opset", [9, 11, 13, 17, 21, 22])
def test_weights_in_every_form_and_opset(weights: str, opset: int) -> None:
    version = 3 if weights == "input" and opset == 9 else 10
    model = og.augment(small(opset=opset, ir_version=version, weights=weights), wrt="parameters", of="loss")
    result = run(model, {"x": X})
    for name in ("conv.weight", "conv.bias"):
        close(result[f"{name}_grad"], oracle()[name])


def test_unnamed_nodes() -> None:
    model = small()
    for node in model.graph.node:
        node.name = ""
    close(run(og.augment(model, wrt="inputs", of="loss"), {"x": X})["x_grad"], oracle()["x"])


def test_vjp_gives_gradients_alone() -> None:
    model = og.vjp(small(), wrt=["x"], of="loss")
    assert outputs(model) == ["x_grad"]
    close(run(model, {"x": X})["x_grad"], oracle()["x"])


def test_grad_needs_a_scalar() -> None:
    close(run(og.grad(small(), wrt="inputs", of="loss"), {"x": X})["x_grad"], oracle()["x"])
    with pytest.raises(og.errors.ArgumentError, match="grad needs a scalar, but 'a' has shape"):
        og.grad(small(), wrt="inputs", of="a")


def test_intermediate_values_and_globs() -> None:
    model = og.augment(small(), wrt=["h", "conv.*"], of=["loss"])
    result = run(model, {"x": X})
    assert set(gradient_map(model)) == {"h", "conv.weight", "conv.bias"}
    close(result["h_grad"], oracle()["h"])
    inner = og.vjp(small(), wrt="inputs", of="h", cotangents="ones")
    assert run(inner, {"x": X})["x_grad"].shape == X.shape


def test_every_floating_output_is_seeded_by_default() -> None:
    model = og.augment(small(), wrt="inputs")
    assert inputs(model) == ["x", "a_grad"]  # the loss has one element and is seeded with 1
    result = run(model, {"x": X, "a_grad": np.ones((2, 3, 4, 4), np.float32)})
    close(result["x_grad"], oracle()["x"] + oracle("sum")["x"])
    ones = og.augment(small(), wrt="inputs", cotangents="ones")
    close(run(ones, {"x": X})["x_grad"], result["x_grad"])


@pytest.mark.parametrize(
    ("scale", "found"), [(1.0, ["w_grad", "b_grad"]), (2.0, ["one_grad", "zero_grad", "w_grad", "b_grad"])], ids=str
)
def test_group_normalization_as_exporters_write_it(scale: float, found: list[str]) -> None:
    """The ones and zeros of the InstanceNormalization are not parameters; the scale and bias after it are."""
    text = """(float[4,6,5,5] x) => (float[4,6,5,5] y) {
        groups = Constant<value_ints = [0, 2, -1]>() shape = Constant<value_ints = [4, 6, 5, 5]>()
        r = Reshape(x, groups) n = InstanceNormalization(r, one, zero) h = Reshape(n, shape)
        m = Mul(h, w) y = Add(m, b) }"""
    arrays = {"one": np.full(2, scale), "zero": np.zeros(2), "w": np.ones((6, 1, 1)), "b": np.ones((6, 1, 1))}
    model = graph_of(text, opset=21, **{name: a.astype(np.float32) for name, a in arrays.items()})
    assert outputs(og.augment(model, cotangents="ones"))[1:] == found


def test_trainable_inputs_have_defaults() -> None:
    model = og.augment(small(), wrt="parameters", of="loss", trainable_inputs=True)
    assert inputs(model) == ["x", "conv.weight", "conv.bias"]
    close(run(model, {"x": X})["conv.weight_grad"], oracle()["conv.weight"])
    doubled = run(model, {"x": X, "conv.bias": BIAS + 100})
    np.testing.assert_allclose(doubled["conv.bias_grad"], np.full(3, 1 / 3), rtol=1e-5)  # every ReLU is open


def test_clashing_names_get_numbers() -> None:
    model = small()
    model.graph.node[1].output[0] = "x_grad"
    model.graph.node[2].input[0] = "x_grad"
    model.graph.output[0].name = "x_grad"
    augmented = og.augment(model, wrt="inputs", of="loss")
    assert gradient_map(augmented) == {"x": "x_grad_1"}
    close(run(augmented, {"x": X})["x_grad_1"], oracle()["x"])


def test_new_constants_do_not_take_names_of_the_model() -> None:
    body = "val_2 = Mul(const_0, val_1) const_1 = Sin(val_2) y = Mul(const_1, val_2)"
    given = graph_of(f"(float[3] const_0, float[3] val_1) => (float[3] y) {{ {body} }}")
    feed = {"const_0": np.full(3, 2, np.float32), "val_1": np.arange(3, dtype=np.float32)}
    got = run(og.augment(given, wrt="inputs", cotangents="ones"), feed)
    a, b = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in feed.values())
    for name, want in zip(feed, torch.autograd.grad(((a * b).sin() * a * b).sum(), [a, b]), strict=True):
        np.testing.assert_allclose(got[f"{name}_grad"], want.numpy(), rtol=1e-5, atol=1e-6)


def test_an_unreached_member_gets_zeros_and_a_warning() -> None:
    model = small()
    model.graph.input.append(helper.make_tensor_value_info("unused", TensorProto.FLOAT, ["N", 5]))
    with pytest.warns(UserWarning, match="derivative is zero: no member of `of` depends on 'unused'") as caught:
        augmented = og.augment(model, wrt="inputs", of="loss")
    assert caught[0].filename == __file__
    result = run(augmented, {"x": X, "unused": np.ones((2, 5), np.float32)})
    np.testing.assert_array_equal(result["unused_grad"], np.zeros((2, 5)))


def test_a_zero_gradient_names_the_steps_that_cause_it() -> None:
    body = "{ q = QuantizeLinear (x, s, o) d = DequantizeLinear (q, s, o) y = Add (d, z) }"
    head = "(float[2,3] x, float[2,3] z) => (float[2,3] y) <float s = {0.1}, int8 o = {0}>"
    quantized = graph_of(f"{head} {body}", opset=21)
    reason = r"on 'x' but through steps.*: 'QuantizeLinear_0' \(QuantizeLinear\); use straight_through=True"
    with pytest.warns(UserWarning, match=reason):
        og.augment(quantized, wrt="inputs", straight_through=False)
    with pytest.warns(UserWarning, match=r"no member of wrt reaches 'd' but .*'QuantizeLinear_0'"):
        og.jvp(quantized, wrt="x", of="d", straight_through=False)


def test_a_target_is_its_own_gradient() -> None:
    model = og.vjp(small(), wrt=["a"], of="a")
    seed = RNG.standard_normal((2, 3, 4, 4)).astype(np.float32)
    result = run(model, {name: seed if name.startswith("a_grad") else X for name in inputs(model)})
    np.testing.assert_array_equal(result[gradient_map(model)["a"]], seed)


@pytest.mark.parametrize("target", ["cpu", "web", "portable"])
def test_a_result_has_the_parameters_of_its_model(target: str) -> None:
    """Not the running statistics, which gradients read in products, and not the constants of lowerings, also in bodies."""
    path = "examples/models/digits_cnn.onnx"
    own = og.load(path).parameters
    results = [
        og.augment(path, target=target),
        og.jacobian(path, wrt="image", target=target),
        og.augment(og.augment(path, wrt="inputs", target=target), wrt="conv1.weight", of="image_grad", target=target),
    ]
    assert all(og.load(result).parameters == own for result in results)
    note = next(entry for entry in results[0].metadata_props if entry.key == CONSTANTS)
    note.value = "{}"
    with pytest.raises(ModelError, match="constants' cannot be used"):
        og.load(results[0])


def test_kinds_of_model_and_no_mutation(tmp_path: Path) -> None:
    proto = small()
    before = proto.SerializeToString()
    assert isinstance(og.augment(proto, wrt="inputs"), onnx.ModelProto)
    assert proto.SerializeToString() == before
    path = tmp_path / "small.onnx"
    onnx.save(proto, path)
    assert isinstance(og.augment(path, wrt="inputs"), onnx.ModelProto)
    assert isinstance(og.augment(str(path), wrt="inputs"), onnx.ModelProto)
    model = ir.from_proto(proto)
    text = ir.to_proto(model).SerializeToString()
    assert isinstance(og.augment(model, wrt="inputs"), ir.Model)
    assert ir.to_proto(model).SerializeToString() == text


@pytest.mark.parametrize(
    "settings",
    [{"memory": og.Memory(recompute=["*"])}, {"trainable_inputs": True}, {"target": og.Target(deterministic=True)}],
    ids=str,
)
def test_forward_mode_and_products_take_the_shared_keywords(settings: dict[str, Any]) -> None:
    t = RNG.standard_normal(WEIGHT.shape).astype(np.float32)
    for function in (og.jvp, og.hvp):
        plain, model = (function(smooth(), wrt="w", of="loss", **kw) for kw in ({}, settings))
        want, got = (run(m, {"x": X, "w_tangent": t})[outputs(m)[-1]] for m in (plain, model))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert inputs(model) == [*inputs(plain), *(["w"] if "trainable_inputs" in settings else [])]


def test_only_plain_operators_and_a_valid_model() -> None:
    model = og.augment(small(), wrt="all")
    assert {n.domain for n in model.graph.node} == {""}
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 21)]
    onnx.checker.check_model(model, full_check=True)


def test_forward_mode() -> None:
    t = RNG.standard_normal(X.shape).astype(np.float32)
    pushed = run(og.jvp(small(), wrt="inputs", of="loss"), {"x": X, "x_tangent": t})
    assert float(pushed["loss_tangent"]) == pytest.approx(float(np.vdot(oracle()["x"], t)), rel=1e-4)


def test_a_direction_of_a_value_that_depends_on_others_is_added() -> None:
    """Forward mode is the transpose of reverse mode, also for two values of which one depends on the other."""
    model = graph_of("(float[3] x) => (float y) { s = ReduceSum <keepdims = 0> (x)  y = Mul (s, s) }")
    feed = {"x": np.array([1, 2, 3], np.float32)}
    directions = {"x_tangent": np.array([1, 0, 0], np.float32), "s_tangent": np.array(2, np.float32)}
    gradients = run(og.vjp(model, wrt=["x", "s"]), feed)
    expected = sum(float((gradients[f"{v}_grad"] * directions[f"{v}_tangent"]).sum()) for v in ("x", "s"))
    assert run(og.jvp(model, wrt=["x", "s"]), {**feed, **directions})["y_tangent"] == expected
    for composition in COMPOSITIONS:
        found = run(og.hvp(model, wrt=["x", "s"], of="y", composition=composition), {**feed, **directions})
        np.testing.assert_array_equal(found["x_grad_tangent"], [6, 6, 6])
        assert found["s_grad_tangent"] == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wrt": ["conv.wieght"]}, r"Unknown value in wrt: 'conv.wieght'. Did you mean 'conv.weight'"),
        ({"of": "los"}, r"Unknown value in of: 'los'. Did you mean 'loss'"),
        ({"cotangents": "zeros"}, "cotangents must be None or 'ones', not 'zeros'"),
        ({"target": "tpu"}, "Unknown target 'tpu'. Targets: cpu, cuda, web, webgpu, arm, portable"),
        ({"wrt": None}, "wrt takes a name or several, not None"),
        ({"target": ["cpu"]}, r"Unknown target \['cpu'\]. Targets: cpu, cuda"),
        ({"of": [3]}, r"of takes a name or several, not \[3\]"),
        ({"of": {"loss": 2}}, r"of takes a name or several, not \{'loss': 2\}"),
    ],
    ids=str,
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        og.augment(small(), **arguments)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"y": [1]}, "Unknown input 'y'"),
        ({"x": [1, 2]}, "Input 'x' has rank 4, but 2 sizes were given"),
        ({"x": "NCHW"}, "input 'x' must be a list of sizes, symbols and None, not 'NCHW'"),
        ([1, 2, 8, 8], "input_shapes must map names of inputs to their sizes"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit(shapes: Any, message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        og.load(small(), input_shapes=shapes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: og.Target("tpu"), "Unknown target 'tpu'. Targets: cpu, cuda"),
        (lambda: og.Target(lowering="quick"), "Unknown lowering 'quick'"),
        (lambda: og.Target(lowering=3), "lowering must be 'auto', 'exact', 'fast' or a mapping"),
        (lambda: og.Target(lowering={"ConvWeightGrad": "fastest"}), "Unknown lowering"),
        (lambda: og.Target(max_workspace=0), "positive number of bytes, not 0"),
        (lambda: og.Target(deterministic="yes"), "deterministic must be True or False"),
        (
            lambda: og.Memory(activations=["float16"]),
            r"activations must be 'float16', 'bfloat16' or None, not \['fl",
        ),
        (lambda: og.Memory(recompute={"c": 1}), r"recompute takes a name or several, not \{'c': 1\}"),
        (lambda: og.Memory(2.0), "The memory budget must be a number of bytes, a share"),
        (lambda: og.Memory(0.5, recompute="auto"), "leave out recompute"),
        (lambda: og.augment(small(), memory="most"), "The memory budget must be a number of bytes, a share"),
    ],
)
def test_bad_settings(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        make()


def test_vjp_and_jvp_keep_the_outputs_on_request() -> None:
    augmented = og.augment(small(), wrt="parameters")
    assert og.vjp(small(), wrt="parameters", outputs=True).SerializeToString() == augmented.SerializeToString()
    alone = outputs(og.vjp(small(), wrt="parameters"))
    assert outputs(augmented)[-len(alone) :] == alone
    assert outputs(og.jvp(small(), wrt="inputs", of="loss")) == ["loss_tangent"]
    assert outputs(og.jvp(small(), wrt="inputs", of="loss", outputs=True)) == [*outputs(small()), "loss_tangent"]


def test_bad_models(tmp_path: Path) -> None:
    with pytest.raises(og.errors.ModelError, match="There is no file"):
        og.augment(tmp_path / "none.onnx")
    with pytest.raises(og.errors.ModelError, match="is a folder"):
        og.augment(tmp_path)
    (tmp_path / "text.onnx").write_text("not a model")
    with pytest.raises(og.errors.ModelError, match="not a readable ONNX model"):
        og.augment(tmp_path / "text.onnx")
    (tmp_path / "empty.onnx").touch()
    with pytest.raises(og.errors.ModelError, match="The model is empty"):
        og.augment(tmp_path / "empty.onnx")
    with pytest.raises(
        og.errors.ArgumentError, match=r"A model is a path, .* not bytes. Convert serialized bytes with onnx"
    ):
        og.augment(small().SerializeToString())


def test_sizes_may_be_numpy_integers() -> None:
    result = og.augment(og.load(small(), input_shapes={"x": np.array([5, 2, 6, 6])}))
    assert result.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 5


def classified() -> onnx.ModelProto:
    """Two branches through operators without a rule and one that bypasses them."""
    machine = (
        "ai.onnx.ml.SVMClassifier <classlabels_ints = [0, 1, 2, 3, 4], rho = [0.5], kernel_params = [0.0, 0.0, 0.0],"
    )
    machine += f" coefficients = [{', '.join(map(str, np.eye(5).ravel()))}]>"
    text = f"""(float[2,5] x) => (float[2,5] y, float[2,5] z) {{
        [relu] r = Relu (x) [first] a, l1 = {machine} (r)
        [second] b, l2 = {machine} (r) [add] y = Add (l1, l2) [tanh] z = Tanh (r) }}"""
    return graph_of(text, opset=20, domains=', "ai.onnx.ml": 3')


def test_all_blocking_nodes_are_reported_with_their_paths() -> None:
    with pytest.raises(og.errors.DifferentiationError) as caught:
        og.augment(classified(), wrt="inputs")
    assert {p.node for p in caught.value.problems} == {"first", "second"}
    problem = next(p for p in caught.value.problems if p.node == "first")
    assert problem.path == ("y", "l1", "r", "x")
    assert (problem.op_type, problem.opset) == ("ai.onnx.ml::SVMClassifier", 3)
    assert "Take `of` before it" in problem.hint
    assert str(caught.value).startswith("2 nodes cannot be differentiated:")
    sent = pickle.loads(pickle.dumps(caught.value))  # as between processes
    assert (str(sent), sent.problems) == (str(caught.value), caught.value.problems)


def test_an_operator_without_a_rule_is_refused_only_on_the_path() -> None:
    x = RNG.standard_normal((2, 5)).astype(np.float32)
    result = run(og.augment(classified(), wrt="inputs", of="z", cotangents="ones"), {"x": x})
    close(result["x_grad"], np.where(x > 0, 1 - np.tanh(np.maximum(x, 0)) ** 2, 0))
