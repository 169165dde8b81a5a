"""ONNX files as PyTorch layers: values, gradients of first and second order, parameters, memory that is shared."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn import functional as F

import onnx_convgrad as og
from onnx_convgrad.errors import ArgumentError, DifferentiationError, ExecutionError
from onnx_convgrad.runtime import run
from onnx_convgrad.torch import Module
from tests.support.classifiers import Classifier
from tests.support.one_input import graph_of

RNG = np.random.default_rng(0)
MLP = graph_of(
    """(double[N,4] x) => (double[N,3] y) {
    a = MatMul (x, w) b = Add (a, c) h = Tanh (b) z = MatMul (h, v) y = Softmax <axis = 1> (z)
    }""",
    w=RNG.standard_normal((4, 6)),
    c=RNG.standard_normal(6),
    v=RNG.standard_normal((6, 3)),
)


def inputs(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("frozen", [pytest.param(False, marks=pytest.mark.slow), True])
def test_derivatives_of_first_and_second_order(frozen: bool) -> None:
    """Of the input alone, and of input and parameters together."""
    layer, x = Module(MLP), inputs()
    for parameter in layer.parameters():
        parameter.requires_grad_(not frozen)
    values = [] if frozen else list(layer.parameters())

    def call(x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return layer(x)

    assert torch.autograd.gradcheck(call, (x, *values))
    assert torch.autograd.gradgradcheck(call, (x, *values))


def test_third_order() -> None:
    layer = Module(graph_of("(double[N] x) => (double[N] y) { y = Sin (x) }"), wrt=None)
    x = torch.linspace(-1, 1, 5, dtype=torch.double, requires_grad=True)
    y = layer(x)
    for expected in (x.cos(), -x.sin(), -x.cos()):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert torch.allclose(y, expected)


def test_a_convolutional_network_trains_like_its_module() -> None:
    net = Classifier()
    layer = Module(net.file())
    own = dict(zip(["w1", "b1", "w2", "b2", "v", "b3"], net.parameters(), strict=True))
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {n: tuple(p.shape) for n, p in own.items()}
    x, target = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(2)), torch.tensor([0, 1, 2, 3])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (net, layer)]
    for _ in range(3):
        losses = []
        for module, optimizer in zip((net, layer), optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(module(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert torch.allclose(*losses, rtol=1e-4)
    for name, parameter in layer.named_parameters():
        assert torch.allclose(parameter, own[name], rtol=1e-3, atol=1e-5), name


@pytest.mark.slow
def test_double_backward_of_a_convolution_equals_pytorch() -> None:
    """The penalty of a gradient, differentiated by the weights."""
    net = Classifier()
    found = []
    for module in (net, Module(net.file())):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
        (slope,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        found.append([p.grad for p in module.parameters()])
    for own, other in zip(*found, strict=True):
        assert own is not None and other is not None
        assert torch.allclose(own, other, rtol=1e-3, atol=1e-4 * float(own.abs().max()))


def test_results_share_memory_and_outlive_the_session() -> None:
    layer = Module(MLP)
    with torch.no_grad():
        y = layer(inputs(1000))
        expected = y.clone()
        del layer
        gc.collect()
        for _ in range(5):
            torch.randn(1000, 3, dtype=torch.double)
    assert torch.equal(y, expected) and torch.allclose(y.sum(1), torch.ones(1000, dtype=torch.double))


def test_operands_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = onnxruntime.OrtValue.from_dlpack

    def spy(tensor: torch.Tensor) -> object:
        value = plain(tensor)
        seen.append(value.data_ptr())
        return value

    monkeypatch.setattr(onnxruntime.OrtValue, "from_dlpack", staticmethod(spy))
    layer, x = Module(MLP), inputs()
    layer(x)
    assert seen == [x.data_ptr(), *(p.data_ptr() for p in layer.parameters())]


def test_runtimes_without_dlpack(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Module(MLP)(inputs()).detach()
    monkeypatch.delattr(onnxruntime.OrtValue, "from_dlpack")
    assert torch.equal(Module(MLP)(inputs()).detach(), expected)


def test_names_of_parameters_are_those_of_modules() -> None:
    shape = np.ones((3, 3), "f")
    model = graph_of("(float[N,3] x) => (float[N,3] y) { a = MatMul (x, w) y = MatMul (a, v) }", w=shape, v=shape)
    for old, new in (("w", "block.conv1.weight"), ("v", "forward.weight")):
        for node in model.graph.node:
            node.input[:] = [new if name == old else name for name in node.input]
        for stored in model.graph.initializer:
            stored.name = new if stored.name == old else stored.name
    layer = Module(model)
    assert list(layer.state_dict()) == ["forward_weight", "block.conv1.weight"]
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.get_parameter("block.conv1.weight").mul_(2)
    x = torch.ones(1, 3)
    assert torch.equal(twin(x), 2 * layer(x))


def test_trained_values_go_back_into_a_file(tmp_path: Path) -> None:
    layer, x = Module(MLP), inputs()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(0.5)
    og.save(layer.to_model(), tmp_path / "m.onnx")
    found = run(str(tmp_path / "m.onnx"), {"x": x.detach().numpy()})
    assert np.allclose(found["y"], layer(x).detach())


def test_integers_and_several_outputs() -> None:
    model = graph_of(
        "(float[V,2] table, int64[N] i) => (float[N,2] y, int64[N] same, bool[N,2] p) {"
        " y = Gather (table, i) same = Identity (i) p = Greater (y, zero) }",
        zero=np.float32(0),
    )
    layer = Module(model, wrt=None)
    table, i = torch.randn(4, 2, generator=torch.Generator().manual_seed(4)).requires_grad_(), torch.tensor([1, 1, 3])
    y, same, positive = layer(table, i=i)
    assert torch.equal(same, i) and torch.equal(positive, y > 0) and positive.dtype == torch.bool
    (y * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    assert table.grad is not None and table.grad[:, 0].tolist() == [0, 3, 0, 3]


def gradient(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(layer(x).square().sum(), x)[0]


def test_a_layer_that_has_run_is_pickled() -> None:
    layer, x = Module(MLP), inputs()
    expected = gradient(layer, x)
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(gradient(again, x), expected)
    assert again.state_dict().keys() == layer.state_dict().keys()


def test_activations_are_checkpointed() -> None:
    layer, x = Module(MLP), inputs()

    def computed_again(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)

    assert torch.equal(gradient(computed_again, x), gradient(layer, x))


def test_tensors_in_the_place_of_parameters() -> None:
    """As a parametrization and `functional_call` put them there."""
    layer, x = Module(MLP), inputs()
    expected = gradient(layer, x)
    halved = {name: value / 2 if name == "v" else value for name, value in layer.state_dict().items()}
    assert not torch.allclose(torch.func.functional_call(layer, halved, (x,)), layer(x))
    torch.nn.utils.parametrizations.weight_norm(layer, "v")
    assert torch.allclose(gradient(layer, x), expected)
    layer(x).square().sum().backward()
    assert layer.parametrizations.v.original0.grad.abs().sum() > 0


def test_errors() -> None:
    layer = Module(MLP)
    with pytest.raises(ArgumentError, match="The layer takes x, not 2 inputs"):
        layer(inputs(), inputs())
    with pytest.raises(ArgumentError, match="The layer takes x, not 0 inputs and z"):
        layer(z=inputs())
    with pytest.raises(ArgumentError, match="The input 'x' is ndarray, not a tensor"):
        layer(np.ones((2, 4)))
    with pytest.raises(ExecutionError, match="ONNX Runtime could not run the layer"):
        layer(torch.ones(2, 5, dtype=torch.double))
    text = "s = SplitToSequence <keepdims = 0> (x) y = ConcatFromSequence <axis = 0, new_axis = 1> (s)"
    listed = Module(graph_of(f"(float[N] x) => (float[M] y) {{ {text} }}", opset=21), wrt=None)
    assert listed(torch.tensor([2.0, 1, 2])).tolist() == [2, 1, 2]
    with pytest.raises(DifferentiationError, match="ConcatFromSequence"):
        listed(torch.full((3,), 0.5, requires_grad=True))
