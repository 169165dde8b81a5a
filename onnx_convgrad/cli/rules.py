"""The command `rules`: list the operators that have a rule, and those of ai.onnx that have none."""

from __future__ import annotations

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
    covered = standard & {r.op_type for r in table if not r.domain and r.kind != "not_differentiable"}
    by_body = sorted(op for op in standard - covered if _has_body(op))
    missing = sorted(standard - covered - set(by_body))
    if out.json:
        counts = {"opset": CANONICAL_OPSET, "covered": len(covered), "total": len(standard)}
        out.print_json(
            {**counts, "through_function_body": by_body, "missing": missing, "rules": [_described(r) for r in table]}
        )
        return
    columns = ["operator", "kind", "differentiated", "without", "missing on"]
    for listed in ([r for r in table if not r.domain], [r for r in table if r.domain]):
        out.table(Table(columns, [_row(r) for r in listed]))
        out.line()
    for line in _LEGEND.splitlines():
        out.line(line)
    out.line()
    out.line(f"{len(covered)} of the {len(standard)} operators of ai.onnx {CANONICAL_OPSET} have a rule.")
    if by_body:
        out.line(f"{len(by_body)} more are differentiated through their function bodies: {', '.join(by_body)}.")
    out.line(f"Not differentiated: {', '.join(missing) or 'none'}.")


def _one_operator(operator: str, table: list[Rule], out: Output) -> None:
    from onnx_convgrad.autodiff.registry import rules as all_rules
    from onnx_convgrad.base.names import check_names
    from onnx_convgrad.lowering.table import lowerings

    by_name = {rule.name: rule for rule in table}
    if operator not in by_name:
        if operator in _standard_operators():
            raise ArgumentError(
                f"No rule covers {operator}; it {_without_rule(operator)}.",
                hint="`python -m onnx_convgrad rules` lists the operators that have one.",
            )
        check_names([operator], list(by_name), "operator")
    rule = by_name[operator]
    abstract = {rule.op_type for rule in all_rules() if operator in rule.of}
    computed = {op: entries for op, entries in lowerings().items() if op == operator or op in abstract}
    if out.json:
        summaries = {op: {name: entry.summary for name, entry in entries.items()} for op, entries in computed.items()}
        out.print_json({**_described(rule), "lowerings": summaries})
        return
    for label, value in _described(rule).items():
        lines = value if label == "facts" else filter(None, [_text(value)])
        for number, line in enumerate(lines):
            out.line(f"{'' if number else label + ':':<16}{line}")
    rows = [[op, name, entry.summary] for op, entries in computed.items() for name, entry in entries.items()]
    if rows:
        out.line()
        out.table(Table(["computes", "lowering", "how"], rows))


def _row(rule: Rule) -> list[str]:
    """An operator in the list, which fits a terminal of 80 columns."""
    one = _described(rule)
    lacks = [
        name
        for name, lacking in (
            ("per sample", one["per sample"] != "yes"),
            ("vmap", one["vmap"] != "one node"),
            ("bounds", one["second order"] and not one["bounds"]),
        )
        if lacking
    ]
    names = [f"{name}*" if name in rule.parameters else name for name in rule.wrt]
    kind = rule.kind.replace("_", " ")
    missing = [name for name in one["missing on"] if name != "portable"]  # it has what cuda and web have
    return [rule.name, kind, ", ".join(names), ", ".join(lacks), ", ".join(missing)]


_LEGEND = (
    "* may hold parameters. Every derivative can be differentiated again.\n"
    "Without `per sample`, gradients for each sample are refused, or those of parameters.\n"
    "Without `vmap`, the transformation runs the operator in a loop.\n"
    "Without `bounds`, robustness behind the operator cannot be certified.\n"
    "`rules OP` shows one operator with its facts."
)


def _text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


_ABILITIES = ("second order", "per sample", "vmap", "bounds", "missing on")


def _described(rule: Rule) -> dict[str, Any]:
    return {
        "operator": rule.name,
        "kind": rule.kind,
        "differentiated": list(rule.wrt),
        "parameters": list(rule.parameters),
        **dict(zip(_ABILITIES, _abilities(rule), strict=True)),
        "module": _module(rule),
        "facts": [_in_words(name, fact) for name in _FACTS if (fact := getattr(rule, name))],
        "no notation": rule.unnoted,
        "reason": rule.reason,
        "note": rule.note,
    }


def _in_words(name: str, fact: Any) -> str:
    return _BY_NODE[name] if callable(fact) else _FACTS[name](fact)


def _abilities(rule: Rule) -> list[Any]:
    """The cells of an operator in the columns `_ABILITIES`; they follow from its derivative and facts."""
    from onnx_convgrad.attacks.interval import is_product
    from onnx_convgrad.autodiff.registry import batched_rule, per_sample_rule
    from onnx_convgrad.ir.targets import TARGETS

    smooth = rule.kind not in ("zero", "not_differentiable")
    noted = rule.factors is not None and not rule.unnoted
    special = per_sample_rule(rule.domain, rule.op_type) is not None
    alone = special or not rule.parameters or rule.broadcasts or rule.kind in ("elementwise", "expansion")
    followed = noted or rule.kind == "expansion"
    bounded = rule.nonnegative or rule.monotone or (rule.moves and rule.kind == "linear") or is_product(rule)
    return [
        "yes" if smooth else "",
        ("yes" if alone else "without parameters") if followed else "",
        "one node" if noted or batched_rule(rule.domain, rule.op_type) is not None else "loop",
        "yes" if bounded else "",
        [name for name, target in TARGETS.items() if not rule.domain and rule.op_type in target.missing],
    ]


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


def _schema(operator: str) -> Any:
    import onnx

    from onnx_convgrad.ir.emit import CANONICAL_OPSET

    return onnx.defs.get_schema(operator, CANONICAL_OPSET)


def _has_body(operator: str) -> bool:
    schema = _schema(operator)
    return bool(schema.has_function or schema.has_context_dependent_function)


def _without_rule(operator: str) -> str:
    """The treatment of an operator without a rule, as the end of a sentence."""
    if _has_body(operator):
        return "is differentiated through its function body"
    schema = _schema(operator)
    if any(kind.startswith("seq(") for one in (*schema.inputs, *schema.outputs) for kind in one.types):
        return "is replaced by operators on its members if the members of the sequence are known"
    return "cannot be differentiated"
