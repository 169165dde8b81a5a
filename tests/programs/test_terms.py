"""The argument `loss` of a training program: names, functions, several terms, a value of the model, onnxscript."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from onnxscript import opset17 as op
from onnxscript import script

import onnx_convgrad as og
from onnx_convgrad import losses
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.runtime import run
from tests.support.one_input import graph_of
from tests.support.training_nets import A, B, Feeds, X, build, off, same, two_outputs


def check(
    loss: Any,
    reference: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    targets: Feeds | None = None,
    **options: Any,
) -> tuple[og.TrainingProgram, Feeds]:
    """Compare a loss of `two_outputs` and its gradients with those of a function of both heads in PyTorch."""
    program = build(two_outputs(), loss=loss, **options)
    got = run(program.gradients, {"x": X, **(targets or {})})
    stored = {i.name: numpy_helper.to_array(i) for i in two_outputs().graph.initializer}
    weights = {name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in stored.items()}
    x = torch.tensor(X, dtype=torch.float64)
    want = reference(*(x @ weights[f"{head}.weight"] + weights[f"{head}.bias"] for head in "ab"))
    assert off(got[program.manifest.loss], want) < 1e-5
    want.sum().backward()
    for name, weight in weights.items():
        if weight.grad is not None:
            assert off(got[f"{name}_grad"], weight.grad) < 1e-5, name
    return program, got


def test_a_loss_computed_by_the_model() -> None:
    program, _ = check("distance", lambda a, b: ((a - b) ** 2).sum())
    assert program.manifest.loss == "distance"
    assert program.manifest.targets == ()
    assert program.manifest.outputs == ("a", "b", "best")


def test_several_weighted_terms() -> None:
    found: list[torch.Tensor] = []

    def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        l1 = F.l1_loss(b, torch.tensor(B), reduction="sum")
        found.extend([F.mse_loss(a, torch.tensor(A)), l1, ((a - b) ** 2).sum()])
        return found[0] + 0.5 * found[1] + 2 * found[2]

    loss = {"a": "mse", "b": (0.5, losses.L1(reduction="sum")), "distance": (2.0, "distance")}
    program, got = check(loss, reference, {"a_target": A, "b_target": B})
    assert program.manifest.terms == ("loss_a", "loss_b", "loss_distance")
    assert [t.name for t in program.manifest.targets] == ["a_target", "b_target"]
    for name, term in zip(program.manifest.terms, found, strict=True):
        assert float(got[name]) == pytest.approx(term.item(), rel=1e-5)


def test_one_target_for_two_terms() -> None:
    def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(a, torch.tensor(A)) + 3 * F.huber_loss(b, torch.tensor(A, dtype=torch.float64))

    terms = [losses.Term(losses.MSE(), "a", target="target"), losses.Term(losses.Huber(), "b", 3.0, "target")]
    program, _ = check(terms, reference, {"target": A})
    assert [t.name for t in program.manifest.targets] == ["target"]


@pytest.mark.parametrize("name", ["x", "logits", "weight"])
def test_labels_beside_a_value_that_is_called_target(name: str, tmp_path: Path) -> None:
    text = """(float[N,3] x) => (float[N,3] y) { logits = MatMul (x, weight) y = Relu (logits) }"""
    model = graph_of(text.replace(name, "target"), **{"weight".replace(name, "target"): np.eye(3, dtype=np.float32)})
    program = build(model, loss="cross_entropy")
    (labels,) = program.manifest.targets
    assert labels.name == program.manifest.losses[0]["target"] == "target_1"
    data = {"x".replace(name, "target"): X, labels.name: np.array([0, 1, 2, 0])}
    og.Trainer(program).fit(data, metrics=["accuracy"], progress="none")
    program.save(tmp_path)
    assert og.Trainer(tmp_path).evaluate(data, "accuracy")["accuracy"] == np.mean(X.argmax(1) == [0, 1, 2, 0])


def test_functions_as_losses() -> None:
    def quartic(e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        return e.square(e.square(e.sub(y, target)))

    def penalty(e: Emitter, y: ir.Value) -> ir.Value:
        return e.op("ReduceSum", e.op("Exp", y), keepdims=0)

    loss, target = {"a": quartic, "b": (0.1, penalty)}, torch.tensor(A)
    program, _ = check(loss, lambda a, b: ((a - target) ** 4).mean() + 0.1 * b.exp().sum(), {"target": A})
    assert [t.name for t in program.manifest.targets] == ["target"]


def test_a_custom_target() -> None:
    def picked(e: Emitter, y: ir.Value, target: ir.Value) -> ir.Value:
        return e.neg(e.op("GatherElements", y, target, axis=1))

    loss, index = losses.Custom(picked, dtype=np.int64, shape=["N", 1], reduction="sum"), np.array([[0], [1], [1], [0]])
    program, _ = check({"a": loss}, lambda a, _: -a.gather(1, torch.tensor(index)).sum(), {"target": index}, wrt="a.*")
    (target,) = program.manifest.targets
    assert (target.dtype, target.shape) == ("int64", ("N", 1))


def test_a_loss_of_several_values() -> None:
    def apart(e: Emitter, a: ir.Value, b: ir.Value, x: ir.Value, w: ir.Value, target: ir.Value) -> ir.Value:
        pairs = e.reduce_sum(e.square(e.sub(e.mul(a, b), target)), [1], keepdims=False)
        return e.add(e.mul(pairs, e.reduce_sum(e.square(x), [1], keepdims=False)), e.op("ReduceSum", w, keepdims=0))

    def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        weight = torch.tensor(numpy_helper.to_array(two_outputs().graph.initializer[0]).astype(np.float64))
        pairs = (a.detach() * b - torch.tensor(A)).square().sum(1) * torch.tensor(X, dtype=torch.float64).square().sum(
            1
        )
        return pairs.mean() + weight.sum()

    loss = losses.Custom(apart, reads=["a", "b", "x", "a.weight"])
    program, _ = check(loss, reference, {"target": A}, wrt="b.*")
    assert [t.name for t in program.manifest.targets] == ["target"]
    assert program.manifest.losses[0]["options"]["reads"] == ["a", "b", "x", "a.weight"]


def test_a_function_of_any_number_of_arguments_takes_what_it_reads_and_no_labels() -> None:
    def squares(e: Emitter, *values: ir.Value) -> ir.Value:
        return e.sum([e.op("ReduceMean", e.square(v), keepdims=0) for v in values])

    loss = losses.Custom(squares, reads=["a", "b", "difference"])
    program, _ = check(loss, lambda a, b: sum((v.square().mean() for v in (b, a - b)), a.square().mean()), {})
    assert not program.manifest.targets


def test_a_loss_of_inner_values_is_not_in_the_exported_file(tmp_path: Path) -> None:
    penalty = losses.Custom(lambda e, d: e.op("ReduceMean", e.square(d), keepdims=0), reads="difference")
    loss = [losses.Term(losses.MSE(), "a"), (0.5, penalty)]
    program, _ = check(loss, lambda a, b: F.mse_loss(a, torch.tensor(A)) + 0.5 * (a - b).square().mean(), {"target": A})
    trainer = og.Trainer(program)
    trainer.step({"x": X, "target": A})
    trainer.export(tmp_path / "trained.onnx")
    assert [n.op_type for n in onnx.load(tmp_path / "trained.onnx").graph.node] == [
        n.op_type for n in two_outputs().graph.node
    ]


def test_a_loss_of_inner_values_in_mixed_precision() -> None:
    def both(e: Emitter, d: ir.Value, a: ir.Value, target: ir.Value) -> ir.Value:
        return e.add(e.square(d), e.square(e.sub(a, target)))

    loss = losses.Custom(both, reads=["difference", "a"])
    batch = {"x": X, "target": A}
    narrow, whole = (
        og.Trainer(og.build_training(two_outputs(), loss=loss, optimizer="sgd", precision=precision)).step(batch)[
            "loss"
        ]
        for precision in ("float16", "float32")
    )
    assert float(narrow) == pytest.approx(float(whole), rel=2e-2)


def test_further_labels_of_a_function() -> None:
    def weighted(e: Emitter, y: ir.Value, target: ir.Value, weight: ir.Value) -> Any:
        return e.mul(weight, og.losses.CrossEntropy(reduction="none")(e, y, target)), weight

    loss, weight, target = losses.Custom(weighted, shape={"weight": ["N"]}), np.float32([1, 0, 2, 3]), [0, 1, 1, 0]

    def reference(a: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        w = torch.tensor(weight)
        return (w * F.cross_entropy(a, torch.tensor(target), reduction="none")).sum() / w.sum()

    program, _ = check({"a": loss}, reference, {"target": np.array(target), "target_weight": weight}, wrt="a.*")
    assert [(t.name, t.dtype, t.shape) for t in program.manifest.targets] == [
        ("target", "int64", ("N",)),
        ("target_weight", "float32", ("N",)),
    ]


READS = {
    "unknown": (["a", "bb"], None, r"Unknown value in reads: 'bb'.*Did you mean 'b'"),
    "another output": (["a", "b"], "b", r"The loss of 'b' reads 'a' first"),
    "too few arguments": (
        ["a", "b", "x"],
        None,
        r"takes an Emitter, the 3 values that it reads and perhaps the labels",
    ),
}


@pytest.mark.parametrize("case", READS)
def test_what_a_loss_cannot_read_is_refused(case: str) -> None:
    reads, output, message = READS[case]

    def built() -> og.TrainingProgram:
        loss = losses.Custom(lambda e, a, b: e.sub(a, b), reads=reads)
        return build(two_outputs(), loss=loss if output is None else {output: loss}, wrt="a.*")

    with pytest.raises(ArgumentError, match=message):
        built()


def test_without_reduction_the_sum_is_differentiated() -> None:
    loss = {"a": losses.MSE(reduction="none")}
    check(loss, lambda a, _: F.mse_loss(a, torch.tensor(A), reduction="none"), {"target": A}, wrt="a.*")


# -- onnxscript --------------------------------------------------------------------------------------------------------


@script(default_opset=op)
def squared(x):  # noqa: ANN001, ANN201 - onnxscript takes its own types
    return x * x


@script(default_opset=op)
def mean_squared(prediction, target):  # noqa: ANN001, ANN201
    """Calls another function; ReduceMean had attributes at this opset."""
    return op.ReduceMean(squared(prediction - target), axes=[0, 1], keepdims=0)


@script(default_opset=op)
def picked(prediction, target):  # noqa: ANN001, ANN201
    return -op.GatherElements(op.LogSoftmax(prediction, axis=1), target, axis=1)


@script(default_opset=op)
def alone(prediction):  # noqa: ANN001, ANN201
    return op.ReduceMean(prediction)


@script(default_opset=op)
def branching(prediction, target):  # noqa: ANN001, ANN201
    if op.ReduceSum(prediction) > 0.0:  # noqa: SIM108 - onnxscript has no ternary operator
        loss = op.ReduceMean(prediction - target)
    else:
        loss = op.ReduceMean(target - prediction)
    return loss


@pytest.mark.parametrize(
    ("function", "built_in", "target"),
    [
        (mean_squared, "mse", A),
        (losses.Custom(picked, dtype=np.int64, shape=["N", 1]), "cross_entropy", np.array([[0], [1], [1], [0]])),
    ],
    ids=["mse", "cross_entropy"],
)
def test_onnxscript_functions_as_losses(function: Any, built_in: str, target: np.ndarray) -> None:
    ours, reference = (build(two_outputs(), loss={"a": loss}, wrt="a.*") for loss in (function, built_in))
    got = run(ours.gradients, {"x": X, "target": target})
    want = run(reference.gradients, {"x": X, "target": target if built_in == "mse" else target[:, 0]})
    same(got, want, 1e-5, 1e-6)
    assert {n.domain for n in ours.gradients.graph.node} == {""}
    assert ours.manifest.losses[0]["options"]["function"] in ("mean_squared", "picked")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (alone, r"'alone' cannot be used as a loss\. It has 1 inputs and 1 outputs"),
        (branching, r"'branching' cannot be used as a loss\. It has control flow \(If\)"),
    ],
    ids=["one input", "control flow"],
)
def test_onnxscript_functions_that_cannot_be_losses(function: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        build(two_outputs(), loss={"a": function}, wrt="a.*")


# -- what a function of one's own may be ---------------------------------------------------------------------------------

LINEAR = graph_of("(float[N,3] x) => (float[N,4] y) { y = MatMul (x, w) }", w=np.ones((3, 4), np.float32))
FUNCTIONS: dict[str, tuple[Any, str]] = {
    "nothing": (lambda e, y, t: None, r"returned None, not a value of the graph"),  # noqa: ARG005
    "a list": (lambda e, y, t: [y, t], r"not a value of the graph\. .*the pair \(total, count\)"),  # noqa: ARG005
    "three values": (lambda e, y, t: (y, t, y), r"not a value of the graph"),  # noqa: ARG005
    "one argument": (lambda e: e, r"takes an Emitter, the output and perhaps the labels, not \(e\)"),
    "labels by name alone": (
        lambda e, *y, target: e.sub(y[0], target),
        r"takes 'target' by name alone.*before the star",
    ),
    "losses of other targets": (
        lambda e, y, t: e.add(og.losses.CrossEntropy()(e, y, t), og.losses.MSE()(e, y, t)),
        r"The loss MSE takes labels of the type FLOAT .*gives it INT64",
    ),
    "a loss of several targets": (
        lambda e, y, t: og.losses.CTC()(e, e.unsqueeze(y, [0]), e.unsqueeze(t, [0])),
        r"The loss CTC needs further labels: lengths",
    ),
}


@pytest.mark.parametrize(("function", "message"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_that_are_no_losses_are_refused(function: Any, message: str) -> None:
    shape = {"shape": ["N"], "dtype": np.int64} if "CTC" in message else {}
    loss = og.losses.Custom(function, **shape) if shape else function
    with pytest.raises(og.errors.ArgumentError, match=message):
        og.build_training(LINEAR, loss=loss, optimizer="sgd")


def test_errors_of_a_function_arrive_as_they_are() -> None:
    def wrong(e: Any, y: Any, t: Any) -> Any:
        return {}["missing"]

    class Wrong(og.losses.Loss):
        def __call__(self, e: Any, y: Any, target: Any) -> Any:
            return {e: y}[target]

    for loss in (wrong, Wrong()):
        with pytest.raises(KeyError):
            og.build_training(LINEAR, loss=loss, optimizer="sgd")


def test_a_function_has_the_targets_of_the_losses_that_it_calls() -> None:
    def both(e: Any, y: Any, t: Any) -> Any:
        return e.add(og.losses.CrossEntropy()(e, y, t), og.losses.Focal(reduction="sum")(e, y, t))

    program = og.build_training(LINEAR, loss=both, optimizer="sgd")
    assert [(p.dtype, len(p.shape or ())) for p in program.manifest.targets] == [("int64", 1)]
    assert program.manifest.classes == {"target": (4, -100)}
    assert [s["joining"] for s in program.manifest.summands()] == ["count", "sum"]


def test_counts_need_no_forward_pass() -> None:
    """Of a loop that is not needed, nothing is left that reads weights, such as what its body captures."""
    body = onnx.parser.parse_graph(
        "b (int64 i, bool go, float[A,B,3] p) => (bool on, float[A,B,3] q) { on = Identity (go) q = Mul (p, h) }"
    )
    model = graph_of(
        """(int64[N,T] x, int64 n) => (float[A,B,3] y) {
            h = Gather (w, x) s = Shape (h) m = Max (s, s) z = Expand (zero, m) a = Add (z, h) }""",
        w=np.arange(15, dtype=np.float32).reshape(5, 3),
        zero=np.zeros(1, np.float32),
        yes=np.array(True),
    )
    model.graph.node.append(onnx.helper.make_node("Loop", ["n", "yes", "a"], ["y"], body=body))

    def entries(e: Emitter, y: ir.Value) -> ir.Value:
        return e.op("ReduceMean", e.square(y), keepdims=0)

    program = og.build_training(model, loss={"y": losses.Custom(entries)}, optimizer=og.optim.SGD(0.1))
    trainer = og.Trainer(program)
    batches = [{"x": np.full((rows, 2), rows), "n": np.array(1)} for rows in (1, 3)]
    assert program.manifest.summands()[0]["joining"] == "count"
    gradient = trainer.gradients(*batches)["w"]
    union = trainer.gradients({"x": np.concatenate([b["x"] for b in batches]), "n": np.array(1)})["w"]
    np.testing.assert_allclose(gradient, union, rtol=1e-5)
