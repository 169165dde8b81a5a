"""Labels and preprocessing in a model's metadata: written, read again, and refused when damaged."""

from __future__ import annotations

import json

import onnx_ir as ir
import pytest

from onnx_convgrad.errors import ModelError
from onnx_convgrad.frontend.metadata import (
    LABELS,
    PREPROCESSING,
    Preprocessing,
    describe,
    labels_of,
    preprocessing_of,
)


def _model() -> ir.Model:
    return ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 21}), ir_version=10)


def test_what_is_written_is_read() -> None:
    model = _model()
    assert labels_of(model) is None
    assert preprocessing_of(model) is None
    wanted = Preprocessing(size=(32, 48), layout="NHWC", mean=(0.5, 0.25, 0.125), std=(2.0,), scale=1.0, resize=64)
    describe(model, ["cat", "dög"], wanted)
    assert labels_of(model) == ("cat", "dög")
    assert preprocessing_of(model) == wanted
    describe(model)
    assert labels_of(model) == ("cat", "dög")


def test_missing_keys_have_defaults_and_unknown_ones_are_ignored() -> None:
    model = _model()
    model.metadata_props[PREPROCESSING] = '{"size": [8, 8], "color": "BGR"}'
    assert preprocessing_of(model) == Preprocessing(size=(8, 8))


@pytest.mark.parametrize(
    "damage",
    [
        "", "[]", "{", '{"size": 8}', '{"size": [8, -8]}', '{"layout": "CHWN"}', '{"mean": []}', '{"std": [0]}',
        '{"scale": 0}', '{"scale": NaN}', '{"mean": ["1"]}', '{"resize": 0}', '{"size": [9999999, 8]}',
    ],
)  # fmt: skip
def test_damaged_preprocessing_is_refused(damage: str) -> None:
    model = _model()
    model.metadata_props[PREPROCESSING] = damage
    with pytest.raises(ModelError, match=r"'onnx_convgrad\.preprocessing' cannot be used"):
        preprocessing_of(model)


@pytest.mark.parametrize("damage", ["", "{}", json.dumps([1]), '["a", null]'])
def test_damaged_labels_are_refused(damage: str) -> None:
    model = _model()
    model.metadata_props[LABELS] = damage
    with pytest.raises(ModelError, match=r"'onnx_convgrad\.labels' cannot be used"):
        labels_of(model)
