"""Attacks equal those of foolbox on the same network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from onnx_convgrad import attacks
from onnx_convgrad.runtime import run
from tests.support.classifiers import Classifier

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
foolbox: Any = pytest.importorskip("foolbox", reason="foolbox is not installed")

CASES: dict[str, tuple[Any, float | None, tuple[Any, ...], dict[str, Any]]] = {
    "fgsm": (lambda a: a.LinfFastGradientAttack(random_start=False), 0.1, (0.1,), {}),
    "fgsm 2": (lambda a: a.L2FastGradientAttack(random_start=False), 0.5, (0.5,), {"norm": "2"}),
    "pgd": (
        lambda a: a.LinfPGD(abs_stepsize=0.02, steps=10, random_start=False),
        0.1,
        (0.1,),
        {"steps": 10, "step": 0.02},
    ),
    "pgd 2": (
        lambda a: a.L2PGD(abs_stepsize=0.1, steps=10, random_start=False),
        0.5,
        (0.5,),
        {"steps": 10, "step": 0.1, "norm": "2"},
    ),
    "deepfool": (lambda a: a.L2DeepFoolAttack(steps=20, candidates=4), None, (), {"steps": 20, "candidates": 4}),
    "carlini_wagner": (
        lambda a: a.L2CarliniWagnerAttack(
            binary_search_steps=4, steps=20, stepsize=0.05, initial_const=0.1, abort_early=False
        ),
        None,
        (),
        {"searches": 4, "steps": 20, "step": 0.05, "constant": 0.1},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_foolbox(case: str) -> None:
    make, epsilon, arguments, options = CASES[case]
    net = Classifier().balanced().eval()
    x = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    label = net(x).argmax(1)
    model = foolbox.PyTorchModel(net, bounds=(0, 1))
    _, expected, success = make(foolbox.attacks)(model, x, label, epsilons=epsilon)
    found = run(getattr(attacks, case.removesuffix(" 2"))(net.file(), *arguments, **options), {"image": x.numpy()})
    assert_allclose(found["adversarial"], expected.detach(), rtol=1e-3, atol=1e-4)
    assert np.array_equal(found["success"], success.numpy())
