"""The command `rules`: list the operators that have a rule, and those of ai.onnx that have none."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_convgrad.cli.command import command
from onnx_convgrad.cli.tables import Output, Table
from onnx_convgrad.errors import ArgumentError

if TYPE_CHECKING:
    from onnx_convgrad.autodiff.registry import Rule

_FACTS: Mapping[str, Callable[[Any], str]] = {
    "moves": lambda fact: f"only moves numbers ({fact})",
    "within": lambda fact: f"stays within {'zero and ' if fact == 'zero' else ''}the operands",
    "nonnegative": lambda _: "sums with weights that are not negative",
    "affine": lambda fact: f"is affine in {', in '.join(' and '.join(group.split()) for group in fact)}",
    "monotone": lambda fact: (
        f"is {fact}" if isinstance(fact, str) else ", ".join(f"is {way} in {name}" for name, way in fact.items())
    ),
    "curve": lambda fact: f"is {'a sigmoid' if fact == 'sigmoid' else fact}",
    "bounds": lambda fact: f"is between {fact[0]:g} and {fact[1]:g}",
    "keeps_zero": lambda fact: "is zero where " + ("an operand is" if fact is True else f"{' or '.join(fact)} is"),
    "poles": lambda fact: (
        "may be infinite or steep where "
        + ", ".join(f"{name} is {' or '.join(f'{place:g}' for place in places)}" for name, places in fact.items())
    ),
}
"""Attribute of rules that says what an operator does, besides its derivative and its factors -> the fact in words."""

_BY_NODE = {
    "within": "may stay within the operands",
    "affine": "may be affine",
    "monotone": "may be monotone",
    "curve": "may be convex or a sigmoid",
    "keeps_zero": "may keep zero",
    "poles": "may have poles",
}
"""Words for facts that depend on attributes and constants of the node."""


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
    from onnx_convgrad.lowering.table import lowerings

    lowerings()  # their modules declare abstract operators, and gradients per sample of convolutions
    table = [rule for rule in all_rules() if rule.domain != "convgrad"]
    if operator is not None:
        _one_operator(operator, table, out)
        return
    standard = _standard_operators()
    covered = standard.keys() & {r.op_type for r in table if not r.domain and r.kind != "not_differentiable"}
    by_body = sorted(op for op in standard.keys() - covered if _has_body(standard[op]))
    missing = sorted(standard.keys() - covered - set(by_body))
    converted = _converted()
    if out.json:
        counts = {"opset": CANONICAL_OPSET, "covered": len(covered), "total": len(standard)}
        out.print_json(
            {
                **counts,
                "through_function_body": by_body,
                "missing": missing,
                "rules": [_described(r) for r in table],
                "converted": converted,
            }
        )
        return
    columns = ["operator", "kind", "differentiated", "without", "missing on"]
    for listed in ([r for r in table if not r.domain], [r for r in table if r.domain]):
        out.table(Table(columns, [_row(r) for r in listed]))
        out.line()
    out.line("Written with other operators when a model is read:")
    for text in dict.fromkeys(converted.values()):
        for indent, words in ((2, ", ".join(name for name, other in converted.items() if other == text)), (6, text)):
            for line in textwrap.wrap(words, 80 - indent, break_long_words=False):
                out.line(indent * " " + line)
    out.line()
    for line in _LEGEND:
        out.line(line)
    out.line()
    out.line(f"{len(covered)} of the {len(standard)} operators of ai.onnx {CANONICAL_OPSET} have a rule.")
    if by_body:
        out.line(f"{len(by_body)} more are differentiated through their function bodies: {', '.join(by_body)}.")
    out.line(f"Not differentiated: {', '.join(missing) or 'none'}.")


_LEGEND = (
    "* may hold parameters. Every derivative can be differentiated again.",
    "Without `per sample`, gradients for each sample are refused, or those of parameters.",
    "Without `vmap`, the transformation runs the operator in a loop.",
    "Without `bounds`, robustness behind the operator cannot be certified.",
    "`rules OP` shows one operator with its facts.",
)


def _converted() -> dict[str, str]:
    """Operators that reading a model writes with others, each with these: those of ONNX Runtime, and optimizers."""
    from onnx_convgrad.frontend.opset.converters import FUSED

    names = {f"{domain}::{op}" if domain else op: convert for (domain, op), convert in FUSED.items()}
    return {name: (names[name].__doc__ or "").partition("\n")[0].rstrip(".") for name in sorted(names)}


def _row(rule: Rule) -> list[str]:
    """An operator in the list, which fits a terminal of 80 columns."""
    one = _described(rule)
    lacking = {
        "per sample": one["per sample"] != "yes",
        "vmap": one["vmap"] != "one node",
        "bounds": one["second order"] and not one["bounds"],
    }
    names = [f"{name}*" if name in rule.parameters else name for name in rule.wrt]
    missing = [name for name in one["missing on"] if name != "portable"]  # it has what cuda and web have
    cells = names, [name for name, lacks in lacking.items() if lacks], missing
    return [rule.name, rule.kind.replace("_", " "), *map(", ".join, cells)]


def _one_operator(operator: str, table: list[Rule], out: Output) -> None:
    from onnx_convgrad.autodiff.registry import rules as all_rules
    from onnx_convgrad.base.names import check_names
    from onnx_convgrad.lowering.table import lowerings

    by_name = {rule.name: rule for rule in table}
    if operator not in by_name:
        if schema := _standard_operators().get(operator):
            raise ArgumentError(
                f"No rule covers {operator}; it {_without_rule(schema)}.",
                hint="`python -m onnx_convgrad rules` lists the operators that have one.",
            )
        converted = _converted()
        if operator in converted:
            described = {"operator": operator, "written as": converted[operator]}
            if out.json:
                out.print_json(described)
            for label, text in described.items():
                out.line(f"{label + ':':<16}{text}")
            return
        check_names([operator], [*by_name, *converted], "operator")
    rule = by_name[operator]
    abstract = {rule.op_type for rule in all_rules() if operator in rule.of}
    computed = {op: entries for op, entries in lowerings().items() if op == operator or op in abstract}
    if out.json:
        summaries = {op: {name: entry.summary for name, entry in entries.items()} for op, entries in computed.items()}
        out.print_json({**_described(rule), "lowerings": summaries})
    for label, value in _described(rule).items():
        text = ", ".join(value) if isinstance(value, list) else str(value)
        lines = value if label == "facts" else filter(None, [text])
        for number, line in enumerate(lines):
            out.line(f"{'' if number else label + ':':<16}{line}")
    rows = [[op, name, entry.summary] for op, entries in computed.items() for name, entry in entries.items()]
    if rows:
        out.line()
        out.table(Table(["computes", "lowering", "how"], rows))


def _described(rule: Rule) -> dict[str, Any]:
    """All that is known of an operator; most of it follows from its derivative and facts."""
    from onnx_convgrad.attacks.interval import is_product
    from onnx_convgrad.autodiff.registry import batched_rule, per_sample_rule
    from onnx_convgrad.ir.targets import TARGETS

    smooth = rule.kind not in ("zero", "not_differentiable")
    noted = rule.factors is not None and not rule.unnoted
    special = per_sample_rule(rule.domain, rule.op_type) is not None
    alone = special or not rule.parameters or rule.broadcasts or rule.kind in ("elementwise", "expansion")
    followed = noted or rule.kind == "expansion"
    one_node = noted or batched_rule(rule.domain, rule.op_type) is not None
    bounded = rule.nonnegative or rule.monotone or (rule.moves and rule.kind == "linear") or is_product(rule)
    facts = {name: fact for name in _FACTS if (fact := getattr(rule, name))}
    return {
        "operator": rule.name,
        "kind": rule.kind,
        "differentiated": list(rule.wrt),
        "parameters": list(rule.parameters),
        "second order": "yes" if smooth else "",
        "per sample": ("yes" if alone else "without parameters") if followed else "",
        "vmap": "one node" if one_node else "loop",
        "bounds": "yes" if bounded else "",
        "missing on": [name for name, t in TARGETS.items() if not rule.domain and rule.op_type in t.missing],
        "module": rule.module.removeprefix("onnx_convgrad."),
        "facts": [_BY_NODE[name] if callable(fact) else _FACTS[name](fact) for name, fact in facts.items()],
        "no notation": rule.unnoted,
        "reason": rule.reason,
        "note": rule.note,
    }


# Any: a schema of ONNX, which is not imported for the help, here and below.
def _standard_operators() -> dict[str, Any]:
    """The schemas of ai.onnx at the canonical opset that are not deprecated, by operator."""
    from onnx import defs

    from onnx_convgrad.ir.emit import CANONICAL_OPSET

    names = {s.name for s in defs.get_all_schemas_with_history() if not s.domain and s.since_version <= CANONICAL_OPSET}
    schemas = {name: defs.get_schema(name, CANONICAL_OPSET) for name in names}
    return {name: schema for name, schema in schemas.items() if not schema.deprecated}


def _has_body(schema: Any) -> bool:
    return bool(schema.has_function or schema.has_context_dependent_function)


def _without_rule(schema: Any) -> str:
    """The treatment of an operator without a rule, as the end of a sentence."""
    if _has_body(schema):
        return "is differentiated through its function body"
    if any(kind.startswith("seq(") for one in (*schema.inputs, *schema.outputs) for kind in one.types):
        return "is replaced by operators on its members if the members of the sequence are known"
    return "cannot be differentiated"
