"""Public functions raise no errors but those of the package."""

from __future__ import annotations

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.limits import check_limit, limits, limits_of
from tests.support.one_input import of_rows


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (KeyError("k"), og.InternalError, r"failed unexpectedly \(KeyError: 'k'\). Please report it, with the model"),
        (MemoryError(), og.LimitError, "not enough memory"),
        (RecursionError("deep"), og.ModelError, "nested too deeply"),
        (og.ArgumentError("wrong"), og.ArgumentError, "^wrong$"),
    ],
)
def test_exceptions_become_errors_of_the_package(raised: Exception, kind: type[Exception], message: str) -> None:
    @typed_errors
    def fails() -> None:
        raise raised

    with pytest.raises(kind, match=message) as caught:
        fails()
    assert caught.value is raised or caught.value.__cause__ is raised


def test_interrupts_pass() -> None:
    @typed_errors
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_arguments_that_no_parameter_takes() -> None:
    with pytest.raises(og.ArgumentError, match="nodes"):
        og.augment(of_rows("{ y = Tanh (x) }"), nodes=3)
    with pytest.raises(og.ArgumentError, match="missing a required argument: 'model'"):
        og.explain()


def test_limits() -> None:
    assert limits() == og.Limits()
    with limits_of(og.Limits(nodes=3)):
        check_limit("nodes", 3, "This")
        with limits_of(None), pytest.raises(og.LimitError, match=r"This asks for 4 nodes, and at most 3 are allowed"):
            check_limit("nodes", 4, "This")
    check_limit("nodes", 4, "This")
    for wrong in (0, -1, 1.5, "many", None):
        with pytest.raises(og.ArgumentError, match="The limit nodes must be a whole number above 0"):
            og.Limits(nodes=wrong)
    with pytest.raises(og.ArgumentError, match=r"limits must be an onnx_convgrad.Limits"):
        og.augment(of_rows("{ y = Tanh (x) }"), limits=np.int64(3))
