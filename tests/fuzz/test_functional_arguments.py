"""Wrong arguments of the public functions of `onnx_convgrad.functional`: an ArgumentError, or a result."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import onnx_convgrad.functional as F
from onnx_convgrad.errors import ArgumentError

X, W, G = (np.ones(shape, np.float32) for shape in ((2, 3, 5), (4, 3, 3), (2, 4, 3)))

FUNCTIONS = [name for name in F.__all__ if name != "explain"]


def _spread(array: np.ndarray, rank: int, axis_size: int) -> np.ndarray:
    return np.ones((*array.shape[:2], *[axis_size] * rank), np.float32)


def _valid(name: str) -> dict[str, Any]:
    """Arguments that fit together, by name."""
    rank = int(next((c for c in name if c.isdigit()), "1"))
    transposed = "transpose" in name
    x, w = _spread(X, rank, 5), _spread(W, rank, 3)
    if transposed:
        w = np.ones((3, 4, *[3] * rank), np.float32)
    g = _spread(G, rank, 7 if transposed else 3)
    every = {
        "input": x,
        "weight": w,
        "grad_output": g,
        "input_size": x.shape,
        "weight_size": w.shape,
        "ggI": x,
        "ggW": w,
        "ggb": None,
        "gO": g,
        "output": g,
        "z": g,
        "input_tangent": x,
    }
    return {p: every[p] for p in inspect.signature(getattr(F, name)).parameters if p in every}


class _Odd:
    """An object whose methods fail."""

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise RuntimeError("no array")

    def __index__(self) -> int:
        raise OverflowError("no index")

    def __hash__(self) -> int:
        raise ValueError("no hash")


class _Endless(list):
    """A list that contains itself."""

    def __init__(self) -> None:
        super().__init__([self])


NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 7, 2**31, 2**40, 2**63, -(2**63), 10**30, True, 1.5, np.nan, np.inf])
WORDS = st.sampled_from([None, "", "same", "valid", "x", b"x", 1j, ..., int, {1}, {"a": 1}, {1: 2, "a": 3}, slice(1)])
SCALARS = NUMBERS | WORDS
MADE = [_Odd, _Endless, object, lambda: np.ma.masked, lambda: np.array([1, 2]), lambda: np.array([]), lambda: range(3)]
OBJECTS = st.integers(0, len(MADE) - 1).map(lambda i: MADE[i]())
PLAIN = SCALARS | OBJECTS | st.lists(NUMBERS, max_size=5) | st.lists(SCALARS, max_size=3).map(tuple)


@st.composite
def _array(draw: st.DrawFn, like: np.ndarray) -> Any:
    """An array that differs from a good one in dtype, rank, sizes or layout; or something else."""
    kind = draw(st.sampled_from(["dtype", "rank", "size", "layout", "other"]))
    if kind == "dtype":
        return like.astype(draw(st.sampled_from("f2 f8 >f4 c8 c16 i4 u1 ? O U3 M8[s] f4,f4".split())), casting="unsafe")
    if kind == "rank":
        return like.reshape(draw(st.sampled_from([(-1,), (1, *like.shape), (*like.shape, 1, 1, 1)])))
    if kind == "size":
        return np.ones(tuple(draw(st.lists(st.integers(0, 5), max_size=6))), np.float32)
    if kind == "layout":
        array = draw(
            st.sampled_from([np.asfortranarray(like), like[..., ::-1], np.broadcast_to(np.float32(1), like.shape)])
        )
        array.flags.writeable = False
        return array
    return draw(PLAIN)


@pytest.mark.parametrize("name", FUNCTIONS)
@seed(0)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_wrong_arguments(name: str, data: st.DataObject) -> None:
    function = getattr(F, name)
    arguments, names = _valid(name), list(inspect.signature(function).parameters)
    for parameter in data.draw(st.sets(st.sampled_from(names), max_size=2)):
        good = arguments.get(parameter)
        wrong = _array(good) if isinstance(good, np.ndarray) else PLAIN
        if parameter == "options":
            wrong |= st.dictionaries(st.sampled_from(["threads", "tf32", "x"]), SCALARS, max_size=2)
        arguments[parameter] = data.draw(wrong, label=parameter)
    try:
        results = function(**arguments)
    except ArgumentError:
        return
    for result in results if isinstance(results, tuple) else [results]:
        assert result is None or isinstance(result, np.ndarray)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_that_do_not_fit_the_signature(name: str) -> None:
    with pytest.raises(TypeError, match="strides"):
        getattr(F, name)(**_valid(name), strides=2)
    with pytest.raises(TypeError, match="missing"):
        getattr(F, name)()


@pytest.mark.parametrize(
    ("size", "options"), [((1, 3, 10**12), {"stride": 10**9}), ((10**9, 10**9, 10**9), {}), ((1, 3, 2**70), {})]
)
def test_a_result_beyond_the_memory_is_refused(size: tuple[int, ...], options: dict[str, int]) -> None:
    g = np.ones((1, 4, 1000), np.float32)
    with pytest.raises(ArgumentError):
        F.conv1d_input(size, W, g, **options)
    with pytest.raises(ArgumentError):
        F.conv1d_input((1, 3, 5), W, g[..., :1], padding=2**40, stride=2**42)
