"""Every operator declares its index notation, and what is declared is true of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnx_convgrad.autodiff.factors import MEAN, SUM, Factors, Work, mix, notation, pick
from onnx_convgrad.autodiff.registry import Rule, rules
from onnx_convgrad.checking.notation import Notation, check_notation, notation_of
from onnx_convgrad.frontend.canonicalize import canonicalize
from onnx_convgrad.ir.call import Call
from onnx_convgrad.ir.emit import DOMAIN
from onnx_convgrad.runtime import session
from onnx_convgrad.testing import Case, make_model, rand
from tests.autodiff.test_registry import cases

NUMBERS = np.array([[3, 1, 2], [0, 2, 1]])
TRUTHS = NUMBERS > 1
ZEROS = [
    *(Case(op, [rand(2, 3), rand(3)]) for op in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")),
    *(Case(op, [TRUTHS, TRUTHS[:, :1]], feed_integers=True) for op in ("And", "Or", "Xor")),
    *(Case(op, [rand(2, 3)]) for op in ("IsNaN", "IsInf", "Shape", "Size", "RandomNormalLike", "RandomUniformLike")),
    *(Case(op, [NUMBERS, NUMBERS[:1]], feed_integers=True) for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")),
    Case("Not", [TRUTHS], feed_integers=True),
    Case("BitwiseNot", [NUMBERS], feed_integers=True),
    Case("BitShift", [NUMBERS.astype(np.uint64)] * 2, {"direction": "LEFT"}, feed_integers=True),
    *(Case(op, [rand(2, 3, 4)], {"axis": 1, "keepdims": k}) for op in ("ArgMax", "ArgMin") for k in (0, 1)),
    Case("QuantizeLinear", [rand(3, 4), np.float32(0.1), np.uint8(3)], constants=[1]),
    Case("QuantizeLinear", [rand(3, 4), np.full(4, 0.1, np.float32), np.zeros(4, np.int8)], {"axis": 1}, constants=[1]),
    Case("AffineGrid", [rand(2, 2, 3), np.array([2, 1, 4, 5])]),
    Case("Hardmax", [rand(3, 4)], {"axis": 0}),
    Case("EyeLike", [rand(3, 4)]),
    Case("Bernoulli", [rand(3, 4, low=0, high=1)]),
    Case("ai.onnx.ml::Binarizer", [rand(3, 4)], {"threshold": 0.1}),
]  # fmt: skip
"""Operators that the rule checker does not run, most of them with derivative zero."""

UNSEEN = {
    "Multinomial": "its results are random",
    "RegexFullMatch": "strings",
    "StringConcat": "strings",
    "ai.onnx.ml::CategoryMapper": "strings",
    "ai.onnx.ml::LabelEncoder": "it takes tables of keys",
    "ai.onnx.ml::OneHotEncoder": "it takes tables of categories",
    "ai.onnx.ml::TreeEnsemble": "its factors mix all but the samples, which the trees of other tests show",
    "ai.onnx.ml::TreeEnsembleClassifier": "as TreeEnsemble",
    "ai.onnx.ml::TreeEnsembleRegressor": "as TreeEnsemble",
}
"""Operators with factors whose cases do not test these, with the reason."""


def checked(model: onnx.ModelProto, feed: Mapping[str, np.ndarray], declared: Notation) -> None:
    live = session(model, optimize=False)
    names = [v.name for v in live.get_outputs()]
    check_notation(declared, lambda fed: dict(zip(names, live.run(names, dict(fed)), strict=True)), feed)


@pytest.mark.parametrize("case", ZEROS, ids=str)
def test_other_operators_have_the_factors_that_they_declare(case: Case) -> None:
    arrays = case.arrays
    model = make_model(case, arrays)
    declared = notation_of(model)
    assert declared is not None
    checked(model, {v.name: arrays[int(v.name[1:])] for v in model.graph.input}, declared)


def test_every_operator_has_factors_or_a_reason() -> None:
    table = {rule.name: rule.factors for rule in rules() if rule.domain != DOMAIN}
    holes = sorted(name for name, factors in table.items() if factors is None)
    assert not holes, f"operators without factors; use none(reason) where there is no notation: {holes}"


def test_every_notation_is_seen_in_a_case() -> None:
    seen = {case.op for case in (*cases(), *ZEROS) if notation_of(make_model(case, case.arrays)) is not None}
    declared = {r.name for r in rules() if r.domain != DOMAIN and not r.unnoted}
    assert declared - seen == set(UNSEEN)


# -- the check itself --------------------------------------------------------------------------------------------------


def convolution() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    case = Case("Conv", [rand(2, 3, 6), rand(4, 3, 3)])
    arrays = [array for array in case.arrays if array is not None]
    return make_model(case, arrays), {f"x{i}": array for i, array in enumerate(arrays)}


def against(factors: Factors) -> Notation:
    x, w = factors.operands
    (y,) = factors.results
    assert x is not None
    assert w is not None
    assert y is not None
    return Notation(factors, {"x0": x, "x1": w}, {"y0": y}, ())


@pytest.mark.parametrize(
    ("text", "work", "wrong"),
    [
        ("n c s, o c t -> n o s", {"c": SUM, "t": SUM}, "index 1 of the factor s"),
        ("n c s, o c t -> n o p", {"c": pick("picks"), "p": mix("convolves"), "s": mix("convolves"), "t": SUM}, None),
        ("n c s, o c t -> n o p", {"p": pick("picks"), "s": SUM, "c": SUM, "t": SUM}, "no operand has"),
        (
            "c n s, o c t -> n o p",
            {"c": MEAN, "p": mix("convolves"), "s": mix("convolves"), "t": SUM},
            "of the factor n",
        ),
    ],
)
def test_a_false_declaration_is_found(text: str, work: dict[str, Work], wrong: str | None) -> None:
    model, feed = convolution()
    node = next(iter(canonicalize(ir.from_proto(model)).graph))
    declared = against(notation(text, **work)(Call(node)))
    if wrong is None:
        checked(model, feed, declared)
        return
    with pytest.raises(AssertionError, match=wrong):
        checked(model, feed, declared)


def test_a_maximum_is_no_sum() -> None:
    case = Case("ReduceMax", [rand(2, 3)], {"keepdims": 0})
    model = make_model(case, case.arrays)
    (x,) = (array for array in case.arrays if array is not None)
    claimed = Notation(Factors((("i", "j"),), ((),), {"i": SUM, "j": SUM}), {"x0": ("i", "j")}, {"y0": ()}, ())
    with pytest.raises(AssertionError, match="not a sum over the factor"):
        checked(model, {"x0": x}, claimed)


@pytest.mark.parametrize(
    ("op", "false", "wrong"),
    [
        ("Tanh", {"moves": "selects"}, "numbers that no operand has"),
        ("Transpose", {"moves": "reshapes"}, "not the operand that it reshapes"),
        ("Relu", {"moves": "selects"}, "numbers that no operand has"),
        ("Exp", {"within": "operands"}, "numbers above"),
        ("Tanh", {"bounds": (0, 1)}, "numbers below 0"),
        ("Tanh", {"affine": ("input",)}, "not affine in input"),
        ("Neg", {"monotone": "rising"}, "falls by"),
        ("Tanh", {"curve": "convex"}, "not convex"),
        ("Cos", {"curve": "sigmoid"}, "not sigmoid"),
        ("Cos", {"keeps_zero": True}, "not zero where input is"),
        ("Exp", {"poles": {"input": (0,)}}, "no pole where x0 is 0"),
    ],
)
def test_a_false_fact_is_found(op: str, false: dict[str, Any], wrong: str) -> None:
    case = Case(op, [rand(3, 4)])
    model = make_model(case, case.arrays)
    declared = notation_of(model)
    assert declared is not None
    assert declared.rule is not None
    claimed = Rule(op, "", "vjp", None, wrt=declared.rule.wrt, **false)
    (x,) = (array for array in case.arrays if array is not None)
    with pytest.raises(AssertionError, match=wrong):
        checked(model, {"x0": x}, replace(declared, rule=claimed))
