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
from onnx_convgrad.pipeline.command_options import CommandOption, written
from onnx_convgrad.pipeline.options import PARTS, Loading, Options, options_of

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file.", show_default=False)]


def command(
    *,
    source: type = Options,
    leave: Collection[str] = (),
    verbose: str = "",
    panels: Mapping[str, str] | None = None,
    rare: str = "",
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
        rare: Fields whose options `--help` leaves out; `--help-all` shows them.
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
                given.pop("help_all", None)
                given["out"] = Output(**{name: bool(given.pop(name, None)) for name in ("verbose", "quiet", "json")})
                with limits_of(getattr(given.get("loading"), "limits", None)):
                    status = run(**given)
            raise typer.Exit(status or 0)

        wanted = inspect.signature(run, eval_str=True).parameters
        panel_of = {name: panel for panel, names in (panels or {}).items() for name in names.split()}
        options, loading = (
            [
                _parameter(option, panel_of.get(field.name))
                for field in options_of(kind)
                if field.name not in leave
                for option in written(field, defaults.get(field.name))
            ]
            for kind in (source, Loading)
        )
        derived = {"options": options, "loading": loading, "given": options, "out": _printing(verbose, bool(rare))}
        parameters = [p for name, parameter in wanted.items() for p in derived.get(name, [parameter])]
        by_keyword = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters]
        invoke.__signature__ = inspect.Signature(by_keyword)  # type: ignore[attr-defined]
        declared: dict[str, Any] = {p.name: getattr(p.annotation, "__metadata__", (None,))[0] for p in parameters}
        invoke.described = {  # type: ignore[attr-defined]
            name: found.described for name, found in declared.items() if hasattr(found, "described")
        }
        names = rare.split()
        invoke.rare = frozenset(  # type: ignore[attr-defined]
            option.parameter for field in options_of(source) if field.name in names for option in written(field)
        )
        return invoke

    return decorate


class Panels(TyperCommand):
    """A command whose help lists its options below several headings; those without one come last.

    Options that are rarely used are left out, unless all are asked for. Docstrings are read when a command is used.
    """

    # Any: typer may bundle click, whose classes these are.
    @property
    def params(self) -> list[Any]:
        described = getattr(self.callback, "described", {})
        for parameter in self._params:
            if parameter.name in described and not parameter.help:
                parameter.help = described[parameter.name].help
        return self._params

    @params.setter
    def params(self, given: list[Any]) -> None:
        self._params = given

    # Any: as above.
    def format_options(self, ctx: Any, formatter: Any) -> None:
        rare: frozenset[str] = frozenset() if ctx.meta.get(ALL_OPTIONS) else getattr(self.callback, "rare", frozenset())
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        rest: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and parameter.name not in rare:
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
        if rare:
            formatter.write_paragraph()
            formatter.write_text(f"{len(rare)} more options: {ctx.command_path} --help-all.")


ALL_OPTIONS = "onnx_convgrad.help_all"
"""Key of a context whose help shows every option."""


# Any: as above.
def _help_all(ctx: Any, wanted: bool | None) -> None:
    """Print the help with all options."""
    if wanted:
        ctx.meta[ALL_OPTIONS] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


# Any: typer declares its options as having any type.
def argument_option(of: str, usage: str, text: str = "", **more: Any) -> Any:
    """An option of the command itself that stands for an argument, whose docstring has its help; `text` follows it."""
    return _declared(CommandOption(usage, text, of), **more)


def _declared(option: CommandOption, **more: Any) -> Any:
    """An option of typer, whose help is read when it is shown."""
    found = typer.Option(*option.names, metavar=option.metavar, show_default=False, **more)
    found.described = option
    return found


def _parameter(option: CommandOption, panel: str | None = None) -> inspect.Parameter:
    """Return the parameter of an option; `None` as its value means that it was not given."""
    kind: Any = list[str] if option.kind is list else option.kind
    annotation = Annotated[kind | None, _declared(option, rich_help_panel=panel)]
    return inspect.Parameter(option.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _printing(verbose: str, several_helps: bool) -> list[inspect.Parameter]:
    options = {"-q --quiet": "Print errors and warnings only.", "--json": "Print JSON instead."}
    if verbose:
        options = {"-v --verbose": f"Print more: {verbose}", **options}
    found = [_parameter(CommandOption(usage, text)) for usage, text in options.items()]
    if several_helps:
        declared = typer.Option(
            "--help-all", help="Show all options and exit.", is_eager=True, callback=_help_all, show_default=False
        )
        found.append(found[0].replace(name="help_all", annotation=Annotated[bool | None, declared]))
    return found


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
        options = written(field)
        raw = [given.pop(option.parameter, None) for option in options]
        if any(value not in (None, [], ()) for value in raw):
            parse = field.metadata["parse"]
            values[field.name] = raw[0] if parse is None else parse(*raw)
            texts = [text for value in raw for text in (value if isinstance(value, (list, tuple)) else [value])]
            if values[field.name] in ([], {}) or any(isinstance(text, str) and not text.strip() for text in texts):
                raise ArgumentError(f"{options[0].names[-1]} is empty.", hint="Give it a value, or omit it.")
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
