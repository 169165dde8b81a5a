"""Mixed precision: products in float16 or bfloat16, float32 parameters, and a loss scale equal to PyTorch's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

import onnx_convgrad as og
from onnx_convgrad import optim
from onnx_convgrad.backends.cuda.cuda_kernels import lacks
from onnx_convgrad.ir.emit import CANONICAL_OPSET, Emitter
from onnx_convgrad.programs.update import sum_of_all
from onnx_convgrad.runtime import run
from tests.support.families import FAMILIES, export
from tests.support.families import exported as export_family
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
    off,
    two_outputs,
)


def dtypes(model: onnx.ModelProto) -> dict[str, set[int]]:
    """Operator -> the types of its first operand, as far as inference finds them."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    known = {i.name: i.type.tensor_type.elem_type for i in (*graph.value_info, *graph.input, *graph.output)}
    known |= {i.name: i.data_type for i in graph.initializer}
    found: dict[str, set[int]] = {}
    for node in graph.node:
        if node.input and node.input[0] in known:
            found.setdefault(node.op_type, set()).add(known[node.input[0]])
    return found


@pytest.mark.parametrize("training_export", [False, True])
def test_losses_follow_those_of_float32(training_export: bool) -> None:
    model = exported(training=training_export)
    full, half = ProgramRun(build(model)), ProgramRun(build(model, precision="float16"))
    for step in range(10):
        want, got = full(arrays(step)), half(arrays(step))
        assert float(got["loss"]) == pytest.approx(float(want["loss"]), rel=1e-3)
        assert off(got["y"], want["y"]) < 5e-3
        assert got["loss_scale_next"] == 65536
    assert {p.dtype for p in half.program.manifest.parameters} == {"float32"}
    for p in half.program.manifest.parameters:
        moved = off(half.state[p.name], full.state[p.name])
        assert moved < 1e-2, p.name
    assert any(off(half.state[p.name], full.state[p.name]) > 1e-6 for p in half.program.manifest.parameters)


def test_statistics_from_products_of_rows_train_like_those_of_float32() -> None:
    """Steps for CUDA, whose images are large enough for `unsupported_forms._product_moments`."""
    nn, generator = torch.nn, torch.Generator().manual_seed(4)
    layers = [
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, padding=1, bias=False),
    ]
    torch.manual_seed(0)
    module = nn.Sequential(
        *layers, nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5)
    )
    images = torch.randn((16, 3, 12, 12), generator=generator) + torch.randn((16, 3, 1, 1), generator=generator)
    feeds = {"x": images.numpy(), "target": torch.randint(0, 5, (16,), generator=generator).numpy()}
    model = export(module.train(), images, dynamo=False, training=True, fold=False, dynamic_batch=True)
    full, half = (ProgramRun(build(model, precision=p, target="cuda")) for p in ("float32", "float16"))
    used = [node.op_type for node in half.program.step.graph.node]
    assert "LayerNormalization" not in used and used.count("Gather") >= 4
    for _ in range(10):
        want, got = full(feeds), half(feeds)
        assert float(got["loss"]) == pytest.approx(float(want["loss"]), rel=1e-3)
        assert got["loss_scale_next"] == 65536
    for name in full.state.keys() & half.state.keys():
        assert off(half.state[name], full.state[name]) < 1e-2, name


def test_what_is_computed_in_float16() -> None:
    program = build(precision="float16")
    found = dtypes(program.step)
    for op in ("Conv", "Gemm", "MatMul", "Relu"):
        assert found.get(op, {TensorProto.FLOAT16}) == {TensorProto.FLOAT16}, op
    assert found["LogSoftmax"] == {TensorProto.FLOAT}
    assert TensorProto.FLOAT16 not in dtypes(program.evaluate)["Conv"]
    outputs = {o.name: o.type.tensor_type.elem_type for o in program.step.graph.output}
    assert {outputs[n] for n in ("loss", "y", "conv1.weight_next")} == {TensorProto.FLOAT}


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_an_overflow_skips_the_step(momentum: float) -> None:
    """Parameters, their state and the counter stay; the scale is halved; running statistics are updated, as in PyTorch."""
    precision, optimizer = og.MixedPrecision("float16", init_scale=2.0**60), optim.SGD(0.05, momentum=momentum)
    program = build(precision=precision, optimizer=optimizer)
    stored = {i.name: numpy_helper.to_array(i) for i in program.step.graph.initializer}
    got = run(program.step, arrays(0))
    assert np.isfinite(got["loss"])
    for entry in program.manifest.moving():
        if entry.name in ("loss_scale", "good_steps") or "running" in entry.name:
            continue
        np.testing.assert_array_equal(got[entry.next], stored[entry.name], err_msg=entry.name)
    assert got["loss_scale_next"] == 2.0**59
    assert got["good_steps_next"] == 0
    assert not np.array_equal(got["bn1.running_mean_next"], stored["bn1.running_mean"])


