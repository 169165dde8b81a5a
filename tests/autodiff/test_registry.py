"""Properties of the rule table as a whole."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

import onnx_convgrad as og
from onnx_convgrad.autodiff import registry
from onnx_convgrad.autodiff.function_bodies import has_body
from onnx_convgrad.autodiff.registry import Rule, elementwise, expansion, lookup, rules, vjp
from onnx_convgrad.ir.call import SIGNATURES, Call, signature
from onnx_convgrad.ir.emit import Emitter
from onnx_convgrad.lowering import table
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.testing import Case
from tests.lowering.conv.test_per_sample import FORCED as FORCED_PER_SAMPLE
from tests.lowering.pool.test_max_grad import FORCED as FORCED_POOLS
from tests.support.conv_geometry import FORCED
from tests.support.operators import text_model

ROOT = Path(__file__).parents[2]
SOURCES = [
    *(ROOT / "rules").glob("*.py"),
    *(ROOT / "onnx_convgrad" / "lowering").rglob("*.py"),
    *(ROOT / "onnx_convgrad" / "ir").glob("*.py"),
]
TESTS = list((ROOT / "tests").rglob("test_*.py"))


def _calls(path: Path) -> Iterator[ast.Call]:
    yield from (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))


def _emitted() -> dict[str, str]:
    """The operators that any rule, lowering or helper emits, with the file."""
    emitted = {}
    for path in SOURCES:
        for call in _calls(path):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if name in ("op", "ops", "reduce", "compare") and call.args:
                operator = call.args[0]
                if isinstance(operator, ast.Constant) and isinstance(operator.value, str):
                    emitted[operator.value] = path.name
    return emitted


def cases() -> Iterator[Case]:
    """The cases that tests run through the generic checker."""
    for path in TESTS:
        try:
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        except pytest.skip.Exception:
            continue  # it compares with a package that is not installed, and has no cases
        for value in vars(module).values():
            if isinstance(value, (list, tuple)):
                yield from (case for case in value if isinstance(case, Case))


def _operands(case: Case) -> Iterator[tuple[str, str]]:
    """The operators of a case, each with the operands that it is differentiated in."""
    if case.body:
        for op in re.findall(r"= (\w+)\s*[<(]", case.body):
            yield from ((op, name.removesuffix("...")) for name in signature("", op)[0])
        return
    names = signature("", case.op)[0]
    arrays = case.arrays
    for i in range(len(arrays)) if case.wrt is None else case.wrt:
        if arrays[i] is not None:
            yield case.op, names[min(i, len(names) - 1)].removesuffix("...")


def test_rules_name_operators_and_operands_of_the_standard() -> None:
    known = {schema.name for schema in onnx.defs.get_all_schemas()}
    for rule in rules():
        if rule.domain:
            continue
        assert rule.op_type in known, f"{rule.op_type} is not an ai.onnx operator"
        operands = {name.removesuffix("...") for name in signature("", rule.op_type)[0]}
        assert set(rule.wrt) <= operands, f"{rule.op_type} has no operand {set(rule.wrt) - operands}"
        assert set(rule.parameters) <= set(rule.wrt), f"{rule.op_type}: parameters must be differentiable"


@pytest.mark.parametrize(("operator", "file"), sorted(_emitted().items()))
def test_emitted_operators_have_rules(operator: str, file: str) -> None:
    abstract = operator.startswith(("Conv", "MaxPool")) and operator.endswith("Grad")
    abstract = abstract or operator.endswith("OverRanks") or operator in ("Center", "Covariance", "NormalizedKernel")
    domain = "convgrad" if abstract else ""
    known = lookup(domain, operator) or has_body(ir.Node("", operator, []))
    assert known, f"{file} emits {operator}, which nothing differentiates"


def test_every_operand_of_every_rule_is_checked_in_both_modes_and_to_second_order() -> None:
    """Except abstract operators: `pipeline/test_orders.py`, `pool/test_max_grad.py`, `conv/test_covariance.py`."""
    checked = {operand for case in cases() if case.order > 1 for operand in _operands(case)}
    wanted = {
        (rule.op_type, name)
        for rule in rules()
        if rule.kind not in ("zero", "not_differentiable") and not rule.domain
        for name in rule.wrt
    }
    assert sorted(wanted - checked) == []


def test_every_lowering_is_forced_over_random_geometry() -> None:
    choices = [c for c in (*FORCED, *FORCED_PER_SAMPLE, *FORCED_POOLS) if isinstance(c, dict)]
    forced = {pair for choice in choices for pair in choice.items()}
    wanted = {(op, name) for op, table in lowerings().items() if op.endswith("Grad") for name in table}
    assert wanted <= forced


BROKEN: dict[str, tuple[Callable[[Emitter, Call], Any], str]] = {
    "no value": (
        lambda _e, _n: 2.0,
        "returned 2.0 for 'x', not an ir.Value.*only elementwise rules may return numbers",
    ),
    "dtype": (lambda e, n: e.cast(n["X"], ir.DataType.DOUBLE), "returned DOUBLE for 'x', which is FLOAT.*Cast the cot"),
    "shape": (
        lambda e, n: e.reduce_sum(n["X"], [0]),
        r"returned shape \[1\] for 'x', which is \[3\].*correct it in here",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_rules_say_what_to_correct(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    thunk, message = BROKEN[fault]
    rule = Rule("Abs", "", "vjp", lambda e, n, _g: {"X": lambda: thunk(e, n)}, ("X",), module="here")
    monkeypatch.setitem(registry._RULES, ("", "Abs"), rule)
    with pytest.raises(og.errors.RuleContractError, match=f"The rule of Abs {message}"):
        og.augment(text_model("(float[3] x) => (float[3] y) { y = Abs (x) }"), wrt="x")


@pytest.mark.parametrize(
    "text",
    [
        "(float[4,6] x, float[2] w) => (float[4,6] y) { y = LayerNormalization (x, w) }",
        "(float[3,3] x, float[4] w) => (float[3,3] y) { y = PRelu (x, w) }",
        "(float[3,2,2] x, float w) => (float[3,2,2] y) { y = InstanceNormalization (x, w, w) }",
    ],
)
def test_operands_that_do_not_fit_together_are_the_fault_of_the_model(text: str) -> None:
    message = r"The operands of node .* do not fit together: '[xw]' is \[.*Correct the shapes"
    with pytest.raises(og.errors.ModelError, match=message):
        og.augment(text_model(text), wrt="inputs")


def test_a_function_body_that_onnx_does_not_give() -> None:
    body = "b (float[1,3] u) => (float[1,3] v) { v = Tanh (u) }"
    model = text_model(f"(float[4,3] x) => (float[4,3] y) {{ y = SequenceMap <body = {body}> (x) }}")
    with pytest.raises(
        og.errors.DifferentiationError, match="its function body cannot be built: Expected a sequence type"
    ):
        og.augment(model, wrt="x")


def test_operators_without_a_derivative_are_refused_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry._RULES, ("", "Abs"))
    registry.not_differentiable("Abs", reason="its sign is random.")
    with pytest.raises(
        og.errors.DifferentiationError, match=r"Abs.*its sign is random\. Path: y <- x\. Take `of` before it"
    ):
        og.augment(text_model("(float[3] x) => (float[3] y) { y = Abs (x) }"), wrt="x")


def test_missing_thunks_and_second_rules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Rule("Abs", "", "vjp", lambda _e, _n, _g: {}, ("X",), module="here")
    monkeypatch.setitem(registry._RULES, ("", "Abs"), rule)
    message = r"declares X in wrt but returned only .*Return a thunk for X.*in here"
    with pytest.raises(og.errors.RuleContractError, match=message):
        og.augment(text_model("(float[3] x) => (float[3] y) { y = Abs (x) }"), wrt="x")
    with pytest.raises(og.errors.RuleContractError, match=r"Two rules are declared for Abs.*the other is in here"):
        registry.zero("Abs")


FAILING: dict[str, tuple[Callable[..., Any], str]] = {
    "rule": (lambda _e, _n, _g: 1 / 0, "ZeroDivisionError: division by zero"),
    "thunk": (
        lambda _e, n, _g: {"X": lambda: n["X"].missing},
        "AttributeError: 'Value' object has no attribute 'missing'",
    ),
    "no mapping": (lambda _e, _n, _g: None, "TypeError: it returned None, not a mapping"),
    "no function": (lambda _e, _n, _g: {"X": 3}, "TypeError: 'int' object is not callable"),
}


@pytest.mark.parametrize("fault", FAILING)
def test_errors_of_a_plugin_name_it(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, reason = FAILING[fault]
    monkeypatch.delitem(registry._RULES, ("", "Abs"))
    registry.vjp("Abs", wrt=["X"])(function)
    message = f"The rule of Abs in tests.autodiff.test_registry failed.*: {reason}.*ONNX_CONVGRAD_PLUGINS=0"
    with pytest.raises(og.errors.RuleContractError, match=message):
        og.augment(text_model("(float[3] x) => (float[3] y) { y = Abs (x) }"), wrt="x")


def test_errors_of_a_rule_of_one_operand_name_its_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry._RULES, ("", "Abs"))
    registry.vjp("Abs", wrt="X")(lambda _e, n, _g: n["X"].missing)
    message = r"The rule of Abs in tests.autodiff.test_registry failed at .*test_registry.py:\d+: AttributeError"
    with pytest.raises(og.errors.RuleContractError, match=message):
        og.augment(text_model("(float[3] x) => (float[3] y) { y = Abs (x) }"), wrt="x")


OWN: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "typo": (elementwise, lambda e, n: {"X": lambda: e.mull(n["X"], 2)}, r"at .*test_registry.py:\d+: Attr.*'mull'"),
    "operand": (elementwise, lambda _e, n: {"X": lambda: n["Z"]}, r"Frob has no operand 'Z', only X"),
    "operator": (elementwise, lambda e, n: {"X": lambda: e.op("Coss", n["X"])}, "a node that is not valid.*Coss"),
    "no operands": (elementwise, lambda e, _n: {"X": lambda: e.op("Cos")}, "a node that is not valid.*input size 0"),
    "attribute": (elementwise, lambda e, n: {"X": lambda: e.op("Cos", n["X"], k=1)}, "not valid.*attribute: k"),
    "types": (elementwise, lambda e, n: {"X": lambda: e.op("Mul", n["X"], e.ints([1]))}, "not valid.*tensor.int64"),
    "domain": (elementwise, lambda e, n: {"X": lambda: e.op("Cos", n["X"], domain="no")}, "not valid.*domain 'no'"),
    "parameters": (elementwise, lambda _: {}, "takes 1 positional argument"),
    "cotangent": (vjp, lambda _e, _n, g: {"X": lambda: g["y"]}, "KeyError: 'y'"),
    "no expansion": (expansion, lambda _e, _n: None, "failed at node 'frob' .*not iterable"),
    "reverse": (partial(expansion, reverse=lambda *_: 1 / 0), lambda _e, n: n["X"], "failed at .*ZeroDivisionError"),
}


@pytest.mark.parametrize("fault", OWN)
def test_a_fault_of_a_rule_for_an_own_operator_is_not_blamed_on_the_model(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No runtime and no checker knows the operator, so neither is asked about the model."""
    declare, function, message = OWN[fault]
    registry.load_rules()
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setitem(SIGNATURES, "acme::Frob", (("X",), ("Y",)))
    signature.cache_clear()
    declare("acme::Frob", wrt=["X"])(function)
    model = text_model("(float[2,3] x) => (float[2,3] y) { [frob] y = acme.Frob (x) }")
    model.opset_import.add(domain="acme", version=1)
    with pytest.raises(
        og.errors.RuleContractError, match=f"rule of acme::Frob in tests.autodiff.test_registry .*{message}"
    ):
        og.augment(model, wrt="inputs")


