"""Epsilon is that of Opacus, and the noise found for an epsilon is the least one."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose

import onnx_convgrad as og
from onnx_convgrad.privacy import Accountant, noise_for


@pytest.mark.peers
def test_epsilon_is_that_of_opacus() -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
    accountants = pytest.importorskip("opacus.accountants", reason="opacus is not installed")
    for noise, rate, steps in ((1.1, 256 / 60000, 14100), (0.7, 0.01, 1000), (2.0, 0.05, 500)):
        theirs = accountants.RDPAccountant()
        theirs.history = [(noise, rate, steps)]
        assert_allclose(Accountant(og.Privacy(noise)).epsilon([(rate, steps)]), theirs.get_epsilon(1e-5), rtol=0.01)
    noise = noise_for(3.0, 1e-5, 0.01, 1000)
    assert Accountant(og.Privacy(noise)).epsilon([(0.01, 1000)]) <= 3
    assert Accountant(og.Privacy(noise - 1e-3)).epsilon([(0.01, 1000)]) > 3
    assert Accountant(og.Privacy(0.0)).epsilon([(0.01, 1)]) == np.inf
