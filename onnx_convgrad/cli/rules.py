"""What `rules` prints: which operators have a rule, and which of ai.onnx have none."""

# ruff: noqa: T201 - commands print

from __future__ import annotations

from json import dumps
from typing import Any

import onnx

from onnx_convgrad.autodiff.registry import Rule
from onnx_convgrad.autodiff.registry import rules as all_rules
from onnx_convgrad.base.names import check_names
from onnx_convgrad.cli.tables import Output, Table
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.ir.emit import CANONICAL_OPSET
from onnx_convgrad.lowering.table import lowerings

__all__ = ["run"]


_FAMILIES = {"ConvTranspose": "Conv", "MatMul": "Product", "Gemm": "Product"}
"""What the operators that compute an operator and its gradients are called, where not after it."""


_MEMBERS = "is taken apart where the members of the sequence are known"
_WITHOUT_RULE = {
    "If": "is replaced by one branch where its condition is constant",
    **dict.fromkeys(
        ["ConcatFromSequence", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert"], _MEMBERS
    ),
}
"""What happens to operators that have no rule."""


def run(operator: str | None, out: Output, *, json: bool) -> None:
    """The rule table, or one operator of it."""
    table = [rule for rule in all_rules() if rule.domain != "convgrad"]
    if operator is not None:
        _one_operator(operator, table, out, json=json)
        return
    covered = {rule.op_type for rule in table if not rule.domain and rule.kind != "not_differentiable"}
    standard = _standard_operators()
    by_body = sorted(op for op in standard - covered if _has_body(op))
    missing = sorted(standard - covered - set(by_body))
    if json:
        counts = {"opset": CANONICAL_OPSET, "covered": len(standard & covered), "total": len(standard)}
        described = [_described(rule) for rule in table]
        print(dumps({**counts, "through_function_body": by_body, "missing": missing, "rules": described}, indent=2))
        return
    rows = [[r.name, r.kind, ", ".join(r.wrt), ", ".join(r.parameters), _module(r)] for r in table]
    out.table(Table(["operator", "kind", "differentiated", "parameters", "module"], rows))
    out.line()
    out.line(f"{len(standard & covered)} of the {len(standard)} operators of ai.onnx {CANONICAL_OPSET} have a rule.")
    if by_body:
        out.line(f"Through their function bodies, {len(by_body)} more: {', '.join(by_body)}")
    out.line(f"Without: {', '.join(missing) or 'none'}")


def _one_operator(operator: str, table: list[Rule], out: Output, *, json: bool) -> None:
    found = {rule.name: rule for rule in table}
    if operator not in found:
        if operator in _standard_operators():
            body = "is differentiated through its function body" if _has_body(operator) else "cannot be differentiated"
            raise ArgumentError(f"No rule covers {operator}; it {_WITHOUT_RULE.get(operator, body)}.")
        check_names([operator], list(found), "operator")
    rule = found[operator]
    family = _FAMILIES.get(operator, operator)
    ways = {op: entries for op, entries in lowerings().items() if op.startswith(family)}
    if json:
        described = {op: {name: entry.summary for name, entry in entries.items()} for op, entries in ways.items()}
        print(dumps({**_described(rule), "lowerings": described}, indent=2))
        return
    for label, text in _described(rule).items():
        shown = ", ".join(text) if isinstance(text, list) else str(text)
        if shown:
            out.line(f"{label + ':':<16}{shown}")
    rows = [[op, name, entry.summary] for op, entries in ways.items() for name, entry in entries.items()]
    if rows:
        out.line()
        out.table(Table(["computes", "lowering", "how"], rows))


def _described(rule: Rule) -> dict[str, Any]:
    return {
        "operator": rule.name,
        "kind": rule.kind,
        "differentiated": list(rule.wrt),
        "parameters": list(rule.parameters),
        "module": _module(rule),
        "reason": rule.reason,
        "note": rule.note,
    }


def _module(rule: Rule) -> str:
    return rule.module.removeprefix("onnx_convgrad.")


def _standard_operators() -> set[str]:
    """Operators of ai.onnx at the canonical opset, without deprecated ones."""
    found = set()
    for name in {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == ""}:
        try:
            schema = onnx.defs.get_schema(name, CANONICAL_OPSET)
        except onnx.defs.SchemaError:
            continue
        if not schema.deprecated:
            found.add(name)
    return found


def _has_body(operator: str) -> bool:
    schema: Any = onnx.defs.get_schema(operator, CANONICAL_OPSET)
    return bool(schema.has_function or schema.has_context_dependent_function)