def test_an_operator_without_a_rule_in_the_expansion_of_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry._RULES, ("", "Abs"))
    registry.expansion("Abs", wrt=["X"])(lambda e, n: [e.op("Coss", n["X"])])
    message = "its rule, in tests.autodiff.test_registry, emits Coss: no rule covers this operator"
    with pytest.raises(og.errors.DifferentiationError, match=message):
        og.augment(text_model("(float[3] x) => (float[3] y) { y = Abs (x) }"), wrt="x")


def test_what_the_nodes_of_a_plugin_do_not_fit_is_not_blamed_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry._RULES, ("", "Abs"))
    registry.vjp("Abs", wrt=["X"])(lambda e, n, g: {"X": lambda: e.op("MatMul", g["Y"], n["X"])})
    with pytest.raises(
        og.errors.RuleContractError, match=r"The rule of Abs in tests.autodiff.test_registry failed at node"
    ):
        og.jvp(text_model("(float[2,3] x) => (float[2,3] y) { y = Abs (x) }"), wrt="x")


def test_errors_of_the_lowering_of_a_plugin_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table._LOWERINGS, "ConvInputGrad", dict(table.lowerings()["ConvInputGrad"]))

    @table.lowering("ConvInputGrad", "plugin_way")
    def plugin_way(e: Emitter, n: Call, spec: Any) -> ir.Value:
        raise KeyError("w")

    message = r"Lowering plugin_way in tests.autodiff.test_registry failed at .*test_registry.py:\d+: KeyError: 'w'"
    with pytest.raises(og.errors.RuleContractError, match=message):
        og.augment(
            text_model("(float[1,2,9] x, float[3,2,4] w) => (float[1,3,6] y) { y = Conv (x, w) }"),
            wrt="x",
            target=og.Target(lowering={"ConvInputGrad": "plugin_way"}),
        )
