"""Rounding of lowerings: the declared multiples, errors on random data, and the limits of `lowering`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnx_convgrad as og
from onnx_convgrad.lowering import candidates
from onnx_convgrad.lowering.candidates import ALLOWED
from onnx_convgrad.lowering.conv.winograd_tiles import MOST, matrices, rounding
from onnx_convgrad.lowering.lower import Choice
from onnx_convgrad.lowering.sketch import Sketch
from onnx_convgrad.lowering.table import lowering, lowerings
from tests.support.command_line import invoke
from tests.support.conv_geometry import (
    SETTINGS,
    Geometry,
    arrays_of,
    attributes_of,
    case,
    conv_model,
    cotangent,
    error,
    geometry,
    model_of,
    oracle,
    run_inputs,
)
from tests.support.one_input import graph_of

UNIT = 2.0**-24
"""Largest relative rounding error of one operation in float32."""

RESULTS = {"Conv": "y", "ConvInputGrad": "x_grad", "ConvWeightGrad": "w_grad"}
DENSE = case((8, 64, 28, 28), 64, (3, 3), begin=1)


def _choices(model: onnx.ModelProto, choosing: object = "auto", **options: object) -> tuple[Choice, ...]:
    settings = {"wrt": ["x", "w"], "training": True, "target": og.Target(lowering=choosing), **options}
    return og.explain(model, **settings).choices  # type: ignore[arg-type]


def _roughest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the lowering that rounds most the cheapest."""

    def ways(entry, node, query, *_, **__):  # noqa: ANN001, ANN002, ANN003, ANN202
        return [(1, Sketch(1 / entry.rounds(query.spec), 0))]

    monkeypatch.setattr(candidates, "_ways", ways)
    monkeypatch.setattr(candidates, "_CANDIDATES", {})


# -- what a lowering declares ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(1, MOST))
def test_a_direct_sum_rounds_once(size: int) -> None:
    assert rounding(matrices(1, size)) == pytest.approx(1)
    assert rounding(matrices(size, 1)) == pytest.approx(1)


def test_two_outputs_of_three_taps_by_hand() -> None:
    """At the points 0, 1, -1 and infinity |G|^2 |B|^2 is 2, 3/2, 3/2 and 2; an output adds three, for three terms."""
    assert rounding(matrices(2, 3)) == pytest.approx(math.sqrt(5 / 3))


@pytest.mark.parametrize(("outputs", "taps"), [(2, 2), (2, 3), (3, 3), (4, 3), (3, 5), (6, 3)])
def test_more_outputs_round_more_and_the_scale_of_a_point_does_not_matter(outputs: int, taps: int) -> None:
    a, g, b = matrices(outputs, taps)
    scales = np.arange(1.0, len(b) + 1)
    assert rounding((a, g * scales[:, None], b / scales[:, None])) == pytest.approx(rounding((a, g, b)))
    assert rounding(matrices(outputs, taps)) > rounding(matrices(outputs - 1, taps))


def test_a_third_party_says_how_much_its_lowering_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    table = lowerings()["ConvInputGrad"]
    monkeypatch.setitem(lowerings(), "ConvInputGrad", dict(table))
    for name, multiple in (("mild", 5.0), ("rough", lambda spec: 2.0 * spec.taps)):

        def mine(e, n, spec):  # noqa: ANN001, ANN202
            """Nothing, for free."""
            return n["X_like"]

        lowering("ConvInputGrad", name, rounding=multiple)(mine)
    model = conv_model(DENSE)
    for choosing, usable in (("exact", set()), ("auto", {"mild"}), ("fast", {"mild", "rough"})):
        (choice,) = _choices(model, choosing, wrt=["x"], training=False)
        assert {c.name for c in choice.candidates if c.name in ("mild", "rough") and not c.reason} == usable


@pytest.mark.parametrize("multiple", ["2", 0, -1.0, math.nan, math.inf])
def test_a_multiple_is_a_positive_number(multiple: object) -> None:
    with pytest.raises(og.errors.ArgumentError, match="The rounding of lowering mine must be"):
        lowering("ConvInputGrad", "mine", rounding=multiple)  # type: ignore[arg-type]


