"""Public functions raise no errors but those of the package."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad import testing
from onnx_convgrad.base.boundary import typed_errors
from onnx_convgrad.base.limits import check_limit, limits, limits_of
from onnx_convgrad.base.warn import warn
from onnx_convgrad.pipeline.report import Report
from tests.support.one_input import of_rows


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (
            KeyError("k"),
            og.errors.InternalError,
            r"failed unexpectedly \(KeyError: 'k'\). Please report it, with the model",
        ),
        (
            AttributeError("x"),
            og.errors.InternalError,
            r"\(AttributeError: x\). If the arguments have the documented types",
        ),
        (MemoryError(), og.errors.LimitError, "not enough memory"),
        (RecursionError("deep"), og.errors.ModelError, "nested too deeply"),
        (og.errors.ArgumentError("wrong"), og.errors.ArgumentError, "^wrong$"),
    ],
)
def test_exceptions_become_errors_of_the_package(raised: Exception, kind: type[Exception], message: str) -> None:
    @typed_errors
    def fails() -> None:
        raise raised

    with pytest.raises(kind, match=message) as caught:
        fails()
    assert caught.value is raised or caught.value.__cause__ is raised


MODEL = of_rows("{ y = Tanh (x) }")


def test_interrupts_pass() -> None:
    @typed_errors
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_arguments_that_no_parameter_takes() -> None:
    with pytest.raises(TypeError, match="augment: got an unexpected keyword argument 'nodes'"):
        og.augment(of_rows("{ y = Tanh (x) }"), nodes=3)
    with pytest.raises(TypeError, match="explain: missing a required argument: 'model'"):
        og.explain()


@pytest.mark.parametrize(
    ("function", "keyword", "words"),
    [
        (og.Target, "deterministic", "deterministic must be True or False, not array"),
        (og.Target, "lowering", "lowering must be"),
        (og.Memory, "recompute", "recompute takes a name or several, not array"),
        (og.Memory, "budget", "The memory budget must be"),
        (partial(og.augment, MODEL, wrt="inputs"), "training", "training must be True or False, not array"),
        (partial(og.augment, MODEL, wrt="inputs"), "target", "Unknown target array"),
        (partial(og.augment, MODEL, wrt="inputs"), "memory", "The memory budget must be"),
        (partial(og.load, MODEL), "input_shapes", "input_shapes must map"),
        (partial(og.load, MODEL), "input_values", "input_values must map"),
    ],
)
def test_an_array_in_place_of_another_argument(function: Callable[..., Any], keyword: str, words: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=words):
        function(**{keyword: np.ones((2, 2))})


def test_a_call_that_does_not_fit_passes_the_functions_that_hand_arguments_on() -> None:
    @typed_errors
    def inner(a: int) -> int:
        return a

    @typed_errors
    def outer(**options: int) -> int:
        return inner(**options)

    with pytest.raises(TypeError, match="inner: missing a required argument: 'a'"):
        outer()
    with pytest.raises(TypeError, match="inner: got an unexpected keyword argument 'b'"):
        outer(a=1, b=2)


def test_constructors() -> None:
    for kind in (Report, og.TrainingProgram, testing.Case, testing.Random):
        with pytest.raises(TypeError, match="missing"):
            kind()
    with pytest.raises(og.errors.ArgumentError, match=r"case must be an onnx_convgrad\.testing\.Case"):
        testing.check(None)
    with pytest.raises(TypeError, match="missing a required argument: 'manifest'"):
        og.data.as_batches({})


def test_a_warning_that_a_filter_raises_is_itself() -> None:
    """Also where an error of the package was raised from it."""

    @typed_errors
    def warns(chained: bool) -> None:
        try:
            warn("careful")
        except UserWarning as problem:
            if chained:
                raise og.errors.ModelError("failed") from problem
            raise

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for chained in (False, True):
            with pytest.raises(UserWarning, match="careful"):
                warns(chained)
        with pytest.raises(UserWarning, match="no member of `of` depends"):
            og.vjp(of_rows("<float[2] w = {1, 2}> { y = Tanh (x) }"), wrt="w")


def test_limits() -> None:
    assert limits() == og.Limits()
    with limits_of(og.Limits(nodes=3)):
        check_limit("nodes", 3, "This")
        with (
            limits_of(None),
            pytest.raises(og.errors.LimitError, match=r"This asks for 4 nodes, and at most 3 are allowed"),
        ):
            check_limit("nodes", 4, "This")
    check_limit("nodes", 4, "This")
    for wrong in (0, -1, 1.5, "many", None):
        with pytest.raises(og.errors.ArgumentError, match="The limit nodes must be a whole number above 0"):
            og.Limits(nodes=wrong)
    with pytest.raises(og.errors.ArgumentError, match=r"limits must be an onnx_convgrad.Limits"):
        og.augment(og.load(of_rows("{ y = Tanh (x) }"), limits=np.int64(3)))


def test_a_function_of_the_caller_that_gives_no_batches() -> None:
    with pytest.raises(og.errors.ArgumentError, match="The function for the data returned None, not batches"):
        og.predict(of_rows("{ y = Tanh (x) }"), lambda _: None)
