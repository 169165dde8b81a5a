"""Explanations, attacks and bounds give the same for every layout, ending and batch of a classifier's file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.testing import assert_allclose

from onnx_convgrad import attacks, attribution
from onnx_convgrad.runtime import run
from tests.support.classifiers import Classifier

METHODS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "saliency": ("attribution", attribution.saliency),
    "input_x_gradient": ("attribution", attribution.input_x_gradient),
    "guided_backprop": ("attribution", attribution.guided_backprop),
    "integrated_gradients": ("attribution", lambda m: attribution.integrated_gradients(m, steps=5)),
    "grad_cam": ("attribution", attribution.grad_cam),
    "grad_cam_plus_plus": ("attribution", attribution.grad_cam_plus_plus),
    "lrp": ("attribution", attribution.lrp),
    "occlusion": ("attribution", lambda m: attribution.occlusion(m, window=4)),
    "fgsm": ("adversarial", lambda m: attacks.fgsm(m, 0.05)),
    "pgd": ("adversarial", lambda m: attacks.pgd(m, 0.05, steps=3)),
    "deepfool": ("adversarial", lambda m: attacks.deepfool(m, steps=3)),
    "carlini_wagner": ("adversarial", lambda m: attacks.carlini_wagner(m, steps=3)),
    "certify": ("margin", lambda m: attacks.certify(m, 0.001, method="crown-ibp")),
}
"""Method -> the output that is compared, and how the method is called."""

KINDS = {
    "nchw-softmax-one": {"end": "Softmax", "batch": "1"},
    "nhwc-scores-free": {"layout": "NHWC", "product": "MatMul"},
    "nhwc-softmax-one": {"layout": "NHWC", "end": "Softmax", "batch": "1", "product": "MatMul"},
}
NET = Classifier().balanced().eval()
X = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(1)).numpy()


def computed(name: str, file: onnx.ModelProto, *, last: bool) -> np.ndarray:
    """The result of a method on one image, with channels first."""
    output, method = METHODS[name]
    value = run(method(file), {"image": X.transpose(0, 2, 3, 1).copy() if last else X})[output]
    return value.transpose(0, 3, 1, 2) if last and value.ndim == 4 else value


@pytest.mark.parametrize("name", METHODS)
def test_every_kind_of_file_gives_the_same(name: str) -> None:
    expected = computed(name, NET.file(), last=False)
    assert np.abs(expected).max() > 0
    for kind, options in KINDS.items():
        found = computed(name, NET.file(**options), last="layout" in options)
        assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max(), err_msg=kind)
