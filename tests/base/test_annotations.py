"""Arguments that certainly do not fit the annotations of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from onnx_convgrad.base.annotations import wrong_argument

if TYPE_CHECKING:
    from fractions import Fraction

Names = str | Sequence[str]


def _called(
    names: Names = "",
    count: int | None = None,
    share: float = 0.0,
    on: bool = False,
    how: Literal["a", "b"] = "a",
    sizes: Sequence[int] = (),
    by_name: Mapping[str, float] | None = None,
    pair: tuple[int, str] = (0, ""),
    then: Callable[[int], int] = abs,
    hidden: Fraction | None = None,
    anything: Any = None,
) -> None: ...


FITTING = [
    ("names", ["a", "b"]),
    ("names", np.array(["a"])),
    ("count", np.int64(3)),
    ("share", np.float32(1)),
    ("share", 1),
    ("on", 1),
    ("how", "b"),
    ("sizes", np.array([1, 2])),
    ("sizes", range(3)),
    ("by_name", {"a": 1}),
    ("pair", (1, "a")),
    ("then", len),
    ("hidden", np.ones(2)),
    ("anything", object),
]
WRONG = [
    ("names", np.ones((2, 2)), "names must be text or a sequence of text, not an array of float64 of shape (2, 2)"),
    ("names", [None], "names must be text or a sequence of text, not [None]"),
    ("count", "3", "count must be a whole number or None, not '3'"),
    ("count", np.ones(2, int), "count must be a whole number or None, not an array of int64 of shape (2,)"),
    ("share", "x", "share must be a number, not 'x'"),
    ("on", None, "on must be True or False, not None"),
    ("how", "c", "how must be 'a' or 'b', not 'c'"),
    ("how", np.ones(2), "how must be 'a' or 'b', not an array"),
    ("sizes", 3, "sizes must be a sequence of a whole number, not 3"),
    ("by_name", {1: 1.0}, "by_name must be a mapping or None, not {1: 1.0}"),
    ("by_name", {"a": "b"}, "by_name must be a mapping or None"),
    ("pair", 3, "pair must be a sequence"),
    ("then", 3, "then must be a function, not 3"),
    ("names", 10**80, "not 1000000"),
]


@pytest.mark.parametrize(("name", "value"), FITTING, ids=str)
def test_fitting(name: str, value: Any) -> None:
    assert wrong_argument(_called, {name: value}) is None


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=str)
def test_wrong(name: str, value: Any, message: str) -> None:
    found = wrong_argument(_called, {name: value})
    assert found is not None
    assert message in found


def test_objects_that_refuse_questions() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert (
        wrong_argument(_called, {"count": Odd()}) == "count must be a whole number or None, not an object of type Odd"
    )
