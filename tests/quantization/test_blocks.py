"""Layers and blocks of a residual network."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import nn

import onnx_convgrad as og
from onnx_convgrad.frontend.files import read
from onnx_convgrad.quantization.blocks import blocks_of, float_name, single_layers
from onnx_convgrad.surgery.quantization import prepare
from tests.support.families import export
from tests.support.zoo.layers import ConvNormAct
from tests.support.zoo.residual import BasicBlock

X = np.random.default_rng(0).normal(size=(8, 1, 8, 8)).astype(np.float32)


def test_a_block_holds_all_paths_between_two_values() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        ConvNormAct(1, 4, 3),
        BasicBlock(4, 4),
        BasicBlock(4, 8, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    proto = export(net.eval(), torch.tensor(X[:2]), dynamo=False, training=False, dynamic_batch=True)
    model = read(og.transforms.insert_quantizers(proto, {"x": X}))
    prepare(model, "qat")
    blocks = blocks_of(model.graph)
    assert [len(block.layers) for block in blocks] == [1, 2, 3, 1]
    assert [v.name for v in blocks[0].sources] == ["x"]
    for before, block in pairwise(blocks):
        assert block.sources == (before.result,)
    real = read(proto)
    assert all(float_name(block.result, real.graph) for block in blocks)
    assert float_name(model.graph.outputs[0], real.graph) == "y"
    layers = single_layers(model.graph)
    assert [len(block.layers) for block in layers] == [1] * 7
