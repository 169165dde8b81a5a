"""The order of the house: floors, circles of imports, names of classes, and prose that a stranger can read."""

from __future__ import annotations

import ast
import configparser
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import onnx_convgrad as og

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "onnx_convgrad"
LISTED = re.compile(r"^\| (?:\d+ \| )?(`.*?) \| ", re.MULTILINE)
"""The cell of a table with the names of packages or classes."""


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package, rules included, by its dotted name."""
    paths = [*PACKAGE.rglob("*.py"), *((PACKAGE / "rules").glob("*.py"))]  # rglob does not follow the link of the rules
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in names.items()}


def section(title: str) -> str:
    """The text of a section of CONTRIBUTING.md."""
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return guide.split(f"\n## {title}\n")[1].split("\n## ")[0]


# -- floors and circles ------------------------------------------------------------------------------------------------


def listed(contract: str, key: str) -> list[str]:
    """The lines of an entry of a contract, names without that of the package."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter", encoding="utf-8")
    lines = parser[f"importlinter:contract:{contract}"][key].split("\n")
    return [line.removeprefix("onnx_convgrad.") for line in lines if line]


@cache
def floors() -> dict[str, int]:
    """Package -> its floor in the contract."""
    return {
        name: floor
        for floor, layer in enumerate(reversed(listed("floors", "layers")), 1)
        for name in map(str.strip, layer.split("|"))
    }


def test_the_table_of_packages_is_that_of_the_contract() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*?) \| ", section("Where things are"), re.MULTILINE)
    table = {name: int(floor) for floor, cell in rows for name in re.findall(r"`(\w+)`", cell)}
    assert table == floors()


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules that a module imports, also inside functions and for annotations."""
    known = modules()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from inner & known.keys() if inner <= known.keys() else {node.module, *inner & known.keys()}


def test_no_circle_of_files() -> None:
    # The root is left out: it loads the public names lazily, and imports of it are imports of all.
    graph = {
        name: {other for other in imported(tree) if other not in (name, "onnx_convgrad")}
        for name, tree in modules().items()
        if name != "onnx_convgrad"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"these files import each other: {' <- '.join(error.args[1])}") from None


# -- names -------------------------------------------------------------------------------------------------------------


@cache
def classes() -> dict[str, list[str]]:
    """Public class -> the modules that define one of this name."""
    found = defaultdict(list)
    for name, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    return found


def test_no_two_public_classes_share_a_name() -> None:
    assert {name: places for name, places in classes().items() if len(places) > 1} == {}


def test_the_nouns_of_the_guide_are_classes() -> None:
    nouns = [name for cell in LISTED.findall(section("Nouns")) for name in re.findall(r"`(\w+)`", cell)]
    assert len(nouns) == len(set(nouns)) >= 40
    assert not [noun for noun in nouns if noun not in classes()]


def glossary() -> dict[str, str]:
    """Term -> meaning."""
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", section("Glossary"), re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a term is listed twice"
    return dict(rows[1:])


def test_a_term_of_the_glossary_has_one_meaning() -> None:
    assert not {term: meaning for term, meaning in glossary().items() if re.search(r"(?:^|[;.,] )\(?\d[.)] ", meaning)}


KEYWORDS = {
    "adapter": "",
    "cotangents": "str | None",
    "options": "SessionOptionsLike | None",
    "seed": "int",
}
"""Keyword -> its annotation in every public function; none if there is no such keyword."""


def public_callables() -> Iterator[tuple[str, Any]]:
    """The functions and classes of the public modules, and the methods of these classes."""
    for name in (n for n in og.__all__ if n != "jax"):  # which needs a package that tests do not have
        found = getattr(og, name)
        for entry in (
            [getattr(found, n, None) for n in getattr(found, "__all__", ())] if inspect.ismodule(found) else [found]
        ):
            yield name, entry
            if inspect.isclass(entry):
                yield from (
                    (entry.__name__, f) for k, f in vars(entry).items() if not k.startswith("_") and callable(f)
                )


def public_keywords() -> Iterator[tuple[str, str, str]]:
    """Place, keyword and annotation, for every parameter of the public functions."""
    for place, function in public_callables():
        with suppress(ValueError, TypeError):  # modules and constants have no signature
            for p in inspect.signature(function).parameters.values():
                if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                    yield place, p.name, str(p.annotation)


def test_a_keyword_means_one_thing_in_all_public_functions() -> None:
    found = [(where, name, kind) for where, name, kind in public_keywords() if name in KEYWORDS]
    assert len(found) > 50
    assert not [entry for entry in found if entry[2] != KEYWORDS[entry[1]]]


# -- prose -------------------------------------------------------------------------------------------------------------

UNCLEAR = {
    "a description starts with what the thing is, not with 'The same'": r'(?:"""|\n +\w+: )(?:The|A|An) same\b',
    "a docstring starts with what the thing is, not with a clause": r'"""(?:What|How|Where|Which|Why|When)\b(?!.*\?)',
    "say 'smallest', 'most' or 'first', not 'from which on'": r"from (?:which|that|there|then|here) on\b",
    "say 'is not a', not 'is no'": r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer|more|less|doubt)[a-z]",
}
"""Advice for a writer -> the pattern of sentences that the advice is about."""


TRAINING = ("data", "evaluation", "metrics", "programs/losses", "training")


def test_the_true_answers_are_labels() -> None:
    """A target is what a graph is emitted for; only the graph input has this name, and code that holds it."""
    pattern = re.compile(r"\b(?:the|a|each|its|all|no|further) targets?\b(?! \{e\.target)", re.IGNORECASE)
    files = (path for folder in TRAINING for path in (PACKAGE / folder).rglob("*.py"))
    assert not [(str(path), m[0]) for path in files for m in pattern.finditer(path.read_text(encoding="utf-8"))]


def prose() -> Iterator[Path]:
    """The files that people read."""
    for name in ("onnx_convgrad", "rules", "tests", "benchmarks", "docs", "examples"):
        for kind in ("py", "md", "js", "mjs"):
            yield from (ROOT / name).rglob(f"*.{kind}")
    yield from ROOT.glob("*.md")


def test_prose_is_plain() -> None:
    generated = [ROOT / "docs" / name for name in ("reference", "project", "gallery")]
    found = defaultdict(list)
    for path in prose():
        if path in (Path(__file__), ROOT / "CHANGELOG.md") or any(folder in path.parents for folder in generated):
            continue
        text = path.read_text(encoding="utf-8")
        for remedy, pattern in UNCLEAR.items():
            for match in re.finditer(pattern, text):
                line = text.count("\n", 0, match.start()) + 1
                found[remedy].append(f"{path.relative_to(ROOT)}:{line}")
    assert not found