def test_the_scale_adapts() -> None:
    onnx_run = ProgramRun(build(precision=og.MixedPrecision("float16", init_scale=2.0**40, growth_interval=5)))
    taken = [int(onnx_run(arrays(i % 3))["step_next"]) for i in range(40)]
    assert taken[0] == 0
    assert taken[-1] > 10
    assert all(np.isfinite(v).all() for v in onnx_run.state.values())


def test_the_scale_equals_that_of_pytorch() -> None:
    """`update` and `GradScaler` get equal gradients, some of them infinite or NaN."""
    rule = og.MixedPrecision("float16", init_scale=1024.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=3)
    program = build(two_outputs(), loss={"a": "mse", "b": "mse"}, precision=rule)
    update = ProgramRun(program, "update")
    generator = np.random.default_rng(0)
    weights = {i.name: numpy_helper.to_array(i) for i in two_outputs().graph.initializer}
    parameters = {p.name: torch.tensor(weights[p.name], requires_grad=True) for p in program.manifest.parameters}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=3)
    for step in range(16):
        scale = float(scaler.scale(torch.ones(1)))
        gradients = {n: generator.standard_normal(p.shape).astype(np.float32) for n, p in parameters.items()}
        if step in (2, 7, 8):
            gradients["a.bias"][0] = np.nan if step == 7 else np.inf
        for name, p in parameters.items():
            p.grad = torch.tensor(gradients[name]) * scale
        scaler.step(optimizer)
        scaler.update()
        got = update({p.gradient: gradients[p.name] for p in program.manifest.parameters})
        assert float(got["loss_scale_next"]) == scaler.get_scale(), step
        for name, p in parameters.items():
            np.testing.assert_allclose(got[f"{name}_next"], p.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert update.state["step"] == 13


def test_the_scale_does_not_overflow() -> None:
    rule = og.MixedPrecision("float16", init_scale=3e38, growth_interval=1)
    program = build(two_outputs(), loss={"a": "mse", "b": "mse"}, precision=rule)
    gradients = {p.gradient: np.ones([int(d) for d in p.shape or ()], np.float32) for p in program.manifest.parameters}
    assert run(program.update, gradients)["loss_scale_next"] == np.float32(3e38)


@pytest.mark.parametrize("decay", [0, 0.1])
@pytest.mark.parametrize("rate", [0.05, 0.0])
def test_sgd_multiplies_the_gradients_once(rate: float, decay: float) -> None:
    """By rate / scale; the other form of the step has the gradients as outputs and gives the same."""
    program = build(precision="float16", optimizer=optim.SGD(rate, weight_decay=decay))
    named = [node.name for node in program.step.graph.node if node.op_type == "Mul"]
    if not decay:
        assert not [name for name in named if "/SGD/" in name]
    whole, feed = run(program.step, arrays(0)), arrays(0)
    gradients = run(program.gradients, feed)
    parts = run(program.update, {p.gradient: gradients[p.gradient] for p in program.manifest.parameters})
    for p in program.manifest.parameters:
        np.testing.assert_allclose(whole[p.next], parts[p.next], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [None, 0, 20, 60, 70, 71, 73])
def test_few_nodes_add_up_all_numbers(bad: int | None) -> None:
    shapes = [(3,)] * 70 + [(2, 5), (5000,), (7,), ()]
    values = [
        ir.Value(name=f"v{i}", shape=ir.Shape(s), type=ir.TensorType(ir.DataType.FLOAT)) for i, s in enumerate(shapes)
    ]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": CANONICAL_OPSET}, name="g")
    total = sum_of_all(Emitter(graph), values)
    total.name, total.shape, total.type = "y", ir.Shape([]), ir.TensorType(ir.DataType.FLOAT)
    graph.outputs.append(total)
    counts = Counter(node.op_type for node in graph)
    assert counts == {"ReduceSum": 8, "Concat": 4, "Reshape": 7}
    rng = np.random.default_rng(0)
    feed = {f"v{i}": rng.standard_normal(s).astype(np.float32) for i, s in enumerate(shapes)}
    want = sum(float(x.sum(dtype=np.float64)) for x in feed.values())
    if bad is not None:
        feed[f"v{bad}"] = np.full(shapes[bad], np.inf, np.float32)
        want = np.inf
    assert run(ir.Model(graph, ir_version=10), feed)["y"] == pytest.approx(want, rel=1e-4)


def test_split_form() -> None:
    program = build(precision="float16", optimizer=optim.AdamW(lr=1e-3, clip_norm=1.0))
    first = check_halves(program, arrays(0))
    assert "loss_scale" in {i.name for i in program.gradients.graph.input}
    reference = run(build().gradients, arrays(0))
    largest = max(np.linalg.norm(reference[p.gradient]) for p in program.manifest.parameters)
    for p in program.manifest.parameters:
        got, want = first[p.gradient], reference[p.gradient]
        if p.name == "conv2.bias":  # which the batch normalization after it takes away again: rounding is left
            assert max(np.linalg.norm(got), np.linalg.norm(want)) < 1e-6 * largest
        else:
            assert off(got, want) < 2e-2, p.name


def test_outputs_keep_names_and_types() -> None:
    loss, feeds = {"a": "mse", "b": "mse"}, {"x": X, "a_target": A, "b_target": B}
    half, full = (build(two_outputs(), loss=loss, precision=p) for p in ("float16", "float32"))
    assert half.manifest.outputs == ("a", "b", "distance", "best")
    got, want = run(half.gradients, feeds), run(full.gradients, feeds)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape)
        np.testing.assert_allclose(got[name], value, rtol=2e-2, atol=1e-2, err_msg=name)


