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
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.pipeline.command_options import CommandOption, written
from onnx_convgrad.pipeline.options import PARTS, Options, options_of

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX file.", show_default=False)]


def command(
    *,
    leave: Collection[str] = (),
    verbose: str = "",
    panels: Mapping[str, str] | None = None,
    **defaults: str,
) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Turn a function into a typer command.

    A parameter with a dataclass as its annotation, such as `options: Options`, stands for the command-line options of all
    its fields, and is an instance of it. With `Annotated[dict[str, Any], Config]` it is a mapping of the fields that were
    given. `out: Output` stands for the options that say how to print. The function returns the exit status, or `None` for 0.

    Args:
        leave: Fields that the command has no use for.
        verbose: Help text of `--verbose`, for commands that have it.
        panels: Heading in the help -> names of the fields below it; others stand below "Options". `--help` leaves out the
            options of those with a star, and `--help-all` shows them.
        defaults: Defaults of fields that differ from those of the dataclass.
    """
    panel_of = {name.rstrip("*"): panel for panel, names in (panels or {}).items() for name in names.split()}
    rare = {name.rstrip("*") for names in (panels or {}).values() for name in names.split() if name.endswith("*")}

    def decorate(run: Callable[..., int | None]) -> Callable[..., None]:
        @functools.wraps(run)
        def invoke(**given: Any) -> None:
            with errors_as_text():
                given.pop("help_all", None)
                for name, (kind, make) in made.items():
                    own = {field: value for field, value in defaults.items() if field in kind.__annotations__}
                    given[name] = make(**{**own, **parsed(kind, given)})
                given["out"] = Output(**{name: bool(given.pop(name, None)) for name in ("verbose", "quiet", "json")})
                with limits_of(getattr(given.get("loading"), "limits", None)):
                    status = run(**given)
            raise typer.Exit(status or 0)

        made: dict[str, tuple[type, type]] = {}
        parameters: list[inspect.Parameter] = []
        hidden: set[str] = set()
        for name, parameter in inspect.signature(run, eval_str=True).parameters.items():
            kind: Any = next(iter(getattr(parameter.annotation, "__metadata__", ())), parameter.annotation)
            if kind is Output:
                parameters += _printing(verbose, bool(rare))
            elif not hasattr(kind, "__dataclass_fields__"):
                parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            else:
                made[name] = kind, dict if kind is not parameter.annotation else kind
                for field in options_of(kind):
                    options = [] if field.name in leave else written(field, defaults.get(field.name))
                    parameters += [_parameter(option, rich_help_panel=panel_of.get(field.name)) for option in options]
                    hidden.update(option.parameter for option in options if field.name in rare)
        declared: dict[str, Any] = {
            p.name: next(iter(getattr(p.annotation, "__metadata__", ())), None) for p in parameters
        }
        described = {n: d.described for n, d in declared.items() if hasattr(d, "described")}
        vars(invoke).update(__signature__=inspect.Signature(parameters), described=described, rare=hidden)
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
        rare: Collection[str] = () if ctx.meta.get(ALL_OPTIONS) else getattr(self.callback, "rare", ())
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and parameter.name not in rare:
                panel = getattr(parameter, "rich_help_panel", None) or "Options"
                heading = "Arguments" if parameter.param_type_name == "argument" else panel
                sections.setdefault(heading, []).append(record)
        rest = sections.pop("Options")
        sections["Other options" if len(sections) > 1 else "Options"] = rest
        for heading, records in sections.items():
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
def own_option(usage: str, text: str = "", *, of: str = "", **more: Any) -> Any:
    """An option of the command itself.

    Args:
        usage: As in `CommandOption`; the name of an option with a value may be missing where it is that of the parameter.
        text: The help, or what it says behind the first sentence on the argument.
        of: The argument that it stands for, if any: see `base.arguments`.
        more: Arguments of `typer.Option`.
    """
    return _declared(CommandOption(usage, text, of), **more)


def _declared(option: CommandOption, **more: Any) -> Any:
    """An option of typer, whose help is read when it is shown."""
    shown = not option.of and "[default: " not in option.text  # else the help has the default
    found = typer.Option(*option.names, metavar=option.metavar, show_default=shown, **more)
    found.described = option
    return found


def _parameter(option: CommandOption, **more: Any) -> inspect.Parameter:
    """Return the parameter of an option; `None` as its value means that it was not given."""
    kind: Any = list[str] if option.kind is list else option.kind
    annotation = Annotated[kind | None, _declared(option, **more)]
    return inspect.Parameter(option.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _printing(verbose: str, several_helps: bool) -> list[inspect.Parameter]:
    options = {"-q --quiet": "Print errors and warnings only.", "--json": "Print JSON instead."}
    if verbose:
        options = {"-v --verbose": f"Print more: {verbose}", **options}
    found = [_parameter(CommandOption(usage, text)) for usage, text in options.items()]
    if several_helps:
        every = CommandOption("--help-all", "Show all options and exit.")
        found.append(_parameter(every, is_eager=True, callback=_help_all))
    return found


def parsed(kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Take the command-line values of a dataclass's options out of `given`; return the fields that were given."""
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
        error = unforeseen(problem)  # the last net: no traceback reaches a user
        _fail(f"{error}", error.exit_status)


def _fail(message: str, status: int) -> None:
    print(f"Error: {message}", file=sys.stderr)
    raise typer.Exit(status) from None
