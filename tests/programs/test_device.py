"""`optimize_for_device`: what is given up, in which order, and that the result trains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import onnx_convgrad as og
from onnx_convgrad.errors import ArgumentError
from onnx_convgrad.memory.timeline import timeline
from onnx_convgrad.runtime import run

pytestmark = pytest.mark.slow


def _fit(digits_cnn: Any, *, batch: int = 16, **options: Any) -> og.transforms.DeviceProgram:
    return og.transforms.optimize_for_device(digits_cnn, loss="cross_entropy", optimizer="sgd", batch=batch, **options)


def test_nothing_is_given_up_where_everything_fits(digits_cnn: Any) -> None:
    found = _fit(digits_cnn, max_memory=10**8)
    assert (found.batch, found.frozen, found.given_up) == (16, (), ())
    assert "Nothing was given up." in str(found)
    assert found.memory == timeline(found.program.model("step").graph).peak <= 10**8


def test_the_batch_is_halved_before_layers_are_frozen(digits_cnn: Any) -> None:
    whole = _fit(digits_cnn, max_memory=10**8).memory
    found = _fit(digits_cnn, max_memory=whole // 3)
    assert found.batch < 16
    assert found.frozen == ()
    assert found.memory <= whole // 3
    assert found.given_up == (f"The batch is {found.batch} instead of 16.",)


def test_some_channels_are_trained_before_layers_are_frozen(digits_cnn: Any) -> None:
    options: dict[str, Any] = {"loss": "cross_entropy", "optimizer": "adam", "batch": 1}
    least = og.transforms.optimize_for_device(digits_cnn, max_memory=10**8, **options)
    model = og.load(digits_cnn, input_shapes={"image": [1, 1, 8, 8]})
    program = og.build_training(model, loss="cross_entropy", optimizer="adam", memory="min", target="arm")
    smallest = timeline(program.model("step").graph).peak
    found = og.transforms.optimize_for_device(digits_cnn, max_memory=smallest - 1, **options)
    assert (found.channels, found.frozen) == (0.5, ())
    assert found.given_up == ("50% of the output channels of each weight are trained, the first ones.",)
    state, whole = (sum(int(np.prod(s.shape)) for s in p.program.manifest.state) for p in (found, least))
    assert state < 0.7 * whole


def test_the_first_layers_are_frozen_at_last(digits_cnn: Any) -> None:
    model = og.load(digits_cnn, input_shapes={"image": [1, 1, 8, 8]})
    least = og.build_training(model, memory="min", loss="cross_entropy", optimizer="sgd", target="arm")
    found = _fit(digits_cnn, max_memory=timeline(least.model("step").graph).peak // 2)
    assert found.batch == 1
    assert found.channels == 1
    assert found.frozen[0] == least.manifest.parameters[0].name
    assert "parameters are frozen" in found.given_up[-1]
    feed = {"image": np.zeros((1, 1, 8, 8), np.float32), found.program.manifest.targets[0].name: np.array([3])}
    assert np.isfinite(run(found.program.step, feed)["loss"])


def test_what_cannot_fit_is_refused(digits_cnn: Any) -> None:
    with pytest.raises(ArgumentError, match=r"No step fits into 1,000 bytes: .* (needs at least|alone take)"):
        _fit(digits_cnn, batch=2, max_memory=1000)
    with pytest.raises(ArgumentError, match="more than max_size"):
        _fit(digits_cnn, batch=2, max_memory=10**8, max_size=1000)
    with pytest.raises(ArgumentError, match="leave out memory"):
        _fit(digits_cnn, max_memory=10**8, memory=0.5)
