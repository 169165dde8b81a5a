"""Equal formulas of small vectors are computed at once for CUDA, with the same bits; dependent ones are left alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

import onnx_convgrad as og
from onnx_convgrad.backends.cuda.batched_updates import BatchUpdates
from onnx_convgrad.ir.passes import run_passes
from onnx_convgrad.ir.targets import TARGETS
from onnx_convgrad.runtime import run
from tests.support.families import export
from tests.support.one_input import graph_of

SGD = "d{i} = Mul (g{i}, rate) p{i}_next = Sub (p{i}, d{i})"
ADAM = """
    a{i} = Mul (m{i}, beta) b{i} = Mul (g{i}, rate) m{i}_next = Add (a{i}, b{i}) s{i} = Sqrt (p{i})
    c{i} = Div (m{i}_next, s{i}) e{i} = Sub (p{i}, c{i}) p{i}_next = Where (ok, e{i}, p{i})
"""


def _model(formula: str, sizes: list[int], more: str = "", outputs: str = "p") -> ir.Model:
    inputs = ", ".join(f"float[{size}] {name}{i}" for i, size in enumerate(sizes) for name in "pgm")
    results = ", ".join(f"float[{size}] {name}{i}_next" for i, size in enumerate(sizes) for name in outputs)
    body = " ".join(formula.format(i=i) for i in range(len(sizes)))
    scalars = "<float rate = {0.1}, float beta = {0.9}>"
    proto = graph_of(f"({inputs}, bool ok) => ({results}) {scalars} {{ {body} {more} }}", opset=21)
    for place, node in enumerate(proto.graph.node):
        node.name = f"node_{place}"
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto, strict_mode=True))


def _batched(model: ir.Model) -> Counter[str]:
    """The operators after the pass, which must keep names and values; equal to those before where nothing is saved."""
    before = ir.to_proto(model)
    rng = np.random.default_rng(0)
    feed = {
        v.name: rng.uniform(0.5, 1.5, [d.dim_value for d in v.type.tensor_type.shape.dim]) for v in before.graph.input
    }
    arrays = {name: np.asarray(x, bool if name == "ok" else np.float32) for name, x in feed.items()}
    changed = run_passes(model, [BatchUpdates(TARGETS["cuda"])])
    after = ir.to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    assert changed == (after != before)
    want = run(before, arrays)
    for name, value in run(after, arrays).items():
        np.testing.assert_array_equal(value, want[name], strict=True)
    return Counter(node.op_type for node in after.graph.node)


def test_formulas_are_computed_at_once() -> None:
    assert _batched(_model(SGD, [5] * 4)) == {"Concat": 2, "Mul": 1, "Sub": 1, "Split": 1}


def test_formulas_with_several_results_stay_together() -> None:
    """The next moment is a result and part of the next parameter."""
    counts = _batched(_model(ADAM, [5] * 6, outputs="pm"))
    assert counts == {"Concat": 3, "Mul": 2, "Add": 1, "Sqrt": 1, "Div": 1, "Sub": 1, "Where": 1, "Split": 2}


def test_sizes_do_not_mix() -> None:
    assert _batched(_model(SGD, [5, 7] * 4)) == {"Concat": 4, "Mul": 2, "Sub": 2, "Split": 2}


@pytest.mark.parametrize("sizes", [[5, 5], [1] * 5, [5000] * 5, [2, 3, 4, 5]])
def test_few_long_and_different_vectors_are_left_alone(sizes: list[int]) -> None:
    assert _batched(_model(SGD, sizes)) == {"Mul": len(sizes), "Sub": len(sizes)}


def test_no_batch_has_more_than_32_members() -> None:
    model = _model(SGD, [3] * 70)
    assert _batched(model) == {"Concat": 6, "Mul": 3, "Sub": 3, "Split": 3}
    assert [len(node.outputs) for node in model.graph if node.op_type == "Split"] == [23, 23, 24]


def test_equal_constants_are_one_scalar_and_others_differ() -> None:
    other = SGD.replace("rate", "r{i}")
    constants = "r{i} = Constant <value = float {{{number}}}> ()"
    for numbers, muls in (([0.5] * 4, 1), ([0.5, 0.25] * 4, 2)):
        body = [constants.format(i=i, number=number) for i, number in enumerate(numbers)]
        model = _model("", [5] * len(numbers), " ".join(body + [other.format(i=i) for i in range(len(numbers))]))
        assert _batched(model)["Mul"] == muls


def test_values_that_others_read_are_leaves_and_results() -> None:
    """The sums come before the subtractions, which then read what the first batch has split."""
    check = "".join(f"t{i} = ReduceSum (d{i}) q{i} = Mul (d{i}, t{i}) p{i}_next = Sub (p{i}, q{i}) " for i in range(4))
    counts = _batched(_model("d{i} = Mul (g{i}, rate)", [5] * 4, check))
    assert counts == {"Concat": 1, "Mul": 5, "Split": 1, "ReduceSum": 4, "Sub": 4}


def test_batches_are_not_split_in_between() -> None:
    more = "all = Concat <axis = 0> (d0, d1, d2, d3) t = ReduceSum (all) "
    more += " ".join(f"q{i} = Mul (d{i}, t) p{i}_next = Sub (p{i}, q{i})" for i in range(4))
    model = _model("d{i} = Mul (g{i}, rate)", [5] * 4, more)
    assert _batched(model) == {"Concat": 3, "Mul": 2, "Sub": 1, "Split": 2, "ReduceSum": 1}


def test_a_chain_is_left_alone() -> None:
    chain = "d0 = Add (p0, g0) t0 = ReduceSum (d0) " + " ".join(
        f"d{i} = Add (p{i}, t{i - 1}) t{i} = ReduceSum (d{i})" for i in range(1, 5)
    )
    results = " ".join(f"p{i}_next = Identity (d{i})" for i in range(5))
    assert _batched(_model("", [5] * 5, chain + " " + results))["Add"] == 5


def test_a_formula_that_reads_the_result_of_another_waits_for_it() -> None:
    formula = """
        a{i} = Mul (p{i}, g{i}) q{i} = ReduceSum (a{i}) b{i} = Mul (a{i}, g{i}) r{i} = ReduceSum (b{i})
        c{i} = Max (q{i}, r{i}) p{i}_next = Tile (c{i}, five{i})
    """
    assert _batched(_model("five{i} = Constant <value_ints = [5]> ()" + formula, [5] * 5))["Mul"] == 6


def test_values_read_in_bodies_are_left_alone() -> None:
    branch = "graph () => (float[5] z) {{ z = Neg (d{i}) }}"
    formula = f"d{{i}} = Mul (g{{i}}, rate) p{{i}}_next = If (ok) <then_branch = {branch}, else_branch = {branch}>"
    assert _batched(_model(formula, [5] * 4)) == {"Mul": 4, "If": 4}


@pytest.mark.parametrize("read", [False, True])
def test_gradients_that_are_results_do_not_wait_for_one_another(read: bool) -> None:
    """Unlike those that an update reads: their sums over all ranks begin when they are ready."""
    formula = "q{i} = Relu (g{i}) d{i} = Mul (q{i}, q{i}) p{i}_next = "
    counts = _batched(_model(formula + ("Sub (p{i}, d{i})" if read else "Neg (d{i})"), [5] * 4))
    assert counts == {"Relu": 4, **({"Concat": 2, "Mul": 1, "Sub": 1, "Split": 1} if read else {"Mul": 4, "Neg": 4})}


def test_other_targets_are_left_alone() -> None:
    assert not run_passes(_model(SGD, [5] * 4), [BatchUpdates(TARGETS["cpu"])])


def _programs(
    optimizer: og.optim.Optimizer, precision: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[og.TrainingProgram, og.TrainingProgram]:
    """A training program for CUDA with the pass and without."""
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())]
    torch.manual_seed(0)
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = export(net, torch.randn(4, 6, 5, 5), dynamo=False, training=True)

    def built() -> og.TrainingProgram:
        return og.build_training(model, loss="cross_entropy", optimizer=optimizer, target="cuda", precision=precision)

    batched = built()
    count = len(batched.step.graph.node)  # which builds it
    monkeypatch.setattr(BatchUpdates, "rewrite", lambda *_: False)
    plain = built()
    assert count < len(plain.step.graph.node)
    return batched, plain


def _feed(program: og.TrainingProgram) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    (x,), (t,) = program.manifest.data, program.manifest.targets
    return {x.name: rng.standard_normal((4, 6, 5, 5)).astype(np.float32), t.name: rng.integers(0, 6, 4)}


@pytest.mark.parametrize("optimizer", [og.optim.SGD(0.1, momentum=0.9), og.optim.AdamW(1e-2)], ids=["sgd", "adamw"])
def test_training_steps_keep_every_bit(optimizer: og.optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for program in _programs(optimizer, "float32", monkeypatch):
        trainer = og.Trainer(program, providers=["cpu"])
        for _ in range(3):
            trainer.step(_feed(program))
        results.append({**trainer.parameters(), **trainer.state()})
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        np.testing.assert_array_equal(value, results[1][name], strict=True)


def test_steps_in_float16_keep_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ONNX's reference evaluator: ONNX Runtime's CPU provider rounds to float16 in some places only.

    The images are small, since that evaluator's LayerNormalization returns its moments in float16.
    """
    results = []
    for program in _programs(og.optim.SGD(0.1), "float16", monkeypatch):
        names = [output.name for output in program.step.graph.output]
        results.append(dict(zip(names, ReferenceEvaluator(program.step).run(None, _feed(program)), strict=True)))
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        np.testing.assert_array_equal(value, results[1][name], strict=True)
