"""The reference of the commands: the help that each prints."""

from __future__ import annotations

import click
import typer

from onnx_convgrad.cli.app import app
from onnx_convgrad.cli.command import ALL_OPTIONS

_COLUMNS = 100


def pages() -> dict[str, str]:
    """Page -> Markdown."""
    group = typer.main.get_command(app)
    lines = [
        "# Commands",
        "",
        "`onnx-convgrad COMMAND`, or `python -m onnx_convgrad COMMAND`. The texts below are what `--help` prints.",
        "",
    ]
    top = group.make_context("onnx-convgrad", [], resilient_parsing=True, max_content_width=_COLUMNS)
    lines += ["```text", _help(group, top), "```", ""]
    for name, command in group.commands.items():
        context = command.make_context(
            name, [], parent=top, resilient_parsing=True, max_content_width=_COLUMNS, terminal_width=_COLUMNS
        )
        lines += [f"## {name}", "", "```text", _help(command, context), "```", ""]
    return {"commands.md": "\n".join(lines)}


def _help(command: click.Command, context: click.Context) -> str:
    context.meta[ALL_OPTIONS] = True
    return command.get_help(context).replace("\b\n", "").rstrip()
