"""README and documentation: links lead somewhere, code blocks run, and print what is shown."""

from __future__ import annotations

import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from benchmarks import tables
from onnx_convgrad.cli.app import app

ROOT = Path(__file__).parents[1]
GENERATED = ("reference", "project", "gallery")
"""Folders that `docs/generate.py` writes; the build of the site checks the links to and from them."""

DOCS = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.relative_to(ROOT).parts[1] not in GENERATED)
NAMING = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")] + DOCS
PAGES = [*NAMING, ROOT / "CHANGELOG.md"]

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:onnx_convgrad|rules|tests|examples|benchmarks|docs)/[\w./]*)`")
LIBRARIES = {"jax", "torch"}
"""Modules of the package with the name of a library, which most mentions mean."""
ROOMS = sorted({path.stem for path in (ROOT / "onnx_convgrad").iterdir() if path.name[0] != "_"} - LIBRARIES)
DOTTED = re.compile(rf"`(?:onnx_convgrad\.)?((?:{'|'.join(ROOMS)})(?:\.\w+)*)`")
RUNNABLE = re.compile(r"^(import|from) ")
"""A Python block that starts with an import is a whole program, and runs; other blocks are fragments."""


def _blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each fenced block."""
    return FENCED.findall(page.read_text(encoding="utf-8"))


def _programs() -> list[tuple[str, str, str | None]]:
    """Name, text and printed result of each runnable block; the result is a `text` block right behind it."""
    programs = []
    for page in [ROOT / "README.md", *DOCS]:
        blocks = _blocks(page)
        for number, (language, text) in enumerate(blocks):
            if language == "python" and RUNNABLE.match(text):
                following = blocks[number + 1] if number + 1 < len(blocks) else ("", "")
                printed = following[1] if following[0] == "text" else None
                programs.append((f"{page.parent.name}-{page.stem}-{number}", text, printed))
    return programs


PROGRAMS = _programs()
EACH_PAGE = pytest.mark.parametrize("page", NAMING, ids=lambda page: page.relative_to(ROOT).as_posix())


def _prose(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(_prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target.is_relative_to(ROOT / "docs") and target.relative_to(ROOT / "docs").parts[0] in GENERATED:
            continue
        assert target.exists(), f"{link} leads nowhere"
        if page in DOCS:
            inside = target in DOCS or target.is_relative_to(ROOT / "docs" / "images")
            assert inside, f"{link} leaves docs/, which a documentation site cannot follow"
        if anchor:
            assert anchor in _anchors(target), f"{link}: no such heading"


def test_the_front_page_leads_to_every_page_in_two_clicks() -> None:
    reached = near = {ROOT / "docs" / "index.md"}
    for _ in range(2):
        near = {
            (page.parent / link.partition("#")[0]).resolve() for page in near for link in LINK.findall(_prose(page))
        }
        near &= {*DOCS}
        reached = reached | near
    assert sorted({*DOCS} - reached) == []


@EACH_PAGE
def test_named_files_and_modules_exist(page: Path) -> None:
    text = _prose(page)
    generated = tuple(f"docs/{folder}" for folder in GENERATED)
    named = (path for path in FILE.findall(text) if not path.startswith(generated))
    missing = [path for path in named if not (ROOT / path).exists()]
    for name in (name for name in DOTTED.findall(text) if not name.endswith(".py")):
        try:
            pkgutil.resolve_name(f"onnx_convgrad.{name}")
        except (ImportError, AttributeError):
            missing.append(name)
    assert missing == []


def test_readme_is_short_and_shows_a_result() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
    assert any("README" in name and printed for name, _, printed in PROGRAMS)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "printed"), [p[1:] for p in PROGRAMS], ids=[p[0] for p in PROGRAMS])
def test_code_runs(text: str, printed: str | None, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # what a program writes stays in `tmp_path`
    (tmp_path / "program.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{text}", encoding="utf-8")
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    if printed is not None:
        assert done.stdout == printed


@EACH_PAGE
def test_options_of_shown_commands_exist(page: Path) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    text = page.read_text(encoding="utf-8").replace("\\\n", "")  # commands on several lines
    for line in re.findall(r"python -m onnx_convgrad ([a-z][^`\n]*)", text):
        name, *words = shlex.split(line, comments=True)
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= known, line


def test_tables_show_the_stored_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check"]) == 0, capsys.readouterr().err


def test_a_table_that_was_edited_is_noticed() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    number = re.compile(r"\d\.\d\d").search(page, page.index("<!-- measured"))
    assert number is not None
    assert tables.updated(f"{page[: number.start()]}9.99{page[number.end() :]}") == page
