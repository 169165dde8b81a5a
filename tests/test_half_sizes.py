"""Sizes in half types, in the graphs of all transformations: see `tests.rules.test_half_sizes`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

import onnx_convgrad as og
from onnx_convgrad import attacks, attribution, curvature
from onnx_convgrad.programs.terms import LOSSES
from tests.support.half_sizes import sizes_in_halves
from tests.support.one_input import graph_of

_BUILDS: dict[str, Callable[[onnx.ModelProto], Any]] = {
    "augment": lambda m: og.augment(m, wrt="all"),
    "training mode": lambda m: og.augment(m, wrt="parameters", training=True),
    "jvp": lambda m: og.jvp(m, wrt="image"),
    "per sample": lambda m: og.augment(m, wrt="parameters", per_sample=True),
    "squared norm": lambda m: og.augment(m, wrt="parameters", per_sample="squared_norm"),
    "attack fgsm": lambda m: attacks.fgsm(m, epsilon=0.1),
    "attack pgd": lambda m: attacks.pgd(m, epsilon=0.1),
    "attack 2": lambda m: attacks.pgd(m, epsilon=0.1, norm="2"),
    **{f"attack {name}": getattr(attacks, name) for name in ("carlini_wagner", "deepfool")},
    **{
        f"explain {name}": getattr(attribution, name)
        for name in attribution.__all__
        if name[0].islower() and callable(getattr(attribution, name))
    },
    **{
        f"{name} {loss}": functools.partial(getattr(curvature, name), loss=loss)
        for name in curvature.__all__
        for loss in ("cross_entropy", "mse")
    },
    **{
        f"train {loss}": (lambda m, loss=loss: og.build_training(m, loss=loss, optimizer="adamw").step)
        for loss in LOSSES
        if loss not in ("ctc", "bce")  # these take sequences and probabilities
    },
    "train bce": lambda m: og.build_training(_with_probabilities(m), loss="bce", optimizer="adamw").step,
}


def _classifier() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((4, 3, 3, 3)), "v": rng.standard_normal((4, 5)), "zero": np.zeros(4)}
    return graph_of(
        """(float16[N,3,H,W] image) => (float16[N,5] logits) {
        c = Conv <pads = [1, 1, 1, 1]> (image, w) n = BatchNormalization (c, one, zero, zero, one) r = Relu (n)
        p = AveragePool <kernel_shape = [2, 2], ceil_mode = 1, strides = [2, 2]> (r)
        q = GlobalAveragePool (p) f = Flatten (q) logits = MatMul (f, v) }""",
        **{name: value.astype(np.float16) for name, value in {**weights, "one": np.ones(4)}.items()},
    )


def _with_probabilities(classifier: onnx.ModelProto) -> onnx.ModelProto:
    """The classifier with a Sigmoid behind its logits."""
    copy = onnx.ModelProto()
    copy.CopyFrom(classifier)
    copy.graph.node.append(onnx.helper.make_node("Sigmoid", ["logits"], ["probabilities"]))
    copy.graph.output[0].name = "probabilities"
    return copy


@pytest.mark.parametrize("name", _BUILDS)
@pytest.mark.filterwarnings("ignore")
def test_no_transformation_casts_a_size_to_a_half_type(name: str) -> None:
    built = _BUILDS[name](_classifier())
    assert len(built.graph.node) > 10
    assert sizes_in_halves(built.graph) == []