def test_constants_that_float16_cannot_hold_stay_in_float32() -> None:
    """A mask of -1e9 would become an infinity."""
    model = graph_of(
        "(float[N,3] x) => (float[N,2] y) { [product] h = MatMul (x, w)  [masked] y = Add (h, mask) }",
        w=np.ones((3, 2), np.float32),
        mask=np.array([0, -1e9], np.float32),
    )
    program = build(model, loss="cross_entropy", precision="float16", wrt="w")
    got = run(program.step, {"x": X, "target": np.zeros(4, np.int64)})
    assert float(got["y"].min()) == np.float32(-1e9)
    assert dtypes(program.step)["MatMul"] == {TensorProto.FLOAT16}


# -- bfloat16 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["transformer", "convnext", "resnet_basic"])
def test_cuda_has_every_kernel_of_bfloat16(name: str) -> None:
    family = next(f for f in FAMILIES if f.name == name)
    proto = export_family(family, dynamo=False, training=True)
    program = build(proto, loss="mse", target="cuda", precision="bfloat16")
    step = onnx.shape_inference.infer_shapes(program.step)
    assert [str(lack) for lack in lacks(step) if not lack.arithmetic] == []
    types = {v.name: v.type.tensor_type.elem_type for v in step.graph.value_info}
    narrow = [n.op_type for n in step.graph.node if types.get(n.output[0]) == TensorProto.BFLOAT16]
    assert {"MatMul", "Gemm"} & set(narrow)
    stored = {t.name: t.data_type for t in step.graph.initializer}
    assert all(stored[p.name] == TensorProto.FLOAT for p in program.manifest.parameters)
    assert not {"loss_scale"} & {s.slot for s in program.manifest.state}


def test_gradients_have_the_digits_of_bfloat16() -> None:
    rng = np.random.default_rng(0)
    shapes = {"a.w": (6, 16), "a.b": (16,), "b.w": (16, 4), "b.b": (4,)}
    stored = {name: rng.normal(size=shape).astype(np.float32) / 2 for name, shape in shapes.items()}
    text = """(float[N,6] x) => (float[N,4] y) {
        [a] h = Gemm (x, "a.w", "a.b")  [r] r = Relu (h)  [b] y = Gemm (r, "b.w", "b.b")
    }"""
    model = graph_of(text, opset=21, **stored)
    feed = {"x": rng.normal(size=(8, 6)).astype(np.float32), "target": rng.normal(size=(8, 4)).astype(np.float32)}
    found = {}
    for precision in ("float32", "bfloat16"):
        graph = build(model, loss="mse", target="cuda", precision=precision).gradients
        names = [output.name for output in graph.graph.output]
        results = ReferenceEvaluator(graph).run(names, {**stored, **feed})
        found[precision] = dict(zip(names, map(np.asarray, results), strict=True))
    assert {"a.w_grad", "b.b_grad", "loss"} <= set(found["float32"])
    for name, want in found["float32"].items():
        got = found["bfloat16"][name]
        assert got.dtype == np.float32
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert 1e-5 < error < 2**-7, name  # eight bits, and not more


def test_a_bfloat16_model_is_refused_with_what_works(tmp_path: Path) -> None:
    net = graph_of("(bfloat16[N,2] x) => (bfloat16[N,2] y) { y = Mul (x, w) }", opset=21)
    net.graph.initializer.append(onnx.helper.make_tensor("w", onnx.TensorProto.BFLOAT16, [2], [1.0, 2.0]))
    program = og.build_training(net, loss="mse", optimizer=og.optim.SGD(0.1))
    program.save(tmp_path / "program")
    x = np.ones((4, 2), "f")
    with pytest.raises(
        og.errors.ExecutionError, match=r"bfloat16 values.*Convert the model to float32.*precision='float16'"
    ):
        og.Trainer(program).step({"x": x, "target": x})
