"""Convolution gradients over random geometry, against float64 autograd of PyTorch, with every lowering forced."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onnx_convgrad as og
from onnx_convgrad.lowering.table import lowerings
from onnx_convgrad.pipeline.built import Built
from onnx_convgrad.pipeline.options import Options, Target
from onnx_convgrad.pipeline.stages import build
from tests.support.conv_geometry import (
    FORCED,
    QUICK,
    SETTINGS,
    Arrays,
    Geometry,
    arrays_of,
    attributes_of,
    cotangent,
    error,
    geometry,
    model_of,
    oracle,
    run_inputs,
)

ROUNDINGS = 2.0**-22
"""Four units in the last place of float32: no sum in float32 is better than that, against the sum of its terms' sizes."""

OPERATORS = {"x": ("ConvInputGrad", "Conv"), "w": ("ConvWeightGrad",), "b": ()}
"""The operators that compute each gradient; that of a transposed convolution's data is a Conv."""


def _together(model: onnx.ModelProto, forced: list, *, training: bool = False) -> Iterator[dict[str, str]]:
    """Choices that force every lowering that applies, one of each operator at a time, in as few models as possible."""
    choices = build(
        model, Options(wrt=["x", "w", "b"], training=training, compare=True, target=Target(lowering="fast"))
    ).choices
    apply = {(c.op_type, way.name) for c in choices for way in c.candidates if way.reason is None}
    columns: dict[str, list] = {}
    for choice in forced:
        for pair in choice.items():
            if pair in apply:
                columns.setdefault(pair[0], []).append(pair)
    for row in itertools.zip_longest(*columns.values()):
        yield dict(filter(None, row))


def _check_gradients(built: Built, got: Arrays, want: Arrays, terms: Arrays, what: tuple) -> None:
    """Equal within a bound, or, where positive and negative terms cancel, within a few roundings of their size."""
    for name in ("x", "w", "b"):
        key = f"{name}_grad"
        chosen = [lowerings()[c.op_type][c.chosen] for c in built.choices if c.op_type in OPERATORS[name]]
        bound = 1e-5 if all(way.exact for way in chosen) else 1e-4
        assert got[key].shape == want[key].shape
        room = max(bound * np.linalg.norm(want[key]), ROUNDINGS * np.linalg.norm(terms[key]), 1e-11)
        assert np.linalg.norm(got[key] - want[key]) < room, (name, *what)


def _check(
    op: str, g: Geometry, shapes: str | set[int], forced: list, *, training: bool = False, **attributes: object
) -> None:
    arrays = arrays_of(g, transposed=op == "ConvTranspose")
    y = oracle(op, arrays, g)["y"]
    seed = cotangent(y, static=shapes == "static")
    want = oracle(op, arrays, g, seed)
    terms = oracle(op, {name: np.abs(a) for name, a in arrays.items()}, g, np.abs(seed))
    model = model_of(op, arrays, shapes, **attributes_of(g), **attributes)
    for choice in ("auto", *(_together(model, forced, training=training) if forced else ())):
        built = build(model, Options(wrt=["x", "w", "b"], training=training, target=Target(lowering=choice)))
        got = run_inputs(ir.to_proto(built.model), {**arrays, "y_grad": seed})
        assert error(got["y"], y) < 1e-4
        _check_gradients(built, got, want, terms, (shapes, choice))


@pytest.mark.slow
@SETTINGS
@given(geometry())
def test_conv(g: Geometry) -> None:
    for shapes in ("static", "symbolic", "absent"):
        _check("Conv", g, shapes, FORCED if shapes == "static" else [])


@pytest.mark.slow
@SETTINGS
@given(geometry(transposed=True))
def test_conv_transpose(g: Geometry) -> None:
    forced = [choice for choice in FORCED if "ConvWeightGrad" in choice]
    for shapes in ("static", "symbolic", "absent"):
        _check("ConvTranspose", g, shapes, forced if shapes == "static" else [], output_padding=g["extra"])


@pytest.mark.slow
@settings(SETTINGS, max_examples=20 if QUICK else SETTINGS.max_examples)
@given(geometry().filter(lambda g: g["batch"]))
def test_an_unknown_batch_in_training(g: Geometry) -> None:
    _check("Conv", g, {0}, [*FORCED, *({"Conv": name} for name in lowerings()["Conv"])], training=True)


@pytest.mark.slow
@settings(SETTINGS, max_examples=30 if QUICK else SETTINGS.max_examples)
@given(geometry())
def test_an_unknown_batch_that_may_be_empty(g: Geometry) -> None:
    _check("Conv", g, {0}, FORCED)


@pytest.mark.slow
@settings(SETTINGS, max_examples=30 if QUICK else SETTINGS.max_examples)
@given(geometry(), st.data())
def test_some_unknown_sizes(g: Geometry, data: st.DataObject) -> None:
    unknown = data.draw(st.sets(st.sampled_from([0, *range(2, 2 + g["rank"])]), min_size=1), label="unknown")
    _check("Conv", g, unknown, FORCED)


def test_the_gradients_are_a_handful_of_nodes() -> None:
    """The walk adds nothing to the nodes of the lowerings; the fastest lowerings may take some more."""
    shapes = {"x": (2, 16, 8, 8), "w": (16, 16, 3, 3), "b": (16,)}
    model = model_of("Conv", {name: np.zeros(s, np.float32) for name, s in shapes.items()}, pads=[1, 1, 1, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = {"ConvInputGrad": "conv_transpose", "ConvWeightGrad": "conv_swap"}
        augmented = og.augment(model, wrt=["x", "w", "b"], target=og.Target(lowering=plain))
    assert len(augmented.graph.node) - 1 <= 6
    assert {n.domain for n in augmented.graph.node} == {""}
