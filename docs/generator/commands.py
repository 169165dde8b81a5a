"""The reference of the commands: the help that each prints."""

from __future__ import annotations

import click
import typer

from onnx_convgrad.cli.app import app
from onnx_convgrad.cli.command import ALL_OPTIONS

_COLUMNS = 100


def pages() -> dict[str, str]:
    """Page -> Markdown: the list of all commands, and a page for each."""
    group = typer.main.get_command(app)
    top = group.make_context("onnx-convgrad", [], resilient_parsing=True, max_content_width=_COLUMNS)
    listed: dict[str, click.Command] = group.commands
    written = {}
    for name, command in listed.items():
        context = command.make_context(
            name, [], parent=top, resilient_parsing=True, max_content_width=_COLUMNS, terminal_width=_COLUMNS
        )
        lines = [f"# The command {name}", "", "```text", _help(command, context), "```", ""]
        written[f"commands/{name}.md"] = "\n".join(lines)
    lines = [
        "# Commands",
        "",
        "`onnx-convgrad COMMAND`, or `python -m onnx_convgrad COMMAND`. These pages show what `--help` prints.",
        "",
        *(
            f"- [{name}](commands/{name}.md): {command.get_short_help_str(_COLUMNS)}"
            for name, command in listed.items()
        ),
        "",
    ]
    return {"commands.md": "\n".join(lines), **written}


def _help(command: click.Command, context: click.Context) -> str:
    context.meta[ALL_OPTIONS] = True
    return command.get_help(context).replace("\b\n", "").rstrip()
