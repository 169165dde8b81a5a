"""Gradients of empty operands: the cases of all rules with one axis of no elements. Nothing of them is NaN."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad.checking.case import is_float
from onnx_convgrad.runtime import run
from onnx_convgrad.testing import Case, make_model
from tests.support.rule_cases import rule_cases

_SHARDS = 4

KILLS = frozenset(("ConvTranspose", "Einsum", "GRU", "LSTM", "RNN", "Unique", "ai.onnx.ml::FeatureVectorizer"))
"""Operators whose kernels end the process at some empty operands; see tests/rules/test_recurrent.py and test_einsum.py."""

REFUSED = {
    "Conv": "quirks.CONV_EMPTY_AXIS",
    "DFT": "ONNX Runtime has no inverse transform of no points",
    "Compress": "it takes elements that are not there",
    "Loop": "its body declares the sizes",
    "MaxRoiPool": "ONNX Runtime has no ArgMax of nothing",
    "Upsample": "ONNX Runtime has no AveragePool of nothing",
    **dict.fromkeys(
        [f"ai.onnx.ml::{op}" for op in ("Imputer", "LinearClassifier", "LinearRegressor", "SVMRegressor")],
        "its attributes say how many features there are, and the kernel takes a table without any",
    ),
}
"""Operators whose kernels run, but not those of the gradient at some empty axes, with the reason."""

Arrays = list[np.ndarray | None]


def _emptied(case: Case) -> Iterator[tuple[int, Arrays]]:
    """The operands without elements along one axis of the first, and so of all others that have this axis."""
    arrays = case.arrays
    first = next((a for a in arrays if is_float(a)), None)
    for axis, size in enumerate([] if first is None else first.shape):
        yield (
            axis,
            [
                np.take(a, [], axis)
                if a is not None
                and first is not None
                and is_float(a)
                and a.ndim == first.ndim
                and a.shape[axis] == size
                else a
                for a in arrays
            ],
        )


def _feed(model: onnx.ModelProto, arrays: Arrays, results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The operands, and ones for cotangents and tangents."""
    known = {**{f"x{i}": a for i, a in enumerate(arrays) if a is not None}, **results}
    feed = {}
    for value in model.graph.input:
        stem = value.name.split("_")[0]
        feed[value.name] = known[stem] if value.name == stem else np.ones_like(known[stem])
    return feed


def _fault(case: Case, arrays: Arrays, shapes: str) -> str | None:
    """The fault of the derivatives; `None` if they have none, or if the kernel does not run."""
    model = make_model(case, arrays, shapes=shapes)
    try:
        results = run(model, _feed(model, arrays, {}))
    except Exception:  # noqa: BLE001 - whatever the reason
        return None
    wrt = [v.name for v in model.graph.input if is_float(arrays[int(v.name[1:])])]
    wrt = wrt if case.wrt is None else [f"x{i}" for i in case.wrt if f"x{i}" in wrt]
    of = [name for name, y in results.items() if is_float(y)] if case.of is None else [f"y{i}" for i in case.of]
    for transform in (og.augment, og.jvp):
        try:
            built = transform(model, wrt=wrt, of=of)
        except og.ConvGradError:  # a refusal, which the tests of the family cover
            continue
        try:
            got = run(built, _feed(built, arrays, results))
        except Exception as problem:  # noqa: BLE001 - whatever the reason
            return f"{transform.__name__}: {problem}"
        if not all(np.isfinite(y).all() for y in results.values() if is_float(y)):
            continue  # the largest of no elements, or the logarithm of their sum: the tangent is not finite either
        for name, value in got.items():
            if name not in results and is_float(value) and not np.isfinite(value).all():
                return f"{transform.__name__}: {name} is not finite"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("shapes", ["static", "symbolic"])
@pytest.mark.parametrize("shard", range(_SHARDS))
def test_derivatives_of_empty_operands_are_finite(shard: int, shapes: str) -> None:
    wrong, seen = {}, set()
    for case in rule_cases():
        if case.op in KILLS or case.op in REFUSED or np.dtype(case.dtype) != np.float32:
            continue
        for axis, arrays in _emptied(case):
            key = (case.op, axis, *(None if a is None else a.ndim for a in arrays))
            if key in seen:
                continue
            seen.add(key)
            if len(seen) % _SHARDS != shard:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fault = _fault(case, arrays, shapes)
            if fault is not None:
                wrong[f"{case} axis {axis}"] = fault
    assert not wrong
    assert len(seen) > 250
