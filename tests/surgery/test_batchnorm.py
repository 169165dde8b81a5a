"""BatchNormalization put back behind convolutions: the same values, and the training of the original network."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import onnx_convgrad as og
from onnx_convgrad.runtime import run
from tests.support.families import export
from tests.support.one_input import graph_of
from tests.support.training_nets import off
from tests.support.zoo.layers import ConvNormAct
from tests.support.zoo.separable import InvertedResidual

RNG = np.random.default_rng(0)


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    found = load_digits()
    return (found.images[:, None] / 16).astype(np.float32), found.target.astype(np.int64)


@cache
def trained() -> nn.Module:
    """A MobileNet-like network, trained a little; its running statistics are those of the first 512 images."""
    torch.manual_seed(0)
    blocks = [InvertedResidual(16, 48, 16, 3, 1, nn.ReLU6), InvertedResidual(16, 48, 24, 3, 2, nn.ReLU6)]
    module = nn.Sequential(
        ConvNormAct(1, 16, act=nn.ReLU6), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)
    )
    x, y = map(torch.from_numpy, digits())
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    for i in range(12):
        rows = slice(64 * i, 64 * i + 64)
        optimizer.zero_grad()
        F.cross_entropy(module(x[rows]), y[rows]).backward()
        optimizer.step()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = 1.0
    with torch.no_grad():
        module(x[:512])
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = 0.1
    return module.eval()


@cache
def folded() -> onnx.ModelProto:
    example = torch.from_numpy(digits()[0][:2])
    return export(copy.deepcopy(trained()), example, dynamo=False, training=False, dynamic_batch=True)


@cache
def unfolded() -> onnx.ModelProto:
    return og.transforms.unfold_batchnorm(folded(), {"x": digits()[0][:512]})


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_values_stay_the_same() -> None:
    x = digits()[0][600:700]
    assert operators(folded()).count("BatchNormalization") == 0
    assert operators(unfolded()).count("BatchNormalization") == operators(folded()).count("Conv") == 7
    got, want = (run(m, {"x": x})["y"] for m in (unfolded(), folded()))
    assert off(got, want) < 1e-5
    unfused = run(unfolded(), {"x": x}, optimize=False)["y"]  # the runtime folds them again
    assert off(unfused, want) < 1e-5
    assert [o.version for o in unfolded().opset_import] == [o.version for o in folded().opset_import]
    onnx.checker.check_model(unfolded())


def test_training_mode_is_that_of_the_original() -> None:
    """With running statistics of the same data, scale and shift are the original ones, and batches are normalized alike."""
    x, y = (a[700:764] for a in digits())
    program = og.build_training(unfolded(), loss="cross_entropy", optimizer=og.optim.SGD(0.01))
    got = og.Trainer(program).step({"x": x, "target": y})
    want = copy.deepcopy(trained()).train()(torch.from_numpy(x))
    assert off(got["y"], want) < 1e-3
    as_deployed = og.Trainer(og.build_training(folded(), loss="cross_entropy", optimizer=og.optim.SGD(0.01)))
    assert off(as_deployed.step({"x": x, "target": y})["y"], want) > 0.05


def test_fine_tuning_goes_as_that_of_the_original() -> None:
    """On inverted images, for which the stored statistics are wrong."""
    x, y = 1 - digits()[0], digits()[1]
    module = copy.deepcopy(trained()).train()
    optimizer = torch.optim.SGD(module.parameters(), 0.02)
    ours = {name: og.Trainer(og.build_training(model, loss="cross_entropy", optimizer=og.optim.SGD(0.02)))
            for name, model in (("unfolded", unfolded()), ("folded", folded()))}  # fmt: skip
    want, got = [], {name: [] for name in ours}
    for i in range(12):
        rows = slice(64 * i, 64 * i + 64)
        optimizer.zero_grad()
        loss = F.cross_entropy(module(torch.from_numpy(x[rows])), torch.from_numpy(y[rows]))
        loss.backward()
        optimizer.step()
        want.append(loss.item())
        for name, trainer in ours.items():
            got[name].append(float(trainer.step({"x": x[rows], "target": y[rows]})["loss"]))
    gaps = {name: np.abs(np.array(losses) / want - 1).max() for name, losses in got.items()}
    assert gaps["unfolded"] < 0.05
    assert gaps["folded"] > 5 * gaps["unfolded"]


CONVS = """(float[N,2,8,8] x) => (float[N,3,6,6] y) {
    [first] a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, "first.weight", "first.bias")
    [up] b = ConvTranspose <strides = [1, 1]> (a, "up.weight")
    [normed] c = Conv (b, "normed.weight", "normed.bias")
    [bn] d = BatchNormalization (c, ones, zeros, zeros, ones)
    [relu] e = Relu (d)
    [last] y = Conv (e, "last.weight", "first.bias")
}"""
"""Two convolutions that can be followed, with a bias that is shared, one that is normalized already, one at the end."""


def convs() -> onnx.ModelProto:
    shapes = {"first.weight": (3, 2, 3, 3), "first.bias": (3,), "up.weight": (3, 4, 3, 3), "normed.weight": (3, 4, 3, 3),
              "normed.bias": (3,), "last.weight": (3, 3, 3, 3)}  # fmt: skip
    stored = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return graph_of(CONVS, **stored, ones=np.ones(3, np.float32), zeros=np.zeros(3, np.float32))


def images(count: int = 70) -> np.ndarray:
    return (3 * RNG.standard_normal((count, 2, 8, 8)) + 5).astype(np.float32)


def stored(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


def test_statistics_are_those_of_the_data() -> None:
    """Over batches of different sizes: 32, 32 and 6."""
    model, x = convs(), images()
    got = stored(og.transforms.unfold_batchnorm(model, {"x": x}))
    with_results = copy.deepcopy(model)
    with_results.graph.output.extend(onnx.ValueInfoProto(name=name) for name in "ab")
    results = run(with_results, {"x": x})
    for name, value in {"first": results["a"].astype(np.float64), "up": results["b"].astype(np.float64)}.items():
        np.testing.assert_allclose(got[f"{name}.bn.running_mean"], value.mean((0, 2, 3)), rtol=1e-5)
        np.testing.assert_allclose(got[f"{name}.bn.running_var"], value.var((0, 2, 3)), rtol=1e-5)
        np.testing.assert_allclose(got[f"{name}.bn.bias"], value.mean((0, 2, 3)), rtol=1e-5)
    assert not any(name.startswith(("normed.bn", "last.bn")) for name in got)
    assert "first.bias" in got, "another layer reads it"


def test_data_of_every_form() -> None:
    """Batches with targets, without, named, and from a function; not more samples than asked for."""
    model, x = convs(), images()
    want = stored(og.transforms.unfold_batchnorm(model, {"x": x}, batch_size=10))
    parts = [x[i : i + 10] for i in range(0, 70, 10)]
    for data in (
        [(p, np.zeros(10)) for p in parts],
        [{"x": p, "y": np.zeros(10)} for p in parts],
        parts,
        lambda _: iter(parts),
    ):
        got = stored(og.transforms.unfold_batchnorm(model, data))
        np.testing.assert_allclose(got["first.bn.running_var"], want["first.bn.running_var"], rtol=1e-5)
    named = og.transforms.unfold_batchnorm(model, {"a": np.zeros(70), "b": x}, batch_size=10, names={"x": "b"})
    np.testing.assert_array_equal(stored(named)["up.bn.bias"], want["up.bn.bias"])
    first = stored(og.transforms.unfold_batchnorm(model, [*parts[:2], x[:0]], samples=20))
    np.testing.assert_allclose(
        first["up.bn.running_mean"], stored(og.transforms.unfold_batchnorm(model, parts[:2]))["up.bn.running_mean"]
    )


def test_kind_of_the_model_and_constant_channels() -> None:
    model = convs()
    for tensor in model.graph.initializer:
        if tensor.name == "first.weight":
            weight = onnx.numpy_helper.to_array(tensor).copy()
            weight[0] = 0
            tensor.CopyFrom(onnx.numpy_helper.from_array(weight, tensor.name))
    before = model.SerializeToString()
    x = images(8)
    result = og.transforms.unfold_batchnorm(ir.from_proto(model), {"x": x}, layers="first")
    assert isinstance(result, ir.Model)
    assert model.SerializeToString() == before
    got = run(result, {"x": x}, optimize=False)["y"]
    assert off(got, run(model, {"x": x})["y"]) < 1e-5
    variance = result.graph.initializers["first.bn.running_var"].const_value.numpy()[0]
    assert 0 <= variance < 1e-12  # that of equal numbers, whose mean is rounded by an order that threads decide


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "frist"}, r"Unknown convolution in layers: 'frist'. Did you mean 'first'"),
        ({"layers": ["first", "last"]}, r"follow 'last', because its result is an output of the model"),
        ({"layers": "normed.weight"}, r"follow 'normed', because a BatchNormalization follows it already"),
        ({"layers": "last*"}, r"follow 'last', because its result is an output"),
        ({"layers": 3}, "layers takes a name or several"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"data": {"x": np.full((4, 2, 8, 8), np.nan, np.float32)}}, "'x' holds nan in sample 0"),
        ({"data": {"x": np.zeros((4, 8, 8), np.float32)}}, "has shape"),
        ({"data": []}, "The data hold no batch to measure"),
        ({"data": 3}, "3 is not a source of data"),
        ({"model": graph_of("(float[2] x) => (float[2] y) { y = Relu (x) }")}, "The model has no convolution"),
        ({"model": og.transforms.add_adapters(convs(), rank=1)}, "has adapters.*Merge them first"),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    arguments = {"model": convs(), "data": {"x": images(4)}, **options}
    with pytest.raises(og.ConvGradError, match=message):
        og.transforms.unfold_batchnorm(arguments.pop("model"), arguments.pop("data"), **arguments)
