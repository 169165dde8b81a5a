"""Checks of names: what is accepted, and what the errors say."""

from __future__ import annotations

import pytest

from onnx_convgrad.base.names import as_names, check_names
from onnx_convgrad.errors import ArgumentError


@pytest.mark.parametrize(
    ("names", "expected"), [("x", ["x"]), (["x", "y"], ["x", "y"]), (("x",), ["x"]), ([], []), ({"x": 1}, ["x"])]
)
def test_one_name_or_several(names: object, expected: list[str]) -> None:
    assert as_names(names, "wrt") == expected


@pytest.mark.parametrize("names", [3, None, ["x", 3], [None]])
def test_other_types_are_refused(names: object) -> None:
    with pytest.raises(ArgumentError, match=r"^wrt takes a name or several, not "):
        as_names(names, "wrt")


def test_known_names_pass() -> None:
    check_names(["b", "a"], ["a", "b", "c"], "value")
    check_names([], [], "value")


def test_near_matches_are_suggested() -> None:
    with pytest.raises(ArgumentError, match=r"Unknown value 'wieght'\. Did you mean 'weight'\?"):
        check_names(["bias", "wieght"], ["weight", "bias"], "value")


@pytest.mark.parametrize(
    ("count", "ending"), [(0, "There are: none."), (2, "There are: 0, 1."), (90, "78, 79 and 10 more.")]
)
def test_options_are_listed_where_none_is_near(count: int, ending: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        check_names(["weight"], [str(i) for i in range(count)], "value")
    assert caught.value.hint.endswith(ending)
