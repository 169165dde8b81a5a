"""Docstrings as Markdown."""

from __future__ import annotations

import textwrap

from onnx_convgrad.base import arguments
from onnx_convgrad.base.arguments import Docstring


def parse(text: str | None) -> Docstring:
    """Parse a docstring; its parts are Markdown. `None` counts as an empty one."""
    plain = arguments.parse(text)
    parameters, raises = ({n: markdown(t) for n, t in part.items()} for part in (plain.parameters, plain.raises))
    return Docstring(markdown(plain.prose), parameters, raises, markdown(plain.returns))


def markdown(text: str) -> str:
    """Turn the conventions of docstrings into Markdown: fence doctests and literal blocks, break lists off the prose."""
    out: list[str] = []
    lines = text.strip("\n").splitlines()
    position = 0
    while position < len(lines):
        line = lines[position]
        if line.startswith(">>> "):
            end = position
            while end < len(lines) and lines[end].strip():
                end += 1
            out += ["```pycon", *lines[position:end], "```"]
            position = end
            continue
        if line.rstrip().endswith("::"):
            end = position + 1
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
                end += 1
            block = textwrap.dedent("\n".join(lines[position + 1 : end])).strip("\n")
            opening = line.rstrip().removesuffix("::").rstrip()
            out += [*([f"{opening}:"] if opening else []), "", "```text", block, "```", ""]
            position = end
            continue
        if line.startswith(("- ", "| ")) and out and out[-1].strip() and not out[-1].startswith(("- ", "| ", "  ")):
            out.append("")
        out.append(line)
        position += 1
    return "\n".join(out).strip()