# -- what it does ------------------------------------------------------------------------------------------------------


def _roundings(choice: Choice) -> float:
    """Number of roundings, of the size of one result, of which a result consists.

    A sum of n random terms, added one after another: its partial sums of i terms are i / n of it in the mean square, and
    rounding each adds UNIT^2 / 3 of that, in total n / 6 of UNIT^2. The transforms of a kernel, of the data and of the
    result, along each axis, add some short sums.
    """
    spec = choice.spec
    of_points = spec.batch * math.prod(spec.y)
    terms = of_points if choice.op_type == "ConvWeightGrad" else spec.channels * spec.taps
    if choice.op_type == "ConvInputGrad":
        terms = spec.features * spec.taps
    return terms / 6 + 3 * spec.rank


@pytest.mark.parametrize(
    "g",
    [
        case((2, 32, 28, 28), 32, (3, 3), begin=1),
        case((2, 16, 24, 24), 24, (5, 5), begin=2),
        case((2, 16, 29, 30), 16, (4, 4), strides=2, begin=1),
        case((2, 12, 12, 13, 14), 8, (3, 3, 3), begin=1),
        case((2, 24, 120), 16, (3,), begin=1),
    ],
    ids=["3x3", "5x5", "strided", "3x3x3", "line"],
)
@pytest.mark.parametrize("relu", [False, True], ids=["normal", "relu"])
def test_errors_are_as_large_as_declared(g: Geometry, relu: bool) -> None:
    """At most the declared multiple of the error of a direct sum, and at least that of a quarter of one rounding."""
    arrays = arrays_of(g, bias=False)
    if relu:
        arrays["x"] = np.maximum(arrays["x"], 0)
    model = model_of("Conv", arrays, set(), **attributes_of(g))
    y = oracle("Conv", arrays, g)["y"]
    seed = cotangent(y)
    want = {"y": y, **oracle("Conv", arrays, g, seed)}
    tried = set()
    for choice in _choices(model, "fast"):
        op = choice.op_type
        for name in (c.name for c in choice.candidates if c.reason is None and not lowerings()[op][c.name].exact):
            built = og.augment(model, wrt=["x", "w"], training=True, target=og.Target(lowering={op: name}))
            got = run_inputs(built, {**arrays, "y_grad": seed})[RESULTS[op]]
            declared = lowerings()[op][name].rounds(choice.spec)
            assert declared > 1
            found = error(got, want[RESULTS[op]])
            assert declared * UNIT / 4 < found < declared * UNIT * math.sqrt(_roundings(choice)), (op, name)
            tried.add((op, name))
    assert tried >= {(op, f"winograd_{most}") for op in RESULTS for most in (2, 3)}


# -- what is chosen ----------------------------------------------------------------------------------------------------


def _allowed(choice: Choice, choosing: str) -> float:
    forward = choice.op_type == "Conv"
    return ALLOWED[choosing].forward if forward else ALLOWED[choosing].backward


