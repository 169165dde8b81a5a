"""Arguments of functions and classes, read from the text of their modules: importing these would make `--help` slow.

Docstrings are in Google's style: prose, and the sections Args, Attributes, Returns, Yields and Raises.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]
_PLACE = re.compile(r"^([\w.]+):([\w.]+?)(?:\((\w*)\))?$")
_DEFAULT = re.compile(r"\b(\w+): (?:(?!, \w+:)[^=\n])+ = (?:field\(default=)?([^,()\n]+)")
_END = re.compile(r"^(?=[^\s)])|^    (?:@|def (?!__init__))|\) -> None:$", re.MULTILINE)
_SENTENCE = re.compile(r"[.](?=\s|$)")
_SECTION = re.compile(
    r"^(Args|Attributes|Returns|Yields|Raises|Examples?):(?:\n|\Z)((?:\n| .*(?:\n|\Z))*)", re.MULTILINE
)
_ENTRY = re.compile(r"^\*{0,2}(\w[\w.]*)(?: \([^)]*\))?: ?", re.MULTILINE)


@dataclass
class Docstring:
    """The parts of a docstring.

    Attributes:
        prose: Everything outside the sections.
        parameters: Parameter or attribute -> its description.
        raises: Exception -> when it is raised.
        returns: What is returned; empty if the docstring does not say.
    """

    prose: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    raises: dict[str, str] = field(default_factory=dict)
    returns: str = ""


def parse(text: str | None) -> Docstring:
    """Parse a docstring; `None` counts as an empty one."""
    whole = inspect.cleandoc(text or "")
    parsed = Docstring(_SECTION.sub("", whole).strip("\n"))
    for heading, indented in _SECTION.findall(whole):
        body = textwrap.dedent(indented)
        if heading in ("Returns", "Yields"):
            parsed.returns = body.strip("\n")
        elif not heading.startswith("Example"):
            _, *entries = _ENTRY.split(body)
            described = parsed.raises if heading == "Raises" else parsed.parameters
            for name, description in zip(entries[::2], entries[1::2], strict=True):
                first, _, rest = description.partition("\n")
                described[name] = f"{first}\n{textwrap.dedent(rest)}".strip()
    return parsed


@dataclass(frozen=True, slots=True)
class Argument:
    """The first sentence that a docstring says of an argument, and its default; `None` unless that is a number or text."""

    sentence: str
    default: Any = None


@cache
def argument(place: str, name: str = "") -> Argument:
    """Read an argument.

    Args:
        place: `module:Function(argument)` relative to the package; without the brackets, the argument is `name`. Empty
            brackets stand for the function itself.
        name: The argument, unless `place` names it.

    Raises:
        LookupError: There is no such definition, or its docstring says nothing of the argument.
    """
    found = _PLACE.match(place)
    if found is None:
        raise LookupError(f"{place!r} is not of the form module:Function(argument).")
    module, qualified, named = found.groups()
    defaults, doc = _definition(module, qualified)
    if named == "":
        return Argument(sentence(doc.prose))
    return Argument(sentence(doc.parameters[named or name]), _literal(defaults.get(named or name, "None")))


def sentence(text: str) -> str:
    """The first sentence, in one line."""
    joined = " ".join(text.split())
    end = _SENTENCE.search(joined)
    return joined if end is None else joined[: end.end()]


@cache
def _definition(module: str, qualified: str) -> tuple[dict[str, str], Docstring]:
    """Argument -> its default, as it is written; and the docstring."""
    path = _PACKAGE.joinpath(*module.split("."))
    code = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    kind = ""
    for name in qualified.split("."):
        start = re.search(rf"^ *(def|class) {name}\b", code, re.MULTILINE)
        if start is None:
            raise LookupError(f"There is no definition of {qualified!r} in {module!r}.")
        kind, code = start[1], code[start.start() :]
    signature, _, rest = code.partition('"""')
    doc, _, after = rest.partition('"""')
    if kind == "class":  # its fields, or its `__init__`
        end = _END.search(after)
        signature += after[: end.start() if end else None]
    return dict(_DEFAULT.findall(signature)), parse(doc)


def _literal(written: str) -> Any:
    try:
        return ast.literal_eval(written.strip())
    except (ValueError, SyntaxError):
        return None
