"""Weights that a module ties on purpose, in files of PyTorch's newer exporter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onnx_convgrad as og
from tests.frontend.exporters.test_separate_merged import fresh_export, program_of
from tests.support.training_nets import Formula

pytestmark = pytest.mark.slow


def test_tied_weights_stay_tied() -> None:
    """A module that is used twice, and a weight that two modules share."""

    def build() -> Formula:
        norm, one, two = nn.LayerNorm(8), nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)
        two.weight = one.weight
        return Formula(lambda m, x: m.norm(m.two(torch.tanh(m.norm(m.one(x))))), norm=norm, one=one, two=two)

    _, model, _ = fresh_export(build, 4, 8)
    gradients = [o.name for o in og.augment(model).graph.output[1:]]
    program = program_of(model)
    names = ["two.weight", "one.bias", "norm.weight", "norm.bias", "two.bias"]
    assert gradients == [f"{name}_grad" for name in names]
    assert [p.name for p in program.manifest.parameters] == names
