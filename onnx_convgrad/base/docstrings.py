"""Parse docstrings in Google's style: prose, and the sections Args, Attributes, Returns, Yields and Raises."""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import dataclass, field

SECTIONS = {"Args": "parameters", "Attributes": "parameters", "Raises": "raises"}
_HEADING = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example|Examples):$")
_ENTRY = re.compile(r"^\*{0,2}(\w[\w.]*)(?: \([^)]*\))?: ?(.*)$")


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
    parsed = Docstring()
    prose: list[str] = []
    lines = inspect.cleandoc(text or "").splitlines()
    position = 0
    while position < len(lines):
        heading = _HEADING.match(lines[position])
        if heading is None:
            prose.append(lines[position])
            position += 1
            continue
        end = position + 1
        while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
            end += 1
        _take(parsed, heading[1], textwrap.dedent("\n".join(lines[position + 1 : end])))
        position = end
    parsed.prose = "\n".join(prose).strip("\n")
    return parsed


def _take(parsed: Docstring, heading: str, body: str) -> None:
    """Store the body of a section."""
    if heading in SECTIONS:
        getattr(parsed, SECTIONS[heading]).update(_entries(body))
    elif heading in {"Returns", "Yields"}:
        parsed.returns = body.strip("\n")


def _entries(body: str) -> dict[str, str]:
    """Split `name: description` entries, whose further lines are indented."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in body.splitlines():
        entry = None if line.startswith(" ") else _ENTRY.match(line)
        if entry is not None:
            name = entry[1]
            found[name] = [entry[2]]
        elif name:
            found[name].append(line)
    return {
        name: "\n".join([first, textwrap.dedent("\n".join(rest))]).strip() for name, (first, *rest) in found.items()
    }