@pytest.mark.slow
@settings(SETTINGS, max_examples=30)
@given(geometry(channels=(1, 9), features=(1, 9), batch=(1, 2)), st.sampled_from([set(), {0}]))
def test_the_default_chooses_nothing_that_rounds_more_than_it_allows(g: Geometry, unknown: set[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _roughest_first(patch)
        for choosing in ALLOWED:
            for choice in _choices(conv_model(g, unknown), choosing):
                chosen = next(c for c in choice.candidates if c.name == choice.chosen)
                assert chosen.rounding == lowerings()[choice.op_type][choice.chosen].rounds(choice.spec)
                assert chosen.rounding <= _allowed(choice, choosing)


def test_the_fast_way_rounds_more_than_the_default_and_that_more_than_the_exact_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _roughest_first(monkeypatch)
    chosen = {}
    for choosing in ALLOWED:
        for choice in _choices(conv_model(DENSE), choosing):
            chosen[choice.op_type, choosing] = next(c.rounding for c in choice.candidates if c.name == choice.chosen)
    for op in RESULTS:
        assert chosen[op, "exact"] == 1
        assert chosen[op, "fast"] == max(e.rounds(choice.spec) for e in _that_apply(op, DENSE))
    assert 1 < chosen["Conv", "auto"] <= ALLOWED["auto"].forward < ALLOWED["auto"].backward
    for op in ("ConvInputGrad", "ConvWeightGrad"):
        assert ALLOWED["auto"].forward < chosen[op, "auto"] <= ALLOWED["auto"].backward < chosen[op, "fast"]


def _that_apply(op: str, g: Geometry) -> Iterator:
    (choice,) = (c for c in _choices(conv_model(g), "fast") if c.op_type == op)
    return (lowerings()[op][c.name] for c in choice.candidates if c.reason is None)


def test_a_forced_lowering_frees_no_other_node(monkeypatch: pytest.MonkeyPatch) -> None:
    _roughest_first(monkeypatch)
    choices = _choices(conv_model(DENSE), {"ConvWeightGrad": "winograd_6"})
    found = {c.op_type: c.chosen for c in choices}
    assert found.pop("ConvWeightGrad") == "winograd_6"
    assert len(found) == 2
    assert "winograd_6" not in found.values()


TRANSPOSED = """(float[2, 16, 14, 14] x, float[16, 16, 3, 3] w) => (float loss) {
    y = ConvTranspose <pads = [1, 1, 1, 1]> (x, w)
    loss = ReduceSumSquare <keepdims = 0> (y)
}"""


def test_a_transposed_convolution_of_the_model_belongs_to_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    _roughest_first(monkeypatch)
    model = graph_of(TRANSPOSED, opset=21)
    for choosing in ALLOWED:
        (forward,) = (c for c in _choices(model, choosing, wrt=["w"]) if c.op_type == "ConvInputGrad")
        chosen = next(c.rounding for c in forward.candidates if c.name == forward.chosen)
        assert (chosen <= ALLOWED["auto"].forward) == (choosing != "fast")


def test_a_convolution_that_is_the_gradient_of_a_transposed_one_does_not() -> None:
    choices = _choices(graph_of(TRANSPOSED, opset=21), wrt=["x"])
    reasons = [c.reason or "" for choice in choices if choice.op_type == "Conv" for c in choice.candidates]
    assert reasons
    assert not any("in the forward pass" in reason for reason in reasons)


# -- what the caller reads ---------------------------------------------------------------------------------------------


def test_explain_says_how_much_a_lowering_rounds_and_why_it_is_not_used() -> None:
    model = conv_model(case((8, 64, 28, 28), 64, (3, 3), begin=1))
    report = og.explain(model, wrt=["x", "w"], training=True, target=og.Target(lowering="fast"))
    rows = {row["operator"]: {c["name"]: c for c in row["candidates"]} for row in report.rows}
    assert rows["Conv"]["winograd_4"]["rounding"] == pytest.approx(rounding(matrices(4, 3)) ** 2)
    assert rows["ConvInputGrad"]["flipped_conv"]["rounding"] == 1
    assert "rounds 4.78 times as much as a direct sum" in str(report)
    usual = str(og.explain(model, wrt=["x", "w"], training=True))
    assert (
        "winograd_3: not used, it rounds 2.62 times as much as a direct sum; lowering='auto' allows 2 in the forward pass"
        in usual
    )
    assert (
        "winograd_6: not used, it rounds 20.6 times as much as a direct sum; lowering='auto' allows 6 in gradients"
        in usual
    )


def test_the_command_line_takes_it(tmp_path) -> None:  # noqa: ANN001
    path = tmp_path / "conv.onnx"
    onnx.save(conv_model(DENSE), path)
    arguments = ["explain", path, "--wrt", "x,w", "--training", "--lowering", "fast"]
    rows = json.loads(invoke(*arguments, "--json").stdout)["rows"]
    assert [row["chosen"] for row in rows] == [c.chosen for c in _choices(conv_model(DENSE), "fast")]
    assert "times as much as a direct sum" in invoke(*arguments).stdout
    assert "cannot be combined" in invoke(*arguments, "--lowering", "ConvWeightGrad=im2col_gemm", status=2).stderr
