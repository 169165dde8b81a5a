"""Checks of names: what is accepted, and what the errors say."""

from __future__ import annotations

import pytest

from onnx_convgrad.base.names import INSPECT, as_names, check_names, globs_of, literal, matches, near_matches, select
from onnx_convgrad.errors import ArgumentError


@pytest.mark.parametrize(
    ("names", "expected"), [("x", ["x"]), (["x", "y"], ["x", "y"]), (("x",), ["x"]), ([], []), ({"x": 1}.keys(), ["x"])]
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


@pytest.mark.parametrize(
    ("name", "options", "near"),
    [
        ("ADAM", ["adam", "sgd"], ["adam"]),
        ("softmax", ["/Softmax_output_0", "y"], ["/Softmax_output_0"]),
        ("fc", ["fc.weight"], []),
        ("conv1", ["conv1.weight", "conv2.weight"], ["conv1.weight"]),
    ],
)
def test_near_matches_are_similar_equal_but_for_case_or_longer(name: str, options: list[str], near: list[str]) -> None:
    assert near_matches(name, options) == near


def test_globs_without_a_match_are_told_with_near_globs() -> None:
    tier = {name: [name] for name in ("layer1.0.weight", "layer1.0.bias", "fc.weight")}
    with pytest.raises(ArgumentError) as caught:
        select("layr1.*", tier, what="value in wrt:", see=INSPECT)
    message = str(caught.value)
    assert message.startswith("Unknown value in wrt: 'layr1.*', a glob that matches nothing. Did you mean 'layer1.*'")
    assert message.endswith("`python -m onnx_convgrad inspect MODEL` lists the names.")


def test_globs_of_a_tree_of_names() -> None:
    assert globs_of(["a.b[0].w", "/n/x", "k"]) == ["a.*", "a.b[[]0].*", "*.w", "/n/*", "*/x"]


@pytest.mark.parametrize("name", ["w[0]", "a*b", "a?b", "[", "plain"])
def test_the_literal_of_a_name_matches_it_alone(name: str) -> None:
    glob = literal(name)
    assert [n for n in ("w[0]", "w0", "a*b", "axxb", "a?b", "axb", "[", "plain") if matches(glob, n)] == [name]
