"""Files as models of ART and foolbox: predictions and gradients are PyTorch's, and the packages' own attacks succeed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from onnx_convgrad import attacks
from tests.support.classifiers import Classifier

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

FILES: dict[str, dict[str, str]] = {
    "logits": {},
    "softmax": {"end": "Softmax"},
    "channels last": {"layout": "NHWC"},
    "one at a time": {"batch": "1"},
}
"""Ways in which the same classifier is written."""


def images(layout: str = "NCHW", count: int = 4) -> np.ndarray:
    x = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(1)).numpy()
    return x if layout == "NCHW" else np.ascontiguousarray(x.transpose(0, 2, 3, 1))


def torch_classifier(net: torch.nn.Module) -> Any:
    from art.estimators.classification import PyTorchClassifier

    return PyTorchClassifier(net, torch.nn.CrossEntropyLoss(reduction="sum"), (3, 8, 8), 5, clip_values=(0, 1))


@pytest.mark.parametrize("case", FILES)
def test_art_computes_what_pytorch_does(case: str) -> None:
    pytest.importorskip("art", reason="ART is not installed")
    net, options = Classifier().balanced().eval(), FILES[case]
    layout = options.get("layout", "NCHW")
    ours, theirs, x = attacks.art_classifier(net.file(**options)), torch_classifier(net), images()
    own = images(layout)

    def back(gradient: np.ndarray) -> np.ndarray:
        return gradient if layout == "NCHW" else np.moveaxis(gradient, -1, -3)

    assert ours.nb_classes == 5 and ours.input_shape == own.shape[1:]
    assert ours.channels_first == (layout == "NCHW")
    assert_allclose(ours.predict(own), theirs.predict(x), atol=1e-5)
    target = np.eye(5)[[0, 3, 1, 4]]
    assert_allclose(back(ours.loss_gradient(own, target)), theirs.loss_gradient(x, target), atol=1e-5)
    for label in (None, 2, [1, 0, 4, 3]):
        assert_allclose(back(ours.class_gradient(own, label)), theirs.class_gradient(x, label), atol=1e-5)


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize("attack", ["fgsm", "pgd", "deepfool"])
def test_attacks_of_art(attack: str, case: str) -> None:
    evasion = pytest.importorskip("art.attacks.evasion", reason="ART is not installed")
    net, options = Classifier().balanced().eval(), FILES[case]
    layout = options.get("layout", "NCHW")
    make = {
        "fgsm": lambda c: evasion.FastGradientMethod(c, eps=0.1),
        "pgd": lambda c: evasion.ProjectedGradientDescent(c, eps=0.1, eps_step=0.02, max_iter=10, verbose=False),
        "deepfool": lambda c: evasion.DeepFool(c, max_iter=20, nb_grads=4, verbose=False),
    }[attack]
    ours = make(attacks.art_classifier(net.file(**options))).generate(images(layout))
    theirs = make(torch_classifier(net)).generate(images())
    assert_allclose(ours if layout == "NCHW" else ours.transpose(0, 3, 1, 2), theirs, atol=1e-4)
    assert np.abs(theirs - images()).max() > 0.01


@pytest.mark.parametrize("case", FILES)
def test_attacks_of_foolbox(case: str) -> None:
    foolbox = pytest.importorskip("foolbox", reason="foolbox is not installed")
    net, options = Classifier().balanced().eval(), FILES[case]
    x, own = torch.from_numpy(images()), torch.from_numpy(images(options.get("layout", "NCHW")))
    label = net(x).argmax(1)
    ours = attacks.foolbox_model(net.file(**options), (0, 1))
    attack = foolbox.attacks.LinfPGD(abs_stepsize=0.02, steps=10, random_start=False)
    _, found, success = attack(ours, own, label, epsilons=0.1)
    _, want, expected = attack(foolbox.PyTorchModel(net, bounds=(0, 1)), x, label, epsilons=0.1)
    found = found if "layout" not in options else found.permute(0, 3, 1, 2)
    assert_allclose(found.detach(), want.detach(), atol=1e-4)
    assert torch.equal(success, expected) and success.any()
