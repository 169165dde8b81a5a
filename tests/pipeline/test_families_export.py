"""The exported networks compute the same as PyTorch, so a gradient mismatch elsewhere is not the exporter's fault."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from tests.support.families import (
    FAMILIES,
    Family,
    exported,
    float32_gradients,
    keeps_mode,
    match_parameters,
    reference_gradients,
)

EXPORTERS = [False, pytest.param(True, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _few_threads() -> Iterator[None]:
    """The networks are far too small to gain from threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _run(proto: onnx.ModelProto, x: torch.Tensor) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["x"]
    return np.asarray(session.run(["y"], {"x": x.numpy()})[0])


def _forward(module: torch.nn.Module, x: torch.Tensor, training: bool) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(copy.deepcopy(module).train(training)(x).numpy())


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("dynamo", EXPORTERS, ids=["torchscript", "dynamo"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_forward(family: Family, dynamo: bool, training: bool) -> None:
    module, x = family.build(), family.example()
    if not keeps_mode(module, dynamo=dynamo, training=training):
        pytest.skip("this exporter has no training-mode batch normalization")
    proto = exported(family, dynamo=dynamo, training=training)
    onnx.checker.check_model(proto, full_check=True)
    np.testing.assert_allclose(_run(proto, x), _forward(module, x, training), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dynamo", EXPORTERS, ids=["torchscript", "dynamo"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_unfolded_keeps_every_parameter(family: Family, dynamo: bool) -> None:
    module, x = family.build(), family.example()
    proto = exported(family, dynamo=dynamo, training=False, fold=False)
    matched = match_parameters(proto, module)
    assert sorted(name for name, _ in matched.values()) == sorted(name for name, _ in module.named_parameters())
    if dynamo and any(isinstance(m, torch.nn.Conv3d) and m.bias is None for m in module.modules()):
        pytest.skip("this exporter gives a Conv3d without bias a two-dimensional one")
    np.testing.assert_allclose(_run(proto, x), _forward(module, x, False), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_dynamic_batch(family: Family, training: bool) -> None:
    module, x = family.build(), family.example()
    proto = exported(family, dynamo=False, training=training, dynamic_batch=True)
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "N"
    wider = torch.cat([x, family.example(seed=1)])[:3]
    np.testing.assert_allclose(_run(proto, wider), _forward(module, wider, training), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_gradient_counts(family: Family, training: bool) -> None:
    module, x = family.build().train(training), family.example()
    seed = np.random.default_rng(1).standard_normal(_forward(module, x, training).shape)
    exact = reference_gradients(module, x, seed)
    single = float32_gradients(module, x, seed)
    assert exact.keys() == single.keys() == {"x", *dict(module.named_parameters())}
    null = family.null_in_training if training else ()
    for name, gradient in exact.items():
        size = np.abs(gradient).max()
        if name in null:
            assert size < 1e-12
        else:
            assert size > 5e-4
            assert np.abs(single[name] - gradient).max() < 5e-4 * size, name
