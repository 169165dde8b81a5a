"""The built site in a real browser: nothing is cut off or out of reach, pages are short, and the search finds guides.

`python docs/generate.py && zensical build --strict` builds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import drive, served

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
SITE = ROOT / "site"
PHONE, SCREEN = 390, 1400
"""Widths of the window in pixels."""

HIGHEST = 9000
"""Most pixels of a page on a screen."""

LONG = re.compile(r"reference/[\w.]+/")
"""Pages that may be longer: a module or class of the reference."""

TABLES = [
    "arguments",
    "more_arguments",
    "options",
    "train_options",
    "operators",
    "operator_facts",
    "converted_operators",
]
"""Pages of the reference that describe several modules."""

SEARCHES = {
    "resume": "training/resume/",
    "NHWC": "how_to/channels_last/",
    "channels last": "how_to/channels_last/",
    "out of memory": "how_to/out_of_memory/",
    "saliency map": "tutorials/explain_a_prediction/",
    "new classes": "training/new_classes/",
    "LoRA": "training/lora/",
    "browser": "browser/",
    "CUDA": "cuda/",
    "check gradients": "how_to/check_gradients/",
    "own loss": "how_to/own_loss/",
    "own operator": "how_to/own_operator/",
    "several processes": "distributed/",
    "mixed precision": "training/mixed_precision/",
}
"""Query -> the page that must be found first."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    newest = max(path.stat().st_mtime for path in [ROOT / "mkdocs.yml", *(ROOT / "docs").rglob("*.md")])
    if newest > max((path.stat().st_mtime for path in SITE.rglob("*.html")), default=0.0):
        pytest.skip("Build the site first: python docs/generate.py && zensical build --strict")
    yield from served(SITE)


@pytest.fixture(scope="module")
def measured(node_modules: Path, address: str) -> dict[str, dict[str, Any]]:
    """Page -> width -> what `layoutOfPage` of the driver measures."""
    pages = sorted(path.parent.relative_to(SITE).as_posix() for path in SITE.rglob("index.html"))
    pages = [f"{page}/" if page != "." else "" for page in pages]
    found = drive(node_modules, address, "layout", seconds=600, pages=pages, widths=[SCREEN, PHONE])
    return found["measured"]  # type: ignore[no-any-return]


def _found(measured: dict[str, dict[str, Any]], key: str, *widths: int) -> dict[str, Any]:
    """Page and width -> what was found there, without empty results."""
    return {
        f"{page} at {width}": by_width[str(width)][key]
        for page, by_width in measured.items()
        for width in widths
        if by_width[str(width)][key]
    }


def test_no_page_scrolls_sideways(measured: dict[str, dict[str, Any]]) -> None:
    wide = _found(measured, "sideways", PHONE, SCREEN)
    assert {place: excess for place, excess in wide.items() if excess > 0} == {}


def test_nothing_is_out_of_reach(measured: dict[str, dict[str, Any]]) -> None:
    assert _found(measured, "hidden", PHONE, SCREEN) == {}


def test_no_table_breaks_a_name_inside_a_word(measured: dict[str, dict[str, Any]]) -> None:
    assert _found(measured, "broken", PHONE, SCREEN) == {}


def test_a_screen_shows_code_of_120_columns_and_whole_tables(measured: dict[str, dict[str, Any]]) -> None:
    assert _found(measured, "cut", SCREEN) == {}
    assert _found(measured, "tables", SCREEN) == {}


def test_pages_are_short(measured: dict[str, dict[str, Any]]) -> None:
    high = {page: by_width[str(SCREEN)]["height"] for page, by_width in measured.items()}
    assert {page: height for page, height in high.items() if height > HIGHEST and not LONG.fullmatch(page)} == {}
    assert {page: high[f"reference/{page}/"] for page in TABLES if high[f"reference/{page}/"] > HIGHEST} == {}


def test_the_search_finds_the_guide_first(node_modules: Path, address: str) -> None:
    found = drive(node_modules, address, "search", queries=list(SEARCHES))["found"]
    first = {query: pages[0] for query, pages in found.items()}
    assert first == SEARCHES
