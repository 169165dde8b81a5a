"""Training mode of nodes inside the bodies of other nodes."""

from __future__ import annotations

import warnings

import onnx
import pytest

import onnx_convgrad as og
from tests.support.operators import text_model

BRANCHED = """(float[2,3,4] x, bool c) => (float[2,3,4] y)
    <float[3] scale = {1.0, 2.0, 3.0}, float[3] shift = {0.0, 0.0, 0.0}, float[3] mean = {0.0, 0.0, 0.0},
     float[3] var = {1.0, 1.0, 1.0}, float ratio = {RATIO}> {
        [scaled] z = Mul (x, x)
        y = If (c) <
            then_branch = t () => (a) { [norm] a = BatchNormalization (z, scale, shift, mean, var) },
            else_branch = e () => (b) { [drop] b = Dropout (z, ratio) }>
    }"""


def _model(ratio: float = 0.5) -> onnx.ModelProto:
    return text_model(BRANCHED.replace("RATIO", str(ratio)))


TRAIN = {
    "augment": lambda model: og.augment(model, wrt=["scale"], training=True),
    "build_training": lambda model: og.build_training(model, loss="mse", optimizer="sgd", wrt=["scale"]).step,
}


@pytest.mark.parametrize("how", TRAIN)
def test_nodes_in_branches_that_stay_in_inference_mode_are_named(how: str) -> None:
    with pytest.warns(UserWarning, match=r"stay in inference mode.*'norm' \(Batch.*'drop' \(Dropout\)"):
        TRAIN[how](_model())


def test_a_dropout_that_drops_nothing_and_inference_are_silent() -> None:
    with pytest.warns(UserWarning, match=r"'norm' \(BatchNormalization\)\.$"):
        TRAIN["augment"](_model(0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        og.augment(_model(), wrt=["scale"])


def test_frozen_nodes_are_silent() -> None:
    with pytest.warns(UserWarning, match=r"mode while the model is trained: 'drop' \(Dropout\)\.$"):
        program = og.build_training(_model(), loss="mse", optimizer="sgd", wrt=["scale"], freeze_statistics=True)
    assert program.step.graph.node
