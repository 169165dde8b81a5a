"""Command-line options: fields of dataclasses, described where the arguments are that they stand for.

Imports nothing slow, so that `--help` answers at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, replace
from typing import Any

from onnx_convgrad.base.arguments import argument


@dataclass(frozen=True, slots=True)
class CommandOption:
    """The form of an option on the command line.

    Attributes:
        usage: Its names and the placeholder of its value: `-o --out FOLDER`, `--epochs INT`, `--lr NUMBER`, `--json` (no
            value), `--wrt NAMES...` (repeatable). Names, placeholder or both may be missing where a field has them.
        text: What the help says, behind the first sentence that the docstring says of the argument.
        of: The argument that it stands for, if any: see `base.arguments`.
        name: Its name, unless `of` has it.
        default: The default that the help shows; else that of the argument.
    """

    usage: str
    text: str = ""
    of: str = ""
    name: str = ""
    default: Any = None

    @property
    def help(self) -> str:
        """The help: the first sentence on the argument, the text, and the default if it is text or a number."""
        said, shown = "", self.default
        if self.of:
            found = argument(self.of, self.name)
            said, shown = _QUOTED.sub(r"\1", found.sentence), found.default if shown is None else shown
        shown = "on" if shown is True else shown
        text = f"{said} {self.text}".strip()
        if "[default: " in text or "by default" in said or not isinstance(shown, (str, int, float)) or shown is False:
            return text
        return f"{text} [default: {shown}]"

    @property
    def names(self) -> list[str]:
        """The option as it is typed."""
        return [word for word in self.usage.split() if word.startswith("-")]

    @property
    def metavar(self) -> str | None:
        """Placeholder of the value; `None` if there is none."""
        return next((word.removesuffix("...") for word in self.usage.split() if not word.startswith("-")), None)

    @property
    def kind(self) -> type:
        """Type of the value on the command line."""
        return list if self.usage.endswith("...") else _KINDS.get(self.metavar, str)

    @property
    def parameter(self) -> str:
        """The Python name: of `--input-shape` it is `input_shape`."""
        return self.names[-1].partition("/")[0].lstrip("-").replace("-", "_")


_QUOTED = re.compile(r"`\"?(.*?)\"?`")
_KINDS: dict[str | None, type] = {None: bool, "INT": int, "NUMBER": float}
_PLACEHOLDERS = {"int": "INT", "float": "NUMBER", "str": "NAME", "bool": "", "Names": "NAMES..."}
"""Type of a field -> the placeholder of its option."""


# Any: a dataclass field has the type of its annotation.
def option(
    usage: str = "",
    *,
    of: str = "",
    text: str = "",
    more: tuple[CommandOption, ...] = (),
    parse: Callable[..., Any] | None = None,
    default: Any = None,
) -> Any:
    """Make a dataclass field with a command-line option.

    Args:
        usage: Names and placeholder of the option, unless they follow from the name and the type of the field.
        of: The argument that it stands for, see `base.arguments`: the first sentence of its description is the help.
        text: Help behind this sentence. A default that is text or a number is added to the help; others stand here in
            square brackets if they are not obvious.
        more: Further options of the field.
        parse: From the values of the options to the value of the field.
        default: Of the field, if no option is given.
    """
    return field(default=default, metadata={"options": (CommandOption(usage, text, of), *more), "parse": parse})


# Any: a dataclass field has the type of its annotation.
def same(of: str, usage: str = "", *, text: str = "") -> Any:
    """A field with the default of the argument that its option stands for."""
    return option(usage, of=of, text=text, default=argument(of).default)


def written(own: Field[Any], default: Any = None) -> list[CommandOption]:
    """The command-line options of a field, whose help shows the default of the command or of the field."""
    shown = own.default if default is None and own.default is not MISSING else default
    options = own.metadata.get("options", ())
    return [_completed(one, own, None if number else shown) for number, one in enumerate(options)]


def _completed(one: CommandOption, own: Field[Any], default: Any) -> CommandOption:
    """An option with what follows from its field: name and placeholder, where none is declared, and the default."""
    kind, words = str(own.type).removesuffix(" | None"), one.usage.split()
    if not one.names:
        flag = own.name.replace("_", "-")
        words.insert(0, "/".join(f"--{no}{flag}" for no in (["", "no-"] if own.default is True else [""])))
    if all(word.startswith("-") for word in words) and not one.usage.startswith("-"):
        words.append(_PLACEHOLDERS.get(kind, "NAME"))
    return replace(one, usage=" ".join(words).strip(), name=own.name, default=default)
