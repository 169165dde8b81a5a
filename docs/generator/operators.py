"""The table of operators: how each of ai.onnx is differentiated, from the table of rules."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout

from onnx_convgrad.cli.app import app

_KINDS = {
    "zero": "The derivative is zero everywhere, such as that of rounding and comparisons.",
    "linear": "The result depends linearly on the operand.",
    "elementwise": "Each element of the result depends on one element of each operand.",
    "multilinear": "Linear in each of several operands: products and convolutions.",
    "vjp": "A general rule.",
    "expansion": "Rewritten with other operators first.",
    "not_differentiable": "Refused, with the reason.",
}


_COLUMNS = ("kind", "differentiated", "per sample", "vmap", "bounds")


def pages() -> dict[str, str]:
    """Page -> Markdown."""
    table = _table()
    lines = [
        "# Operators",
        "",
        (
            f"{table['covered']} of the {table['total']} operators of ai.onnx {table['opset']} have a rule, and "
            f"{len(table['through_function_body'])} more are differentiated through their function bodies: "
            f"{', '.join(f'`{op}`' for op in table['through_function_body'])}. "
            f"Not differentiated: {', '.join(f'`{op}`' for op in table['missing'])}."
        ),
        "",
        (
            "`onnx-convgrad rules` prints a short form of this table, and `onnx-convgrad rules Conv` one operator with its "
            "lowerings. [Models](../models.md#operators) says which conditions apply. [Operators of ONNX "
            "Runtime](converted_operators.md), such as GroupQueryAttention, are written with these when a model is read."
        ),
        "",
        "| kind | meaning |",
        "|---|---|",
        *(f"| {kind} | {meaning} |" for kind, meaning in _KINDS.items()),
        "",
        (
            "Gradients per sample, `vmap` and bounds follow from the index notation of operators and from facts that are "
            "declared beside their derivatives; tests check both by numbers. Where an operator has no notation, "
            "[Facts](operator_facts.md) says why: then `vmap` runs it in a loop, and gradients per sample through it are "
            "refused. `vmap` runs other operators as one node for all examples where their attributes, and the operands "
            "that the examples differ in, allow it. Operands with a star may hold parameters. "
            "Each derivative is differentiable again."
        ),
        "",
        f"| operator | {' | '.join(_COLUMNS)} |",
        f"|---|{'---|' * len(_COLUMNS)}",
    ]
    facts = [
        "# Facts about operators",
        "",
        (
            "An operator that an execution provider lacks is written with others, or runs on the CPU. Facts are declared "
            "beside the derivatives of [operators](operators.md). Remarks say why an operator has no index notation or no "
            "derivative."
        ),
        "",
        "| operator | missing on | facts | remark |",
        "|---|---|---|---|",
    ]
    for rule in table["rules"]:
        shown = {key: ", ".join(value) if isinstance(value, list) else value for key, value in rule.items()}
        stars = (f"{name}\\*" if name in rule["parameters"] else name for name in rule["differentiated"])
        shown["differentiated"] = ", ".join(stars)
        lines.append(f"| `{rule['operator']}` | {' | '.join(shown[key] for key in _COLUMNS)} |")
        remark = "; ".join(filter(None, (shown["reason"], shown["note"], shown["no notation"]))).replace("|", "\\|")
        if rule["facts"] or rule["missing on"] or remark:
            facts.append(f"| `{rule['operator']}` | {shown['missing on']} | {'; '.join(rule['facts'])} | {remark} |")
    converted = [
        "# Operators that are written with others",
        "",
        (
            "Reading a model writes these operators with others, which are differentiated: those of ONNX Runtime "
            "(com.microsoft), and training operators. Where a form has no equivalent, the model is refused with the reason. "
            "Values are those of ONNX Runtime's CPU kernels, as tests check."
        ),
        "",
        "| operator | written as |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in table["converted"].items()),
    ]
    written = {"operators": lines, "operator_facts": facts, "converted_operators": converted}
    return {f"{name}.md": "\n".join([*text, ""]) for name, text in written.items()}


def _table() -> dict:
    printed = io.StringIO()
    with redirect_stdout(printed):
        app(["rules", "--json"], standalone_mode=False)
    return json.loads(printed.getvalue())
