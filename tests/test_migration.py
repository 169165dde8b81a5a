"""The tables of names: each new name exists, and each old one does not."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from onnx_convgrad.cli.app import app
from onnx_convgrad.programs.manifest import VERSION

PAGE = (Path(__file__).parents[1] / "docs" / "how_to" / "migrate_to_1_0.md").read_text(encoding="utf-8")
TABLES = (Path(__file__).parents[1] / "docs" / "how_to" / "from_pytorch.md").read_text(encoding="utf-8")
HEADER = "| 1.0.0rc1 | 1.0.0 |\n|---|---|\n"
ANOTHER_MEANING = "The same name with another meaning"
SPAN = re.compile(r"`([^`]+)`")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
ROOTS = {"og": "onnx_convgrad", "onnx_convgrad": "onnx_convgrad", "trainer": "onnx_convgrad.Trainer"}
"""Name in the table -> the object that it stands for."""


class Row(NamedTuple):
    section: str
    old: list[str]
    new: list[str]


def _rows() -> Iterator[Row]:
    for section in PAGE.split("\n## ")[1:]:
        for table in section.split(HEADER)[1:]:
            for line in table.partition("\n\n")[0].splitlines():
                old, new = (SPAN.findall(cell) for cell in line.strip("|").split(" | "))
                yield Row(section.partition("\n")[0], old, new)


ROWS = list(_rows())
FROM_PYTORCH = [
    text
    for line in TABLES.splitlines()
    if line.startswith("|")
    for text in SPAN.findall(line.partition(" | ")[2])
    if text.startswith(("og.", "trainer."))
]


def _missing(text: str) -> list[str]:
    """The names of a command, an import or an expression that do not exist."""
    name, *words = text.split()
    if name == "from":
        return list(_missing_in(ast.parse(f"{words[0]}.{words[2]}", mode="eval").body))
    if name.startswith("-"):  # an option that all commands of the row have
        return []
    if any(word.startswith("--") for word in words):
        known = {option for parameter in COMMANDS[name].params for option in parameter.opts}
        return [word for word in words if word.startswith("-") and word not in known]
    return list(_missing_in(ast.parse(text, mode="eval").body))


def _missing_in(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Attribute():
            yield from [] if _exists(node) else [ast.unparse(node)]
        case ast.Call(func=called, keywords=keywords) if _exists(called):
            taken = inspect.signature(_object(called)).parameters
            yield from (f"{ast.unparse(called)}({k.arg}=)" for k in keywords if k.arg not in taken)
            for value in [*node.args, *(k.value for k in keywords)]:
                yield from _missing_in(value)
        case ast.Call(func=called):
            yield ast.unparse(called)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _missing_in(child)


def _object(node: ast.AST) -> Callable[..., Any]:
    root, _, rest = ast.unparse(node).partition(".")
    return pkgutil.resolve_name(f"{ROOTS[root]}.{rest}")  # type: ignore[no-any-return]


def _exists(node: ast.AST) -> bool:
    """Whether an attribute can be read, or is a field of a class."""
    try:
        _object(node)
    except (AttributeError, ImportError):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Attribute) or not _exists(node.value):
            return False
        return node.attr in getattr(_object(node.value), "__annotations__", {})
    return True


def test_the_page_has_tables_of_each_kind() -> None:
    assert len(ROWS) > 80
    assert all(row.old and row.new for row in ROWS)
    assert len({row.old[0] for row in ROWS}) == len(ROWS), "a name has two rows"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.old[0])
def test_new_names_exist(row: Row) -> None:
    assert [name for text in row.new for name in _missing(text)] == []


@pytest.mark.parametrize("row", [row for row in ROWS if row.section != ANOTHER_MEANING], ids=lambda row: row.old[0])
def test_old_names_do_not_exist(row: Row) -> None:
    assert [text for text in row.old if not _missing(text)] == []


@pytest.mark.parametrize("text", FROM_PYTORCH)
def test_the_names_for_users_of_pytorch_exist(text: str) -> None:
    assert _missing(text) == []


def test_the_page_names_the_version_of_manifests() -> None:
    assert f"version {VERSION - 1} of `manifest.json` is refused, version {VERSION} is written" in PAGE
