"""The error tree: exit statuses, hints, pickling, and how several problems are reported."""

from __future__ import annotations

import pickle

import pytest

from onnx_convgrad import errors
from onnx_convgrad.errors import ConvGradError, DifferentiationError, ExecutionError, Problem, UnsupportedCase

TREE = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ConvGradError)]


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_the_docstring_draws_every_error_with_its_exit_status(kind: type[ConvGradError]) -> None:
    (line,) = (
        text for text in (errors.__doc__ or "").splitlines() if text.lstrip("│ ├└─").split(" ")[0] == kind.__name__
    )
    assert kind is ConvGradError or line.endswith(f"exit status {kind.exit_status}")


def test_the_hint_follows_the_message() -> None:
    assert str(ConvGradError("It is wrong.", hint="Mend it.")) == "It is wrong. Mend it."
    assert str(ConvGradError("It is wrong.")) == "It is wrong."


PROBLEM = Problem("node_3", "Foo", 17, "There is no rule.", tuple("abcdefgh"), "Write one.")


@pytest.mark.parametrize(
    "error", [ExecutionError("no", hint="go", snippet="import x"), DifferentiationError([PROBLEM])], ids=type
)
def test_errors_pass_between_processes(error: ConvGradError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.__dict__) == (str(error), error.__dict__)


def test_all_problems_are_listed() -> None:
    text = str(DifferentiationError([PROBLEM, PROBLEM]))
    assert text.startswith("2 nodes cannot be differentiated:\n")
    assert (
        text.count("node_3 (Foo, opset 17): There is no rule. Path: a <- b <- c <- ... <- f <- g <- h. Write one.") == 2
    )
    assert str(DifferentiationError([PROBLEM])).startswith("1 node cannot")


def test_first_few_names() -> None:
    assert errors.first_few(["a", "b"]) == "a, b"
    assert errors.first_few(list("abcdefg")) == "a, b, c, d, e and 2 more"


def test_require() -> None:
    errors.require(True, "no reason.")
    with pytest.raises(UnsupportedCase, match=r"a reason\. a remedy\."):
        errors.require(False, "a reason.", "a remedy.")
