"""Arguments of functions and classes, read from their files: importing them would make `--help` slow."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from onnx_convgrad.base.docstrings import Docstring, parse

_PACKAGE = Path(__file__).parents[1]
_PLACE = re.compile(r"^([\w.]+):([\w.]+?)(?:\((\w*)\))?$")
_DEFAULT = re.compile(r"\b(\w+): (?:(?!, \w+:)[^=\n])+ = (?:field\(default=)?([^,()\n]+)")
_END = re.compile(r"^(?=[^\s)])|^    (?:@|def (?!__init__))|\) -> None:$", re.MULTILINE)
_SENTENCE = re.compile(r"[.](?=\s|$)")


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
