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
_SENTENCE = re.compile(r"[.](?=\s|$)")


@dataclass(frozen=True, slots=True)
class Argument:
    """The first sentence that a docstring says of an argument, and its default; `None` if that is no number or text."""

    sentence: str
    default: Any = None


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
    code, doc = _definition(module, qualified)
    if named == "":
        return Argument(sentence(doc.prose))
    return Argument(sentence(doc.parameters[named or name]), _default(code, named or name))


def sentence(text: str) -> str:
    """The first sentence, in one line."""
    joined = " ".join(text.split())
    end = _SENTENCE.search(joined)
    return joined if end is None else joined[: end.end()]


@cache
def _definition(module: str, qualified: str) -> tuple[str, Docstring]:
    """The signature of a function, or the fields and `__init__` of a class; and its docstring."""
    path = _PACKAGE.joinpath(*module.split("."))
    code = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    for name in qualified.split("."):
        start = re.search(rf"^ *(def|class) {name}\b", code, re.MULTILINE)
        if start is None:
            raise LookupError(f"There is no definition of {qualified!r} in {module!r}.")
        code = code[start.start() :]
    before, _, rest = code.partition('"""')
    doc, _, after = rest.partition('"""')
    end = re.search(r"^(?=[^\s)])|^    (@|def (?!__init__))|\) -> None:$", after, re.MULTILINE)
    return (before + after[: end.start() if end else None] if start[1] == "class" else before), parse(doc)


def _default(code: str, name: str) -> Any:
    found = re.search(rf"\b{name}: (?:(?!, \w+:)[^=\n])+ = (?:field\(default=)?([^,()\n]+)", code)
    try:
        return None if found is None else ast.literal_eval(found[1].strip())
    except (ValueError, SyntaxError):
        return None
