"""Forms of JSON: what fits, and what the errors say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onnx_convgrad.base.forms import NAME, NATURAL, NUMBER, check_form, parse_json

FORM = {"name": NAME, "sizes": (None, [(NATURAL, str)]), "rows": [{"x": float, str: object}, ...], "on": bool}
GOOD = {"name": "a", "sizes": [1, "N"], "rows": [{"x": 1, "more": []}], "on": True}


@pytest.mark.parametrize("change", [{}, {"sizes": None}, {"sizes": []}, {"rows": [{"x": float("nan")}] * 2}])
def test_what_fits(change: dict[str, Any]) -> None:
    assert parse_json(json.dumps(GOOD | change), FORM).keys() == GOOD.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "'name' must be a name, not ''"),
        ({"name": 3}, "'name' must be a name, not 3"),
        ({"sizes": [1, -2]}, r"'sizes\[1\]' must be text, not -2"),
        ({"sizes": 7}, "'sizes' must be a list, not 7"),
        ({"sizes": [2**63]}, r"'sizes\[0\]' must be text"),
        ({"rows": []}, "'rows' must be a list with members"),
        ({"rows": [{}]}, r"there is no 'rows\[0\]\.x'"),
        ({"rows": [[]]}, r"'rows\[0\]' must be a map, not \[\]"),
        ({"rows": [{"x": 10**400}]}, r"'rows\[0\]\.x' must be a number, not 1000"),
        ({"on": 1}, "'on' must be true or false, not 1"),
        ({"other": 1}, "there is an unknown 'other'"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_form(GOOD | change, FORM)


def test_other_texts() -> None:
    for text, message in (
        ("{", "Expecting property name"),
        ("[1]", "it must be a map"),
        ("[" * 10**5, "nested too deeply"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_json(text, FORM)
    with pytest.raises(ValueError, match="must be a finite number"):
        check_form({"x": float("inf")}, {"x": NUMBER})
