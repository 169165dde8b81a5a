"""Tables of arguments: those of Python by function, and the options of the commands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import typer

from generator.api import default_text, member
from onnx_convgrad.base.arguments import sentence
from onnx_convgrad.cli import app as program

PACKAGE = "onnx_convgrad"
FUNCTIONS = {
    "arguments.md": {
        "Loading": "load",
        "Transformations": "augment vjp grad jvp hvp vmap jacobian hessian explain Target Memory",
        "Training": "build_training MixedPrecision Privacy Trainer Trainer.fit",
        "Predictions": "predict evaluate",
    },
    "more_arguments.md": {
        "Data": "data.ImageFolder data.Preprocessing",
        "Quantization": "transforms.insert_quantizers transforms.quantize",
        "Other changes of a model": "transforms.replace_head transforms.add_adapters transforms.unfold_batchnorm "
        "transforms.replace_batchnorm transforms.lower_gradient_ops",
        "Sessions": "runtime.SessionOptions",
    },
}
"""Page -> heading -> the functions and classes below it."""

TITLES = {"arguments.md": "Arguments", "more_arguments.md": "Arguments of data, changes of a model and sessions"}

EVERYWHERE = {"--help", "--json", "--quiet", "--help-all"}
"""Options that every command has."""

Row = tuple[str, str, str]
"""Name, default and meaning, as Markdown."""

_DEFAULT = re.compile(r" ?\[default: (.*)\]$")


def pages() -> dict[str, str]:
    """Page -> Markdown."""
    return {**{page: _arguments(page) for page in FUNCTIONS}, **_options()}


def _arguments(page: str) -> str:
    """The arguments of each function; what a function above has too is named alone."""
    about = "Arguments of functions and classes that are often used; the [reference](index.md) has the details of each."
    other = next(path for path in FUNCTIONS if path != page)
    lines, seen = [f"# {TITLES[page]}", "", about, "", f"Others: [{TITLES[other]}]({other}).", ""], dict[Row, str]()
    for heading, names in FUNCTIONS[page].items():
        lines += [f"## {heading}", ""]
        for name in names.split():
            thing: Any = resolve_name(f"{PACKAGE}:{name}")
            rows = [
                (
                    f"`{key}`",
                    "required" if default is inspect.Parameter.empty else f"`{default_text(default)}`",
                    sentence(text),
                )
                for key, (_, default, text) in member(f"{PACKAGE}.{name}", thing).parameters.items()
            ]
            lines += [f"### {name}", "", *_table("argument", rows, name, seen, lambda first: f"`{first}`")]
    return "\n".join(lines)


def _options() -> dict[str, str]:
    """The options of each command; what a command above has too is named alone. `train` has a page of its own."""
    statuses = " ".join((program.__doc__ or "").split("\n\n")[1].split())
    about = (
        "Every command has `--json`, which prints JSON, `-q`, which prints errors and warnings only, and `--help`. "
        "[Commands](commands.md) shows what it prints. Tables are printed on a terminal, plain text into a pipe, errors on "
        "stderr."
    )
    keys = "In the TOML file of `--config` they are keys, without the dashes in front. [Other commands](options.md)."
    several = ["# Options of the commands", "", about, "", statuses, ""]
    train = ["# Options of train", "", keys, ""]
    seen = dict[Row, str]()
    for name, command in typer.main.get_command(program.app).commands.items():  # type: ignore[attr-defined]
        rows = [_row(one) for one in command.params if one.opts[-1].startswith("-") and not EVERYWHERE & {*one.opts}]
        table = [command.get_short_help_str(200), "", *_table("option", rows, name, seen, _place)]
        train += table if name == "train" else []
        several += [f"## {name}", "", *(["[Options of train](train_options.md).", ""] if name == "train" else table)]
    return {"options.md": "\n".join(several), "train_options.md": "\n".join(train)}


def _place(command: str) -> str:
    return f"[{command}]({'train_options.md' if command == 'train' else f'options.md#{command}'})"


# Any: an option of click, which typer may bundle.
def _row(one: Any) -> Row:
    """Names, default and meaning of an option."""
    found = _DEFAULT.search(one.help)
    default = found[1] if found else one.default if type(one.default) in {int, float, str} else ""
    *others, last = [*one.opts, *one.secondary_opts]
    typed = f"{last} {one.metavar}" if one.metavar and not one.secondary_opts else last
    names = ", ".join(f"`{name}`" for name in (*others, typed))
    return names, "required" if one.required else _escaped(f"{default}"), _escaped(_DEFAULT.sub("", one.help))


def _escaped(text: str) -> str:
    """Plain text as Markdown."""
    return text.replace("<", "&lt;").replace("*", "\\*")


def _table(first: str, rows: list[Row], owner: str, seen: dict[Row, str], place: Callable[[str], str]) -> list[str]:
    """A table of the rows that are new, and a line with the names of those that an earlier owner has, too."""
    shared: dict[str, list[str]] = {}
    new = []
    for row in rows:
        earlier = seen.setdefault(row, owner)
        if earlier == owner:
            new.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |")
        else:
            shared.setdefault(earlier, []).append(row[0])
    lines = [f"| {first} | default | meaning |", "|---|---|---|", *new, ""] if new else []
    for earlier, names in shared.items():
        lines += [f"As for {place(earlier)}: {', '.join(names)}.", ""]
    return lines
