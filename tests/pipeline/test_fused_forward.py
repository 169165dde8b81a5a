"""ONNX Runtime fuses the same nodes in a model and in the forward part of the model with gradients.

ONNX Runtime makes one node of a convolution and an activation, and of a convolution, an addition and a ReLU, if nothing
else reads the values between them: so gradients read the result of the activation. Weights that are fed give a FusedConv;
constant ones a Conv in blocks of channels, where the processor has such kernels. The addition is fused on the CPU alone.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

import onnx_convgrad as og
from tests.support.optimizer import optimized

ACTIVATIONS = ["Relu ({})", "LeakyRelu <alpha = 0.1> ({})", "Tanh ({})", "HardSigmoid ({})", "Clip ({}, zero, six)"]
CONV = "Conv <pads = [1, 1, 1, 1]>"


def _model(body: str) -> onnx.ModelProto:
    """Convolutions of 16 channels, with weights w1 to w3 and biases b1 to b3."""
    text = f'<ir_version: 10, opset_import: ["": 21]> g (float[2, 16, 8, 8] x) => (float[2, 16, 8, 8] y) {{ {body} }}'
    model = parser.parse_model(text)
    rng = np.random.default_rng(0)
    arrays = {f"w{i}": rng.standard_normal((16, 16, 3, 3)) / 12 for i in (1, 2, 3)}
    arrays |= {f"b{i}": rng.standard_normal(16) for i in (1, 2, 3)} | {"zero": np.zeros(()), "six": np.full((), 6)}
    used = {name for node in model.graph.node for name in node.input}
    for name in sorted(used & set(arrays)):
        model.graph.initializer.append(numpy_helper.from_array(arrays[name].astype(np.float32), name))
    return model


def _fed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its weights as inputs too."""
    fed = onnx.ModelProto()
    fed.CopyFrom(model)
    for weight in model.graph.initializer:
        if weight.dims:
            fed.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, list(weight.dims)))
    return fed


def _fused(model: onnx.ModelProto, folder: Path) -> Counter[tuple[str, int]]:
    """Activation and number of operands of a fused convolution -> number of such fusions by ONNX Runtime."""
    found: Counter[tuple[str, int]] = Counter()
    for node in optimized(model, folder).graph.node:
        activation = [a.s.decode() for a in node.attribute if a.name == "activation"]
        if node.op_type in ("Conv", "FusedConv") and activation:
            found[activation[0], len([name for name in node.input if name])] += 1
    return found


def _kept(model: onnx.ModelProto, folder: Path, **settings: Any) -> Counter[tuple[str, int]]:
    """The fused nodes of a model, of which those with gradients have as many."""
    fed = settings.get("trainable_inputs", False)
    expected = _fused(_fed(model) if fed else model, folder)
    assert _fused(og.augment(model, **settings), folder) == expected
    return expected


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda text: text.split()[0])
def test_activations(activation: str, tmp_path: Path) -> None:
    body = f"a = {CONV} (x, w1, b1) h = {activation.format('a')} c = {CONV} (h, w2, b2) y = {activation.format('c')}"
    name = activation.split(maxsplit=1)[0]
    model = _model(body)
    for settings in ({"trainable_inputs": True, "training": True}, {"wrt": "all"}):
        assert _kept(model, tmp_path, **settings) == {(name, 3): 2}


@pytest.mark.parametrize("order", ["c, r", "r, c"])
def test_additions(order: str, tmp_path: Path) -> None:
    """A residual block: Conv, Add and ReLU are one node with four operands."""
    body = (
        f"a = {CONV} (x, w1, b1) r = Relu (a) b = {CONV} (r, w2, b2) h = Relu (b) c = {CONV} (h, w3, b3)"
        f" s = Add ({order}) y = Relu (s)"
    )
    model = _model(body)
    for settings in ({"trainable_inputs": True}, {"wrt": "inputs"}, {"wrt": "all", "trainable_inputs": True}):
        assert _kept(model, tmp_path, **settings) == {("Relu", 3): 2, ("Relu", 4): 1}


def test_training_step(tmp_path: Path) -> None:
    """The graph of a training program too, where the convolutions themselves are not lowered otherwise."""
    model = _model(f"a = {CONV} (x, w1, b1) r = Relu (a) c = {CONV} (r, w2, b2) s = Add (c, r) y = Relu (s)")
    program = og.build_training(
        model, loss="mse", optimizer=og.optim.SGD(0.1), target=og.Target(lowering={"Conv": "conv"})
    )
    assert _fused(program.step, tmp_path) == {("Relu", 3): 1, ("Relu", 4): 1}
