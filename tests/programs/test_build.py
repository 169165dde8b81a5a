"""Training programs: names and order, the split form, parameters and outputs, options, errors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad import optim
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of
from tests.support.training_nets import (
    A,
    B,
    ProgramRun,
    X,
    arrays,
    build,
    check_halves,
    exported,
    net,
    off,
    same,
    two_outputs,
)

# -- the contract ------------------------------------------------------------------------------------------------------


def test_names_and_order() -> None:
    program = build()
    names = [name for name, _ in net().named_parameters()]
    statistics = [f"bn{i}.running_{what}" for i in (1, 2) for what in ("mean", "var")]
    slots = [f"{name}_momentum_buffer" for name in names]
    inputs = [i.name for i in program.step.graph.input]
    outputs = [o.name for o in program.step.graph.output]
    assert inputs[:3] == ["x", "target", "learning_rate"]
    assert sorted(inputs[3 : 3 + len(names)]) == sorted(names)
    assert sorted(inputs[3 + len(names) :]) == sorted(["step", *slots, *statistics])
    assert outputs[:2] == ["loss", "y"]
    assert outputs[2:] == [f"{name}_next" for name in inputs[3:]]
    assert [o.name for o in program.evaluate.graph.output] == ["loss", "y"]
    gradients = [o.name for o in program.gradients.graph.output]
    assert gradients == [
        "loss",
        "y",
        *(f"{n}_grad" for n in inputs[3 : 3 + len(names)]),
        *(f"{n}_next" for n in statistics),
    ]
    assert program.update.graph.input[0].name == "learning_rate"
    assert {i.name for i in program.update.graph.input} == {
        "learning_rate", "step", *names, *slots, *(f"{n}_grad" for n in names)
    }  # fmt: skip
    for part in ("step", "gradients", "update", "evaluate"):
        model = getattr(program, part)
        onnx.checker.check_model(model, full_check=True)
        assert {n.domain for n in model.graph.node} == {""}
        assert [(o.domain, o.version) for o in model.opset_import] == [("", 21)]
        manifest = json.loads({p.key: p.value for p in model.metadata_props}["onnx_convgrad.training"])
        assert (manifest["format"], manifest["version"]) == ("onnx_convgrad.training_program", 2)
        assert manifest["optimizer"]["name"] == "SGD" and manifest["losses"][0]["loss"] == "CrossEntropy"


# -- the split form ----------------------------------------------------------------------------------------------------


def test_gradients_then_update_is_a_step() -> None:
    check_halves(build(optimizer=optim.AdamW(lr=1e-3, clip_norm=1.0)), arrays(0))


def test_accumulation_over_two_halves() -> None:
    """The mean of the gradients of two halves is that of the whole, if no statistic depends on the batch."""
    program = build(freeze_statistics=True)
    whole = run(program.gradients, arrays(0))
    halves = [run(program.gradients, {k: v[part] for k, v in arrays(0).items()}) for part in (slice(3), slice(3, 6))]
    for p in program.manifest.parameters:
        mean = (halves[0][p.gradient] + halves[1][p.gradient]) / 2
        assert off(mean, whole[p.gradient]) < 1e-5, p.name


# -- parameters and outputs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"wrt": ["fc.*", "conv3.bias"]}, "fc.weight fc.bias conv3.bias"),
        ({"wrt": "bn1.*"}, "bn1.weight bn1.bias"),
        ({"freeze": ["conv*", "bn1.bias"]}, "bn1.weight bn2.weight bn2.bias fc.weight fc.bias"),
    ],
    ids=str,
)
def test_parameters_by_name_and_glob(options: dict[str, Any], names: str) -> None:
    program, trained = build(**options), set(names.split())
    assert {p.name for p in program.manifest.parameters} == trained
    inputs = {i.name for i in program.step.graph.input}
    assert {name for name, _ in net().named_parameters()} & inputs == trained
    assert "bn1.running_mean" in inputs
    next_ = {name.removesuffix("_next") for name in run(program.step, arrays(0)) if name.endswith("_next")}
    slots = {f"{name}_momentum_buffer" for name in trained}
    assert next_ == {"step", *trained, *slots, *(s.name for s in program.manifest.state if s.kind == "statistic")}


def test_parameters_without_effect_on_the_loss_are_left_out() -> None:
    model = two_outputs()
    with pytest.warns(UserWarning, match="Not trained, since the loss does not depend on it: 'b.weight', 'b.bias'"):
        program = build(model, loss={"a": "mse"})
    assert [p.name for p in program.manifest.parameters] == ["a.weight", "a.bias"]
    assert "b.weight" not in [i.name for i in program.step.graph.input]
    run(program.step, {"x": np.zeros((2, 3), np.float32), "target": np.zeros((2, 2), np.float32)})
    with pytest.raises(og.errors.ArgumentError, match="The loss does not depend on any of the parameters"):
        build(model, loss={"a": "mse"}, wrt="b.*")


def test_outputs_by_choice() -> None:
    model = two_outputs()
    assert build(model, loss={"a": "mse", "b": "mse"}, outputs=["b"]).manifest.outputs == ("b",)
    assert build(model, loss={"a": "mse", "b": "mse"}, outputs=[]).manifest.outputs == ()
    chosen = pytest.warns(UserWarning, match="Not trained")
    with chosen:
        assert build(model, loss="mse", outputs="a").manifest.losses[0]["output"] == "a"


# -- name clashes ------------------------------------------------------------------------------------------------------


def test_clashing_names_are_the_same_in_all_graphs() -> None:
    model = two_outputs()
    text = model.SerializeToString().replace(b"difference", b"learn_rate").replace(b"distance", b"loss____")
    clashing = onnx.ModelProto.FromString(text)
    for name, new in (("loss____", "loss"), ("learn_rate", "learning_rate"), ("best", "a.weight_next")):
        for node in clashing.graph.node:
            node.input[:] = [new if v == name else v for v in node.input]
            node.output[:] = [new if v == name else v for v in node.output]
        for info in clashing.graph.output:
            info.name = new if info.name == name else info.name
    program = build(clashing, loss={"a": "mse", "b": (0.0, "mse")})
    m = program.manifest
    assert (m.loss, m.learning_rate.name) == ("loss_1", "learning_rate_1")
    assert m.parameters[0].next == "a.weight_next_1"
    assert m.parameters[0].next in [o.name for o in program.step.graph.output]
    assert m.parameters[0].next in [o.name for o in program.update.graph.output]
    assert m.learning_rate.name in [i.name for i in program.update.graph.input]
    onnx_run = ProgramRun(program)
    found = [float(onnx_run({"x": X, "a_target": A, "b_target": B})["loss_1"]) for _ in range(10)]
    assert found[-1] < found[0]


# -- options and errors ------------------------------------------------------------------------------------------------


def test_a_lowering_may_be_forced() -> None:
    for choice in ("im2col_gemm", "im2col_conv"):
        program = build(target=og.Target(lowering={"ConvWeightGrad": choice}))
        assert float(run(program.step, arrays(0))["loss"]) == pytest.approx(float(run(build().step, arrays(0))["loss"]))


@pytest.mark.parametrize("target", ["cuda", "web", "portable"])
def test_other_targets(target: str) -> None:
    want, got = (run(build(target=t).step, arrays(0)) for t in ("cpu", target))
    same(got, want, 1e-3, 1e-5)


def test_the_model_is_not_changed() -> None:
    before = exported().SerializeToString()
    build()
    assert exported().SerializeToString() == before
    model = ir.from_proto(exported())
    build(model).step  # noqa: B018 - building is what is tested
    assert ir.to_proto(model).SerializeToString() == ir.to_proto(ir.from_proto(exported())).SerializeToString()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "crossentropy"}, "Unknown loss 'crossentropy'. Did you mean 'cross_entropy'"),
        ({"loss": 3}, "A loss is a name, a member of onnx_convgrad.losses or a function, not 3"),
        ({"loss": {}}, "The argument loss is empty"),
        ({"loss": {"logits": "mse"}}, "Unknown output in loss: 'logits'"),
        ({"loss": "y"}, r"The loss 'y' has shape .*; it must be one number"),
        ({"optimizer": 3}, "optimizer must be a name or a member of onnx_convgrad.optim, not 3"),
        ({"wrt": "inputs"}, "wrt names 'x', which is not an initializer of the model and cannot be trained"),
        ({"wrt": "conv9.*"}, "Unknown value in wrt: 'conv9"),
        ({"freeze": "conv9.*"}, "Unknown initializer in freeze: 'conv9"),
        ({"freeze": "*"}, "Every parameter is frozen: there is nothing to train"),
        ({"outputs": ["z"]}, "Unknown output 'z'"),
        ({"freeze_statistics": "bn3*"}, "Unknown BatchNormalization or statistic in freeze_statistics: 'bn3"),
        ({"target": "tpu"}, "Unknown target 'tpu'"),
        ({"model": two_outputs(), "loss": "mse"}, r"The model has 3 floating outputs \(a, b, distance\)"),
        ({"model": two_outputs(), "loss": {"best": "mse"}}, "loss is of 'best', which has dtype INT64, not a floating one"),
        ({"model": two_outputs(), "loss": {"a": lambda *_: 3}}, "The loss function returned 3, not a value of the graph"),
        ({"precision": "half"}, "Unknown precision 'half'"),
        ({"precision": "bfloat16"}, "needs target='cuda': other providers have no bfloat16 products"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        build(**options)


def test_recomputed_values_give_the_same_steps() -> None:
    """`recompute` copies forward nodes into the backward part of `step` and `gradients`; every bit stays."""
    plain, again = (ProgramRun(build(exported(), memory=og.Memory(recompute=r))) for r in (None, ["*elu*"]))
    for part in ("step", "gradients"):
        copies = [n.name for n in again.program.model(part).graph if "/recomputed" in (n.name or "")]
        assert copies
    for step in range(3):
        assert float(plain(arrays(step))["loss"]) == float(again(arrays(step))["loss"])
    same(again.state, plain.state)


def test_max_workspace_applies_to_training() -> None:
    with pytest.raises(og.errors.LoweringError, match="max_workspace"):
        build(exported(), target=og.Target(max_workspace=1)).step  # noqa: B018 - built when asked for


def test_brackets_in_names_are_not_globs() -> None:
    """Lists of modules give such names; in a glob, brackets enclose a set of characters."""
    weight, bias = "layers[0].weight", "layers[0].bias"
    stored = {weight: np.ones((4, 3), np.float32), bias: np.ones(3, np.float32)}
    model = graph_of(
        f'(float[N,4] x) => (float[N,3] "out[0]") {{ "out[0]" = Gemm (x, "{weight}", "{bias}") }}', **stored
    )
    optimizer = og.optim.SGD(lr=1.0, groups={bias: {"lr": 0.25}})
    program = og.build_training(model, loss="cross_entropy", optimizer=optimizer, freeze=weight, outputs="out[0]")
    assert [p.name for p in program.manifest.parameters] == [bias]
    assert optimizer.of(bias)[1] == 0.25


@pytest.mark.parametrize("optimizer", [optim.SGD(lr=0.1, clip_norm=1.0), optim.Adam()])
def test_parameters_named_like_new_values(optimizer: optim.Optimizer) -> None:
    """PyTorch's newer exporter gives such names to weights that it has folded or transposed."""
    stored = {name: np.full(shape, 0.1, np.float32) for name, shape in {"val_0": (4, 5), "val_1": (5, 3)}.items()}
    text = "(float[N,4] x) => (float[N,3] y) { h = MatMul (x, val_0)  r = Relu (h)  y = MatMul (r, val_1) }"
    proto = graph_of(text, opset=21, **stored)
    program = og.build_training(proto, loss="cross_entropy", optimizer=optimizer)
    feed = {"x": np.ones((2, 4), np.float32), "target": np.array([0, 2])}
    check_halves(program, feed, atol=0)
