"""Kronecker factors equal those of curvlinops, and diagonals those of BackPACK, on the same network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn

from onnx_convgrad import curvature
from onnx_convgrad.runtime import run
from tests.support.classifiers import Classifier

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

LAYERS = {"w1": "conv1", "w2": "conv2", "v": "linear"}


def _net() -> Classifier:
    net = Classifier().balanced()
    net.residual = False
    return net


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2])


@pytest.mark.parametrize("approximation", ["expand", "reduce"])
def test_factors_equal_curvlinops(approximation: str) -> None:
    curvlinops: Any = pytest.importorskip("curvlinops", reason="curvlinops is not installed")
    net, (x, target) = _net(), _batch()
    options = {"fisher_type": "type-2", "kfac_approx": approximation, "check_deterministic": False}
    operator = curvlinops.KFACLinearOperator(
        net, nn.CrossEntropyLoss(), list(net.parameters()), [(x, target)], **options
    )
    operator.compute_kronecker_factors()
    made = curvature.kfac(net.file(), loss="cross_entropy", approximation=approximation)
    found = run(made, {"image": x.numpy(), "target": target.numpy()})
    for weight, layer in LAYERS.items():
        for kind, theirs in (("input", operator._input_covariances), ("gradient", operator._gradient_covariances)):
            expected = theirs[layer].numpy()
            assert_allclose(
                found[f"{weight}_{kind}_covariance"], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max()
            )


def test_eigenvalues_equal_curvlinops() -> None:
    curvlinops: Any = pytest.importorskip("curvlinops", reason="curvlinops is not installed")
    net, (x, target) = _net(), _batch()
    options = {"fisher_type": "type-2", "check_deterministic": False}
    parameters = list(net.parameters())
    operator = curvlinops.EKFACLinearOperator(net, nn.CrossEntropyLoss(), parameters, [(x, target)], **options)
    operator.compute_kronecker_factors()
    operator._compute_eigenvectors()
    operator.compute_eigenvalue_correction()
    feed = {"image": x.numpy(), "target": target.numpy()}
    for weight, layer in LAYERS.items():
        feed[f"{weight}_input_basis"] = operator._input_covariances_eigenvectors[layer].numpy()
        feed[f"{weight}_gradient_basis"] = operator._gradient_covariances_eigenvectors[layer].numpy()
    found = run(curvature.ekfac(net.file(), loss="cross_entropy"), feed)
    for weight, layer in LAYERS.items():
        place = operator._mapping[layer]["weight"]
        expected = operator._corrected_eigenvalues[layer][place].numpy()
        assert_allclose(found[f"{weight}_eigenvalues"], expected, rtol=1e-5, atol=1e-5 * expected.max())


def test_diagonals_equal_backpack() -> None:
    backpack: Any = pytest.importorskip("backpack", reason="backpack is not installed")
    extensions: Any = pytest.importorskip("backpack.extensions", reason="backpack is not installed")
    net, (x, target) = _net(), _batch()
    plain = nn.Sequential(net.conv1, net.relu1, net.pool, net.conv2, net.relu2, net.mean, nn.Flatten(), net.linear)
    module, loss = backpack.extend(plain), backpack.extend(nn.CrossEntropyLoss())
    with backpack.backpack(extensions.DiagGGNExact(), extensions.DiagHessian()):
        loss(module(x), target).backward()
    feed = {"image": x.numpy(), "target": target.numpy()}
    ggn = run(curvature.diagonal_ggn(net.file(), loss="cross_entropy"), feed)
    hessian = run(curvature.hessian_diagonal(net.file(), loss="cross_entropy", wrt=["v", "b3"], method="exact"), feed)
    for name, parameter in zip(["w1", "b1", "w2", "b2", "v", "b3"], net.parameters(), strict=True):
        expected = parameter.diag_ggn_exact.numpy()
        assert_allclose(ggn[f"{name}_diagonal_ggn"], expected, rtol=1e-5, atol=1e-5 * expected.max())
        if f"{name}_hessian_diagonal" in hessian:
            expected = parameter.diag_h.numpy()
            assert_allclose(
                hessian[f"{name}_hessian_diagonal"], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max()
            )
