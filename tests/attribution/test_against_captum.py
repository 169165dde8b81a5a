"""Explanations equal those of captum on the same network."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from onnx_convgrad import attribution
from onnx_convgrad.runtime import run
from tests.support.classifiers import LAYER, Classifier

pytestmark = pytest.mark.peers
attr: Any = pytest.importorskip("captum.attr", reason="captum is not installed")

LABEL = 3


def _images() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def _ours(name: str, net: Classifier, x: torch.Tensor, **options: Any) -> np.ndarray:
    return run(getattr(attribution, name)(net.file(), label=LABEL, **options), {"image": x.numpy()})["attribution"]


class WithLayer(Classifier):
    """The classifier with the layer of the map as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Identity()

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(super().features(x))


def _theirs(name: str, net: Classifier, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    if name == "occlusion":
        made = attr.Occlusion(net)
        found = made.attribute(x, sliding_window_shapes=(3, 3, 3), strides=(3, 2, 2), baselines=0, target=LABEL)
    elif name == "integrated_gradients":
        found = attr.IntegratedGradients(net).attribute(x, target=LABEL, n_steps=20)
    elif name == "grad_cam":
        found = attr.LayerGradCam(net, net.layer).attribute(x, target=LABEL, relu_attributions=True)[:, 0]
    else:
        kinds = {
            "saliency": attr.Saliency,
            "input_x_gradient": attr.InputXGradient,
            "guided_backprop": attr.GuidedBackprop,
            "lrp": attr.LRP,
        }
        found = kinds[name](net).attribute(x, target=LABEL)
    return found.detach()


OPTIONS: dict[str, dict[str, Any]] = {
    "saliency": {},
    "input_x_gradient": {},
    "guided_backprop": {},
    "integrated_gradients": {"steps": 20},
    "occlusion": {"window": 3, "stride": 2},
    "grad_cam": {"layer": LAYER, "resize": False},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_captum(name: str) -> None:
    net, x = WithLayer(), _images()
    found, expected = _ours(name, net, x, **OPTIONS[name]), _theirs(name, net, x)
    assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("epsilon", "gamma"), [(1e-6, 0.0), (0.1, 0.0), (1e-6, 0.25)])
def test_relevance_equals_captum(epsilon: float, gamma: float) -> None:
    """Without the residual connection, whose functional addition captum takes for a gradient."""
    rules = importlib.import_module("captum.attr._utils.lrp_rules")
    net, x = Classifier(), _images()
    net.residual = False
    found = _ours("lrp", net, x, stabilizer=epsilon, gamma=gamma)
    for layer in (net.conv1, net.conv2, net.linear):
        layer.rule = rules.GammaRule(gamma) if gamma else rules.EpsilonRule(epsilon)
    expected = _theirs("lrp", net, x)
    assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
