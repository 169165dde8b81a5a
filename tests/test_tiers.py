"""Core and tools: docstrings, help, the page on stability and the contracts of imports draw one line between them."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import Any

import pytest
import typer

from onnx_convgrad import transforms
from onnx_convgrad.cli.app import TOOL, app
from tests.test_house import ROOT, floors, imported, listed, modules

MAY_CHANGE = "(tool: may change in a minor version)."
"""The end of the first line of a tool."""

CORE_PACKAGES, TOOL_PACKAGES = listed("core", "source_modules"), listed("core", "forbidden_modules")
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
TOOL_COMMANDS = [name for name, command in COMMANDS.items() if command.epilog == TOOL]
TOOLS = [*TOOL_PACKAGES, *(f"cli.{name}" for name in TOOL_COMMANDS)]


@cache
def first_lines() -> dict[str, str]:
    """Module, without the name of the package -> the first line of its docstring."""
    texts = {name: ast.get_docstring(tree) or "" for name, tree in modules().items()}
    return {name.removeprefix("onnx_convgrad."): text.partition("\n")[0] for name, text in texts.items()}


def row(tier: str) -> list[str]:
    """The names in a row of the table of tiers."""
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    (cell,) = re.findall(rf"^\| \*\*{tier}\*\* \| (.*?) \|", page, re.MULTILINE)
    return re.findall(r"`([\w.]+)`", cell)


def package_of(module: str) -> str:
    """The package of the table that a module belongs to."""
    return module.removeprefix("onnx_convgrad.").partition(".")[0]


def test_every_package_is_core_or_a_tool() -> None:
    assert sorted([*CORE_PACKAGES, *TOOL_PACKAGES, "cli", "__main__"]) == sorted(floors())


def test_no_tool_may_import_another() -> None:
    named = listed("tools", "modules")
    assert {*TOOL_PACKAGES} <= {*named} <= {*TOOLS}
    others = [name for name in TOOLS if name not in named]  # commands that stand for the functions of one tool
    reached = [imported(modules()[f"onnx_convgrad.{name}"]) for name in others]
    assert [len({package_of(name) for name in names} & {*TOOL_PACKAGES}) for names in reached] == [1] * len(others)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_says_that_it_may_change(tool: str) -> None:
    assert first_lines()[tool].endswith(MAY_CHANGE)


def test_no_module_of_the_core_says_so() -> None:
    saying = [name for name, line in first_lines().items() if "(tool" in line]
    assert [name for name in saying if not any(f"{name}.".startswith(f"{tool}.") for tool in TOOLS)] == []


def says_so(transform: str) -> bool:
    """Whether the docstring of a member of `transforms` begins as that of a tool."""
    return getattr(transforms, transform).__doc__.partition("\n")[0].endswith(MAY_CHANGE)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", transforms.__all__)
def test_a_transform_says_whether_it_is_a_tool(name: str) -> None:
    assert says_so(name) == (package_of(getattr(transforms, name).__module__) in TOOL_PACKAGES)


def test_the_page_on_stability_lists_core_and_tools() -> None:
    packages = {name for name in row("Tools") if "." not in name} - {*TOOL_COMMANDS}
    assert packages == {*TOOL_PACKAGES} - {"bench", "quantization"}  # their functions and commands are listed
    assert {*row("Core")} & {*TOOLS, *TOOL_COMMANDS} == set()
    assert {*row("Core"), *row("Tools")} >= {*COMMANDS}
    assert {n for n in row("Tools") if "." in n} == {
        f"transforms.{name}" for name in transforms.__all__ if says_so(name)
    }


def test_the_names_on_the_page_on_stability_exist() -> None:
    named = [name for tier in ("Core", "Tools", "For plugins") for name in row(tier)]
    assert len(named) == len({*named})
    known = {*COMMANDS, "onnx_convgrad", *(f"transforms.{name}" for name in transforms.__all__)}
    assert [name for name in named if name not in known and f"onnx_convgrad.{name}" not in modules()] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_says_whether_it_is_a_tool(name: str) -> None:
    context = COMMANDS[name].make_context(name, [], resilient_parsing=True)
    assert COMMANDS[name].get_help(context).rstrip().endswith(TOOL) == (name in row("Tools"))
