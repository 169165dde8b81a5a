"""The command `rules`: list the operators that have a rule, and those of ai.onnx that have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_convgrad.cli.command import command
from onnx_convgrad.cli.tables import Output, Table
from onnx_convgrad.errors import ArgumentError

if TYPE_CHECKING:
    from onnx_convgrad.autodiff.registry import Rule

_FAMILIES = {"ConvTranspose": "Conv", "MatMul": "Product", "Gemm": "Product"}
"""Prefix of the names of an operator's lowerings, if it is not the operator's own name."""

_FACTS = ("moves", "within", "nonnegative", "affine", "monotone", "curve", "bounds")
"""Attributes of rules that say what an operator does, besides its derivative and its factors."""

_MEMBERS = "is replaced by operators on its members if the members of the sequence are known"


@command()
def rules(
    operator: Annotated[str | None, typer.Argument(metavar="OP", help="Show one operator.", show_default=False)] = None,
    *,
    out: Output,
) -> None:
    """List the operators that can be differentiated.

    \b
    Example:
      onnx-convgrad rules Conv
    """
    from onnx_convgrad.autodiff.registry import rules as all_rules
    from onnx_convgrad.ir.emit import CANONICAL_OPSET

    table = [rule for rule in all_rules() if rule.domain != "convgrad"]
    if operator is not None:
        _one_operator(operator, table, out)
        return
    standard = _standard_operators()
    covered = standard & {r.op_type for r in table if not r.domain and r.kind != "not_differentiable"}
    by_body = sorted(op for op in standard - covered if _has_body(op))
    missing = sorted(standard - covered - set(by_body))
    if out.json:
        counts = {"opset": CANONICAL_OPSET, "covered": len(covered), "total": len(standard)}
        out.print_json(
            {**counts, "through_function_body": by_body, "missing": missing, "rules": [_described(r) for r in table]}
        )
        return
    rows = [
        [r.name, r.kind, ", ".join(r.wrt), ", ".join(r.parameters), _module(r).removeprefix("rules.")] for r in table
    ]
    out.table(Table(["operator", "kind", "differentiated", "parameters", "module"], rows))
    out.line()
    out.line(f"{len(covered)} of the {len(standard)} operators of ai.onnx {CANONICAL_OPSET} have a rule.")
    if by_body:
        out.line(f"{len(by_body)} more are differentiated through their function bodies: {', '.join(by_body)}.")
    out.line(f"Not differentiated: {', '.join(missing) or 'none'}.")


def _one_operator(operator: str, table: list[Rule], out: Output) -> None:
    from onnx_convgrad.base.names import check_names
    from onnx_convgrad.lowering.table import lowerings

    by_name = {rule.name: rule for rule in table}
    if operator not in by_name:
        if operator in _standard_operators():
            instead = _MEMBERS if "Sequence" in operator else "cannot be differentiated"
            instead = "is differentiated through its function body" if _has_body(operator) else instead
            raise ArgumentError(
                f"No rule covers {operator}; it {instead}.",
                hint="`python -m onnx_convgrad rules` lists the operators that have one.",
            )
        check_names([operator], list(by_name), "operator")
    rule = by_name[operator]
    family = _FAMILIES.get(operator, operator)
    computed = {op: entries for op, entries in lowerings().items() if op.startswith(family)}
    if out.json:
        summaries = {op: {name: entry.summary for name, entry in entries.items()} for op, entries in computed.items()}
        out.print_json({**_described(rule), "lowerings": summaries})
        return
    for label, text in _described(rule).items():
        shown = ", ".join(text) if isinstance(text, list) else str(text)
        if shown:
            out.line(f"{label + ':':<16}{shown}")
    rows = [[op, name, entry.summary] for op, entries in computed.items() for name, entry in entries.items()]
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
        "facts": [_in_words(name, fact) for name in _FACTS if (fact := getattr(rule, name))],
        "no notation": rule.unnoted,
        "reason": rule.reason,
        "note": rule.note,
    }


def _in_words(name: str, fact: Any) -> str:
    if fact is True:
        return name
    if callable(fact):
        return f"{name}: depends on the node"
    texts = [f"{way} in {operand}" for operand, way in fact.items()] if isinstance(fact, Mapping) else fact
    return f"{name}: {texts if isinstance(texts, str) else ', '.join(map(str, texts))}"


def _module(rule: Rule) -> str:
    return rule.module.removeprefix("onnx_convgrad.")


def _standard_operators() -> set[str]:
    """Operators of ai.onnx at the canonical opset that are not deprecated."""
    import onnx

    from onnx_convgrad.ir.emit import CANONICAL_OPSET

    operators = set()
    for name in {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == ""}:
        try:
            schema = onnx.defs.get_schema(name, CANONICAL_OPSET)
        except onnx.defs.SchemaError:
            continue
        if not schema.deprecated:
            operators.add(name)
    return operators


def _has_body(operator: str) -> bool:
    import onnx

    from onnx_convgrad.ir.emit import CANONICAL_OPSET

    schema: Any = onnx.defs.get_schema(operator, CANONICAL_OPSET)
    return bool(schema.has_function or schema.has_context_dependent_function)
