"""Turn functions into commands: options from the fields of a dataclass, errors as one paragraph, an exit status.

Everything slow is imported inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from onnx_convgrad.base.boundary import unforeseen
from onnx_convgrad.base.limits import limits_of
from onnx_convgrad.cli.tables import Output, recorded_warnings
from onnx_convgrad.errors import ArgumentError, ConvGradError
from onnx_convgrad.pipeline.options import PARTS, CommandOption, Loading, Options, options_of

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file.", show_default=False)]


def command(
    *,
    source: type = Options,
    leave: Collection[str] = (),
    verbose: str = "",
    panels: Mapping[str, str] | None = None,
    **defaults: str,
) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Turn a function into a typer command.

    A parameter `options: Options` stands for the command-line options of all its fields, `loading: Loading` for those that
    say how the model is loaded, `given` for those of another dataclass, as a mapping of the fields that were given, and
    `out: Output` for the options that say how to print. The function returns the exit status, or `None` for 0.

    Args:
        source: The dataclass whose fields `given` maps.
        leave: Fields of `Options` that the command has no use for.
        verbose: Help text of `--verbose`, for commands that have it.
        panels: Heading in the help -> names of the fields below it; others stand below "Options".
        defaults: Defaults of fields that differ from those of `Options`.
    """

    def decorate(run: Callable[..., int | None]) -> Callable[..., None]:
        @functools.wraps(run)
        def invoke(**given: Any) -> None:
            with errors_as_text():
                if "options" in wanted:
                    given["options"] = Options(**{**defaults, **parsed(Options, given)})
                if "loading" in wanted:
                    given["loading"] = Loading(**parsed(Loading, given))
                if "given" in wanted:
                    given["given"] = parsed(source, given)
                given["out"] = Output(**{name: bool(given.pop(name, None)) for name in ("verbose", "quiet", "json")})
                with limits_of(getattr(given.get("loading"), "limits", None)):
                    status = run(**given)
            raise typer.Exit(status or 0)

        wanted = inspect.signature(run, eval_str=True).parameters
        panel_of = {name: panel for panel, names in (panels or {}).items() for name in names.split()}
        options, loading = (
            [
                _parameter(option, defaults.get(field.name, field.default), panel_of.get(field.name))
                for field in options_of(kind)
                if field.name not in leave
                for option in field.metadata.get("options", ())
            ]
            for kind in (source, Loading)
        )
        derived = {"options": options, "loading": loading, "given": options, "out": _printing(verbose)}
        parameters = [p for name, parameter in wanted.items() for p in derived.get(name, [parameter])]
        by_keyword = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters]
        invoke.__signature__ = inspect.Signature(by_keyword)  # type: ignore[attr-defined]
        return invoke

    return decorate


class Panels(TyperCommand):
    """A command whose help lists its options below several headings; those without one come last."""

    # Any: typer may bundle click, whose classes these are.
    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        rest: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panel = (
                    "Arguments"
                    if parameter.param_type_name == "argument"
                    else getattr(parameter, "rich_help_panel", None)
                )
                (rest if panel is None else sections.setdefault(panel, [])).append(record)
        last = "Other options" if len(sections) > 1 else "Options"
        for heading, records in {**sections, last: rest}.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _parameter(option: CommandOption, default: object = None, panel: str | None = None) -> inspect.Parameter:
    """Return the parameter of an option; `None` as its value means that it was not given."""
    shown = isinstance(default, (str, int, float)) and option.kind is not bool
    text = f"{option.help} [default: {default}]" if shown else option.help
    declared = typer.Option(*option.names, help=text, metavar=option.metavar, show_default=False, rich_help_panel=panel)
    kind: Any = list[str] if option.kind is list else option.kind
    return inspect.Parameter(
        option.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, declared]
    )


def _printing(verbose: str) -> list[inspect.Parameter]:
    options = {"-q --quiet": "Print errors and warnings only.", "--json": "Print JSON instead."}
    if verbose:
        options = {"-v --verbose": f"Print more: {verbose}", **options}
    return [_parameter(CommandOption(usage, text)) for usage, text in options.items()]


def parsed(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Take the command-line values of a dataclass's options out of `given`; return the fields that were given.

    Raises:
        ArgumentError: A value is empty or cannot be parsed.
    """
    values = {}
    for field in fields(kind):
        if kind is Options and field.name in PARTS:
            part = parsed(PARTS[field.name], given)
            if part:
                values[field.name] = PARTS[field.name](**part)
            continue
        raw = [given.pop(option.parameter, None) for option in field.metadata.get("options", ())]
        if any(value not in (None, [], ()) for value in raw):
            parse = field.metadata["parse"]
            values[field.name] = raw[0] if parse is None else parse(*raw)
            texts = [text for value in raw for text in (value if isinstance(value, (list, tuple)) else [value])]
            if values[field.name] in ([], {}) or any(isinstance(text, str) and not text.strip() for text in texts):
                option = field.metadata["options"][0].names[-1]
                raise ArgumentError(f"{option} is empty.", hint="Give it a value, or omit it.")
    return values


@contextlib.contextmanager
def errors_as_text() -> Iterator[None]:
    """Print the package's errors, and those of files, as one paragraph on stderr, and exit with their status."""
    for library in ("onnx_ir", "onnx_shape_inference"):  # they log what is then refused with a hint
        logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        with recorded_warnings():
            yield
        sys.stdout.flush()
    except ConvGradError as problem:
        _fail(f"{problem}", problem.exit_status)
    except BrokenPipeError:  # the reader of a pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except OSError as problem:
        if problem.filename is None:  # printing failed
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            _fail(f"the output cannot be written: {problem.strerror or problem}.", 2)
        _fail(f"{os.fspath(problem.filename)!r} cannot be used: {problem.strerror}.", 2)
    except Exception as problem:
        if hasattr(problem, "exit_code"):  # an exit or a usage error of click, which typer may bundle
            raise
        fault = unforeseen(problem)  # the last net: no traceback reaches a user
        _fail(f"{fault}", fault.exit_status)


def _fail(message: str, status: int) -> None:
    print(f"Error: {message}", file=sys.stderr)
    raise typer.Exit(status) from None
