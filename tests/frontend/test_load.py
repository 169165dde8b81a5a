"""A loaded model: what it says of itself, that nothing changes it, and that nothing is read or converted again."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.frontend import canonicalize, gate
from onnx_convgrad.frontend.roles import roles_of
from onnx_convgrad.pipeline.options import Options
from onnx_convgrad.pipeline.stages import build
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of

DIGITS = Path("examples/models/digits_cnn.onnx")


def net() -> onnx.ModelProto:
    """A product, a bias, a number, and an If that an input decides."""
    return graph_of("""(float[N, 3] x, bool wide) => (float[N, 2] y)
        <float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {0, 1}, float half = {0.5}, int64[1] k = {0}> {
            p = MatMul (x, w) q = Add (p, b) r = Mul (q, half)
            y = If (wide) <then_branch = t () => (float[N, 2] u) { u = Mul (r, r) },
                           else_branch = e () => (float[N, 2] v) { v = Neg (r) }> }""")


def test_a_loaded_model_says_what_it_is() -> None:
    model = og.load(net(), input_values={"wide": True})
    assert (model.inputs, model.outputs, model.parameters, model.opset) == (("x",), ("y",), ("w", "b"), 17)
    assert repr(model) == (
        "<Model 'g': inputs x float32[N, 3]; outputs y float32[N, 2]; 2 parameters of 8 numbers; opset 17>"
    )
    found = {name: (role.kind, role.reason) for name, role in model.roles.items()}
    assert found == found | {
        "x": ("input", "input of the model"),
        "w": ("parameter", "B of 'MatMul_0' (MatMul)"),
        "half": ("constant", "one number"),
        "wide": ("constant", "input that is bound to a constant"),
    }


def test_roles_of_stored_values() -> None:
    roles = og.load(DIGITS).roles
    assert [name for name, role in roles.items() if role.kind == "parameter"][:3] == [
        "conv1.weight",
        "bn1.weight",
        "bn1.bias",
    ]
    assert {name for name, role in roles.items() if role.kind == "statistic"} == {
        f"bn{i}.running_{kind}" for i in (1, 2, 3) for kind in ("mean", "var")
    }
    quantized = graph_of("""(float[2, 2] x) => (float[2, 2] y) <float s = {0.1}, int8 z = {0}, float[2, 2] w = {1, 2, 3, 4}>
        { q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) y = MatMul (d, w) }""")
    assert og.load(quantized).roles["s"].reason == "scale of a quantizer"


def test_a_value_that_may_be_a_parameter_is_unclear() -> None:
    model = graph_of("(float[2] x) => (float[2] y) <float temperature = {1.37}> { y = Mul (x, temperature) }")
    role = og.load(model).roles["temperature"]
    assert (role.kind, role.reason) == ("unclear", "parameter or constant: the file does not say which")


def both(transform: Callable[..., Any]) -> tuple[Any, Any]:
    return transform(DIGITS), transform(og.load(DIGITS))


@pytest.mark.parametrize(
    "transform",
    [
        og.augment,
        lambda m: og.vjp(m, wrt="inputs", cotangents="ones"),
        lambda m: og.jvp(m, wrt="all"),
        lambda m: og.jacobian(m, of="logits", wrt="image", per_sample=True),
        og.vmap,
        og.transforms.replace_batchnorm,
        og.transforms.lower_gradient_ops,
        lambda m: og.build_training(m, loss="cross_entropy", optimizer="sgd").step,
        lambda m: og.attribution.saliency(m, label=1),
    ],
)
def test_transformations_of_it_equal_those_of_its_file(transform: Callable[..., Any]) -> None:
    of_file, of_loaded = both(transform)
    assert of_file == of_loaded


def test_reports_and_sessions_take_it() -> None:
    of_file, of_loaded = both(lambda m: str(og.explain(m)))
    assert of_file == of_loaded
    image = np.random.default_rng(0).random((2, 1, 8, 8), np.float32)
    of_file, of_loaded = both(lambda m: og.session(m).run(None, {"image": image})[0])
    np.testing.assert_array_equal(of_file, of_loaded)


def test_nothing_is_read_or_converted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = og.load(DIGITS)
    state = ir.to_proto(model.canonical).SerializeToString(), ir.to_proto(model.source).SerializeToString()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it was done before")

    for module, name in ((gate, "_Gate"), (canonicalize, "run_passes")):
        monkeypatch.setattr(module, name, refuse)
    first, again = og.augment(model), og.augment(model)
    assert first == again
    og.vjp(model, wrt="inputs", training=True)
    assert og.build_training(model, loss="cross_entropy", optimizer="adam", wrt={"*.weight": slice(0, 2)}).step
    assert state == (
        ir.to_proto(model.canonical).SerializeToString(),
        ir.to_proto(model.source).SerializeToString(),
    )


def test_results_have_the_kind_of_what_was_loaded(tmp_path: Path) -> None:
    onnx.save(net(), tmp_path / "m.onnx")
    assert isinstance(og.augment(og.load(tmp_path / "m.onnx")), onnx.ModelProto)
    assert isinstance(og.augment(og.load(net())), onnx.ModelProto)
    assert isinstance(og.augment(og.load(ir.from_proto(net()))), ir.Model)


def test_its_inputs_and_limits_are_fixed() -> None:
    model = og.load(net(), input_values={"wide": False}, input_shapes={"x": [4, 3]}, limits=og.Limits(nodes=10))
    assert [v.name for v in og.augment(model, cotangents="ones").graph.input] == ["x"]
    assert og.load(model) is model
    for call in (og.augment, og.load, og.transforms.lower_gradient_ops, og.vmap):
        with pytest.raises(
            og.errors.ArgumentError, match=r"loaded already, and input_shapes .*\. Give them to onnx_convgrad\.load"
        ):
            call(og.load(model, input_shapes={"x": [5, 3]}))
    with pytest.raises(og.errors.ArgumentError, match="loaded already, and base_dir "):
        og.save(og.load(model, base_dir="."), "m.onnx")
    x = np.ones((4, 3), np.float32)
    with pytest.raises(og.errors.ArgumentError, match="loaded already, and input_values "):
        og.predict(og.load(model, input_values={"wide": True}), {"x": x})
    want = run(net(), {"x": x, "wide": np.array(False)})["y"]
    np.testing.assert_array_equal(og.session(model).run(None, {"x": x})[0], want)


def test_arguments_are_checked_before_the_file_is_read() -> None:
    with pytest.raises(og.errors.ArgumentError, match="input_shapes must map names of inputs to their sizes"):
        og.load("no.onnx", input_shapes=[1])  # type: ignore[arg-type]
    with pytest.raises(og.errors.ArgumentError, match="'x' is in input_values and in input_shapes"):
        og.load("no.onnx", input_shapes={"x": [1]}, input_values={"x": 1})
    with pytest.raises(og.errors.ArgumentError, match=r"limits must be an onnx_convgrad\.Limits"):
        og.load("no.onnx", limits=5)  # type: ignore[arg-type]
    with pytest.raises(og.errors.ArgumentError, match=r"A model is a path, .* or an onnx_convgrad\.Model, not int"):
        og.load(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("producer", "own"), [("pytorch", ["a", "b"]), ("", ["a"])])
def test_equal_members_of_the_outermost_module_are_separate_in_files_of_pytorch(producer: str, own: list[str]) -> None:
    """The older exporter stores them once and copies them by an Identity; elsewhere a copy may be intended."""
    model = graph_of("""(float[N, 2] x) => (float[N, 2] y) <float[2] a = {1, 1}, float[2, 2] w = {1, 2, 3, 4}>
        { b = Identity (a) p = Mul (x, a) q = Mul (p, b) y = MatMul (q, w) }""")
    model.producer_name = producer
    assert og.load(model).parameters == (*own, "w")
    program = og.build_training(model, loss="mse", optimizer="sgd")
    assert [p.name for p in program.manifest.parameters] == [*own, "w"]


def test_parts_of_a_parameter_are_parameters() -> None:
    built = build(DIGITS, Options(wrt={"conv1.weight": slice(0, 2)}))
    kinds = {name: role.kind for name, role in roles_of(built.primal.graph).items()}
    assert {name for name in kinds if name.startswith("conv1")} == {"conv1.weight[0:2]", "conv1.weight[2:16]"}
    assert set(kinds.values()) >= {"input", "parameter", "statistic"}


def test_copies_and_pickles_give_the_same_graphs(tmp_path: Path) -> None:
    onnx.save(net(), tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    for given in (tmp_path / "m.onnx", ir.load(tmp_path / "m.onnx")):
        model = og.load(given, input_values={"wide": True}, input_shapes={"x": [4, 3]}, limits=og.Limits(nodes=100))
        assert copy.copy(model) is model
        assert copy.deepcopy({"model": model}) == {"model": model}
        again = pickle.loads(pickle.dumps(model))
        assert (repr(again), again.kind, again.input_shapes, again.limits) == (
            repr(model), model.kind, {"x": [4, 3]}, og.Limits(nodes=100),
        )  # fmt: skip
        assert og.augment(og.load(ir.to_proto(again.canonical))) == og.augment(og.load(ir.to_proto(model.canonical)))


def test_a_deep_model_can_be_pickled() -> None:
    nodes = " ".join(f"v{i + 1} = Sin (v{i})" for i in range(500))
    model = og.load(graph_of(f"(float[2] v0) => (float[2] v500) {{ {nodes} }}"))
    again = pickle.loads(pickle.dumps(model))
    assert og.augment(again, wrt="inputs") == og.augment(model, wrt="inputs")
