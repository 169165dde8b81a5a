"""CITATION.cff is a valid entry of the Citation File Format 1.2 and agrees with the package."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

import onnx_convgrad

FIELDS = {
    "abstract": str,
    "authors": list,
    "cff-version": str,
    "commit": str,
    "contact": list,
    "date-released": date,
    "doi": str,
    "identifiers": list,
    "keywords": list,
    "license": str,
    "license-url": str,
    "message": str,
    "preferred-citation": dict,
    "references": list,
    "repository": str,
    "repository-artifact": str,
    "repository-code": str,
    "title": str,
    "type": str,
    "url": str,
    "version": str,
}
"""Fields that version 1.2.0 of the format allows, without its alternative of several licenses."""

REQUIRED = {"authors", "cff-version", "message", "title"}
ENTITY = set(
    "address alias city country date-end date-start email fax location name orcid post-code region tel website".split()
)
"""Fields of an author that is not a person."""


@pytest.fixture(scope="module")
def citation(root: Path) -> dict[str, Any]:
    return yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def test_the_citation_is_valid(citation: dict[str, Any]) -> None:
    assert citation.keys() >= REQUIRED
    assert citation.keys() <= FIELDS.keys()
    assert [name for name, value in citation.items() if not isinstance(value, FIELDS[name])] == []
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] in {"software", "dataset"}
    assert citation["authors"]
    for author in citation["authors"]:
        assert "name" in author
        assert author.keys() <= ENTITY
    keywords = citation["keywords"]
    assert all(isinstance(word, str) and word for word in keywords)
    assert len(keywords) == len(set(keywords))


def test_the_citation_is_of_this_version(citation: dict[str, Any], root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["version"] == onnx_convgrad.__version__ == project["version"]
    assert citation["license"] == project["license"]
    heading = rf"^## \[{re.escape(citation['version'])}\] - {citation['date-released']}$"
    assert re.search(heading, (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
