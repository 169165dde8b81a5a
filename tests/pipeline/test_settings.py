"""`Target`, `Memory` and `MixedPrecision` are values: equal, hashable, copied, and fixed once they are made."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import onnx_convgrad as og

DIGITS = Path("examples/models/digits_cnn.onnx")
CHOSEN = {"ConvWeightGrad": "im2col_gemm"}
VALUES = [
    og.Target(),
    og.Target("cuda", deterministic=True, lowering="exact", max_workspace=2**20),
    og.Target(lowering=CHOSEN),
    og.Memory(),
    og.Memory(0.5),
    og.Memory(recompute=["/conv1/*", "/conv2/*"], activations="float16"),
    og.MixedPrecision("float16", init_scale=4.0),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_copies_are_equal_and_have_one_hash(value: Any) -> None:
    names = {kind.__name__: kind for kind in (og.Target, og.Memory, og.MixedPrecision)}
    copies = [copy.deepcopy(value), pickle.loads(pickle.dumps(value)), replace(value), eval(repr(value), names)]
    assert [one == value for one in copies] == [True] * 4
    assert {*copies, value} == {value}
    with pytest.raises(FrozenInstanceError):
        setattr(value, fields(value)[0].name, None)


def test_later_changes_of_what_was_given_do_not_reach_them() -> None:
    lowering, names = dict(CHOSEN), ["/conv1/*"]
    target, memory = og.Target(lowering=lowering), og.Memory(recompute=names)
    lowering["ConvInputGrad"] = "col2im_gemm"
    names.append("/conv2/*")
    assert (target, memory) == (og.Target(lowering=CHOSEN), og.Memory(recompute=("/conv1/*",)))


def test_one_value_serves_several_calls() -> None:
    settings = {"target": og.Target(lowering=CHOSEN), "memory": og.Memory(activations="float16")}
    fixed = partial(og.augment, **settings)
    assert fixed(DIGITS) == fixed(DIGITS) == og.augment(DIGITS, **settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: og.Target(max_workspace=True), "max_workspace must be a positive number of bytes, not True"),
        (lambda: replace(og.Target(), name="gpu"), "Unknown target 'gpu'"),
        (lambda: replace(og.Memory(0.5), recompute="auto"), "leave out recompute"),
        (lambda: og.augment(DIGITS, target=og.Memory()), "Unknown target Memory"),
        (lambda: og.augment(DIGITS, memory=og.Target()), "memory budget must be"),
    ],
)
def test_values_of_another_kind_are_refused(make: Any, message: str) -> None:
    with pytest.raises(og.errors.ArgumentError, match=message):
        make()
