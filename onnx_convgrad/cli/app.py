"""The command-line program: one command per module.

Exit status: 0 done; 1 a check failed; 2 bad arguments or an unusable model; 3 something cannot be differentiated;
130, 143 training was interrupted by SIGINT, SIGTERM and everything is saved.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from onnx_convgrad.base.other_names import instead
from onnx_convgrad.base.version import __version__
from onnx_convgrad.cli.attribute import attribute
from onnx_convgrad.cli.augment import augment
from onnx_convgrad.cli.bench import bench
from onnx_convgrad.cli.check import check
from onnx_convgrad.cli.command import Panels
from onnx_convgrad.cli.evaluate import evaluate
from onnx_convgrad.cli.explain import explain
from onnx_convgrad.cli.inspect import inspect
from onnx_convgrad.cli.lower import lower
from onnx_convgrad.cli.map import map_gradients
from onnx_convgrad.cli.predict import predict
from onnx_convgrad.cli.quantize import quantize
from onnx_convgrad.cli.rules import rules
from onnx_convgrad.cli.train import train
from onnx_convgrad.cli.view import view
from onnx_convgrad.cli.web import web
from onnx_convgrad.errors import shown

app = typer.Typer(
    name="onnx-convgrad",
    help="Build gradients of ONNX models as ONNX models, out of plain ai.onnx operators.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
TOOL = "This command is a tool: it may change in a minor version."
"""The last line of the help of a tool."""

for _command in (inspect, augment, explain, check, train, predict, evaluate, rules):
    app.command(cls=Panels)(_command)
for _command in (view, lower, bench, quantize, attribute, web):
    app.command(cls=Panels, epilog=TOOL)(_command)
app.command("map", cls=Panels, epilog=TOOL)(map_gradients)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"onnx-convgrad {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program itself."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script `onnx-convgrad`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open until the exit
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # escape characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        status = app(args=arguments, prog_name="onnx-convgrad", standalone_mode=False)
    except KeyboardInterrupt:
        status = 130
    except Exception as problem:
        format_message = getattr(problem, "format_message", None)  # a usage error, whichever click raised it
        if format_message is None:
            raise
        given = list(sys.argv[1:] if arguments is None else arguments)
        print(_usage_error(format_message(), given, getattr(problem, "ctx", None)), file=sys.stderr)
        status = getattr(problem, "exit_code", 2)
    sys.exit(status or 0)


_NO_NUMBER = re.compile(r"Invalid value for '(-[\w-]+)[^']*': Input should be a valid (number|integer)")
_OUTSIDE = re.compile(r"Invalid value for '(-[\w-]+)[^']*': Input should be (greater|less) than or equal to (\S+)")
_NUMBERS = {"number": "a number such as 0.001", "integer": "a whole number such as 10"}


# Any: a context of click, which typer may bundle, here and below.
def _known(context: Any) -> list[str]:
    """The options of a command, or the commands of the program."""
    if context is None:
        return []
    return [*getattr(context.command, "commands", ()), *(name for p in context.command.params for name in p.opts)]


def _usage_error(message: str, given: Sequence[str], context: Any) -> str:
    """Return one line, or the help itself if there was no command at all; `given` are the command's words."""
    if found := _NO_NUMBER.match(message):
        option, kind = found[1], found[2]
        after = (word.partition("=")[2] for word in given if word.startswith(f"{option}="))
        value = next(after, next((b for a, b in pairwise(given) if a == option), ""))
        message = f"{option} takes {_NUMBERS[kind]}, not {value!r}"
    if found := _OUTSIDE.match(message):
        message = f"{found[1]} must be at {'least' if found[2] == 'greater' else 'most'} {found[3]}"
    if message.startswith("Usage:"):
        return message
    message = instead(message, _known(context))
    where = f" See `{context.command_path} --help`." if context is not None else ""
    end = "" if message.endswith("?") else "."
    return shown(f"Error: {message.rstrip('.')}{end}{where}")
