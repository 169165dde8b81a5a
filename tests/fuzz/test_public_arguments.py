"""Arguments of a wrong kind of every public function and class: an error that says so, or a result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad import callbacks, data, losses, metrics, optim, schedules, testing, transforms
from tests.support.one_input import graph_of

pytestmark = pytest.mark.slow

WRONG = [None, "x", b"x", 3, np.ones((2, 3)), [None], {1: 2}, object(), set(), lambda *_: None, np.nan, 10**30]


def misfit(problem: BaseException | None) -> bool:
    """Whether this is an error that Python, or NumPy for an array, raises for an object of a wrong type."""
    return isinstance(problem, (TypeError, AttributeError)) or "truth value of an" in f"{problem}"


MODULES = (og, callbacks, data, losses, metrics, optim, schedules, testing, transforms)


def _public() -> Iterator[Any]:
    for module in MODULES:
        for name in sorted({*module.__all__} - {"jax", "torch"}):  # they need further packages
            value = getattr(module, name)
            abstract = getattr(value, "_is_protocol", False)
            if callable(value) and not abstract and not (inspect.isclass(value) and issubclass(value, Exception)):
                yield pytest.param(value, id=f"{module.__name__.rpartition('.')[2]}.{name}")


def _needed(function: Callable[..., Any]) -> dict[str, Any]:
    """Valid values of the arguments that a function requires."""
    model = graph_of("(float[N,4] x) => (float[N,3] y) { y = MatMul (x, w) }", w=np.ones((4, 3), np.float32))
    every = {
        "model": model,
        "wrt": "inputs",
        "of": "y",
        "loss": "mse",
        "optimizer": optim.SGD(0.1),
        "classes": 4,
        "path": "out.onnx",
    }
    required = [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    return {name: every[name] for name in required if name in every}


@pytest.mark.parametrize("function", list(_public()))
@pytest.mark.filterwarnings("ignore")
def test_wrong_kinds(function: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused = 0
    parameters = inspect.signature(function).parameters.values()
    taken = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for name in (*taken, "unknown"):
        for wrong in WRONG:
            try:
                function(**{**_needed(function), name: wrong})
            except og.ConvGradError as problem:
                if isinstance(problem, og.errors.InternalError) and not misfit(problem.__cause__):
                    pytest.fail(f"{name}={wrong!r}: {problem}")
                refused += 1
            except (TypeError, AttributeError):
                refused += 1
    assert refused
